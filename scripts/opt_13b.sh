#!/usr/bin/env bash
# OPT 13B with a 350M reward model.
#
#   HARDWARE                  what trains in step 3                planned: needed of a GPU (highest phase), a node's host
#   8xa100-80g or 8xh100-80g  all weights                          67 GB (experience), 184 GB
#   16xv100-32g               all weights, states on the host      26 GB (train), 225 GB
#   8xa100-40g                adapters                             31 GB (train), 7 GB
#   8xv100-32g                adapters                             28 GB (experience), 7 GB
#
#   scripts/opt_13b.sh 1      supervised fine-tuning; then 2, the reward model; then 3, PPO
#   HARDWARE=16xv100-32g scripts/opt_13b.sh 3 --dry_run      another row; --dry_run only looks
#
# Any flag of the step overrides. Settings from outside (hardware, hosts, data, folders), shared flags: launch.sh.
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
hardware 8xa100-80g 8xh100-80g 16xv100-32g 8xa100-40g 8xv100-32g
models facebook/opt-13b facebook/opt-350m
sft=(--per_device_train_batch_size 4 --per_device_eval_batch_size 4 --gradient_accumulation_steps 4 --zero_stage 3)
reward=(--per_device_train_batch_size 8 --per_device_eval_batch_size 8 --gradient_accumulation_steps 1
    --learning_rate 5e-5 --zero_stage 3)
ppo=(--per_device_generation_batch_size 16 --generation_batches 1 --per_device_training_batch_size 8
    --actor_zero_stage 3 --critic_zero_stage 2 --offload_reference_model)

case "$HARDWARE" in  # what differs there
16xv100-32g)
    sft+=(--gradient_accumulation_steps 2 --offload)
    ppo+=(--per_device_generation_batch_size 8 --generation_batches 1 --per_device_training_batch_size 4 --offload)
    ;;
8xa100-40g | 8xv100-32g)
    sft+=("${lora[@]}")
    ppo+=(--per_device_generation_batch_size 8 --generation_batches 2 --per_device_training_batch_size 4
        --offload_reference_model false "${actor_lora[@]}")
    ;;
esac

start "$@"
