#!/usr/bin/env bash
# The three steps on a small pretrained model and real film reviews, on two ranks; PPO under ZeRO-3 with three seeds.
#
#   scripts/trial_reviews.sh MODEL_DIR DATA_DIR OUTPUT_DIR
#
# MODEL_DIR: a causal language model with tokenizer (a 260K-parameter Llama trained on TinyStories was used).
# DATA_DIR: sft.jsonl (text), pairs.jsonl (prompt, chosen, rejected), prompts.jsonl (prompt).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
[ $# -eq 3 ] || fail "usage: $0 MODEL_DIR DATA_DIR OUTPUT_DIR"
model="$(realpath "$1")" data="$(realpath "$2")" out="$(realpath -m "$3")"
mkdir -p "$out"
cd "$root"

launch() { deepspeed --log_level critical --num_gpus 2 --master_port "${MASTER_PORT:-29500}" "$@"; }

if [ ! -e "$out/sft/config.json" ]; then
    launch training/step1_sft.py --model_name_or_path "$model" --data_path "$data/sft.jsonl" --output_dir "$out/sft" \
        --max_seq_len 128 --per_device_train_batch_size 16 --num_train_epochs 3 --learning_rate 3e-3 \
        --lr_scheduler_type cosine --num_warmup_steps 50 --per_device_eval_batch_size 50 --seed 1
fi
if [ ! -e "$out/reward/config.json" ]; then
    launch training/step2_reward.py --model_name_or_path "$out/sft" --data_path "$data/pairs.jsonl" \
        --output_dir "$out/reward" --max_seq_len 160 --pairwise_loss from_difference \
        --per_device_train_batch_size 8 --num_train_epochs 2 --learning_rate 1e-3 --num_warmup_steps 20 \
        --held_out 400 --per_device_eval_batch_size 50 --normalization_data_path "$data/prompts.jsonl" \
        --max_prompt_seq_len 32 --max_answer_seq_len 48 --seed 1234
fi
for seed in ${SEEDS:-1 2 3}; do
    launch training/step3_rlhf.py --actor_model_name_or_path "$out/sft" --critic_model_name_or_path "$out/reward" \
        --data_path "$data/prompts.jsonl" --output_dir "$out/ppo_seed$seed" --seed "$seed" \
        --actor_zero_stage 3 --critic_zero_stage 3 --max_prompt_seq_len 32 --max_answer_seq_len 48 \
        --per_device_generation_batch_size 32 --per_device_training_batch_size 32 --max_steps 24 \
        --actor_learning_rate 3e-4 --critic_learning_rate 3e-4 --num_eval_prompts 256 --eval_steps 6
done
python -m training.reporting.compare_runs "$out"/ppo_seed* --output "$out/score_against_kl.png"
