#!/usr/bin/env bash
# SmolLM2 tuned on WikiSQL, E2E and DialogSum, accelerators of the tuned model, and the comparison
# of dynamic modes by the tasks' scores.
#
#   bash recipes/tasks/tasks.sh DATA runs/tasks [MODEL]
#
# DATA: the folder of `multirate eval`. MODEL: a folder with SmolLM2-135M-Instruct. Needs
# 'multirate[eval]'. m2r2-carry and eagle go on from the package's of SmolLM2 (FROM), the others, of
# which it has none, begin from nothing; all see the same answers in as many steps. Interrupted at
# any point, the same command goes on. None of the weights are part of the package: DialogSum is for
# non-commercial use.
set -euo pipefail
DATA=$1 OUT=$2 MODEL=${3:-smollm2} HERE=$(dirname "$0")
FROM=${FROM:-src/multirate/reference/smollm2}
[ -f "$OUT/tuning.jsonl" ] || python "$HERE/prepare.py" --data "$DATA" --out "$OUT"
[ -f "$OUT/model/model.safetensors" ] || \
    python "$HERE/tune.py" --model "$MODEL" --data "$OUT/tuning.jsonl" --out "$OUT/model" --steps 80
multirate answers "$OUT/model" --data "$OUT/accelerators.jsonl" --limit "${ANSWERS:-2700}" \
    --out "$OUT/own.jsonl" --max-new-tokens 96 --batch 40
folders=()
for method in ${METHODS:-m2r2-carry eagle lite deed free calm-classifier specee mixture_of_depths}; do
    options=(--lr 0.001 --warmup-steps 10)
    case $method in
        m2r2-carry) options+=(--start-from "$FROM/$method" --option unroll_steps=2)
                    options+=(--option "taps=[8,15,22]") ;;
        eagle) options+=(--start-from "$FROM/$method") ;;
        calm-classifier | mixture_of_depths) ;;
        *) options+=(--option draft_vocab=8192) ;;
    esac
    folders+=(-a "$method=$OUT/$method")
    [ -f "$OUT/$method/accelerator.json" ] && [ ! -f "$OUT/$method/training_state.pt" ] && continue
    multirate train "$OUT/model" --data "$OUT/own.jsonl" --out "$OUT/$method" --method "$method" \
        --teacher-states "$OUT/states" --steps "${STEPS:-160}" --tokens-per-batch 2048 "${options[@]}"
done

# every method along its dial; the tuned model's 8-bit weights for all of them, which read prompts, too
NARROW=prompt_weights=narrow
along() { # METHOD SETTING VALUES...
    local method=$1 setting=$2 value
    shift 2
    for value in "$@"; do
        rows+=",$method:$setting=$value:model_weights=int8:$NARROW"
    done
    rows+=",$method:$setting=$1"
}
six() { echo "[$1,$1,$1,$1,$1,$1]"; }
rows=autoregressive,int8_weights,int8_weights:margin=0.15,int8_weights:$NARROW
rows+=,sam,m2r2-carry,m2r2-carry:margin=0.15,m2r2-carry:margin=0
rows+=,m2r2-carry:margin=0.15:$NARROW,m2r2-carry:margin=0:$NARROW
for threshold in 0.9 0.8 0.7 0.5; do
    rows+=",m2r2-carry:margin=0:$NARROW:exit_thresholds=[$threshold]"
done
rows+=,eagle:lookup=sam,eagle:lookup=sam:margin=0.15,eagle:lookup=sam:margin=0
rows+=,eagle:lookup=sam:margin=0.15:$NARROW,eagle:lookup=sam:margin=0:$NARROW
along lite thresholds "$(six 0.999)" "$(six 0.95)" "$(six 0.7)"
for method in deed free specee mixture_of_depths; do
    along "$method" threshold 0.999 0.95 0.7
done
rows+=,free:adaptive=0.4,free:adaptive=0.4:model_weights=int8:$NARROW
along calm-classifier:confidence=classifier:decay=0.0 threshold 0.999 0.95 0.7
along calm:confidence=softmax:draft_vocab=16384:decay=0.0 threshold 0.9999 0.998 0.95
along calm:confidence=state:decay=0.0 threshold 0.96
along skipdecode min_share 0.9667 0.85 0.7
for task in e2e_nlg:32 wikisql:40 dialogsum:20; do
    multirate bench "$OUT/model" --suite "${task%:*}" --data "$DATA" --methods "$rows" \
        "${folders[@]}" --no-tuned --limit "${task#*:}" -n 96 --repeats 1 \
        --json "$OUT/task_${task%:*}.json"
done
