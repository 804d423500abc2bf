#!/usr/bin/env bash
# From nothing to the numbers of docs/environments.md: a model that calls a calculator, the same model without the
# calculator, and a model that learns a guessing game. For each seed of step 3: right answers and rewards on held-out
# prompts, before and after. One process; about three minutes a seed on a CPU core, and 2 for the environment.
#
#   scripts/environments.sh [OUTPUT_DIR [SEED...]]      by default out/environments in the repository, and seed 1234
set -euo pipefail
case "${1:-}" in -*) sed -n '2,/^set/{s/^# \{0,1\}//p}' "$0"; exit ;; esac
started=$SECONDS
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
out="${1:-$root/out/environments}"
seeds=("${@:2}")
[ -z "$(ls -A "$out" 2>/dev/null)" ] || fail "$out is not empty. Remove it, or name another folder: $0 OUTPUT_DIR"
mkdir -p "$out"
out="$(cd "$out" && pwd)"
cd "$root"

say() { printf '\n== %s (%d s)\n' "$1" $((SECONDS - started)); }

# models NAME EPOCHS: data, a tokenizer of characters, and step 1.
models() {
    python "examples/$1.py" "$out/$1/data"
    python -m training.tools.toy.model --characters --data "$out/$1/data/sft.jsonl" --output_dir "$out/$1/base" \
        --num_layers 2
    python training/step1_sft.py --model_name_or_path "$out/$1/base" --data_path "$out/$1/data/sft.jsonl" \
        --output_dir "$out/$1/sft" --max_seq_len 32 --per_device_train_batch_size 64 --num_train_epochs "$2" \
        --learning_rate 5e-3 --lr_scheduler_type cosine --num_warmup_steps 20 --held_out 128 --dtype fp32
}

# step3 EXAMPLE CLASS SEED FLAGS...: 256 responses a step.
step3() {
    python training/step3_rlhf.py --actor_model_name_or_path "$out/$1/sft" --data_path "$out/$1/data/prompts.jsonl" \
        --eval_data_path "$out/$1/data/eval_prompts.jsonl" --environment "examples/$1.py:$2" --seed "$3" \
        --max_prompt_seq_len 16 --max_answer_seq_len 16 --per_device_generation_batch_size 256 \
        --per_device_training_batch_size 256 --lr_scheduler_type cosine --actor_learning_rate 1e-3 \
        --critic_learning_rate 2e-3 --kl_coef 0.01 --eval_steps 1000 --dtype fp32 "${@:4}"
}

say "sums: data and step 1"
models calculator 10
say "guessing game: data and step 1"
models guessing_game 4
for seed in "${seeds[@]:-1234}"; do
    say "step 3: sums with the calculator, seed $seed"
    step3 calculator Calculator "$seed" --stop "]" --max_turns 2 --num_eval_prompts 500 --max_steps 20 \
        --output_dir "$out/with_calculator_$seed"
    say "step 3: sums without it, seed $seed"
    step3 calculator Calculator "$seed" --stop "]" --max_turns 1 --num_eval_prompts 500 --max_steps 20 \
        --output_dir "$out/without_$seed"
    say "step 3: guessing game, seed $seed"
    step3 guessing_game Game "$seed" --stop "?" --max_turns 4 --num_eval_prompts 500 --max_steps 120 \
        --output_dir "$out/game_$seed"
done

say "reward of held-out prompts (sums: the share of right answers) and turns, before and after"
python - "$out" <<'END'
import json
import sys
from pathlib import Path

print("| run | reward before | after | turns before | after |\n| --- | --- | --- | --- | --- |")
for file in sorted(Path(sys.argv[1]).glob("*_*/metrics.jsonl")):
    lines = [line for line in map(json.loads, file.open()) if "eval/score" in line]
    cells = [f"{lines[place][name]:.3f}" for name in ("eval/score", "eval/turns") for place in (0, -1)]
    print("|", file.parent.name, "|", " | ".join(cells), "|")
END
say "done"
