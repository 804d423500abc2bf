#!/usr/bin/env bash
# The quickstart's task with a sampler that is off on purpose (scripts/rounded_sampler.py), with two ranks under ZeRO-3:
# as it is, and with what it draws weighed by the ratio of the actor's probability to its own. About 6 minutes on two CPU
# cores that have nothing else to do.
#
#   scripts/trial_corrections.sh QUICKSTART_DIR OUTPUT_DIR [ROUNDED_TO...]      by default bf16 int3
#
# QUICKSTART_DIR: with data/, sft/ and reward/, as scripts/quickstart_models.sh writes them. OUTPUT_DIR gets a folder for
# each run. Before and after a run answers to held-out prompts are drawn by the sampler, too, and judged by the grammar.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
[ $# -ge 2 ] || fail "usage: $0 QUICKSTART_DIR OUTPUT_DIR [ROUNDED_TO...]"
models="$(realpath "$1")" out="$(realpath -m "$2")"
shift 2
[ $# -gt 0 ] || set -- bf16 int3
cd "$root"

ppo() {  # NAME PROGRAM FLAGS
    local written="$out/$1" program="$2"
    printf '\n== %s (%d s)\n' "$1" "$SECONDS"
    shift 2
    deepspeed --log_level critical --num_gpus 2 --master_port "${MASTER_PORT:-29500}" "$program" \
        --actor_model_name_or_path "$models/sft" --critic_model_name_or_path "$models/reward" \
        --data_path "$models/data/prompts.jsonl" --eval_data_path "$models/data/eval_prompts.jsonl" \
        --num_eval_prompts 256 --output_dir "$written" --actor_zero_stage 3 --critic_zero_stage 3 --dtype fp32 \
        --max_prompt_seq_len 12 --max_answer_seq_len 32 --per_device_generation_batch_size 64 \
        --per_device_training_batch_size 64 --max_steps "${STEPS:-60}" --ppo_epochs 2 --kl_coef 0.15 \
        --actor_learning_rate 1.5e-3 --critic_learning_rate 2e-3 --lr_scheduler_type cosine "$@" > "$out/$(basename "$written").log" 2>&1 ||
        { tail -n 20 "$out/$(basename "$written").log"; exit 1; }
    python -m training.toy.reviews judge "$written/samples/before.jsonl" "$written/samples/after.jsonl"
    python - "$written/metrics.jsonl" << 'EOF'
import json, statistics, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
names = ["rollout/logprob_gap", "rollout/sampler_kl", "rollout/ratio_min", "rollout/ratio_max", "rollout/ratio_far"]
for name in (*names, "policy/correction", "policy/correction_cut"):
    values = [row[name] for row in rows if row.get(name) is not None]
    if values:
        print(f"{name} {statistics.fmean(values):.4g} in the mean of {len(values)} steps, {values[-1]:.4g} in the last")
ends = [row for row in rows if "eval/score" in row]
print("; ".join(f"step {row['step']}: held-out score {row['eval/score']:.3f}, KL {row['eval/kl']:.2f}" for row in ends))
EOF
}

mkdir -p "$out"
ppo exact training/step3_rlhf.py
for rounded in "$@"; do
    export ROUNDED_TO="$rounded"
    for correction in none token_truncate; do
        ppo "${rounded}_$correction" scripts/rounded_sampler.py --rollout_backend rounded --set "correction=$correction"
    done
done
