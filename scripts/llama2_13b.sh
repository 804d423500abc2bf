#!/usr/bin/env bash
# Llama-2 13B with a Llama-2 7B reward model.
#
# Hardware: one node of 8 A100-80G (bf16, as it stands); two of A100-40G with --offload --rollout_backend zero3
# (HOSTFILE=...).
#
#   scripts/llama2_13b.sh 1        supervised fine-tuning
#   scripts/llama2_13b.sh 2        reward model
#   scripts/llama2_13b.sh 3        PPO, from what 1 and 2 wrote
#   scripts/llama2_13b.sh 3 --dry_run --kl_coef 0.05     any flag of the step overrides; --dry_run only looks
#
# Settings from outside (hosts, data, folders): launch.sh.
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
NUM_GPUS="${NUM_GPUS:-8}"
out="${OUT:-out/llama2-13b}"
common=(--data_path "${data[@]}" --data_split 2,4,4 --dtype "${DTYPE:-bf16}" --seed 1234)

case "$step" in
1) launch step1_sft.py "${common[@]}" --output_dir "$out/sft" \
    --model_name_or_path meta-llama/Llama-2-13b-hf --max_seq_len 512 --num_train_epochs 4 \
    --per_device_train_batch_size 4 --per_device_eval_batch_size 4 --gradient_accumulation_steps 1 \
    --learning_rate 9.65e-6 --lr_scheduler_type cosine --zero_stage 3 --gradient_checkpointing "$@" ;;
2) launch step2_reward.py "${common[@]}" --output_dir "$out/reward" \
    --model_name_or_path meta-llama/Llama-2-7b-hf --sft_model_name_or_path "$out/sft" \
    --max_seq_len 512 --num_train_epochs 1 \
    --per_device_train_batch_size 8 --per_device_eval_batch_size 8 --gradient_accumulation_steps 1 \
    --learning_rate 9.65e-6 --weight_decay 0.1 --zero_stage 3 --gradient_checkpointing "$@" ;;
3) launch step3_rlhf.py "${common[@]}" --output_dir "$out/ppo" \
    --actor_model_name_or_path "$out/sft" --critic_model_name_or_path "$out/reward" \
    --max_prompt_seq_len 256 --max_answer_seq_len 256 \
    --per_device_generation_batch_size 8 --generation_batches 2 --per_device_training_batch_size 4 \
    --actor_learning_rate 9.65e-6 --critic_learning_rate 5e-6 \
    --actor_zero_stage 3 --critic_zero_stage 3 --actor_gradient_checkpointing --critic_gradient_checkpointing \
    --offload_reference_model --offload_reward_model --rollout_backend replica --eval_steps 50 --save_steps 100 "$@" ;;
*) usage ;;
esac
