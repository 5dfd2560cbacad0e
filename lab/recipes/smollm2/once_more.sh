#!/usr/bin/env bash
# How the package's m2r2-carry of SmolLM2-135M-Instruct went on (eagle's is that of on_a_gpu.sh now)
# from where again.sh left it, over 3,100 new answers (2,600 to questions that the model asks itself,
# 500 about long texts) and those that again.sh brought.
#
#   bash lab/recipes/smollm2/once_more.sh DATA runs/go_on runs/again runs/once_more
#
# and from there once more, over 3,100 others and all of these:
#
#   SEED=5353 LONG_SEED=11 STEPS=500 OWN=runs/again/own.jsonl BEFORES_SELF=runs/once_more/self.jsonl \
#       bash lab/recipes/smollm2/once_more.sh DATA runs/go_on runs/once_more runs/and_again
#
# DATA: as of accelerators.sh. Interrupted at any point, the same command goes on.
set -euo pipefail
DATA=$1 GO_ON=$2 BEFORE=$3 OUT=$4 MODEL=${MODEL:-smollm2} HERE=$(dirname "$0")
OWN=${OWN:-$BEFORE/own.jsonl}
earlier=()
[ -n "${BEFORES_SELF:-}" ] && earlier=(--data "$BEFORES_SELF")
mkdir -p "$OUT"
multirate answers "$MODEL" --questions 2600 --seed "${SEED:-4242}" --out "$OUT/self.jsonl" --max-new-tokens 256 --batch 40
[ -f "$OUT/long_questions.jsonl" ] || \
    python "$HERE/long_questions.py" --data "$DATA" --out "$OUT/long_questions.jsonl" --count 500 \
        --seed "${LONG_SEED:-9}"
multirate answers "$MODEL" --data "$OUT/long_questions.jsonl" --out "$OUT/long.jsonl" \
    --max-new-tokens 160 --batch 16
for method in ${METHODS:-m2r2-carry eagle}; do
    [ -f "$OUT/$method/accelerator.json" ] && [ ! -f "$OUT/$method/training_state.pt" ] && continue
    options=(--lr 0.001)
    [ "$method" = m2r2-carry ] && options+=(--option unroll_steps=2 --option "taps=[8,15,22]")
    multirate train "$MODEL" --method "$method" --start-from "$BEFORE/$method" --out "$OUT/$method" \
        --data "$OUT/self.jsonl" --data "$OUT/long.jsonl" "${earlier[@]}" --data "$OWN" \
        --data "$GO_ON/train_long.jsonl" --heldout-files "$GO_ON/heldout.jsonl" --max-length 1024 \
        --tokens-per-batch 2048 --threads 1 --warmup-steps 20 --steps "${STEPS:-700}" \
        --teacher-states "$GO_ON/states" "${options[@]}"
done
