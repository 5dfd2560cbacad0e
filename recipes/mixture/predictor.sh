#!/usr/bin/env bash
# The accelerated residual that names the mixture's experts ahead of time. Interrupted, the same command resumes.
#
#   bash recipes/mixture/predictor.sh runs/mixture/base/model runs/reference/data runs/mixture/predictor
set -euo pipefail
MODEL=$1 DATA=$2 OUT=$3
multirate train "$MODEL" --objective experts --data "$DATA/chat.jsonl" --out "$OUT" --steps "${STEPS:-800}" --seed 1 \
    --option rank="${RANK:-64}" --option ahead=3
