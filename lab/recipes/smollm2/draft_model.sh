#!/usr/bin/env bash
# The draft model of 7.2M parameters for `two_model` (lab/models/smollm2-draft), from nothing.
#
#   bash lab/recipes/smollm2/draft_model.sh DATA OUT     the model is written to OUT/model
#
# DATA: a folder with the permissive training sets that questions.py names. ANSWERS and STEPS make it
# smaller. The shipped model came from these commands, except that the learning rate of its first 600
# steps was that of a schedule of 1,500 steps. It took 18 minutes on two cores after the answers.
set -euo pipefail
DATA=$1 OUT=$2 MODEL=${MODEL:-smollm2} HERE=$(dirname "$0")
mkdir -p "$OUT"
[ -f "$OUT/all.jsonl" ] || python "$HERE/questions.py" --data "$DATA" --out "$OUT/all.jsonl"
head -n "${ANSWERS:-2640}" "$OUT/all.jsonl" > "$OUT/questions.jsonl"
multirate answers "$MODEL" --data "$OUT/questions.jsonl" --out "$OUT/own.jsonl" --max-new-tokens 224 --batch 32
[ -f "$OUT/start/config.json" ] || python "$HERE/draft_model.py" --model "$MODEL" --out "$OUT/start"
python "$HERE/../tasks/tune.py" --model "$OUT/start" --whole --lr 0.002 --steps "${STEPS:-1000}" \
    --data "$OUT/own.jsonl" --out "$OUT/model"
