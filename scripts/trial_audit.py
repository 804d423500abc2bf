"""Does the audit know beforehand which reward model PPO can use? Eight reward models of known worth.

    nice -n 19 python scripts/trial_audit.py OUTPUT_DIR --sft out/sft --pairs pairs.jsonl --prompts prompts.jsonl \
        --judge judge.py:judge --lengths 32 48

The reward models start from the SFT model and learn from 200 to 2,000 pairs, of which 0 to 30 % have their labels
swapped. The audit reads them without the judge. Then PPO runs by each of them, and the judge, a function as
--reward_function takes it, reads the responses of each evaluation. After each run the audit's measures are printed
beside the judge's peak in PPO, with their rank correlation. What is done is not done again: call it again to go on.
"""

import argparse
import json
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the packages are not installed

import numpy as np

from engine.atomic_files import whole_folder
from scripts.comparison.runs import run_program, write_json
from training.config.reward import load_function
from training.reporting.best_of import chances
from training.reporting.health import column
from training.reporting.run_record import METRICS_FILE, read_metrics
from training.runtime.watch import STOPPED

MODELS = ((2000, 0.0), (200, 0.3), (600, 0.0), (1000, 0.3), (2000, 0.3), (200, 0.0), (1000, 0.15), (400, 0.15))
"""Pairs that a reward model learns from, and the share of them with swapped labels."""
TESTED = 400  # further pairs, by which the pair accuracy is measured
EXAMPLES = 2000  # so many pairs, seen once or again and again, are learned from in each step 2


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
    log = out.with_name(f"{out.name}.log")
    print(f"{time.strftime('%H:%M')} {out.name}: {program}", flush=True)
    command = [sys.executable, "-m", program, *map(str, words), "--output_dir", str(out)]
    ended = run_program(command, log)
    if ended.code not in (0, STOPPED):  # a reward model that learned noise, or a policy that broke, is a result too
        sys.exit(f"{' '.join(command)} ended with exit code {ended.code}; {log} has what it printed.")
    write_json(done, {"seconds": ended.seconds, "cpu_seconds": ended.cpu_seconds})


def write_pairs(source: Path, folder: Path) -> None:
    """Write the pairs of each reward model, and those by which all are tested. Larger sets contain the smaller ones."""
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    sets = {"tested": rows[-TESTED:]}
    for count, noise in MODELS:
        swaps = random.Random(count)
        sets[name_of(count, noise)] = [
            row | {"chosen": row["rejected"], "rejected": row["chosen"]} if swaps.random() < noise else row
            for row in rows[:count]
        ]
    with whole_folder(folder) as partial:
        for name, part in sets.items():
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part)
            (partial / f"{name}.jsonl").write_text(text, encoding="utf-8")


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
    with np.errstate(invalid="ignore"):  # NaN where all are equal
        return float(np.corrcoef(ranks)[0, 1])


def main() -> None:
    """Make what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    for name in ("--sft", "--pairs", "--prompts"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--judge", required=True, help="file.py:function, which PPO and reward models know nothing of")
    parser.add_argument("--lengths", type=int, nargs=2, required=True, help="longest prompt and response, in tokens")
    parser.add_argument("--steps", type=int, default=24, help="of PPO")
    parser.add_argument("--rate", type=float, default=4e-4, help="learning rate of PPO")
    parser.add_argument("--reward_rate", type=float, default=1e-3, help="learning rate of step 2")
    options = parser.parse_args()
    home, sft, judge = options.output.resolve(), options.sft.resolve(), load_function(options.judge)
    if not (home / "pairs").is_dir():
        write_pairs(options.pairs, home / "pairs")
    prompt, response = options.lengths
    lengths = ("--max_prompt_seq_len", prompt, "--max_answer_seq_len", response)
    prompts = ("--data_path", options.prompts.resolve(), *lengths, "--seed", 1)
    rewards = {name_of(*each): home / "rewards" / name_of(*each) for each in MODELS}
    for (count, _), (name, path) in zip(MODELS, rewards.items(), strict=True):
        run(
            path,
            "training.step2_reward",
            *("--model_name_or_path", sft, "--data_path", home / "pairs" / f"{name}.jsonl", *lengths, "--seed", 1),
            *("--eval_data_path", home / "pairs" / "tested.jsonl", "--max_seq_len", 2 * (prompt + response)),
            *("--pairwise_loss", "from_difference", "--num_train_epochs", round(EXAMPLES / count)),
            *("--learning_rate", options.reward_rate, "--num_warmup_steps", 20, "--per_device_eval_batch_size", 50),
            *("--normalization_data_path", options.prompts.resolve()),
        )
    run(
        home / "audit",
        "training.tools.audit",
        *("--sft_model_name_or_path", sft, *prompts, "--reward_model_name_or_path", *rewards.values()),
    )
    for name, path in rewards.items():
        run(
            home / "ppo" / name,
            "training.step3_rlhf",
            *("--actor_model_name_or_path", sft, "--critic_model_name_or_path", path, *prompts),
            *("--actor_learning_rate", options.rate, "--critic_learning_rate", options.rate),
            *("--per_device_generation_batch_size", 64, "--per_device_training_batch_size", 32),
            *("--max_steps", options.steps, "--eval_steps", 4, "--num_eval_prompts", 128),
        )
        show(home, judge)


def measured(audit: dict, reward: str, judge: Callable) -> dict[str, float]:
    """The best of 8 by a reward in each measure, in the mean of the other rewards, and by the judge, whom the audit has
    not asked."""
    found, samples, n = audit["rewards"][reward], audit["samples"], audit["how"]["num_samples_per_prompt"]
    k = audit["how"]["verdict_at"]
    best, one = found["best_of"][str(k)], found["best_of"]["1"]
    others = [best[name][0] - one[name][0] for name in audit["rewards"] if name != reward]
    scores = np.array([sample[reward] for sample in samples]).reshape(-1, n)
    judged = judge([sample["prompt"] for sample in samples], [sample["response"] for sample in samples])
    return {
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
        measures[name]["pair accuracy"] = column(trained, "eval/accuracy")[-1]
    columns = list(measures[names[0]])
    print("\t".join(["", "judge's peak", *columns]))
    for name in names:
        print("\t".join([name, *(f"{value:.3f}" for value in (peaks[name], *measures[name].values()))]))
    found = [rank_correlation([measures[name][one] for name in names], list(peaks.values())) for one in columns]
    print("\t".join(["rank correlation", "", *(f"{value:.2f}" for value in found)]))
    write_json(home / "result.json", {"peaks": peaks, "measures": measures, "correlation": dict(zip(columns, found))})


if __name__ == "__main__":
    main()
