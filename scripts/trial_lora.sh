#!/usr/bin/env bash
# The quickstart's task by LoRA alone: actor and critic train factors, and are the reference and the reward model too.
# About 2 minutes on two CPU cores that have nothing else to do.
#
#   scripts/trial_lora.sh QUICKSTART_DIR OUTPUT_DIR [FLAGS OF STEP 3]
#
# QUICKSTART_DIR: with data/, sft/ and reward/, as scripts/quickstart_models.sh writes them. The SFT model's head is its
# embedding too, in which words of both sentiments stand so near each other that no hidden state keeps to those of one
# (docs/lora.md). So the head gets an adapter as well: "_" is in the names of all layers, its own too.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
[ $# -ge 2 ] || fail "usage: $0 QUICKSTART_DIR OUTPUT_DIR [FLAGS OF STEP 3]"
models="$(realpath "$1")" out="$(realpath -m "$2")"
shift 2
cd "$root"

deepspeed --log_level critical --num_gpus 2 --master_port "${MASTER_PORT:-29500}" training/step3_rlhf.py \
    --actor_model_name_or_path "$models/sft" --critic_model_name_or_path "$models/reward" \
    --data_path "$models/data/prompts.jsonl" --eval_data_path "$models/data/eval_prompts.jsonl" --num_eval_prompts 256 \
    --output_dir "$out/ppo" --actor_zero_stage 3 --critic_zero_stage 3 --max_prompt_seq_len 12 --max_answer_seq_len 32 \
    --per_device_generation_batch_size 64 --per_device_training_batch_size 64 --max_steps 60 --ppo_epochs 2 \
    --kl_coef 0.15 --lr_scheduler_type cosine --enable_ema --ema_decay 0.95 --only_optimize_lora \
    --actor_lora_dim 32 --actor_lora_module_name _ --actor_lora_learning_rate 2e-3 \
    --critic_lora_dim 32 --critic_lora_learning_rate 4e-3 --lora_alpha 32 "$@"
python -m training.toy.reviews judge "$out/ppo/samples/before.jsonl" "$out/ppo/samples/after.jsonl"
