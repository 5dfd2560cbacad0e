#!/usr/bin/env bash
# The comparison of dynamic methods by quality and speed (lab/results/dynamic_smollm2.json): every
# trained one from nothing, on the same answers of SmolLM2-135M-Instruct, for the same number of steps.
#
#   bash lab/recipes/smollm2/dynamic_baselines.sh DATA runs/dynamic
#
# DATA: as for answers.sh. The answers and teacher states are those of equal_training.sh, which runs
# first if EQUAL does not have them. QUESTIONS: MT-Bench's question.jsonl. An interrupted run continues.
set -euo pipefail
DATA=$1 OUT=$2 MODEL=${MODEL:-smollm2} QUESTIONS=${QUESTIONS:-question.jsonl}
EQUAL=${EQUAL:-runs/equal} HERE=$(dirname "$0")
. "$HERE/train_equally.sh"
[ -f "$EQUAL/m2r2-carry/accelerator.json" ] || bash "$HERE/equal_training.sh" "$DATA" "$EQUAL"
mkdir -p "$OUT"
folders=()
for method in ${METHODS:-lite deed calm-classifier specee free mixture_of_depths}; do
    case $method in
        calm-classifier | mixture_of_depths) options=(--lr 0.001) ;;
        *) options=(--lr 0.001 --option draft_vocab=12288) ;;
    esac
    folders+=(-a "$method=$OUT/$method")
    train_equally "$method" "$OUT/$method" 300 20 "${options[@]}"
done
# m2r2-carry, trained as long on the same answers by equal_training.sh
folders+=(-a "m2r2-carry-equal=$EQUAL/m2r2-carry")
multirate bench "$MODEL" --weights bf16 "${folders[@]}" --no-tuned --suite mt_bench --data "$QUESTIONS" --limit 3 \
    -n 96 --points 4 --repeats 1 --methods dynamic --json "$OUT/dynamic.json"
