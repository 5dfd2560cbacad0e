# Sourced by equal_training.sh and dynamic_baselines.sh: one training on the answers and teacher states
# in EQUAL.
#
#   train_equally METHOD FOLDER STEPS WARMUP OPTIONS...
#
# A finished accelerator is kept, and an interrupted training continues.

train_equally() {
    local method=$1 folder=$2 steps=$3 warmup=$4
    shift 4
    [ -f "$folder/accelerator.json" ] && [ ! -f "$folder/training_state.pt" ] && return
    multirate train "$MODEL" --data "$EQUAL/train_self.jsonl" --data "$EQUAL/own.jsonl" \
        --data "$EQUAL/long.jsonl" --max-length 1024 --heldout-files "$EQUAL/heldout.jsonl" \
        --out "$folder" --method "$method" --teacher-states "$EQUAL/states" --steps "$steps" \
        --tokens-per-batch 2048 --warmup-steps "$warmup" --threads 1 "$@"
}
