#!/usr/bin/env bash
# 2,730 answers of SmolLM2-135M-Instruct's own (0.5M tokens): the data of equal_training.sh and of
# the texts file.
#
#   bash lab/recipes/smollm2/equal_answers.sh DATA OUT
#
# DATA: as for answers.sh. Writes OUT/own.jsonl (answers to 1,000 questions of the sets),
# OUT/long.jsonl (to 190 questions about long texts), OUT/train_self.jsonl (to 1,540 questions that
# the model samples itself) and OUT/heldout.jsonl (to 60 more of these). SETS, LONG, OWN and
# HELDOUT change the numbers. An interrupted run continues.
set -euo pipefail
DATA=$1 OUT=$2 MODEL=${MODEL:-smollm2} HERE=$(dirname "$0")
mkdir -p "$OUT"
[ -f "$OUT/questions.jsonl" ] || python "$HERE/questions.py" --data "$DATA" --out "$OUT/questions.jsonl"
head -n "${SETS:-1000}" "$OUT/questions.jsonl" > "$OUT/asked.jsonl"
[ -f "$OUT/long_questions.jsonl" ] || \
    python "$HERE/long_questions.py" --data "$DATA" --out "$OUT/long_questions.jsonl" --count "${LONG:-190}"
multirate answers "$MODEL" --data "$OUT/asked.jsonl" --out "$OUT/own.jsonl" --max-new-tokens 224 --batch 40
multirate answers "$MODEL" --data "$OUT/long_questions.jsonl" --out "$OUT/long.jsonl" \
    --max-new-tokens 160 --batch 16
multirate answers "$MODEL" --questions "${OWN:-1600}" --out "$OUT/self.jsonl" --max-new-tokens 256 --batch 40
head -n "-${HELDOUT:-60}" "$OUT/self.jsonl" > "$OUT/train_self.jsonl"
tail -n "${HELDOUT:-60}" "$OUT/self.jsonl" > "$OUT/heldout.jsonl"
