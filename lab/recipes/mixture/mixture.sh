#!/usr/bin/env bash
# The toy mixture of experts (lab/models/mixture) and its expert predictor, from nothing.
#
#   bash lab/recipes/mixture/mixture.sh DATA runs/mixture     the model is written to runs/mixture/model
#
# DATA: the folder of permissive training sets that prepare.py names. CONFIG: another configuration.
# An interrupted run continues. The shipped model came from this configuration, on data that an earlier
# version of prepare.py wrote; the shipped predictor came from predictor.sh.
set -euo pipefail
DATA=$1 OUT=$2 HERE=$(dirname "$0") CONFIG=${CONFIG:-$(dirname "$0")/mixture.yaml}
PRETRAINING=$HERE/../pretraining
mkdir -p "$OUT"
[ -f "$OUT/data/heldout_questions.jsonl" ] || python "$PRETRAINING/prepare.py" --data "$DATA" --out "$OUT/data"
[ -f "$OUT/base/facts.json" ] || \
    python "$PRETRAINING/pretrain.py" --config "$CONFIG" --data "$OUT/data" --out "$OUT/base"
bash "$HERE/predictor.sh" "$OUT/base/model" "$OUT/data" "$OUT/predictor"
python "$PRETRAINING/install.py" --base "$OUT/base" --config "$CONFIG" --target "$OUT/model" \
    --accelerator "$OUT/predictor" "$OUT/model/predictor"
