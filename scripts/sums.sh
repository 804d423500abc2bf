#!/usr/bin/env bash
# From nothing to models that a checker has taught two-digit sums: data, a tokenizer of characters, an SFT model that is
# right about half of the time, and PPO, RLOO and GRPO, each with as many responses and two ranks; then the accuracy of all
# on sums that none has seen. About 10 minutes on two CPU cores, 2 of them for the environment; on GPUs where it finds some.
#
#   scripts/sums.sh [OUTPUT_DIR [DIALECT...]]      by default sums/ in the repository; must be empty
#
# DIALECT: of those below, by default default (PPO), trl_rloo and grpo. docs/verifiable.md has the table.
set -euo pipefail
started=$SECONDS
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
out="${1:-$root/sums}"
[ $# -eq 0 ] || shift
[ $# -gt 0 ] || set -- default trl_rloo grpo
[ -z "$(ls -A "$out" 2>/dev/null)" ] || fail "$out is not empty. Remove it, or name another folder: $0 OUTPUT_DIR"
mkdir -p "$out"
out="$(cd "$out" && pwd)"
cd "$root"

ranks=2                                                            # on the CPU
if [ "$gpus" -gt 0 ]; then                                         # on GPUs: 1, 2 or 4, which divide the batches
    ranks=1
    while [ $((ranks * 2)) -le "$gpus" ] && [ "$ranks" -lt 4 ]; do ranks=$((ranks * 2)); done
fi

say() { printf '\n== %s (%d s)\n' "$1" $((SECONDS - started)); }
free_port() { python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
launch() { deepspeed --log_level critical --num_gpus "$ranks" --master_port "${PORT:-$(free_port)}" "$@" --dtype fp32; }

# A step of 256 responses: PPO asks as many sums, the others ask 32 of them eight times.
train() {
    local dialect="$1" prompts=32 more=(--num_samples_per_prompt 8)
    case "$dialect" in
        default) prompts=256 more=(--critic_learning_rate 2e-3) ;;
    esac
    say "step 3: --dialect $dialect"
    launch training/step3_rlhf.py --dialect "$dialect" --actor_model_name_or_path "$out/sft" \
        --data_path "$out/data/prompts.jsonl" --eval_data_path "$out/data/eval_prompts.jsonl" --num_eval_prompts 500 \
        --reward_function training.toy.sums:right --output_dir "$out/$dialect" --max_prompt_seq_len 8 \
        --max_answer_seq_len 4 --per_device_generation_batch_size $((prompts / ranks)) \
        --per_device_training_batch_size $((256 / ranks)) --max_steps 60 --eval_steps 20 --actor_learning_rate 1e-3 \
        --lr_scheduler_type cosine --kl_coef 0.01 "${more[@]}"
}

say "sums, a tokenizer of characters and an untrained model"
python -m training.toy.sums make --output_dir "$out/data"
python -m training.toy.model --characters --data "$out/data/sft.jsonl" --output_dir "$out/base" --num_layers 2

say "step 1: supervised fine-tuning, ended early"
launch training/step1_sft.py --model_name_or_path "$out/base" --data_path "$out/data/sft.jsonl" \
    --output_dir "$out/sft" --max_seq_len 16 --per_device_train_batch_size $((64 / ranks)) --num_train_epochs 8 \
    --learning_rate 5e-3 --lr_scheduler_type cosine --num_warmup_steps 20 --held_out 256 \
    --per_device_eval_batch_size 64

for dialect in "$@"; do train "$dialect"; done

say "right answers to held-out sums"
python -m training.toy.sums accuracy --data "$out/data/eval_prompts.jsonl" "$out/sft" "${@/#/$out/}"
say "done"
