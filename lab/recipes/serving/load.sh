#!/usr/bin/env bash
# Questions from 1, 2, 4, 8 and 16 clients at a time, the same ones to every server and other ones at
# every level: multirate with and without drafts, with the accelerator that ACCELERATOR names, and
# llama.cpp, where LLAMA_SERVER names its llama-server. Twenty minutes of an idle machine with two
# cores.
#
#   LLAMA_SERVER=/path/to/llama-server bash lab/recipes/serving/load.sh MODEL.gguf EVAL runs/serving
#
# Run it in the root of the repository, with 'multirate[serve]' and locust installed. EVAL: a folder
# with spec_bench/question.jsonl. Writes OUT/serving_load.json. At every level the servers take turns,
# in rounds of REQUESTS new questions and every other time in the opposite order, because shared
# machines change speed within minutes. The servers that are not asked are idle.
set -euo pipefail
MODEL=$1 EVAL=$2 OUT=$3
LEVELS=${LEVELS:-1 2 4 8 16} REQUESTS=${REQUESTS:-32} ROUNDS=${ROUNDS:-2} TOKENS=${TOKENS:-128}
mkdir -p "$OUT"
rm -f "$OUT"/*-*.json
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
multirate serve "$MODEL" --port 8301 2> "$OUT/multirate.log" &
multirate serve "$MODEL" --port 8302 --method autoregressive 2> "$OUT/plain.log" &
SERVERS="multirate=8301 plain=8302"
if [ -n "${ACCELERATOR:-}" ]; then
    multirate serve "$MODEL" --port 8304 -a "$ACCELERATOR" 2> "$OUT/accelerator.log" &
    SERVERS="$SERVERS accelerator=8304"
fi
if [ -n "${LLAMA_SERVER:-}" ]; then
    "$LLAMA_SERVER" -m "$MODEL" --port 8303 -np 16 -c 32768 > "$OUT/llama.log" 2>&1 &
    SERVERS="$SERVERS llama.cpp=8303"
fi
for server in $SERVERS; do
    until curl -sf "http://127.0.0.1:${server#*=}/health" > /dev/null; do sleep 1; done
done
first=0
order=$SERVERS
for clients in $LEVELS; do
    for round in $(seq "$ROUNDS"); do
        for server in $order; do
            locust -f lab/recipes/serving/load.py --headless --only-summary --users "$clients" \
                --spawn-rate 100 --host "http://127.0.0.1:${server#*=}" --requests "$REQUESTS" \
                --questions "$EVAL/spec_bench/question.jsonl" --first "$first" \
                --max-tokens "$TOKENS" --out "$OUT/${server%=*}-$clients-$round.json" \
                > "$OUT/locust.log" 2>&1
        done
        order=$(echo "$order" | tr ' ' '\n' | tac | xargs)
        first=$((first + REQUESTS))
    done
done
python "$(dirname "$0")/gather.py" "$OUT" --argv "$0" "$@"
