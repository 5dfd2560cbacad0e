#!/usr/bin/env bash
# What tasks.sh trains, in six minutes on one GPU: SmolLM2 fine-tuned with LoRA, its own answers to all
# the questions, and every method's accelerator, side by side. Then run compare.sh, which needs no GPU.
#
#   bash lab/recipes/tasks/on_a_gpu.sh DATA runs/tasks [MODEL]
#
# DATA: the data folder of `multirate eval`. A step has 4,096 tokens. The numbers of steps are those
# that each method made in about 130 seconds on an H200, with the other trainings beside it; there the
# learning rate followed a cosine of 480 steps that was cut short.
set -euo pipefail
DATA=$1 OUT=$2 MODEL=${3:-smollm2} HERE=$(dirname "$0")
FROM=${FROM:-src/multirate/reference/smollm2}
[ -f "$OUT/tuning.jsonl" ] || python "$HERE/prepare.py" --data "$DATA" --out "$OUT"
[ -f "$OUT/model/model.safetensors" ] || \
    python "$HERE/tune.py" --model "$MODEL" --data "$OUT/tuning.jsonl" --out "$OUT/model" \
        --rank 32 --lr 0.001 --steps 450 --tokens-per-batch 4096
multirate answers "$OUT/model" --data "$OUT/accelerators.jsonl" --out "$OUT/own.jsonl" \
    --max-new-tokens 96 --batch 256
train() { # METHOD STEPS OPTIONS...
    multirate train "$OUT/model" --data "$OUT/own.jsonl" --out "$OUT/$1" --method "$1" --steps "$2" \
        --tokens-per-batch 4096 --lr 0.001 --warmup-steps 20 "${@:3}" > "$OUT/$1.log" 2>&1 &
}
train m2r2-carry 393 --start-from "$FROM/m2r2-carry" --option unroll_steps=2
train eagle 472 --start-from "$FROM/eagle"
train lite 410 --option draft_vocab=8192
train deed 419 --option draft_vocab=8192
train free 480 --option draft_vocab=8192
train calm-classifier 480
train specee 170 --option draft_vocab=8192
train mixture_of_depths 140
wait
grep -H -i "error\|tokens per" "$OUT"/*.log || true
