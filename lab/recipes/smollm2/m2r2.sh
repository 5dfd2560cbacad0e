#!/usr/bin/env bash
# The accelerator `m2r2` of SmolLM2-135M-Instruct, from nothing.
#
#   bash lab/recipes/smollm2/m2r2.sh DATA OUT
#
# The shipped file came from this command on one NVIDIA H200, with six other trainings beside it and
# 283 seconds for each. It planned 1,900 steps and made 1,538 of them: the learning rate followed the cosine of
# 1,900 steps and went to its end in the last tenth of the time. This script has the same data, rate
# and number of steps, and a cosine of 1,538 steps.
#
# One gate, shallower than the paper's L/4: deeper ones cost more than they gain.
. "$(dirname "$0")/accelerator.sh"
train m2r2 1538 --lr 0.002 --option draft_vocab=12288 --option fuse=true --option "gates=[4]"
