#!/usr/bin/env bash
# Medusa's heads for SmolLM2-135M-Instruct (lab/accelerators/medusa), from nothing.
#
#   bash lab/recipes/smollm2/medusa.sh DATA OUT
#
# The shipped file came from this command on one NVIDIA H200, with six other trainings beside it and
# 283 seconds for each. It planned 1,900 steps and made 1,585 of them: the learning rate followed the cosine of
# 1,900 steps and went to its end in the last tenth of the time. This script has the same data, rate
# and number of steps, and a cosine of 1,585 steps.
. "$(dirname "$0")/accelerator.sh"
train medusa 1585 --lr 0.01
