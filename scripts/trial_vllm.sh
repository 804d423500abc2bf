#!/usr/bin/env bash
# vLLM in the trainer's processes against our own loop: the same PPO steps with both, on two CPU ranks under ZeRO-3, give
# the same responses before and after; what the runs tell of the distance between vLLM and the actor is computed anew by
# transformers (scripts/sampler_gap.py); then the quickstart's task is learned with vLLM. About 12 minutes on two
# cores, and some more for the environment.
#
#   scripts/trial_vllm.sh MODELS OUT      MODELS: what scripts/quickstart_models.sh made (sft, reward, data)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/vllm_environment.sh"
models="$(cd "$1" && pwd)"
mkdir -p "$2"
out="$(cd "$2" && pwd)"
cd "$root"
[ -e "$out/sft" ] || python scripts/widen_heads.py "$models/sft" "$out/sft"
export PYTHONPATH="$root" HF_HUB_OFFLINE=1

run() { # name steps flags...
    local name="$1" steps="$2" program=training/step3_rlhf.py
    shift 2
    rm -rf "${out:?}/$name"
    case " $* " in *" vllm "*) program=scripts/vllm_batches.py ;; esac
    KEEP_BATCHES="$out/$name/batches" deepspeed --log_level critical --num_gpus 2 \
        --master_port "${MASTER_PORT:-29500}" "$program" --actor_model_name_or_path "$out/sft" \
        --critic_model_name_or_path "$models/reward" --data_path "$models/data/prompts.jsonl" \
        --eval_data_path "$models/data/eval_prompts.jsonl" --num_eval_prompts 256 --output_dir "$out/$name" \
        --actor_zero_stage 3 --critic_zero_stage 3 --max_prompt_seq_len 12 --max_answer_seq_len 32 \
        --per_device_generation_batch_size 64 --per_device_training_batch_size 64 --max_steps "$steps" --ppo_epochs 2 \
        --kl_coef 0.15 --actor_learning_rate 1.5e-3 --critic_learning_rate 2e-3 --lr_scheduler_type cosine "$@" \
        > "$out/$name.log" 2>&1 || { tail -20 "$out/$name.log" >&2; exit 1; }
    echo "$name: $(grep -m1 '^rollouts by' "$out/$name.log")"
}

same() { # two runs
    python - "$out/$1" "$out/$2" <<'P'
import json, os, sys
for when in ("before", "after", "after_ema"):
    if not all(os.path.exists(f"{run}/samples/{when}.jsonl") for run in sys.argv[1:]):
        continue
    rows = [[json.loads(line)["response"] for line in open(f"{run}/samples/{when}.jsonl")] for run in sys.argv[1:]]
    print(f"  {when}: {sum(a == b for a, b in zip(*rows))} of {len(rows[0])} responses are the same")
P
}

lora=(--actor_lora_dim 8 --critic_lora_dim 8 --only_optimize_lora --lora_target_modules all-linear lm_head)
lora+=(--actor_lora_learning_rate 5e-3 --critic_lora_learning_rate 5e-3)
ema=(--enable_ema --ema_decay 0.5)
run replica 3 --rollout_backend replica "${ema[@]}"
run vllm 3 --rollout_backend vllm "${ema[@]}" --save_steps 2 && same replica vllm
python -m training.restarts.export "$out/vllm/checkpoints/step_000002" "$out/vllm/after_step_2" > "$out/export.log" 2>&1
python scripts/sampler_gap.py "$out/vllm" 3 "$out/vllm/after_step_2"
run vllm_on_both 3 --rollout_backend vllm --vllm_tensor_parallel_size 2 && same replica vllm_on_both
run lora_replica 3 --rollout_backend replica "${lora[@]}"
run lora_vllm 3 --rollout_backend vllm "${lora[@]}" && same lora_replica lora_vllm
# vLLM's own sampler, of rounded matrices, so that there is something to measure and to correct.
ROUNDED_TO=int5 run own 2 --rollout_backend vllm --vllm_sampler own --vllm_tensor_parallel_size 2 --temperature 0.7 \
    --set correction=token_truncate correction_min=0.8 correction_max=1.2
python scripts/sampler_gap.py "$out/own" 1 "$out/sft" --rounded_to int5
# Rounded by less where its log-probs are taken for the actor's: a run of which the first are further off ends.
ROUNDED_TO=int11 run sampler 2 --rollout_backend vllm --temperature 1.3 --old_logprobs sampler
python scripts/sampler_gap.py "$out/sampler" 1 "$out/sft" --rounded_to int11
run learned 60 --rollout_backend vllm --enable_ema --ema_decay 0.95
python -m training.toy.reviews judge "$out/learned/samples/before.jsonl" "$out/learned/samples/after.jsonl"
