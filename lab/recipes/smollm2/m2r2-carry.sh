#!/usr/bin/env bash
# The accelerator `m2r2-carry` of SmolLM2-135M-Instruct, from nothing.
#
#   bash lab/recipes/smollm2/m2r2-carry.sh DATA OUT
#
# The shipped file was not made by this script. Its history cannot be replayed: eleven runs, each on
# from the one before (20.0M tokens in 8,173 steps: ten on a CPU with 2,048 tokens per step, the last
# on an H200 with 8,192), over answers that were made along the way. Its accelerator.json lists the
# runs. This script trains with the options of the equal-training comparison
# (lab/results/equal_training_gpu.json).
. "$(dirname "$0")/accelerator.sh"
train m2r2-carry 776 --lr 0.002 --option draft_vocab=12288 --option unroll_steps=3 \
    --option "taps=[8,15,22]" --option feature_weight=10 --option noise=0.2
