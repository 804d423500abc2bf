#!/usr/bin/env bash
# The quickstart's task by LoRA alone, with two ranks under ZeRO-3, in two ways: actor and critic are the reference and
# the reward model too (two trunks in place of four); and one trunk is all four. About 5 minutes on two CPU cores that
# have nothing else to do.
#
#   scripts/trial_lora.sh QUICKSTART_DIR OUTPUT_DIR [FLAGS OF STEP 3]
#
# QUICKSTART_DIR: with data/, sft/ and reward/, as scripts/quickstart_models.sh writes them. OUTPUT_DIR gets two_trunks/,
# one_trunk/ and reward/, the reward model that shares the SFT model's trunk. The SFT model's head is its embedding too,
# in which words of both sentiments stand so near each other that no hidden state keeps to those of one (docs/lora.md).
# So the head gets an adapter as well: "_" is in the names of all layers, its own too.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
[ $# -ge 2 ] || fail "usage: $0 QUICKSTART_DIR OUTPUT_DIR [FLAGS OF STEP 3]"
models="$(realpath "$1")" out="$(realpath -m "$2")"
shift 2
cd "$root"

say() { printf '\n== %s (%d s)\n' "$1" "$SECONDS"; }

launch() {  # RANKS PROGRAM FLAGS
    local ranks="$1"
    shift
    deepspeed --log_level critical --num_gpus "$ranks" --master_port "${MASTER_PORT:-29500}" "$@"
}

ppo() {  # OUTPUT FLAGS
    local written="$1"
    shift
    launch 2 training/step3_rlhf.py --actor_model_name_or_path "$models/sft" --output_dir "$written" \
        --data_path "$models/data/prompts.jsonl" --eval_data_path "$models/data/eval_prompts.jsonl" \
        --num_eval_prompts 256 --max_prompt_seq_len 12 --max_answer_seq_len 32 \
        --per_device_generation_batch_size 64 --per_device_training_batch_size 64 --max_steps 60 --ppo_epochs 2 \
        --kl_coef 0.15 --lr_scheduler_type cosine --enable_ema --ema_decay 0.95 --dtype fp32 --actor_zero_stage 3 \
        --only_optimize_lora --actor_lora_dim 32 --actor_lora_module_name _ --critic_lora_dim 32 --lora_alpha 32 "$@"
    python -m training.toy.reviews judge "$written/samples/before.jsonl" "$written/samples/after.jsonl"
}

say "two trunks: actor and reference, critic and reward model"
ppo "$out/two_trunks" --critic_model_name_or_path "$models/reward" --critic_zero_stage 3 \
    --actor_lora_learning_rate 2e-3 --critic_lora_learning_rate 4e-3 "$@"

say "step 2: a reward model that is an adapter on the SFT model"
launch 1 training/step2_reward.py --model_name_or_path "$models/sft" --data_path "$models/data/pairs.jsonl" \
    --output_dir "$out/reward" --only_optimize_lora --lora_dim 32 --lora_alpha 32 --lora_learning_rate 3e-3 \
    --learning_rate 1e-4 --num_train_epochs 8 --per_device_train_batch_size 32 --max_seq_len 48 --num_warmup_steps 10 \
    --held_out 256 --normalization_data_path "$models/data/prompts.jsonl" --max_prompt_seq_len 12 \
    --max_answer_seq_len 32 --dtype fp32

say "one trunk for four"
ppo "$out/one_trunk" --share_trunk --critic_model_name_or_path "$out/reward/adapter" \
    --actor_lora_learning_rate 3e-3 --critic_lora_learning_rate 2e-3 "$@"
