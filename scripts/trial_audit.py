"""Does the audit know beforehand which reward model PPO can use? Eight reward models of known worth on the reviews.

    REVIEWS_MODEL=... REVIEWS_DATA=... nice -n 19 python scripts/trial_audit.py OUTPUT_DIR --judge judge.py:judge

Reward models learn from 200 to 3,600 pairs, of which 0 to 30 % have their labels swapped. The audit reads them without
the judge; PPO runs by each of them, and the judge, a function as --reward_function takes it, reads the responses of
each evaluation. Printed are the audit's measures beside the judge's peak in PPO, and their rank correlation. What is
done is not done again: call it again to go on. The variables are those of scripts/trial_reviews.sh.
"""

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the packages are not installed

import numpy as np

from scripts.comparison.runs import run_program, write_json
from scripts.comparison.tasks import HELD_OUT, REVIEWS
from training.config.reward import load_function
from training.reporting.run_record import METRICS_FILE, read_metrics

MODELS = ((3600, 0.0), (3600, 0.3), (2000, 0.15), (1000, 0.0), (1000, 0.3), (600, 0.15), (200, 0.0), (200, 0.3))
"""Pairs that a reward model learns from, and the share of them with swapped labels."""
TESTED = 400  # pairs with their own labels, of which the pair accuracy is measured
EXAMPLES = 4000  # about so many pairs, seen once or again and again, are learned from in each step 2
LENGTHS = ("--max_prompt_seq_len", "32", "--max_answer_seq_len", "48")


def name_of(pairs: int, noise: float) -> str:
    """A reward model's name."""
    return f"pairs{pairs}_noise{noise:g}"


def run(out: Path, program: str, *words: object) -> None:
    """Run a program of the project, unless its record is in `out`. Raises: SystemExit if it fails."""
    done = out / "done.json"
    if done.is_file():
        return
    shutil.rmtree(out, ignore_errors=True)  # of a run that was cut off
    out.parent.mkdir(parents=True, exist_ok=True)
    log = out.with_suffix(".log")
    print(f"{time.strftime('%H:%M')} {out.name}: {program}", flush=True)
    command = [sys.executable, "-m", program, *map(str, words), "--output_dir", str(out)]
    ended = run_program(command, log)
    if ended.code:
        sys.exit(f"{' '.join(command)} ended with exit code {ended.code}; {log} has what it printed.")
    write_json(done, {"seconds": ended.seconds, "cpu_seconds": ended.cpu_seconds})


def write_pairs(source: Path, folder: Path) -> None:
    """The pairs of each reward model, and those by which all are tested. Larger sets contain the smaller ones."""
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    random.Random(0).shuffle(rows)
    tested, rest = rows[:TESTED], rows[TESTED:]
    sets = {"tested": tested}
    for count, noise in MODELS:
        swaps = random.Random(count)
        sets[name_of(count, noise)] = [
            row | {"chosen": row["rejected"], "rejected": row["chosen"]} if swaps.random() < noise else row
            for row in rest[:count]
        ]
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in sets.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def make_reward_models(home: Path, models: Path) -> dict[str, Path]:
    """Run step 2 for each of MODELS; returns their folders."""
    found = {}
    for count, noise in MODELS:
        name = name_of(count, noise)
        found[name] = home / "rewards" / name
        run(
            found[name],
            "training.step2_reward",
            *("--model_name_or_path", models / "sft", "--data_path", home / "pairs" / f"{name}.jsonl"),
            *("--eval_data_path", home / "pairs" / "tested.jsonl", "--max_seq_len", 160, *LENGTHS, "--seed", 1),
            *("--pairwise_loss", "from_difference", "--learning_rate", 1e-3, "--num_warmup_steps", 20),
            *("--num_train_epochs", max(2, round(EXAMPLES / count)), "--per_device_eval_batch_size", 50),
            *("--normalization_data_path", models / "data" / "prompts.jsonl"),
        )
    return found


def peak(out: Path, judge: Callable, before: bool = False) -> float:
    """The judge's mean over the held-out responses, in the evaluation where it is highest, or before the first step."""
    means = []
    for path in (out / "samples").glob("before.jsonl" if before else "*.jsonl"):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        means.append(float(np.mean(judge([row["prompt"] for row in rows], [row["response"] for row in rows]))))
    return max(means)


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's: the correlation of the ranks; equal numbers share the mean of theirs."""
    ranks = [[(np.less(x, v).sum() + np.less_equal(x, v).sum() - 1) / 2 for v in x] for x in (one, other)]
    return float(np.corrcoef(ranks)[0, 1])


def main() -> None:
    """Make what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--judge", required=True, help="file.py:function, which PPO and reward models know nothing of")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rate", type=float, default=4e-4)
    parser.add_argument("--responses", type=int, default=64)
    options = parser.parse_args()
    if why := REVIEWS.why_not():
        sys.exit(why)
    home = options.output.resolve()
    models, judge = home / "models", load_function(options.judge)
    if not (models / "data" / "sft.jsonl").is_file():
        REVIEWS.prepare(models)
    if not (home / "pairs" / "tested.jsonl").is_file():
        write_pairs(Path(os.environ["REVIEWS_DATA"]) / "pairs.jsonl", home / "pairs")
    rewards = make_reward_models(home, models)
    prompts = ("--data_path", models / "data" / "prompts.jsonl", "--eval_data_path")
    prompts = (*prompts, models / "data" / "eval_prompts.jsonl", *LENGTHS)
    for name, path in rewards.items():
        run(
            home / "ppo" / name,
            "training.step3_rlhf",
            *("--actor_model_name_or_path", models / "sft", "--critic_model_name_or_path", path, *prompts),
            *("--actor_learning_rate", options.rate, "--critic_learning_rate", options.rate, "--seed", 1),
            *("--per_device_generation_batch_size", options.responses, "--per_device_training_batch_size", 32),
            *("--max_steps", options.steps, "--eval_steps", 3, "--num_eval_prompts", HELD_OUT),
        )
    run(
        home / "audit",
        "training.audit",
        *("--sft_model_name_or_path", models / "sft", *prompts, "--num_eval_prompts", 64, "--seed", 1),
        *("--reward_model_name_or_path", *rewards.values()),
    )
    show(home, json.loads((home / "audit" / "audit.json").read_text(encoding="utf-8")), judge)


def show(home: Path, audit: dict, judge: Callable) -> None:
    """Print a line a reward model, and how well each of the audit's measures orders them as the judge's peaks do."""
    names = [name_of(*each) for each in MODELS]
    before = peak(home / "ppo" / names[0], judge, before=True)
    peaks = {name: peak(home / "ppo" / name, judge) - before for name in names}
    measures = {name: audit["rewards"][name]["measures"] for name in names}
    for name in names:
        trained = read_metrics(home / "rewards" / name / METRICS_FILE)
        measures[name] |= {"pair accuracy": [row["eval/accuracy"] for row in trained if "eval/accuracy" in row][-1]}
    columns = list(measures[names[0]])
    print("\t".join(["", "judge's peak", *columns]))
    for name in names:
        print("\t".join([name, *(f"{value:.3f}" for value in (peaks[name], *measures[name].values()))]))
    found = [rank_correlation([measures[name][one] for name in names], list(peaks.values())) for one in columns]
    print("\t".join(["rank correlation", "", *(f"{value:.2f}" for value in found)]))
    write_json(home / "result.json", {"peaks": peaks, "measures": measures, "correlation": dict(zip(columns, found))})


if __name__ == "__main__":
    main()
