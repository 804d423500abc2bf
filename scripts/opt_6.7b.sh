#!/usr/bin/env bash
# OPT 6.7B with a 350M reward model.
#
#   HARDWARE                  what trains in step 3                planned: needed of a GPU (highest phase), a node's host
#   8xv100-32g                all weights, states on the host      23 GB (train), 238 GB
#   8xa100-80g or 8xh100-80g  all weights                          64 GB (train), 98 GB
#   1xa100-80g or 1xh100-80g  adapters                             28 GB (train), 14 GB
#   1xv100-32g                adapters, states on the host         21 GB (train), 16 GB
#
#   scripts/opt_6.7b.sh 1      supervised fine-tuning; then 2, the reward model; then 3, PPO
#   HARDWARE=8xa100-80g scripts/opt_6.7b.sh 3 --dry_run      another row; --dry_run only looks
#
# Any flag of the step overrides. Settings from outside (hardware, hosts, data, folders), shared flags: launch.sh.
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
hardware 8xv100-32g 8xa100-80g 8xh100-80g 1xa100-80g 1xh100-80g 1xv100-32g
models facebook/opt-6.7b facebook/opt-350m
sft=(--per_device_train_batch_size 4 --per_device_eval_batch_size 4 --gradient_accumulation_steps 4 --zero_stage 3)
reward=(--per_device_train_batch_size 8 --per_device_eval_batch_size 8 --gradient_accumulation_steps 1
    --learning_rate 5e-5)
ppo=(--per_device_generation_batch_size 8 --generation_batches 2 --per_device_training_batch_size 4
    --actor_zero_stage 3 --critic_zero_stage 2 --offload_reference_model)

case "$HARDWARE" in  # what differs there
8xv100-32g)
    ppo+=(--offload)
    ;;
1x[ah]100-80g)
    sft+=(--gradient_accumulation_steps 16 --zero_stage 1 "${lora[@]}")
    reward+=(--gradient_accumulation_steps 8)
    ppo+=(--generation_batches 8 --actor_zero_stage 1 --critic_zero_stage 1 --offload_reference_model false
        "${actor_lora[@]}")
    ;;
1xv100-32g)
    sft+=(--gradient_accumulation_steps 16 --zero_stage 1 "${lora[@]}")
    reward+=(--gradient_accumulation_steps 8)
    ppo+=(--generation_batches 8 --per_device_training_batch_size 2 --actor_zero_stage 2 --offload
        --offload_reference_model false "${actor_lora[@]}")
    ;;
esac

start "$@"
