#!/usr/bin/env bash
# An expert predictor for a mixture of experts: M2R2's accelerated residual, which predicts the experts
# of later layers. mixture.sh runs this for the toy mixture; the shipped predictor came from it.
#
#   bash lab/recipes/mixture/predictor.sh MODEL DATA OUT
#
# MODEL: a model that prepare.py's data trained; DATA: that data. It trains on the model's own answers
# and on a ninth of the original ones. An interrupted run continues. It runs the attention of the later
# layers; for a predictor without attention, set ATTENTION=false RANK=64 STEPS=600 LR=4e-3.
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
