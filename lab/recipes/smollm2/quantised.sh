#!/usr/bin/env bash
# SmolLM2's Q4_1 file as it is, against llama.cpp on the same file and against its weights expanded to
# bf16: the README's table (lab/results/quantised_smollm2.json). Ten minutes of an idle machine with
# two cores.
#
#   bash lab/recipes/smollm2/quantised.sh EVAL runs/quantised
#
# Run it in the root of the repository. EVAL: a folder with mt_bench/question.jsonl. The row of
# llama.cpp needs 'multirate[baselines]'.
set -euo pipefail
EVAL=$1 OUT=$2
mkdir -p "$OUT"
multirate bench smollm2 --no-tuned --suite mt_bench --data "$EVAL/mt_bench/question.jsonl" \
    --methods generate,autoregressive,sam,m2r2-carry:lookup=0,m2r2-carry --baselines llamacpp,bf16 \
    --limit 8 -n 256 --leave-out-loops --repeats 1 --json "$OUT/quantised_smollm2.json"
