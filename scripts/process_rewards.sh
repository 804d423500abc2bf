#!/usr/bin/env bash
# A process reward model and PPO with it, from nothing: additions written step by step, a tokenizer of characters, an SFT
# model that is right about some of them, a process reward model trained on labelled lines, and PPO with two rewards
# and three seeds: the end alone (a checker), and the steps alone (the process reward model). One process; a quarter of an
# hour on a CPU core. docs/step_rewards.md has the table that it prints.
#
#   scripts/process_rewards.sh OUTPUT_DIR [STEPS]      in the environment that is active; goes on where it was stopped
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,/^set/{s/^# \{0,1\}//p}' "$0"; exit 2; }
out="$1" steps="${2:-40}"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
mkdir -p "$out"
out="$(cd "$out" && pwd)"
cd "$root"

# run FOLDER PROGRAM FLAGS...: unless it has been run.
run() {
    local folder="$1" program="$2"
    shift 2
    [ ! -f "$folder/done" ] || return 0
    rm -rf "$folder"
    python "training/$program" --output_dir "$folder" --dtype fp32 "$@"
    touch "$folder/done"
}

if [ ! -d "$out/base" ]; then
    python examples/chains.py --output_dir "$out/data"
    python -m training.tools.toy.model --characters --data "$out/data/sft.jsonl" --output_dir "$out/base" --num_layers 2
fi
run "$out/sft" step1_sft.py --model_name_or_path "$out/base" --data_path "$out/data/sft.jsonl" --max_seq_len 64 \
    --per_device_train_batch_size 32 --num_train_epochs 4 --learning_rate 5e-3 --lr_scheduler_type cosine \
    --num_warmup_steps 20 --held_out 128
run "$out/prm" step2_reward.py --step_end '\n' --model_name_or_path "$out/sft" --data_path "$out/data/steps.jsonl" \
    --max_seq_len 72 --per_device_train_batch_size 64 --num_train_epochs 6 --learning_rate 3e-3 \
    --lr_scheduler_type cosine --num_warmup_steps 50 --held_out 512

# ppo NAME SEED REWARD...: the reward of four good lines is 1 in all of them.
ppo() {
    local name="$1" seed="$2"
    shift 2
    run "$out/$name-$seed" step3_rlhf.py --actor_model_name_or_path "$out/sft" --data_path "$out/data/prompts.jsonl" \
        --eval_data_path "$out/data/eval_prompts.jsonl" --num_eval_prompts 256 --max_prompt_seq_len 12 \
        --max_answer_seq_len 44 --per_device_generation_batch_size 128 --per_device_training_batch_size 128 \
        --max_steps "$steps" --eval_steps 10 --ppo_epochs 2 --kl_coef 0.01 \
        --lr_scheduler_type cosine --actor_learning_rate 4e-4 --critic_learning_rate 1e-3 --seed "$seed" "$@"
}

model=(--reward_model_name_or_path "$out/prm" --reward_function examples/chains.py:right)
for seed in 1 2 3; do
    ppo end "$seed" --reward_function examples/chains.py:right
    ppo steps "$seed" "${model[@]}" --reward_model_weight 0.25 --reward_weights 0 --set critic_start=zero_head
done
# The curves of right answers to 256 held-out prompts; then 2,000 new prompts, answered by each trained model.
python - "$out" <<'TABLE'
import json
import statistics
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, "examples")
from chains import make_chains, right

out = Path(sys.argv[1])
curves = {}
for file in sorted(out.glob("*-[123]/metrics.jsonl")):
    for row in map(json.loads, file.read_text().splitlines()):
        score = row.get("eval/reward_right", row.get("eval/score"))
        if score is not None:
            curves.setdefault(file.parent.name.rpartition("-")[0], {}).setdefault(row["step"], []).append(score)
steps = sorted(next(iter(curves.values())))
print("| right answers after steps | " + " | ".join(map(str, steps)) + " |\n|" + " --- |" * (len(steps) + 1))
for name, curve in curves.items():
    cells = [f"{statistics.mean(curve[step]):.1%} ({min(curve[step]):.0%} to {max(curve[step]):.0%})" for step in steps]
    print(f"| {name} | " + " | ".join(cells) + " |")

known = {json.loads(line)["prompt"] for file in out.glob("data/*.jsonl") for line in file.read_text().splitlines()}
new = make_chains(seed=7, terms=5, sft=1, steps=1, prompts=1, eval_prompts=5000)["eval_prompts.jsonl"]
rows = [row for row in new if row["prompt"] not in known][:2000]
tokenizer = AutoTokenizer.from_pretrained(out / "sft")
prompts = torch.tensor(tokenizer([row["prompt"] for row in rows])["input_ids"])
print("\n| model | right answers | right lines | all lines right |\n| --- | --- | --- | --- |")
for folder in [out / "sft", *sorted(out.glob("*-[123]/actor"))]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    drawn = []
    for part in prompts.split(500):
        whole = model.generate(part, attention_mask=torch.ones_like(part), max_new_tokens=44, do_sample=True, top_k=0)
        drawn += tokenizer.batch_decode(whole[:, part.shape[1] :], skip_special_tokens=True)
    pairs = [(text.split("\n"), row["answer"].split("\n")) for text, row in zip(drawn, rows)]
    shares = sum(right([], drawn, [row["answer"] for row in rows])) / len(rows)
    lines = sum(line == wanted for text, answer in pairs for line, wanted in zip(text, answer)) / (4 * len(rows))
    whole = sum(text == answer for text, answer in pairs) / len(rows)
    name = folder.name if folder.name == "sft" else folder.parent.name
    print(f"| {name} | {shares:.1%} | {lines:.1%} | {whole:.1%} |", flush=True)
TABLE
