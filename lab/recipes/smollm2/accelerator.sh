# Sourced by the scripts that train one accelerator of SmolLM2-135M-Instruct each:
#
#   bash lab/recipes/smollm2/METHOD.sh DATA OUT     the accelerator is written to OUT/METHOD
#
# DATA: as for answers.sh, which first writes the training data to ANSWERS (default: OUT/answers)
# if it is not there. STEPS and BATCH change the number of steps and the tokens per step. A finished
# accelerator is kept, and an interrupted training continues.
set -euo pipefail
DATA=$1 OUT=$2 MODEL=${MODEL:-smollm2} HERE=$(dirname "$0") ANSWERS=${ANSWERS:-$2/answers}

train() { # METHOD STEPS OPTIONS...
    local method=$1 steps=${STEPS:-$2}
    shift 2
    [ -f "$OUT/$method/accelerator.json" ] && [ ! -f "$OUT/$method/training_state.pt" ] && return
    [ -f "$ANSWERS/self.jsonl" ] && [ -f "$ANSWERS/own.jsonl" ] || bash "$HERE/answers.sh" "$DATA" "$ANSWERS"
    multirate train "$MODEL" --method "$method" --out "$OUT/$method" --data "$ANSWERS/self.jsonl" \
        --data "$ANSWERS/own.jsonl" --heldout-files "$ANSWERS/heldout.jsonl" --max-length 1024 \
        --tokens-per-batch "${BATCH:-8192}" --warmup-steps "${WARMUP:-40}" --steps "$steps" "$@"
}
