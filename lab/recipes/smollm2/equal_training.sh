#!/usr/bin/env bash
# The equal-training comparison on a CPU (lab/results/equal_training.json): every trained lossless
# method from nothing, on the same answers of SmolLM2-135M-Instruct, for the same number of steps.
#
#   bash lab/recipes/smollm2/equal_training.sh DATA runs/equal
#
# DATA: as for answers.sh. QUESTIONS: MT-Bench's question.jsonl. An interrupted run continues. Each
# method has the best of the learning rates that we tried. Its options are those of the shipped
# accelerators, plus what the method's paper adds.
set -euo pipefail
DATA=$1 OUT=$2 MODEL=${MODEL:-smollm2} QUESTIONS=${QUESTIONS:-question.jsonl}
HERE=$(dirname "$0") EQUAL=$OUT
. "$HERE/train_equally.sh"
bash "$HERE/equal_answers.sh" "$DATA" "$OUT"
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
        # lookup is off by default for every method but M2R2
        row=$method:lookup=$lookup
        [ "$row" = "$method:lookup=0" ] && [ "$method" != m2r2-carry ] && row=$method
        rows+=,$row
    done
done
multirate bench "$MODEL" --weights bf16 "${folders[@]}" --no-tuned --suite mt_bench --data "$QUESTIONS" --limit 8 \
    -n 128 --repeats 1 --json "$OUT/equal_training.json" --methods "$rows"
