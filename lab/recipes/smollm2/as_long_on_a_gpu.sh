#!/usr/bin/env bash
# The accelerators of M2R2's rivals go on until each has seen as many tokens as the package's
# m2r2-carry (20.1M), side by side on one GPU, over the answers of on_a_gpu.sh (46,592, of the
# model's own).
#
#   bash lab/recipes/smollm2/as_long_on_a_gpu.sh ACCELERATORS runs/on_a_gpu runs/as_long
#
# ACCELERATORS: a folder with eagle3/ and hydra/, as of lossless.sh; the others go on from the
# package's. HELDOUT: as of on_a_gpu.sh. TOKENS: another number to reach. BATCH: tokens of a step.
set -euo pipefail
ACCELERATORS=$1 ANSWERS=$2 OUT=$3 MODEL=${MODEL:-smollm2} HELDOUT=${HELDOUT:-runs/smollm2/heldout.jsonl}
TOKENS=${TOKENS:-20100000} BATCH=${BATCH:-8192}
PACKAGE=$(python -c 'import multirate.named_models as m; print(m.NAMED["smollm2"].accelerators)')
mkdir -p "$OUT"

steps_left() { # FOLDER: a step sees 0.965 of a batch, the rest being room that no answer fits
    python - "$1" "$TOKENS" "$BATCH" <<'PYTHON'
import json, sys

folder, wanted, batch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
training = json.load(open(f"{folder}/accelerator.json"))["training"]
seen = sum(part["tokens"] for part in [training, *training.get("before", [])])
print(max(0, round((wanted - seen) / (0.965 * batch))))
PYTHON
}
go_on() { # METHOD FOLDER OPTIONS...
    local method=$1 from=$2 steps
    shift 2
    steps=$(steps_left "$from")
    echo "$method: $steps steps"
    [ "$steps" -gt 0 ] || return 0
    multirate train "$MODEL" --method "$method" --start-from "$from" --out "$OUT/$method" \
        --data "$ANSWERS/self.jsonl" --data "$ANSWERS/own.jsonl" --heldout-files "$HELDOUT" \
        --max-length 1024 --tokens-per-batch "$BATCH" --warmup-steps 40 --steps "$steps" "$@" \
        > "$OUT/$method.log" 2>&1 &
    running[$method]=$!
}
declare -A running
# half the rates that each began with, as m2r2-carry's went on with
go_on eagle3 "$ACCELERATORS/eagle3" --lr 0.001
go_on hydra "$ACCELERATORS/hydra" --lr 0.001
go_on eagle "$PACKAGE/eagle" --lr 0.001
go_on kangaroo "$PACKAGE/kangaroo" --lr 0.015
go_on medusa "$PACKAGE/medusa" --lr 0.005
go_on m2r2 "$PACKAGE/m2r2" --lr 0.001
failed=0
for method in "${!running[@]}"; do
    wait "${running[$method]}" || { failed=1; echo "$method failed: $(tail -1 "$OUT/$method.log")" >&2; }
done
exit $failed
