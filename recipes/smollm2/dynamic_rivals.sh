#!/usr/bin/env bash
# Every trained dynamic method on the same answers of SmolLM2-135M-Instruct, the same steps, from
# nothing, and the comparison by quality and speed.
#
#   bash recipes/smollm2/dynamic_rivals.sh DATA runs/dynamic
#
# DATA: as of accelerators.sh; the answers and states are those of equal_training.sh, which makes
# them in EQUAL first. QUESTIONS: MT-Bench's question.jsonl. Interrupted at any point, the same
# command goes on.
set -euo pipefail
DATA=$1 OUT=$2 MODEL=${MODEL:-smollm2} QUESTIONS=${QUESTIONS:-question.jsonl}
EQUAL=${EQUAL:-runs/equal}
[ -f "$EQUAL/heldout.jsonl" ] || bash "$(dirname "$0")/equal_training.sh" "$DATA" "$EQUAL"
mkdir -p "$OUT"
folders=()
for method in ${METHODS:-lite deed calm-classifier specee free mixture_of_depths m2r2-carry}; do
    case $method in
        calm-classifier | mixture_of_depths) options=(--lr 0.001) ;;
        m2r2-carry)
            options=(--lr 0.002 --option draft_vocab=12288 --option unroll_steps=3)
            options+=(--option "taps=[8,15,22]" --option feature_weight=10 --option noise=0.2)
            ;;
        *) options=(--lr 0.001 --option draft_vocab=12288) ;;
    esac
    name=$method
    [ "$method" = m2r2-carry ] && name=m2r2-carry-equal
    folders+=(-a "$name=$OUT/$method")
    [ -f "$OUT/$method/accelerator.json" ] && [ ! -f "$OUT/$method/training_state.pt" ] && continue
    multirate train "$MODEL" --data "$EQUAL/train_self.jsonl" --data "$EQUAL/own.jsonl" \
        --data "$EQUAL/long.jsonl" --max-length 1024 --heldout-files "$EQUAL/heldout.jsonl" \
        --out "$OUT/$method" --method "$method" --teacher-states "$EQUAL/states" --steps 100 \
        --tokens-per-batch 2048 --warmup-steps 10 --threads 1 "${options[@]}"
done
multirate bench "$MODEL" "${folders[@]}" --no-tuned --suite mt_bench --data "$QUESTIONS" --limit 3 \
    -n 96 --points 4 --repeats 1 --methods dynamic --json "$OUT/dynamic.json"
