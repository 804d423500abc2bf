#!/usr/bin/env bash
# Llama-2 13B with a Llama-2 7B reward model.
#
#   HARDWARE                  what trains in step 3                planned: needed of a GPU (highest phase), a node's host
#   8xa100-80g or 8xh100-80g  all weights                          75 GB (train), 275 GB
#   16xa100-40g               all weights, states on the host      34 GB (train), 334 GB
#   8xa100-40g                adapters                             30 GB (train), 5 GB
#   8xv100-32g                adapters                             28 GB (experience), 5 GB
#
#   scripts/llama2_13b.sh 1      supervised fine-tuning; then 2, the reward model; then 3, PPO
#   HARDWARE=16xa100-40g scripts/llama2_13b.sh 3 --dry_run      another row; --dry_run only looks
#
# Any flag of the step overrides. Settings from outside (hardware, hosts, data, folders), shared flags: launch.sh.
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
hardware 8xa100-80g 8xh100-80g 16xa100-40g 8xa100-40g 8xv100-32g
models meta-llama/Llama-2-13b-hf meta-llama/Llama-2-7b-hf
sft=(--per_device_train_batch_size 4 --per_device_eval_batch_size 4 --gradient_accumulation_steps 1 --zero_stage 3)
reward=(--per_device_train_batch_size 8 --per_device_eval_batch_size 8 --gradient_accumulation_steps 1
    --learning_rate 9.65e-6 --zero_stage 3 --gradient_checkpointing)
ppo=(--per_device_generation_batch_size 8 --generation_batches 2 --per_device_training_batch_size 4
    --actor_zero_stage 3 --critic_zero_stage 3 --critic_gradient_checkpointing)

case "$HARDWARE" in  # what differs there
8x[ah]100-80g)
    ppo+=(--offload_reference_model --offload_reward_model)
    ;;
16xa100-40g)
    sft+=(--offload)
    reward+=(--per_device_train_batch_size 4 --per_device_eval_batch_size 4 --gradient_accumulation_steps 1 --offload)
    ppo+=(--generation_batches 1 --offload --offload_reference_model --offload_reward_model)
    ;;
8xa100-40g)
    sft+=("${lora[@]}")
    reward+=("${lora[@]}")
    ppo+=("${both_lora[@]}")
    ;;
8xv100-32g)
    sft+=(--per_device_train_batch_size 2 --per_device_eval_batch_size 2 --gradient_accumulation_steps 2 "${lora[@]}")
    reward+=(--per_device_train_batch_size 4 --per_device_eval_batch_size 4 --gradient_accumulation_steps 2
        "${lora[@]}")
    ppo+=("${both_lora[@]}")
    ;;
esac

start "$@"
