#!/usr/bin/env bash
# The quickstart's corpus, tokenizer, SFT model and reward model, with a given number of ranks in the environment that
# is active. About 3 minutes on two CPU cores. scripts/quickstart.sh and scripts/compare_dialects.py go on from here.
#
#   scripts/quickstart_models.sh OUTPUT_DIR RANKS      in the repository; writes data/, base/, sft/ and reward/
#
# RANKS: 1, 2, 4 or 8.
set -euo pipefail
[ $# -eq 2 ] || { echo "usage: $0 OUTPUT_DIR RANKS" >&2; exit 2; }
out="$1" ranks="$2"

say() { printf '\n== %s (%d s)\n' "$1" $((SECONDS - ${started:-0})); }
launch() { deepspeed --log_level critical --num_gpus "$ranks" --master_port "$(free_port)" "$@" --dtype fp32; }
free_port() { python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

say "corpus, tokenizer and an untrained model"
python -m training.tools.toy.reviews make --output_dir "$out/data"
python -m training.tools.toy.model --data "$out/data/sft.jsonl" "$out/data/pairs.jsonl" --output_dir "$out/base"

say "step 1: supervised fine-tuning"
launch training/step1_sft.py --model_name_or_path "$out/base" --data_path "$out/data/sft.jsonl" \
    --output_dir "$out/sft" --max_seq_len 48 --per_device_train_batch_size $((64 / ranks)) --num_train_epochs 6 \
    --learning_rate 5e-3 --lr_scheduler_type cosine --num_warmup_steps 20 --held_out 256 \
    --per_device_eval_batch_size 64

say "step 2: reward model"
launch training/step2_reward.py --model_name_or_path "$out/sft" --data_path "$out/data/pairs.jsonl" \
    --output_dir "$out/reward" --max_seq_len 48 --per_device_train_batch_size $((32 / ranks)) --num_train_epochs 2 \
    --learning_rate 3e-3 --num_warmup_steps 10 --held_out 256 --per_device_eval_batch_size 64 \
    --normalization_data_path "$out/data/prompts.jsonl" --max_prompt_seq_len 12 --max_answer_seq_len 32
