#!/usr/bin/env bash
# The accelerators of the embedded reference model: same data, same steps, same seed for each method.
#
#   bash recipes/reference/accelerators.sh runs/reference/base/model runs/reference/data runs/reference/accelerators
#
# First the model answers the training questions itself (a draft must agree with what the model says), then every
# method trains on these answers and the original ones. Interrupted, the same command resumes.
# KANGAROO_SIZE widens Kangaroo's adapter to the size of m2r2-carry, at the same layer.
set -euo pipefail
MODEL=$1 DATA=$2 OUT=$3
STEPS=${STEPS:-450}
mkdir -p "$OUT"
multirate answers "$MODEL" --data "$DATA/chat.jsonl" --out "$OUT/own_answers.jsonl" --limit 2000 --max-new-tokens 140
own=()  # six times: about a third of what is seen
for _ in 1 2 3 4 5 6; do own+=(--data "$OUT/own_answers.jsonl"); done
for method in ${METHODS:-m2r2-carry kangaroo m2r2}; do
    options=()
    # the gate that drafts; re-initialisation makes deeper gates independent of it
    [ "$method" = m2r2 ] && options=(--option "gates=[5]")
    [ "$method" = kangaroo ] && options=(--option exit_layer=1 --option match_parameters="${KANGAROO_SIZE:-1240000}")
    [ -f "$OUT/$method/accelerator.json" ] && continue
    multirate train "$MODEL" --data "$DATA/chat.jsonl" "${own[@]}" \
        --heldout-files "$DATA/heldout_chat.jsonl" --heldout-samples 96 \
        --out "$OUT/$method" --method "$method" --steps "$STEPS" --seed 1 "${options[@]}"
done
