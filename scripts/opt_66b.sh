#!/usr/bin/env bash
# OPT 66B with a 350M reward model.
#
#   HARDWARE                    what trains in step 3                planned: needed of a GPU (highest phase), a node's host
#   64xa100-80g or 64xh100-80g  all weights                          76 GB (experience), 116 GB
#   8xa100-80g or 8xh100-80g    adapters                             80 GB (experience), 12 GB
#
#   scripts/opt_66b.sh 1      supervised fine-tuning; then 2, the reward model; then 3, PPO
#   HARDWARE=8xa100-80g scripts/opt_66b.sh 3 --dry_run      another row; --dry_run only looks
#
# Any flag of the step overrides. Settings from outside (hardware, hosts, data, folders), shared flags: launch.sh.
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
hardware 64xa100-80g 64xh100-80g 8xa100-80g 8xh100-80g
models facebook/opt-66b facebook/opt-350m
sft=(--per_device_train_batch_size 2 --per_device_eval_batch_size 2 --gradient_accumulation_steps 1 --zero_stage 3)
reward=(--per_device_train_batch_size 2 --per_device_eval_batch_size 2 --gradient_accumulation_steps 1
    --learning_rate 5e-5 --zero_stage 3)
ppo=(--per_device_generation_batch_size 8 --generation_batches 1 --per_device_training_batch_size 4
    --actor_zero_stage 3 --critic_zero_stage 2 --eval_steps 20 --save_steps 10)

case "$HARDWARE" in  # what differs there
64x[ah]100-80g)
    ppo+=(--offload_reference_model)
    ;;
8x[ah]100-80g)
    sft+=(--gradient_accumulation_steps 8 "${lora[@]}")
    reward+=(--gradient_accumulation_steps 8)
    ppo+=(--generation_batches 2 "${actor_lora[@]}")
    ;;
esac

start "$@"
