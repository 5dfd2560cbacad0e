#!/usr/bin/env bash
# The tiny model that the tests run on, and its accelerators `m2r2-carry`, `m2r2` and `kangaroo`, from
# nothing. The last step copies them into src/multirate/reference/tiny, or into TARGET.
#
#   bash lab/recipes/tiny/tiny.sh DATA runs/tiny
#
# DATA: the folder of permissive training sets that prepare.py names. The model answers the training
# questions itself, and every method trains on these answers with the same seed. An interrupted run
# continues. ANSWERS, STEPS: smaller numbers, for a trial.
#
# The shipped accelerators came from this script. The shipped model did too, except that its first 225
# steps followed a schedule with 400 steps in the first phase and ran compiled.
set -euo pipefail
DATA=$1 OUT=$2
ROOT=$(cd "$(dirname "$0")/../../.." && pwd) PACKAGE=${TARGET:-src/multirate/reference/tiny}
mkdir -p "$OUT"
OUT=$(realpath "$OUT") DATA=$(realpath "$DATA")
cd "$ROOT"
base=$OUT/base data=$OUT/data
[ -f "$data/heldout_questions.jsonl" ] || python lab/recipes/pretraining/prepare.py --data "$DATA" --out "$data" --vocab-size 1024
[ -f "$base/facts.json" ] || python lab/recipes/pretraining/pretrain.py --config lab/recipes/tiny/tiny.yaml --data "$data" --out "$base"
cd "$OUT" # so that cards name files and not folders of this machine
multirate answers base/model --data data/questions.jsonl --out own_answers.jsonl --limit "${ANSWERS:-800}" --max-new-tokens 96 --batch 32
multirate answers base/model --data data/heldout_questions.jsonl --out heldout_own.jsonl --limit 64 --max-new-tokens 96 --batch 32
for method in m2r2-carry kangaroo m2r2; do
    options=(--option rank=16 --option arla_dim=16) steps=150
    # it starts from a least-squares fit, close to its best
    [ "$method" = m2r2-carry ] && options+=(--option draft_vocab=512 --lr 0.001) steps=20
    # the gate that drafts, and a deeper one where the residual starts again
    [ "$method" = m2r2 ] && options+=(--option "gates=[1,3]")
    [ "$method" = kangaroo ] && options=(--option exit_layer=1)
    [ -f "$method/accelerator.json" ] && [ ! -f "$method/training_state.pt" ] && continue
    multirate train base/model --data own_answers.jsonl --heldout-files heldout_own.jsonl \
        --out "$method" --method "$method" --steps "${STEPS:-$steps}" --tokens-per-batch 2048 --warmup-steps 15 --seed 1 "${options[@]}"
done
cd "$ROOT"
python lab/recipes/pretraining/install.py --base "$base" --config lab/recipes/tiny/tiny.yaml --target $PACKAGE/model \
    --accelerator "$OUT/m2r2-carry" $PACKAGE/accelerators/m2r2-carry \
    --accelerator "$OUT/kangaroo" $PACKAGE/accelerators/kangaroo \
    --accelerator "$OUT/m2r2" $PACKAGE/accelerators/m2r2
