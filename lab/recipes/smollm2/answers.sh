#!/usr/bin/env bash
# The training data of SmolLM2's accelerators: the model's own greedy answers.
#
#   bash lab/recipes/smollm2/answers.sh DATA OUT
#
# DATA: a folder with the permissive training sets that questions.py and long_questions.py name.
# Writes to OUT:
#   own.jsonl      answers to at most SETS questions of these sets and LONG about long texts
#   self.jsonl     answers to OWN questions that the model samples itself
#   heldout.jsonl  answers to HELDOUT other questions that it samples itself, for evaluation
# The defaults give about 46,600 answers (8.1M tokens), like the data of the shipped accelerators.
# That takes 75 seconds on an H200 (answers_on_gpu.py) and hours on a CPU, so set smaller numbers
# there. Existing files are kept, and an interrupted run continues.
set -euo pipefail
DATA=$1 OUT=$2 MODEL=${MODEL:-smollm2} HERE=$(dirname "$0")
SETS=${SETS:-25200} LONG=${LONG:-3000} OWN=${OWN:-24000} HELDOUT=${HELDOUT:-60}
mkdir -p "$OUT"
if [ ! -f "$OUT/questions.jsonl" ]; then
    python "$HERE/questions.py" --data "$DATA" --out "$OUT/first.jsonl"
    python "$HERE/questions.py" --data "$DATA" --out "$OUT/further.jsonl" --further 20000
    python "$HERE/long_questions.py" --data "$DATA" --out "$OUT/long.jsonl" --count "$LONG"
    cat "$OUT/first.jsonl" "$OUT/further.jsonl" > "$OUT/sets.jsonl"
    { head -n "$SETS" "$OUT/sets.jsonl"; cat "$OUT/long.jsonl"; } > "$OUT/questions.jsonl"
fi
multirate answers "$MODEL" --questions "$HELDOUT" --seed 1 --out "$OUT/heldout.jsonl" --max-new-tokens 256
if python -c 'import torch; raise SystemExit(not torch.cuda.is_available())'; then
    [ -f "$OUT/own.jsonl" ] || python "$HERE/answers_on_gpu.py" --model "$MODEL" --out "$OUT" \
        --questions "$OWN" --data "$OUT/questions.jsonl" --heldout "$OUT/heldout.jsonl"
else
    multirate answers "$MODEL" --data "$OUT/questions.jsonl" --out "$OUT/own.jsonl" --max-new-tokens 224 --batch 32
    multirate answers "$MODEL" --questions "$OWN" --out "$OUT/self.jsonl" --max-new-tokens 224 --batch 32
fi
