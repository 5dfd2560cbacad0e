#!/usr/bin/env bash
# SmolLM2 fine-tuned on WikiSQL, E2E and DialogSum, accelerators for the tuned model, and the comparison
# of dynamic methods by task score (compare.sh). on_a_gpu.sh trains longer, in minutes.
#
#   bash lab/recipes/tasks/tasks.sh DATA runs/tasks [MODEL]
#
# DATA: the data folder of `multirate eval`. MODEL: a folder with SmolLM2-135M-Instruct. Needs
# 'multirate[eval]'. m2r2-carry and eagle start from the shipped accelerators of SmolLM2 (FROM); the
# others start from nothing. All train on the same answers for the same number of steps. An interrupted
# run continues. None of these weights are shipped, because DialogSum is for non-commercial use.
set -euo pipefail
DATA=$1 OUT=$2 MODEL=${3:-smollm2} HERE=$(dirname "$0")
FROM=${FROM:-src/multirate/reference/smollm2}
[ -f "$OUT/tuning.jsonl" ] || python "$HERE/prepare.py" --data "$DATA" --out "$OUT"
[ -f "$OUT/model/model.safetensors" ] || \
    python "$HERE/tune.py" --model "$MODEL" --data "$OUT/tuning.jsonl" --out "$OUT/model" --steps 80
multirate answers "$OUT/model" --data "$OUT/accelerators.jsonl" --limit "${ANSWERS:-2700}" \
    --out "$OUT/own.jsonl" --max-new-tokens 96 --batch 40
for method in ${METHODS:-m2r2-carry eagle lite deed free calm-classifier specee mixture_of_depths}; do
    options=(--lr 0.001 --warmup-steps 10)
    case $method in
        m2r2-carry) options+=(--start-from "$FROM/$method" --option unroll_steps=2)
                    options+=(--option "taps=[8,15,22]") ;;
        eagle) options+=(--start-from "$FROM/$method") ;;
        calm-classifier | mixture_of_depths) ;;
        *) options+=(--option draft_vocab=8192) ;;
    esac
    [ -f "$OUT/$method/accelerator.json" ] && [ ! -f "$OUT/$method/training_state.pt" ] && continue
    multirate train "$OUT/model" --data "$OUT/own.jsonl" --out "$OUT/$method" --method "$method" \
        --teacher-states "$OUT/states" --steps "${STEPS:-160}" --tokens-per-batch 2048 "${options[@]}"
done
bash "$HERE/compare.sh" "$DATA" "$OUT"
