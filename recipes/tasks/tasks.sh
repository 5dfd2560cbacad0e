#!/usr/bin/env bash
# SmolLM2 tuned on WikiSQL, E2E and DialogSum, accelerators of the tuned model, and the comparison
# of dynamic modes by the tasks' scores.
#
#   bash recipes/tasks/tasks.sh DATA runs/tasks [MODEL]
#
# DATA: the folder of `multirate eval`. MODEL: a folder with SmolLM2-135M-Instruct. Needs
# 'multirate[eval]'. Interrupted at any point, the same command goes on. None of the weights are
# part of the package: DialogSum is for non-commercial use.
set -euo pipefail
DATA=$1 OUT=$2 MODEL=${3:-smollm2} HERE=$(dirname "$0")
[ -f "$OUT/tuning.jsonl" ] || python "$HERE/prepare.py" --data "$DATA" --out "$OUT"
[ -f "$OUT/model/model.safetensors" ] || \
    python "$HERE/tune.py" --model "$MODEL" --data "$OUT/tuning.jsonl" --out "$OUT/model" --steps 80
multirate answers "$OUT/model" --data "$OUT/accelerators.jsonl" --limit "${ANSWERS:-2700}" \
    --out "$OUT/own.jsonl" --max-new-tokens 96 --batch 40
folders=()
for method in ${METHODS:-m2r2-carry lite deed free calm-classifier specee}; do
    options=(--lr 0.001 --warmup-steps 10)
    [ "$method" = calm-classifier ] || options+=(--option draft_vocab=8192)
    folders+=(-a "$method=$OUT/$method")
    [ -f "$OUT/$method/accelerator.json" ] && [ ! -f "$OUT/$method/training_state.pt" ] && continue
    multirate train "$OUT/model" --data "$OUT/own.jsonl" --out "$OUT/$method" --method "$method" \
        --teacher-states "$OUT/states" --steps "${STEPS:-160}" --tokens-per-batch 2048 "${options[@]}"
done
for task in wikisql e2e_nlg dialogsum; do
    multirate bench "$OUT/model" --suite $task --data "$DATA" --methods dynamic "${folders[@]}" \
        --limit "${LIMIT:-40}" -n 96 --repeats 1 --json "$OUT/$task.json"
done
