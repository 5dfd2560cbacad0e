#!/usr/bin/env bash
# The texts file of `sam` and other lookup methods (lab/texts/smollm2.safetensors): 507,480 tokens
# of SmolLM2-135M-Instruct's own answers.
#
#   bash lab/recipes/smollm2/texts.sh DATA OUT     the file is OUT/texts.safetensors
#
# DATA: as for answers.sh. The answers are those of equal_training.sh. The shipped file came from
# these commands; on another processor the model may choose another token where two are nearly as
# likely.
set -euo pipefail
DATA=$1 OUT=$2 MODEL=${MODEL:-smollm2} HERE=$(dirname "$0")
bash "$HERE/equal_answers.sh" "$DATA" "$OUT"
multirate texts "$MODEL" --data "$OUT/train_self.jsonl" --data "$OUT/own.jsonl" \
    --data "$OUT/long.jsonl" --out "$OUT/texts.safetensors"
