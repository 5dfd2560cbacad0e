#!/usr/bin/env bash
# The accelerator `eagle3` of SmolLM2-135M-Instruct, from nothing. It is too large to ship; lossless.sh
# and the equal-training comparison need it.
#
#   bash lab/recipes/smollm2/eagle3.sh DATA OUT
#
# The equal-training comparison has this run, with 1,003 steps in 283 seconds of an H200. The suites'
# tables have another: 316 steps and then, with --start-from, 664 steps.
. "$(dirname "$0")/accelerator.sh"
train eagle3 1003 --lr 0.002 --option draft_vocab=12288
