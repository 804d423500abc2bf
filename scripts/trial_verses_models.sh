#!/usr/bin/env bash
# Data, SFT and reward model of the trial on Bible verses, in the environment that is active: a byte-level BPE, a GPT-2
# of 0.6 million parameters, and a reward model that prefers the New Testament.
# scripts/compare_dialects.py goes on from here.
#
#   scripts/trial_verses_models.sh TEXT OUTPUT_DIR      in the repository; writes data/, base/, sft/ and reward/
#
# TEXT: what `printf 'gen1:1-rev22:21\n' | bible -f` prints (Debian's package bible-kjv).
set -euo pipefail
text="$1" out="$2"

launch() { deepspeed --log_level critical --num_gpus 2 --master_port "${MASTER_PORT:-29500}" "$@" --dtype fp32; }

[ -e "$out/base/config.json" ] || python -m scripts.comparison.verses "$text" "$out"
if [ ! -e "$out/sft/config.json" ]; then
    launch training/step1_sft.py --model_name_or_path "$out/base" --data_path "$out/data/sft.jsonl" \
        --output_dir "$out/sft" --max_seq_len 128 --per_device_train_batch_size 16 --num_train_epochs 5 \
        --learning_rate 3e-3 --lr_scheduler_type cosine --num_warmup_steps 50 --held_out 400 \
        --per_device_eval_batch_size 50 --seed 1
fi
if [ ! -e "$out/reward/config.json" ]; then
    launch training/step2_reward.py --model_name_or_path "$out/sft" --data_path "$out/data/pairs.jsonl" \
        --output_dir "$out/reward" --max_seq_len 128 --pairwise_loss from_difference \
        --per_device_train_batch_size 8 --num_train_epochs 2 --learning_rate 1e-3 --num_warmup_steps 20 \
        --held_out 400 --per_device_eval_batch_size 50 --normalization_data_path "$out/data/prompts.jsonl" \
        --max_prompt_seq_len 32 --max_answer_seq_len 48 --seed 1234
fi
