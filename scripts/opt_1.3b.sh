#!/usr/bin/env bash
# OPT 1.3B with a 350M reward model.
#
#   HARDWARE                  what trains in step 3                planned: needed of a GPU (highest phase), a node's host
#   8xv100-32g                all weights                          16 GB (train), 25 GB
#   8xa100-40g                all weights                          16 GB (train), 25 GB
#   1xa100-80g or 1xh100-80g  all weights                          47 GB (train), 25 GB
#
#   scripts/opt_1.3b.sh 1      supervised fine-tuning; then 2, the reward model; then 3, PPO
#   HARDWARE=8xa100-40g scripts/opt_1.3b.sh 3 --dry_run      another row; --dry_run only looks
#
# Any flag of the step overrides. Settings from outside (hardware, hosts, data, folders), shared flags: launch.sh.
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
hardware 8xv100-32g 8xa100-40g 1xa100-80g 1xh100-80g
models facebook/opt-1.3b facebook/opt-350m
sft=(--per_device_train_batch_size 8 --per_device_eval_batch_size 8 --gradient_accumulation_steps 2 --zero_stage 2)
reward=(--per_device_train_batch_size 8 --per_device_eval_batch_size 8 --gradient_accumulation_steps 1
    --learning_rate 5e-5)
ppo=(--per_device_generation_batch_size 16 --generation_batches 1 --per_device_training_batch_size 8
    --actor_zero_stage 2 --critic_zero_stage 2 --enable_ema)

case "$HARDWARE" in  # what differs there
1x[ah]100-80g)
    sft+=(--per_device_train_batch_size 8 --per_device_eval_batch_size 8 --gradient_accumulation_steps 16)
    reward+=(--per_device_train_batch_size 8 --per_device_eval_batch_size 8 --gradient_accumulation_steps 8)
    ppo+=(--generation_batches 8)
    ;;
esac

start "$@"
