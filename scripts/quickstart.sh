#!/usr/bin/env bash
# From nothing to a model that PPO has taught to write positive film reviews: environment, corpus, tokenizer, SFT model,
# reward model, PPO with two ranks under ZeRO-3. About 5 minutes on two CPU cores, 2 of them for the environment; on GPUs
# where it finds some.
#
#   scripts/quickstart.sh [OUTPUT_DIR]      by default quickstart/ in the repository; must be empty
set -euo pipefail
case "${1:-}" in -*) sed -n '2,/^set/{s/^# \{0,1\}//p}' "$0"; exit ;; esac
started=$SECONDS
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
out="${1:-$root/quickstart}"
[ -z "$(ls -A "$out" 2>/dev/null)" ] || fail "$out is not empty. Remove it, or name another folder: $0 OUTPUT_DIR"
mkdir -p "$out"
out="$(cd "$out" && pwd)"
cd "$root"

ranks=2                                                            # on the CPU
if [ "$gpus" -gt 0 ]; then                                         # on GPUs: 1, 2, 4 or 8, which divide the batches
    ranks=1
    while [ $((ranks * 2)) -le "$gpus" ] && [ "$ranks" -lt 8 ]; do ranks=$((ranks * 2)); done
fi
source scripts/quickstart_models.sh "$out" "$ranks"             # corpus, tokenizer, steps 1 and 2

say "step 3: PPO, four engines under ZeRO-3"
launch training/step3_rlhf.py --actor_model_name_or_path "$out/sft" --critic_model_name_or_path "$out/reward" \
    --data_path "$out/data/prompts.jsonl" --eval_data_path "$out/data/eval_prompts.jsonl" --num_eval_prompts 256 \
    --output_dir "$out/ppo" --actor_zero_stage 3 --critic_zero_stage 3 --max_prompt_seq_len 12 \
    --max_answer_seq_len 32 --per_device_generation_batch_size $((128 / ranks)) \
    --per_device_training_batch_size $((128 / ranks)) --max_steps 60 --eval_steps 15 --ppo_epochs 2 --kl_coef 0.15 \
    --actor_learning_rate 1.5e-3 --critic_learning_rate 2e-3 --lr_scheduler_type cosine --enable_ema --ema_decay 0.95 \
    --print_answers_interval 20

say "the result, by the grammar that wrote the corpus"
python -m training.tools.toy.reviews judge "$out/ppo/samples/before.jsonl" "$out/ppo/samples/after.jsonl"
echo
echo "to look at it, after source $venv/bin/activate:"
echo "curves: four-engine-rlhf report $out/ppo; or tensorboard --logdir $out, then http://localhost:6006/#custom_scalars"
echo "answer by answer: four-engine-rlhf compare --models sft=$out/sft ppo=$out/ppo --data_path $out/data/prompts.jsonl" \
    "--eval_data_path $out/data/eval_prompts.jsonl --reward_model_name_or_path $out/reward --max_prompt_seq_len 12" \
    "--max_answer_seq_len 32 --output_dir $out/comparison"
say "done"
