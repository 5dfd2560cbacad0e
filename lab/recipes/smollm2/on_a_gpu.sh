#!/usr/bin/env bash
# Every trained lossless method of SmolLM2-135M-Instruct from nothing, all side by side on one GPU,
# over the same 46,592 answers (8.1M tokens) of the model's own.
#
#   bash lab/recipes/smollm2/on_a_gpu.sh DATA runs/on_a_gpu
#
# DATA: as of accelerators.sh. HELDOUT: questions with answers that no training sees
# (accelerators.sh makes them). A batch has 8,192 tokens. The steps are those that each method made
# in 283 seconds on an H200 beside the others. There the rate's cosine was that of 1,900 steps,
# cut short: in the last tenth of the time it went to its end. The eagle3 and hydra of the README's
# tables are of another such run: 316 and, with --start-from, 664 steps; 253 and 420. LICENCES of the
# questions: see questions.py and long_questions.py.
set -euo pipefail
DATA=$1 OUT=$2 MODEL=${MODEL:-smollm2} HELDOUT=${HELDOUT:-runs/smollm2/heldout.jsonl} HERE=$(dirname "$0")
mkdir -p "$OUT"
python "$HERE/questions.py" --data "$DATA" --out "$OUT/sets.jsonl"
python "$HERE/questions.py" --data "$DATA" --out "$OUT/more_sets.jsonl" --further 20000
python "$HERE/long_questions.py" --data "$DATA" --out "$OUT/long.jsonl" --count 3000
[ -f "$OUT/self.jsonl" ] || python "$HERE/answers_on_gpu.py" --model "$MODEL" --out "$OUT" --questions 24000 \
    --data "$OUT/sets.jsonl" "$OUT/more_sets.jsonl" "$OUT/long.jsonl" --heldout "$HELDOUT"
M=(--option draft_vocab=12288)
train() { # METHOD STEPS OPTIONS...
    local method=$1 steps=$2
    shift 2
    multirate train "$MODEL" --method "$method" --data "$OUT/self.jsonl" --data "$OUT/own.jsonl" \
        --heldout-files "$HELDOUT" --out "$OUT/$method" --max-length 1024 --tokens-per-batch 8192 \
        --warmup-steps 40 --steps "$steps" "$@" > "$OUT/$method.log" 2>&1 &
}
train m2r2-carry 776 --lr 0.002 "${M[@]}" --option unroll_steps=3 --option "taps=[8,15,22]" \
    --option feature_weight=10 --option noise=0.2
train eagle 1347 --lr 0.002 "${M[@]}"
train eagle3 1003 --lr 0.002 "${M[@]}"
train hydra 800 --lr 0.002 "${M[@]}"
train medusa 1585 --lr 0.01
train kangaroo 1900 --lr 0.03 "${M[@]}"
train m2r2 1538 --lr 0.002 "${M[@]}" --option fuse=true --option "gates=[4]"
wait
grep -H -i "error\|tokens per" "$OUT"/*.log || true
