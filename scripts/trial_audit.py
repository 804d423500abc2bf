"""Does the audit know beforehand which reward model PPO can use? Eight reward models of known worth on the reviews.

    REVIEWS_MODEL=... REVIEWS_DATA=... nice -n 19 python scripts/trial_audit.py OUTPUT_DIR --judge judge.py:judge

Reward models learn from 200 to 2,000 pairs, of which 0 to 30 % have their labels swapped. The audit reads them without
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
from scripts.comparison.tasks import REVIEWS
from training.config.reward import load_function
from training.reporting.best_of import chances
from training.reporting.run_record import METRICS_FILE, read_metrics

LEARNED = 2000  # pairs that SFT and reward models learn from; a judge may learn from the others
MODELS = ((2000, 0.0), (200, 0.3), (600, 0.0), (1000, 0.3), (2000, 0.3), (200, 0.0), (1000, 0.15), (400, 0.15))
"""Pairs that a reward model learns from, and the share of them with swapped labels."""
TESTED = 400  # of the other pairs, by which the pair accuracy is measured
EXAMPLES = 2000  # so many pairs, seen once or again and again, are learned from in each step 2
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


def write_data(source: Path, folder: Path) -> None:
    """Write the texts of SFT, the pairs of each reward model, and those by which all are tested. Larger sets contain
    the smaller ones."""
    rows = [json.loads(line) for line in (source / "pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    learned, others = rows[:LEARNED], rows[LEARNED:]
    texts = [{"text": row["prompt"] + row[kind]} for row in learned for kind in ("chosen", "rejected")]
    random.Random(0).shuffle(texts)
    sets = {"sft": texts, "tested": others[:TESTED]}
    for count, noise in MODELS:
        swaps = random.Random(count)
        sets[name_of(count, noise)] = [
            row | {"chosen": row["rejected"], "rejected": row["chosen"]} if swaps.random() < noise else row
            for row in learned[:count]
        ]
    folder.mkdir(parents=True)
    for name, part in sets.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def make_models(home: Path, data: Path, prompts: Path) -> dict[str, Path]:
    """Run step 1, and step 2 for each of MODELS; returns the folders of the reward models."""
    run(
        home / "sft",
        "training.step1_sft",
        *("--model_name_or_path", os.environ["REVIEWS_MODEL"], "--data_path", data / "sft.jsonl", "--seed", 1),
        *("--max_seq_len", 128, "--per_device_train_batch_size", 32, "--num_train_epochs", 4, "--learning_rate", 3e-3),
        *("--lr_scheduler_type", "cosine", "--num_warmup_steps", 50, "--per_device_eval_batch_size", 50),
    )
    found = {}
    for count, noise in MODELS:
        name = name_of(count, noise)
        found[name] = home / "rewards" / name
        run(
            found[name],
            "training.step2_reward",
            *("--model_name_or_path", home / "sft", "--data_path", data / f"{name}.jsonl"),
            *("--eval_data_path", data / "tested.jsonl", "--max_seq_len", 160, *LENGTHS, "--seed", 1),
            *("--pairwise_loss", "from_difference", "--learning_rate", 1e-3, "--num_warmup_steps", 20),
            *("--num_train_epochs", round(EXAMPLES / count), "--per_device_eval_batch_size", 50),
            *("--normalization_data_path", prompts),
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
    home, data = options.output.resolve(), Path(os.environ["REVIEWS_DATA"]).resolve()
    judge = load_function(options.judge)
    if not (home / "data").is_dir():
        write_data(data, home / "data")
    rewards = make_models(home, home / "data", data / "prompts.jsonl")
    prompts = ("--data_path", data / "prompts.jsonl", *LENGTHS, "--seed", 1)
    run(
        home / "audit",
        "training.audit",
        *("--sft_model_name_or_path", home / "sft", *prompts, "--num_eval_prompts", 64),
        *("--reward_model_name_or_path", *rewards.values()),
    )
    for name, path in rewards.items():
        run(
            home / "ppo" / name,
            "training.step3_rlhf",
            *("--actor_model_name_or_path", home / "sft", "--critic_model_name_or_path", path, *prompts),
            *("--actor_learning_rate", options.rate, "--critic_learning_rate", options.rate),
            *("--per_device_generation_batch_size", options.responses, "--per_device_training_batch_size", 32),
            *("--max_steps", options.steps, "--eval_steps", 4, "--num_eval_prompts", 128),
        )
        show(home, judge)


def measured(audit: dict, reward: str, judge: Callable) -> dict[str, float]:
    """The audit's safety of a reward, and the best of 8 by it in each measure, in the mean of the other rewards, and by
    the judge, whom the audit has not asked."""
    found, samples, n = audit["rewards"][reward], audit["samples"], audit["how"]["num_samples_per_prompt"]
    k = audit["how"]["verdict_at"]
    best, one = found["best_of"][str(k)], found["best_of"]["1"]
    others = [best[name][0] - one[name][0] for name in audit["rewards"] if name != reward]
    scores = np.array([sample[reward] for sample in samples]).reshape(-1, n)
    judged = judge([sample["prompt"] for sample in samples], [sample["response"] for sample in samples])
    return {
        "safety": found["safety"][0],
        "judge of the best": float((chances(scores, k) * np.reshape(judged, (-1, n))).sum(1).mean()),
        "others": float(np.mean(others)),
        **{name: value for name, (value, _) in best.items() if name not in audit["rewards"]},
    }


def show(home: Path, judge: Callable) -> None:
    """Print a line for each reward model that PPO has learned from, and how well each of the audit's measures orders
    them as the judge's peaks do."""
    audit = json.loads((home / "audit" / "audit.json").read_text(encoding="utf-8"))
    names = [name for name in audit["rewards"] if (home / "ppo" / name / "done.json").is_file()]
    if len(names) < 3:
        return
    before = peak(home / "ppo" / names[0], judge, before=True)
    peaks = {name: peak(home / "ppo" / name, judge) - before for name in names}
    measures = {name: measured(audit, name, judge) for name in names}
    for name in names:
        trained = read_metrics(home / "rewards" / name / METRICS_FILE)
        measures[name]["pair accuracy"] = [row["eval/accuracy"] for row in trained if "eval/accuracy" in row][-1]
    columns = list(measures[names[0]])
    print("\t".join(["", "judge's peak", *columns]))
    for name in names:
        print("\t".join([name, *(f"{value:.3f}" for value in (peaks[name], *measures[name].values()))]))
    found = [rank_correlation([measures[name][one] for name in names], list(peaks.values())) for one in columns]
    print("\t".join(["rank correlation", "", *(f"{value:.2f}" for value in found)]))
    write_json(home / "result.json", {"peaks": peaks, "measures": measures, "correlation": dict(zip(columns, found))})


if __name__ == "__main__":
    main()
