#!/usr/bin/env bash
# The accelerator `kangaroo` of SmolLM2-135M-Instruct, from nothing.
#
#   bash lab/recipes/smollm2/kangaroo.sh DATA OUT
#
# The shipped file came from this command on one NVIDIA H200, with six other trainings beside it and
# 283 seconds for each. It made all of its 1,900 steps.
. "$(dirname "$0")/accelerator.sh"
train kangaroo 1900 --lr 0.03 --option draft_vocab=12288
