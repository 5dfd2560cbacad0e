#!/usr/bin/env bash
# The last part of the package's m2r2-carry of SmolLM2-135M-Instruct, on one GPU: from where
# once_more.sh left it, over the answers of on_a_gpu.sh (46,592, of the model's own).
#
#   bash lab/recipes/smollm2/go_on_on_a_gpu.sh runs/and_again/m2r2-carry runs/on_a_gpu runs/m2r2-carry
#
# It trains with a draft head of its own, for the 807 steps that 350 s of an H200 allowed beside
# seven other trainings, and leaves this head out in the end: drafts that the base's head reads are
# right more often (docs/experiments.md). HELDOUT: as of on_a_gpu.sh.
set -euo pipefail
BEFORE=$1 ANSWERS=$2 OUT=$3 MODEL=${MODEL:-smollm2} HELDOUT=${HELDOUT:-runs/smollm2/heldout.jsonl}
train() { # FROM TO OPTIONS...
    multirate train "$MODEL" --method m2r2-carry --start-from "$1" --out "$2" \
        --data "$ANSWERS/self.jsonl" --data "$ANSWERS/own.jsonl" --heldout-files "$HELDOUT" \
        --max-length 1024 --tokens-per-batch 8192 "${@:3}"
}
train "$BEFORE" "$OUT/own_head" --lr 0.001 --warmup-steps 40 --steps 807 \
    --option unroll_steps=3 --option own_head=true
train "$OUT/own_head" "$OUT/m2r2-carry" --lr 1e-12 --weight-decay 0 --warmup-steps 1 --steps 1 \
    --option own_head=false
