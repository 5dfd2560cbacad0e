#!/usr/bin/env bash
# How the package's m2r2-carry of SmolLM2-135M-Instruct went on (the other methods' are those of
# on_a_gpu.sh now) from where accelerators.sh left it, on new answers, each seen once: the same ones,
# in the same order, for each method.
#
#   bash lab/recipes/smollm2/go_on.sh DATA runs/go_on
#
# DATA: as of accelerators.sh. 6,624 answers, 1.95M tokens: to 2,600 further questions of the sets,
# 700 about long texts, and 3,324 that the model asked itself. Interrupted at any point, the same
# command goes on; one thread of a method reads 1,100 (m2r2-carry) to 3,400 (eagle) tokens/s on an
# AMD EPYC (Zen 5), after the base has read all at 900.
set -euo pipefail
DATA=$1 OUT=$2 MODEL=${MODEL:-smollm2} HERE=$(dirname "$0")
FROM=${FROM:-src/multirate/reference/smollm2}
mkdir -p "$OUT"
[ -f "$OUT/sets.jsonl" ] || python "$HERE/questions.py" --data "$DATA" --out "$OUT/sets.jsonl" --further 2600
[ -f "$OUT/long.jsonl" ] || \
    python "$HERE/long_questions.py" --data "$DATA" --out "$OUT/long.jsonl" --count 700 --seed 5
multirate answers "$MODEL" --data "$OUT/sets.jsonl" --out "$OUT/own.jsonl" --max-new-tokens 224 --batch 40
multirate answers "$MODEL" --data "$OUT/long.jsonl" --out "$OUT/train_long.jsonl" --max-new-tokens 160 --batch 16
for asked in "0 1600" "3131 1000" "2125 784"; do
    set -- $asked
    multirate answers "$MODEL" --questions "$2" --seed "$1" --out "$OUT/self_$1.jsonl" --max-new-tokens 256 --batch 40
done
head -n -60 "$OUT/self_0.jsonl" > "$OUT/train_self.jsonl"
tail -n 60 "$OUT/self_0.jsonl" > "$OUT/heldout.jsonl"
for method in ${METHODS:-m2r2-carry eagle m2r2 kangaroo}; do
    options=(--lr 0.001)
    [ "$method" = m2r2-carry ] && options+=(--option unroll_steps=2 --option "taps=[8,15,22]")
    [ "$method" = kangaroo ] && options=(--lr 0.01)
    [ -f "$OUT/$method/accelerator.json" ] && [ ! -f "$OUT/$method/training_state.pt" ] && continue
    multirate train "$MODEL" --data "$OUT/train_self.jsonl" --data "$OUT/own.jsonl" \
        --data "$OUT/train_long.jsonl" --data "$OUT/self_3131.jsonl" --data "$OUT/self_2125.jsonl" \
        --max-length 1024 --heldout-files "$OUT/heldout.jsonl" --out "$OUT/$method" --method "$method" \
        --start-from "$FROM/$method" --teacher-states "$OUT/states" --steps 953 \
        --tokens-per-batch 2048 --warmup-steps 20 --threads 1 "${options[@]}"
done
