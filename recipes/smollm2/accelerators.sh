#!/usr/bin/env bash
# The accelerators of SmolLM2-135M-Instruct: same data, same steps, same seed for each method.
#
#   bash recipes/smollm2/accelerators.sh DATA runs/smollm2
#
# DATA: the folder of permissive training sets that questions.py names. The model answers their
# questions itself, reads its own answers once (--teacher-states, 1.3 KB a token), and every method
# trains on what it says. Interrupted at any point, the same command goes on. ANSWERS: how many
# questions; STEPS: optimizer steps of 2,048 tokens.
set -euo pipefail
DATA=$1 OUT=$2 MODEL=${MODEL:-smollm2}
mkdir -p "$OUT"
[ -f "$OUT/questions.jsonl" ] || python "$(dirname "$0")/questions.py" --data "$DATA" --out "$OUT/questions.jsonl"
head -n "${ANSWERS:-3120}" "$OUT/questions.jsonl" > "$OUT/asked.jsonl"
multirate answers "$MODEL" --data "$OUT/asked.jsonl" --out "$OUT/own.jsonl" --max-new-tokens 192 --batch 32
for method in ${METHODS:-m2r2-carry kangaroo m2r2}; do
    options=()
    [ "$method" = m2r2-carry ] && options=(--option draft_vocab=8192 --option unroll_steps=2)
    # the gate that drafts is shallower than the paper's L/4: deeper ones cost more than they add
    [ "$method" = m2r2 ] && options=(--option draft_vocab=8192 --option "gates=[4,8,15]")
    [ -f "$OUT/$method/accelerator.json" ] && [ ! -f "$OUT/$method/training_state.pt" ] && continue
    multirate train "$MODEL" --data "$OUT/own.jsonl" --out "$OUT/$method" --method "$method" \
        --teacher-states "$OUT/states" --steps "${STEPS:-550}" --tokens-per-batch 2048 \
        --heldout-samples 128 --lr 0.001 --warmup-steps 20 "${options[@]}"
done
