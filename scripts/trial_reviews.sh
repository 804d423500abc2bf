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

source scripts/trial_models.sh "$model" "$data" "$out"      # steps 1 and 2

for seed in ${SEEDS:-1 2 3}; do
    launch training/step3_rlhf.py --actor_model_name_or_path "$out/sft" --critic_model_name_or_path "$out/reward" \
        --data_path "$data/prompts.jsonl" --output_dir "$out/ppo_seed$seed" --seed "$seed" \
        --actor_zero_stage 3 --critic_zero_stage 3 --max_prompt_seq_len 32 --max_answer_seq_len 48 \
        --per_device_generation_batch_size 32 --per_device_training_batch_size 32 --max_steps 24 \
        --actor_learning_rate 3e-4 --critic_learning_rate 3e-4 --num_eval_prompts 256 --eval_steps 6
done
python -m training.tools.report "$out"/ppo_seed* --output "$out/report.html" --overwrite
