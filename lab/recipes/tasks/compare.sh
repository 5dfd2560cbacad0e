#!/usr/bin/env bash
# Dynamic methods by task score (lab/results/task_*.json): every method at several settings, with what
# tasks.sh or on_a_gpu.sh trained.
#
#   bash lab/recipes/tasks/compare.sh DATA runs/tasks
#
# DATA: the data folder of `multirate eval`. Half an hour of an idle machine with two cores. Finished
# tasks are kept.
set -euo pipefail
DATA=$1 OUT=$2
folders=()
for method in m2r2-carry eagle lite deed free calm-classifier specee mixture_of_depths; do
    folders+=(-a "$method=$OUT/$method")
done

along() { # METHOD SETTING VALUES...
    local method=$1 setting=$2 value
    shift 2
    for value in "$@"; do
        rows+=",$method:$setting=$value"
    done
}
six() { echo "[$1,$1,$1,$1,$1,$1]"; }
rows=autoregressive,sam,m2r2-carry,eagle:lookup=sam
for threshold in 0.9 0.8 0.7 0.5; do
    rows+=",m2r2-carry:exit_thresholds=[$threshold]"
done
along lite thresholds "$(six 0.999)" "$(six 0.95)" "$(six 0.7)"
for method in deed free specee mixture_of_depths; do
    along "$method" threshold 0.999 0.95 0.7
done
along calm-classifier:decay=0.0 threshold 0.999 0.95 0.7
along calm:confidence=softmax:draft_vocab=16384:decay=0.0 threshold 0.9999 0.998 0.95
along calm:confidence=state:decay=0.0 threshold 0.96
along skipdecode min_share 0.9667 0.85 0.7
for task in e2e_nlg:32 wikisql:40 dialogsum:20; do
    result=$OUT/task_${task%:*}.json
    [ ! -f "$result" ] || continue
    multirate bench "$OUT/model" --suite "${task%:*}" --data "$DATA" --methods "$rows" "${folders[@]}" \
        --no-tuned --limit "${task#*:}" -n 96 --repeats 1 --json "$result"
done
