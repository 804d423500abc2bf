#!/usr/bin/env bash
# The quickstart's task by LoRA alone: actor and critic train factors, and are the reference and the reward model too.
# About 2 minutes on two CPU cores that have nothing else to do.
#
#   scripts/trial_lora.sh QUICKSTART_DIR OUTPUT_DIR [FLAGS OF STEP 3]
#
# QUICKSTART_DIR: with data/, sft/ and reward/, as scripts/quickstart_models.sh writes them. The SFT model's head is its
# embedding too, which LoRA leaves as it is; words of both sentiments stand so near each other there that no hidden state
# keeps to those of one (docs/lora.md). So the head gets a weight of its own first, equal to the embedding, and an adapter.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
[ $# -ge 2 ] || fail "usage: $0 QUICKSTART_DIR OUTPUT_DIR [FLAGS OF STEP 3]"
models="$(realpath "$1")" out="$(realpath -m "$2")"
shift 2
cd "$root"

python - "$models/sft" "$out/sft" <<'PYTHON'
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

given, untied = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(given)
weights = dict(model.state_dict())
weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
model.config.tie_word_embeddings = False
other = type(model)(model.config)
other.load_state_dict(weights)
other.save_pretrained(untied)
AutoTokenizer.from_pretrained(given).save_pretrained(untied)
PYTHON

deepspeed --log_level critical --num_gpus 2 --master_port "${MASTER_PORT:-29500}" training/step3_rlhf.py \
    --actor_model_name_or_path "$out/sft" --critic_model_name_or_path "$models/reward" \
    --data_path "$models/data/prompts.jsonl" --eval_data_path "$models/data/eval_prompts.jsonl" --num_eval_prompts 256 \
    --output_dir "$out/ppo" --actor_zero_stage 3 --critic_zero_stage 3 --max_prompt_seq_len 12 --max_answer_seq_len 32 \
    --per_device_generation_batch_size 64 --per_device_training_batch_size 64 --max_steps 60 --ppo_epochs 2 \
    --kl_coef 0.15 --lr_scheduler_type cosine --enable_ema --ema_decay 0.95 --only_optimize_lora \
    --actor_lora_dim 32 --actor_lora_module_name _ --actor_lora_learning_rate 2e-3 \
    --critic_lora_dim 32 --critic_lora_learning_rate 4e-3 --lora_alpha 32 "$@"
python -m training.toy.reviews judge "$out/ppo/samples/before.jsonl" "$out/ppo/samples/after.jsonl"
