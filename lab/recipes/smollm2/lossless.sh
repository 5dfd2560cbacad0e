#!/usr/bin/env bash
# Every lossless method on every suite, on the weights expanded to bf16: the speed tables
# (lab/results/mt_bench_smollm2.json and suite_*.json). An hour of an idle machine with two cores.
#
#   bash lab/recipes/smollm2/lossless.sh EVAL runs/lossless [SUITE...]
#
# Run it in the root of the repository.
#
# EVAL: a folder with mt_bench/question.jsonl, spec_bench/question.jsonl, gsm8k/test.jsonl and
# humaneval/HumanEval.jsonl.gz. SUITE: mt_bench, spec_bench, humaneval, gsm8k, t1 (MT-Bench at
# temperature 1), b4 (in batches of 4) or mt_bench_all (all of its questions, the fastest rows). The
# default is all of them.
#
# Answers have up to 256 tokens, and answers that run into loops are not counted. Batches have up to
# 96 tokens, and all count. Finished suites are kept. ACCELERATORS: a folder with eagle3/ and hydra/,
# which are too large to ship (on_a_gpu.sh, or eagle3.sh and hydra.sh); without it these rows are left
# out. Rows of llama.cpp need 'multirate[baselines]'.
set -euo pipefail
EVAL=$1 OUT=$2 MODEL=${MODEL:-smollm2}
shift 2
mkdir -p "$OUT"
DRAFT=two_model:draft=lab/models/smollm2-draft

GIVEN=(-a "medusa=lab/accelerators/medusa") LARGE= LARGEST=
if [ -n "${ACCELERATORS:-}" ]; then
    GIVEN+=(-a "eagle3=$ACCELERATORS/eagle3" -a "hydra=$ACCELERATORS/hydra")
    LARGE=,eagle3,eagle3:lookup=sam
    LARGEST=$LARGE,hydra
fi
EVERY=,lookahead,prompt_lookup,sam,token_recycling,token_recycling:lookup=sam,$DRAFT,$DRAFT:lookup=sam
EVERY+=,layerskip,medusa,kangaroo,kangaroo:lookup=sam,eagle,eagle:lookup=sam,m2r2,m2r2-carry:lookup=0
EVERY+=,m2r2-carry$LARGEST
BEST=,prompt_lookup,sam,token_recycling:lookup=sam,kangaroo:lookup=sam,eagle,eagle:lookup=sam
BEST+=,m2r2-carry:lookup=0,m2r2-carry$LARGE
FASTEST=,sam,eagle:lookup=sam,m2r2-carry:lookup=0,m2r2-carry$LARGE

measure() { # NAME SUITE FILE METHODS OPTIONS...
    local to=$OUT/$1.json suite=$2 data=$EVAL/$3 methods=$4
    shift 4
    [ -f "$to" ] || multirate bench "$MODEL" --weights bf16 "${GIVEN[@]}" --no-tuned --suite "$suite" --data "$data" \
        --methods "$methods" --repeats 1 --json "$to" "$@"
}
MT=mt_bench/question.jsonl LONG="-n 256 --leave-out-loops"
measure_suite() { # SUITE NAME METHODS
    case $1 in
        mt_bench_all) measure "$2" mt_bench $MT "$3" $LONG ;;
        spec_bench) measure "$2" spec_bench spec_bench/question.jsonl "$3" --limit 28 $LONG ;;
        humaneval) measure "$2" humaneval humaneval/HumanEval.jsonl.gz "$3" --limit 12 $LONG ;;
        gsm8k) measure "$2" gsm8k gsm8k/test.jsonl "$3" --limit 12 $LONG ;;
        t1) measure "$2" mt_bench $MT "$3" --temperature 1 --limit 6 $LONG ;;
    esac
}
[ $# -gt 0 ] || set -- mt_bench spec_bench humaneval gsm8k t1 b4 mt_bench_all
for name in "$@"; do
    case $name in
        mt_bench) measure mt_bench_smollm2 mt_bench $MT "generate,autoregressive$EVERY" \
            --baselines llamacpp --limit 8 $LONG ;;
        spec_bench) measure_suite "$name" suite_spec_bench \
            "autoregressive$EVERY,sam:texts=lab/texts/smollm2.safetensors" ;;
        humaneval | gsm8k | t1) measure_suite "$name" "suite_$name" "autoregressive$BEST" ;;
        b4) measure suite_b4 mt_bench $MT "autoregressive$BEST,m2r2" --batch 4 --limit 8 -n 96 ;;
        mt_bench_all) measure_suite "$name" suite_mt_bench_all "autoregressive$FASTEST" ;;
        *)
            echo "$name is no suite; accepted: mt_bench, spec_bench, humaneval, gsm8k, t1, b4," \
                "mt_bench_all" >&2
            exit 2
            ;;
    esac
done
