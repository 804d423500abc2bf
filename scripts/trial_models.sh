#!/usr/bin/env bash
# SFT and reward model of a trial on texts of one's own, in the environment that is active; what is there already is kept.
# scripts/trial_reviews.sh and scripts/compare_dialects.py go on from here.
#
#   scripts/trial_models.sh MODEL_DIR DATA_DIR OUTPUT_DIR [SFT_EPOCHS]      in the repository; writes sft/ and reward/
#
# The folders are those of scripts/trial_reviews.sh.
set -euo pipefail
[ $# -ge 3 ] || { echo "usage: $0 MODEL_DIR DATA_DIR OUTPUT_DIR [SFT_EPOCHS]" >&2; exit 2; }
model="$1" data="$2" out="$3" sft_epochs="${4:-3}"

launch() { deepspeed --log_level critical --num_gpus 2 --master_port "${MASTER_PORT:-29500}" "$@"; }

if [ ! -e "$out/sft/config.json" ]; then
    launch training/step1_sft.py --model_name_or_path "$model" --data_path "$data/sft.jsonl" --output_dir "$out/sft" \
        --max_seq_len 128 --per_device_train_batch_size 16 --num_train_epochs "$sft_epochs" --learning_rate 3e-3 \
        --lr_scheduler_type cosine --num_warmup_steps 50 --per_device_eval_batch_size 50 --seed 1
fi
if [ ! -e "$out/reward/config.json" ]; then
    launch training/step2_reward.py --model_name_or_path "$out/sft" --data_path "$data/pairs.jsonl" \
        --output_dir "$out/reward" --max_seq_len 160 --pairwise_loss from_difference \
        --per_device_train_batch_size 8 --num_train_epochs 2 --learning_rate 1e-3 --num_warmup_steps 20 \
        --held_out 400 --per_device_eval_batch_size 50 --normalization_data_path "$data/prompts.jsonl" \
        --max_prompt_seq_len 32 --max_answer_seq_len 48 --seed 1234
fi
