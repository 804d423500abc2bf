#!/usr/bin/env bash
# Llama-3.1 8B with a Llama-3.1 8B reward model, for long sequences (docs/many_nodes.md, Long sequences).
#
#   HARDWARE                  longest sequence in all steps        planned: needed of a GPU (highest phase), a node's host
#   8xh100-80g or 8xa100-80g  32,768 tokens                        76 GB (experience), 186 GB
#   16xh100-80g or 16xa100-80g  131,072 tokens                     72 GB (train), 93 GB
#
#   scripts/llama3.1_8b.sh 1    supervised fine-tuning; then 2, the reward model; then 3, PPO
#   HARDWARE=16xh100-80g HOSTFILE=hosts scripts/llama3.1_8b.sh 3 --dry_run      another row; --dry_run only looks
#
# Any flag of the step overrides. Settings from outside (hardware, hosts, data, folders), shared flags: launch.sh.
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
hardware 8xh100-80g 8xa100-80g 16xh100-80g 16xa100-80g
models meta-llama/Llama-3.1-8B meta-llama/Llama-3.1-8B
sft=(--per_device_train_batch_size 1 --per_device_eval_batch_size 1 --gradient_accumulation_steps 4 --zero_stage 3
    --sequence_parallel_size 8)
ppo=(--actor_zero_stage 3 --critic_zero_stage 3 --critic_gradient_checkpointing --max_prompt_seq_len 2048
    --sequence_parallel_size 8)

case "$HARDWARE" in  # what differs there
8x[ah]100-80g)
    sft+=(--max_seq_len 32768)
    ppo+=(--max_answer_seq_len 30720 --per_device_generation_batch_size 4 --generation_batches 2
        --per_device_training_batch_size 8)
    ;;
16x[ah]100-80g)
    sft+=(--max_seq_len 131072)
    ppo+=(--max_answer_seq_len 129024 --per_device_generation_batch_size 1 --generation_batches 8
        --per_device_training_batch_size 1)
    ;;
esac
reward=("${sft[@]}" --learning_rate 9.65e-6 --gradient_checkpointing)

start "$@"
