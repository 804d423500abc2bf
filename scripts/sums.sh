#!/usr/bin/env bash
# From nothing to models that a checker has taught two-digit sums: data, a tokenizer of characters, an SFT model that is
# right about some of them, PPO, GRPO and RLOO with as many responses each, and the accuracy of all on sums that none has
# seen.
# One process; a few minutes on a CPU core, 2 of them for the environment.
#
#   scripts/sums.sh [OUTPUT_DIR]      by default sums/ in the repository; must be empty
set -euo pipefail
case "${1:-}" in -*) sed -n '2,/^set/{s/^# \{0,1\}//p}' "$0"; exit ;; esac
started=$SECONDS
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
out="${1:-$root/sums}"
[ -z "$(ls -A "$out" 2>/dev/null)" ] || fail "$out is not empty. Remove it, or name another folder: $0 OUTPUT_DIR"
mkdir -p "$out"
out="$(cd "$out" && pwd)"
cd "$root"

say() { printf '\n== %s (%d s)\n' "$1" $((SECONDS - started)); }

# step3 NAME PROMPTS FLAGS...: 100 steps of 256 responses.
step3() {
    local name="$1" prompts="$2"
    shift 2
    python training/step3_rlhf.py --actor_model_name_or_path "$out/sft" --data_path "$out/data/prompts.jsonl" \
        --eval_data_path "$out/data/eval_prompts.jsonl" --num_eval_prompts 500 \
        --reward_function training.tools.toy.sums:right --output_dir "$out/$name" --max_prompt_seq_len 8 \
        --max_answer_seq_len 4 --per_device_generation_batch_size "$prompts" --per_device_training_batch_size 256 \
        --max_steps 100 --eval_steps 1000 --lr_scheduler_type cosine --kl_coef 0.01 --dtype fp32 "$@"
}

say "sums, a tokenizer of characters, and step 1, ended early"
scripts/sums_models.sh "$out" 1

say "step 3: PPO, 256 sums a step"
step3 ppo 256 --dialect default --actor_learning_rate 1e-3 --critic_learning_rate 2e-3

say "step 3: GRPO, 32 sums a step, each asked eight times"
step3 grpo 32 --dialect grpo_trl --num_samples_per_prompt 8 --actor_learning_rate 3e-4

say "step 3: RLOO, 32 sums a step, each asked eight times"
step3 rloo 32 --dialect trl_rloo --num_samples_per_prompt 8 --temperature 1.0 --actor_learning_rate 3e-4

say "right answers to held-out sums"
python -m training.tools.toy.sums accuracy --data "$out/data/eval_prompts.jsonl" "$out/sft" \
    "$out/ppo/actor" "$out/grpo/actor" "$out/rloo/actor"
say "done"
