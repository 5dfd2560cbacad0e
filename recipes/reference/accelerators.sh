#!/usr/bin/env bash
# The accelerators of the embedded reference model: same data, same steps, same seed for each method.
#
#   bash recipes/reference/accelerators.sh runs/reference/base/model runs/reference/data runs/reference/accelerators
#
# First the model answers the training questions itself (a draft must agree with what the model says), second turns
# included, then every method trains on these answers and a few of the original ones. The base reads each sample once,
# for all methods (--teacher-states). Interrupted, the same command resumes.
# KANGAROO_SIZE widens Kangaroo's adapter to the size of m2r2-carry, at the same layer; its threshold is the fastest of
# 0.2 to 0.6 (the paper's) on held-out questions.
set -euo pipefail
MODEL=$1 DATA=$2 OUT=$3
STEPS=${STEPS:-1000}
mkdir -p "$OUT"
own=$OUT/own_answers.jsonl original=$OUT/original_answers.jsonl
multirate answers "$MODEL" --data "$DATA/questions.jsonl" --out "$own" --limit "${ANSWERS:-12000}" --max-new-tokens 192
multirate answers "$MODEL" --data "$DATA/heldout_questions.jsonl" --out "$OUT/heldout_own.jsonl" --limit 96 --max-new-tokens 192
[ -f "$original" ] || awk 'NR % 24 == 0' "$DATA/chat.jsonl" > "$original"
for method in ${METHODS:-m2r2-carry kangaroo m2r2}; do
    options=()
    [ "$method" = m2r2-carry ] && options=(--option "draft_vocab=${DRAFT_VOCAB:-1536}")
    # the gate that drafts, after a quarter of the layers; re-initialisation makes deeper gates independent of it
    [ "$method" = m2r2 ] && options=(--option "gates=[6]")
    [ "$method" = kangaroo ] && options=(--option exit_layer=1 --option match_parameters="${KANGAROO_SIZE:-1082241}" \
        --option threshold=0.2 --option max_draft=8)
    [ -f "$OUT/$method/accelerator.json" ] && [ ! -f "$OUT/$method/training_state.pt" ] && continue
    multirate train "$MODEL" --data "$own" --data "$own" --data "$original" \
        --heldout-files "$OUT/heldout_own.jsonl" --teacher-states "$OUT/states" \
        --out "$OUT/$method" --method "$method" --steps "$STEPS" --seed 1 "${options[@]}"
done
