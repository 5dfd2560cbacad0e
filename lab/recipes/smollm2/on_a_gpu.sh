#!/usr/bin/env bash
# The equal-training comparison on a GPU: every trained lossless method of SmolLM2-135M-Instruct from
# nothing, side by side on one GPU, on the same 46,592 answers (8.1M tokens).
#
#   bash lab/recipes/smollm2/on_a_gpu.sh DATA runs/on_a_gpu
#
# DATA: as for answers.sh. Each method has a script of its own, which gives its options and the steps
# that it made in 283 seconds of an H200 beside the other six. Logs: OUT/METHOD.log.
set -euo pipefail
DATA=$1 OUT=$2 HERE=$(dirname "$0")
export ANSWERS=${ANSWERS:-$OUT/answers}
bash "$HERE/answers.sh" "$DATA" "$ANSWERS"
for method in m2r2-carry eagle eagle3 hydra medusa kangaroo m2r2; do
    bash "$HERE/$method.sh" "$DATA" "$OUT" > "$OUT/$method.log" 2>&1 &
done
wait
grep -H -i "error\|tokens per" "$OUT"/*.log || true
