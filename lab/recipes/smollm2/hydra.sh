#!/usr/bin/env bash
# The accelerator `hydra` of SmolLM2-135M-Instruct, from nothing. It is too large to ship; lossless.sh
# and the equal-training comparison need it.
#
#   bash lab/recipes/smollm2/hydra.sh DATA OUT
#
# The equal-training comparison has this run, with 800 steps in 283 seconds of an H200. The suites'
# tables have another: 253 steps and then, with --start-from, 420 steps.
. "$(dirname "$0")/accelerator.sh"
train hydra 800 --lr 0.002 --option draft_vocab=12288
