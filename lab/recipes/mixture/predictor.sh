#!/usr/bin/env bash
# The accelerated residual that names the mixture's experts ahead of time. Interrupted, the same command resumes.
#
#   bash lab/recipes/mixture/predictor.sh runs/mixture/base/model runs/mixture/data runs/mixture/predictor
#
# It trains on the model's own answers, which is what it will be asked about, and on a part of the original ones.
# It runs the later layers' attention and starts close to its best. ATTENTION=false RANK=64 STEPS=600 LR=4e-3: one without.
set -euo pipefail
MODEL=$1 DATA=$2 OUT=$3
mkdir -p "$OUT.data"
own=$OUT.data/own.jsonl heldout=$OUT.data/heldout.jsonl original=$OUT.data/original.jsonl
[ -f "$OUT.data/experts/experts.json" ] || multirate pack "$MODEL" --out "$OUT.data/experts"
multirate answers "$MODEL" --experts "$OUT.data/experts" --data "$DATA/questions.jsonl" --out "$own" \
    --limit "${ANSWERS:-4000}" --max-new-tokens 96
multirate answers "$MODEL" --experts "$OUT.data/experts" --data "$DATA/heldout_questions.jsonl" --out "$heldout" \
    --limit 96 --max-new-tokens 96
[ -f "$original" ] || awk 'NR % 9 == 0' "$DATA/chat.jsonl" > "$original"
multirate train "$MODEL" --objective experts --data "$own" --data "$original" --heldout-files "$heldout" --out "$OUT" \
    --steps "${STEPS:-150}" --seed 1 --lr "${LR:-1e-3}" --option rank="${RANK:-0}" --option ahead=3 \
    --option sketch="${SKETCH:-8}" --option attention="${ATTENTION:-true}"
