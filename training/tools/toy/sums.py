"""Two-digit sums: data with answers, a checker as a reward function, and the accuracy of models.

    python -m training.tools.toy.sums make --output_dir data
    ... training/step3_rlhf.py --data_path data/prompts.jsonl --reward_function training.tools.toy.sums:right ...
    python -m training.tools.toy.sums accuracy --data data/eval_prompts.jsonl sft ppo/actor rloo/actor

Each of the 8,100 sums is in one of three files: sums with answers for step 1, prompts for step 3, and held-out prompts.
The reward of step 3 says only whether an answer is right.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.errors import UserError
from training.data.record_forms import PROMPTS
from training.data.row_selection import load_rows
from training.runtime.environment import program
from training.runtime.launch import quiet_libraries
from training.tools.toy.reviews import write_files

NEW_TOKENS = 4  # three digits and EOS


def right(prompts: list[str], responses: list[str], answer: list[int]) -> list[float]:
    """1 if a response is the answer and nothing else, apart from spaces around it; else 0."""
    return [float(response.strip() == str(number)) for response, number in zip(responses, answer, strict=True)]


def make_sums(seed: int, sft: int, eval_prompts: int) -> dict[str, list[dict]]:
    """{file name: its records}. sft: number of records for SFT. eval_prompts: number of held-out prompts. All other
    sums become prompts for step 3."""
    sums = [(first, second) for first in range(10, 100) for second in range(10, 100)]
    random.Random(seed).shuffle(sums)
    records = [{"prompt": f"{first}+{second}=", "answer": first + second} for first, second in sums]
    learned = records[:sft]
    held_out = records[sft : sft + eval_prompts]
    asked = records[sft + eval_prompts :]
    return {
        "sft.jsonl": [{"prompt": each["prompt"], "response": str(each["answer"])} for each in learned],
        "prompts.jsonl": asked,
        "eval_prompts.jsonl": held_out,
    }


def run_make(args: argparse.Namespace) -> None:
    """Write the three files."""
    write_files(args.output_dir, make_sums(args.seed, args.sft, args.eval_prompts), args.overwrite)


def accuracy(folder: Path, rows: Sequence[dict], sampled: bool) -> float:
    """The share of right answers to prompts of equal length. sampled: whether to sample from the model's distribution
    instead of taking the most likely token."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from engine.models.config_and_tokenizer import read_tokenizer

    logging.disable_progress_bar()
    tokenizer, model = read_tokenizer(str(folder), "models"), AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    prompts = torch.tensor(tokenizer([row["prompt"] for row in rows])["input_ids"])
    drawn = {"do_sample": True, "top_k": 0} if sampled else {"do_sample": False}
    whole = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=NEW_TOKENS, **drawn)
    responses = tokenizer.batch_decode(whole[:, prompts.shape[1] :], skip_special_tokens=True)
    return sum(right([], responses, [row["answer"] for row in rows])) / len(rows)


def run_accuracy(args: argparse.Namespace) -> None:
    """Print a Markdown table with a line for each model. A model is named after its folder, or, if this is `actor`,
    after the folder around it."""
    quiet_libraries()
    rows = load_rows(str(args.data), PROMPTS, None, phase=3, seed=0)[0]
    found = [rows[place] for place in range(len(rows))]
    for folder in args.models:
        if not (folder / "config.json").is_file():
            raise UserError(f"{folder}: this is not a folder of a model, as it has no config.json. Name another.")
    print("| model | greedy | sampled |\n| --- | --- | --- |")
    for folder in args.models:
        name = folder.parent.name if folder.name == "actor" else folder.name
        greedy, sampled = (accuracy(folder, found, sampled) for sampled in (False, True))
        print(f"| {name} | {greedy:.1%} | {sampled:.1%} |", flush=True)


@program
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m training.tools.toy.sums", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    make = commands.add_parser("make", help="write sft.jsonl, prompts.jsonl and eval_prompts.jsonl")
    make.add_argument("--output_dir", type=Path, required=True)
    make.add_argument("--seed", type=int, default=0)
    make.add_argument("--overwrite", action="store_true", help="write even into a folder that is not empty")
    make.add_argument("--sft", type=int, default=4000, help="records of sft.jsonl (default %(default)s)")
    make.add_argument("--eval_prompts", type=int, default=500, help="records held out (default %(default)s)")
    make.set_defaults(run=run_make)
    table = commands.add_parser("accuracy", help="print the share of right answers, greedy and sampled")
    table.add_argument("models", type=Path, nargs="+", help="folders of models")
    table.add_argument("--data", type=Path, required=True, help="JSON lines with prompt and answer")
    table.set_defaults(run=run_accuracy)
    args = parser.parse_args(arguments)
    args.run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
