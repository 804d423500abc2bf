#!/usr/bin/env bash
# Two-digit sums, a tokenizer of characters and an SFT model that is right about some of them, with a given number of
# ranks in the environment that is active: docs/verifiable.md's first steps. About a minute on two CPU cores.
# scripts/compare_dialects.py goes on from here.
#
#   scripts/sums_models.sh OUTPUT_DIR RANKS      in the repository; writes data/, base/ and sft/
#
# RANKS: 1, 2 or 4.
set -euo pipefail
[ $# -eq 2 ] || { echo "usage: $0 OUTPUT_DIR RANKS" >&2; exit 2; }
out="$1" ranks="$2"

python -m training.tools.toy.sums make --output_dir "$out/data"
python -m training.tools.toy.model --characters --data "$out/data/sft.jsonl" --output_dir "$out/base" --num_layers 2
port="$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
deepspeed --log_level critical --num_gpus "$ranks" --master_port "$port" training/step1_sft.py \
    --model_name_or_path "$out/base" --data_path "$out/data/sft.jsonl" --output_dir "$out/sft" --max_seq_len 16 \
    --per_device_train_batch_size $((64 / ranks)) --num_train_epochs 4 --learning_rate 5e-3 \
    --lr_scheduler_type cosine --num_warmup_steps 20 --held_out 256 --dtype fp32
