#!/usr/bin/env bash
# The accelerators of SmolLM2-135M-Instruct: same data, same steps, same seed for each method.
#
#   bash lab/recipes/smollm2/accelerators.sh DATA runs/smollm2
#
# DATA: the folder of permissive training sets that questions.py names. The model answers their
# questions and such as it asks itself, reads its own answers once (--teacher-states, 1.3 KB a
# token), and every method trains on what it says. Interrupted at any point, the same command goes
# on. ANSWERS: how many questions of the sets; OWN: how many of its own; STEPS: optimizer steps of
# at most 2,048 tokens.
#
# The m2r2-carry in the package saw 3,120 questions of the sets first (550 steps, 8,192 draft
# tokens), then 627 more and 2,000 of its own (1,820 steps, --start-from the first, 12,288 draft
# tokens), then long texts, too (350 steps), then 2,023 and 150 more and 1,700 more of its own, each
# once, with --option "taps=[8,15,22]" (440 steps), and then what go_on.sh has. Answers that are seen
# twice are learned by heart.
set -euo pipefail
DATA=$1 OUT=$2 MODEL=${MODEL:-smollm2}
mkdir -p "$OUT"
[ -f "$OUT/questions.jsonl" ] || python "$(dirname "$0")/questions.py" --data "$DATA" --out "$OUT/questions.jsonl"
head -n "${ANSWERS:-3747}" "$OUT/questions.jsonl" > "$OUT/asked.jsonl"
[ -f "$OUT/long.jsonl" ] || \
    python "$(dirname "$0")/long_questions.py" --data "$DATA" --out "$OUT/long.jsonl" --count "${LONG:-500}"
multirate answers "$MODEL" --data "$OUT/long.jsonl" --out "$OUT/train_long.jsonl" --max-new-tokens 160 --batch 16
multirate answers "$MODEL" --data "$OUT/asked.jsonl" --out "$OUT/own.jsonl" --max-new-tokens 224 --batch 32
multirate answers "$MODEL" --questions "${OWN:-1100}" --seed 7 --out "$OUT/self.jsonl" --max-new-tokens 256 --batch 40
head -n -100 "$OUT/self.jsonl" > "$OUT/train_self.jsonl"
tail -n 100 "$OUT/self.jsonl" > "$OUT/heldout.jsonl"
for method in ${METHODS:-m2r2-carry eagle kangaroo m2r2}; do
    options=(--lr 0.001 --warmup-steps 20)
    [ "$method" = m2r2-carry ] && options+=(--option draft_vocab=12288 --option unroll_steps=2)
    # one gate, shallower than the paper's L/4: deeper ones cost more than they add, in training, too
    # (dynamic mode with several gates: --option "gates=[4,10,20]")
    [ "$method" = m2r2 ] && options+=(--option draft_vocab=12288 --option fuse=true --option "gates=[4]")
    [ "$method" = eagle ] && options=(--lr 0.002 --warmup-steps 20)
    # it starts from little: the higher rate
    [ "$method" = kangaroo ] && options=(--lr 0.03 --warmup-steps 20 --option draft_vocab=12288)
    [ -f "$OUT/$method/accelerator.json" ] && [ ! -f "$OUT/$method/training_state.pt" ] && continue
    multirate train "$MODEL" --data "$OUT/own.jsonl" --data "$OUT/train_self.jsonl" \
        --data "$OUT/train_long.jsonl" --max-length 1024 \
        --heldout-files "$OUT/heldout.jsonl" --out "$OUT/$method" --method "$method" \
        --teacher-states "$OUT/states" --steps "${STEPS:-1070}" --tokens-per-batch 2048 "${options[@]}"
done
