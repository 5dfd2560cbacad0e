#!/usr/bin/env bash
# How the package's m2r2-carry of SmolLM2-135M-Instruct went on (the other methods' are those of
# on_a_gpu.sh now) from where go_on.sh left it: once more over its answers, and then over these and
# 4,500 new ones (1.2M tokens); Kangaroo once over all.
#
#   bash lab/recipes/smollm2/again.sh DATA runs/go_on runs/again
#
# DATA: as of accelerators.sh. Interrupted at any point, the same command goes on. What a second and
# a third time over the same answers brings: docs/experiments.md.
set -euo pipefail
DATA=$1 BEFORE=$2 OUT=$3 MODEL=${MODEL:-smollm2} HERE=$(dirname "$0")
mkdir -p "$OUT"
if [ ! -f "$OUT/sets.jsonl" ]; then # those that go_on.sh has not asked
    python "$HERE/questions.py" --data "$DATA" --out "$OUT/all_sets.jsonl" --further 7100
    tail -n 4500 "$OUT/all_sets.jsonl" > "$OUT/sets.jsonl"
fi
multirate answers "$MODEL" --data "$OUT/sets.jsonl" --out "$OUT/own.jsonl" --max-new-tokens 224 --batch 40
OLD=(--data "$BEFORE/train_self.jsonl" --data "$BEFORE/own.jsonl" --data "$BEFORE/train_long.jsonl"
     --data "$BEFORE/self_3131.jsonl" --data "$BEFORE/self_2125.jsonl")
train() { # FROM OUT STEPS SEED OPTIONS...
    local from=$1 out=$2 steps=$3 seed=$4
    shift 4
    [ -f "$out/accelerator.json" ] && [ ! -f "$out/training_state.pt" ] && return
    multirate train "$MODEL" --method "$method" --start-from "$from" --out "$out" --steps "$steps" \
        --seed "$seed" --teacher-states "$BEFORE/states" --heldout-files "$BEFORE/heldout.jsonl" \
        --max-length 1024 --tokens-per-batch 2048 --warmup-steps 20 --threads 1 "${OLD[@]}" "$@"
}
for method in ${METHODS:-m2r2-carry eagle kangaroo}; do
    options=(--lr 0.001)
    if [ "$method" = kangaroo ]; then # which go_on.sh's answers are new to
        train "${FROM:-src/multirate/reference/smollm2}/kangaroo" "$OUT/kangaroo" 1100 2 --lr 0.01 \
            --data "$OUT/own.jsonl"
        continue
    fi
    [ "$method" = m2r2-carry ] && options+=(--option unroll_steps=2 --option "taps=[8,15,22]")
    train "$BEFORE/$method" "$OUT/second/$method" 953 1 "${options[@]}"
    train "$OUT/second/$method" "$OUT/$method" 1100 2 "${options[@]}" --data "$OUT/own.jsonl"
done
