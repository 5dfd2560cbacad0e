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
SERVERS=""
start() {  # one server after the other, because each one measures the machine when it starts
    "${@:3}" > "$OUT/$1.log" 2>&1 &
    until sleep 1; curl -sf "http://127.0.0.1:$2/health" > /dev/null; do
        kill -0 $! || { tail -n 3 "$OUT/$1.log"; exit 1; }
    done
    kill -0 $! || { echo "another server has port $2"; exit 1; }
    SERVERS="$SERVERS $1=$2"
}
start multirate 8301 multirate serve "$MODEL" --port 8301
start plain 8302 multirate serve "$MODEL" --port 8302 --method autoregressive
if [ -n "${ACCELERATOR:-}" ]; then
    start accelerator 8304 multirate serve "$MODEL" --port 8304 -a "$ACCELERATOR"
fi
if [ -n "${LLAMA_SERVER:-}" ]; then
    start llama.cpp 8303 "$LLAMA_SERVER" -m "$MODEL" --port 8303 -np 16 -c 32768
fi
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
