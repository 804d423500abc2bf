#!/usr/bin/env bash
# OPT 30B with a 350M reward model.
#
#   HARDWARE                    what trains in step 3                planned: needed of a GPU (highest phase), a node's host
#   32xa100-80g or 32xh100-80g  all weights                          65 GB (train), 107 GB
#   8xa100-80g or 8xh100-80g    adapters                             60 GB (train), 9 GB
#
#   scripts/opt_30b.sh 1      supervised fine-tuning; then 2, the reward model; then 3, PPO
#   HARDWARE=8xa100-80g scripts/opt_30b.sh 3 --dry_run      another row; --dry_run only looks
#
# Any flag of the step overrides. Settings from outside (hardware, hosts, data, folders), shared flags: launch.sh.
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
hardware 32xa100-80g 32xh100-80g 8xa100-80g 8xh100-80g
models facebook/opt-30b facebook/opt-350m
sft=(--per_device_train_batch_size 4 --per_device_eval_batch_size 4 --gradient_accumulation_steps 1 --zero_stage 3)
reward=(--per_device_train_batch_size 4 --per_device_eval_batch_size 4 --gradient_accumulation_steps 1
    --learning_rate 5e-5 --zero_stage 3)
ppo=(--per_device_generation_batch_size 8 --generation_batches 1 --per_device_training_batch_size 4
    --actor_zero_stage 3 --critic_zero_stage 2 --eval_steps 25 --save_steps 25)

case "$HARDWARE" in  # what differs there
32x[ah]100-80g)
    ppo+=(--offload_reference_model)
    ;;
8x[ah]100-80g)
    sft+=(--gradient_accumulation_steps 4 "${lora[@]}")
    reward+=(--gradient_accumulation_steps 2)
    ppo+=(--generation_batches 2 "${actor_lora[@]}")
    ;;
esac

start "$@"
