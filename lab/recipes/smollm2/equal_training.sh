#!/usr/bin/env bash
# Every trained lossless method on the same answers of SmolLM2-135M-Instruct, the same steps, from
# nothing, and the comparison.
#
#   bash lab/recipes/smollm2/equal_training.sh DATA runs/equal
#
# DATA: as of accelerators.sh. QUESTIONS: MT-Bench's question.jsonl. Interrupted at any point, the
# same command goes on. Each method has its own learning rate, the best of those that were tried
# (docs/experiments.md); options are those of the accelerators in the package, with what each
# method's paper adds.
set -euo pipefail
DATA=$1 OUT=$2 MODEL=${MODEL:-smollm2} QUESTIONS=${QUESTIONS:-question.jsonl}
HERE=$(dirname "$0") EQUAL=$OUT
. "$HERE/train_equally.sh"
mkdir -p "$OUT"
[ -f "$OUT/questions.jsonl" ] || python "$HERE/questions.py" --data "$DATA" --out "$OUT/questions.jsonl"
head -n 1000 "$OUT/questions.jsonl" > "$OUT/asked.jsonl"
[ -f "$OUT/long_questions.jsonl" ] || \
    python "$HERE/long_questions.py" --data "$DATA" --out "$OUT/long_questions.jsonl" --count 190
multirate answers "$MODEL" --data "$OUT/asked.jsonl" --out "$OUT/own.jsonl" --max-new-tokens 224 --batch 40
multirate answers "$MODEL" --data "$OUT/long_questions.jsonl" --out "$OUT/long.jsonl" \
    --max-new-tokens 160 --batch 16
multirate answers "$MODEL" --questions 1600 --out "$OUT/self.jsonl" --max-new-tokens 256 --batch 40
head -n -60 "$OUT/self.jsonl" > "$OUT/train_self.jsonl"
tail -n 60 "$OUT/self.jsonl" > "$OUT/heldout.jsonl"
folders=()
for method in ${METHODS:-kangaroo medusa hydra eagle eagle3 m2r2-carry}; do
    case $method in
        kangaroo) options=(--lr 0.03 --option draft_vocab=12288) ;;
        medusa) options=(--lr 0.01) ;;
        m2r2-carry)
            options=(--lr 0.002 --option draft_vocab=12288 --option unroll_steps=3)
            options+=(--option "taps=[8,15,22]" --option feature_weight=10 --option noise=0.2)
            ;;
        *) options=(--lr 0.002 --option draft_vocab=12288) ;;
    esac
    folders+=(-a "$method=$OUT/$method")
    train_equally "$method" "$OUT/$method" 300 20 "${options[@]}"
done
rows=autoregressive
for method in kangaroo medusa hydra eagle eagle3 m2r2-carry; do
    for lookup in 0 sam; do
        # only M2R2 is joined unless it is told otherwise
        row=$method:lookup=$lookup
        [ "$row" = "$method:lookup=0" ] && [ "$method" != m2r2-carry ] && row=$method
        rows+=,$row,$row:staged=0
    done
done
multirate bench "$MODEL" "${folders[@]}" --no-tuned --suite mt_bench --data "$QUESTIONS" --limit 8 \
    -n 128 --repeats 1 --json "$OUT/equal_training.json" --methods "$rows"
