"""Several reward models of the same pairs, and what a task's judge says of the SFT model's best responses by each.

    python -m scripts.comparison.reward_models judged_reviews OUTPUT_DIR --ways epochs2 epochs4

OUTPUT_DIR gets the task's models and data, a folder a reward model, and the audit of all. What is there is kept.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev

from engine.errors import UserError
from scripts.comparison.folders import make
from scripts.comparison.judged import STEP2, step2
from scripts.comparison.tasks import TASKS
from training.reporting.health import column
from training.reporting.run_record import METRICS_FILE, read_metrics

WAYS: dict[str, dict[str, float]] = {
    "epochs2": {"num_train_epochs": 2},
    "epochs4": {"num_train_epochs": 4},
    "epochs8_dropout0.4": {"num_train_epochs": 8, "dropout": 0.4},
    "epochs16_dropout0.2": {"num_train_epochs": 16, "dropout": 0.2},
    "epochs16_dropout0.4": {"num_train_epochs": 16, "dropout": 0.4},
}
"""What differs from the task's own step 2."""
SEEDS = (1234, 2, 3)  # the first is that of the task's own


def main(name: str, home: Path, ways: Sequence[str]) -> None:
    """Train what is missing, audit all by the judge, and print a table."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    task = TASKS[name]
    reason = task.why_not()
    if reason:
        sys.exit(reason)
    task.prepare(home)
    made = {(way, seed): home / "rewards" / f"{way}_{seed}" for way in ways for seed in SEEDS}
    for (way, seed), folder in made.items():
        step2(home, folder, **{"dropout": 0.0, **STEP2[name], **WAYS[way], "seed": seed})
    audit = home / "audit"
    words = ["-m", "training.tools.audit", "--sft_model_name_or_path", home / "sft", "--judge", task.judge]
    words += ["--data_path", home / "data" / "eval_prompts.jsonl", "--output_dir", audit, "--dtype", "fp32"]
    words += ["--num_samples_per_prompt", 64, "--num_eval_prompts", 96]
    for flag in ("max_prompt_seq_len", "max_answer_seq_len"):
        words += [f"--{flag}", STEP2[name][flag]]
    make(audit, sys.executable, *words, "--reward_model_name_or_path", *made.values(), last="audit.json")
    print(table(json.loads((audit / "audit.json").read_text(encoding="utf-8")), task.judge_name, made))


def table(audit: dict, judge: str, made: dict[tuple[str, int], Path]) -> str:
    """A row a way; the judge's means are in standard deviations of a response above the mean of all responses."""
    values = [sample[judge] for sample in audit["samples"]]
    mean, deviation = fmean(values), pstdev(values)
    lines = ["|  | pair accuracy | best of 16, judged | best of 64, judged |", "| --- | --- | --- | --- |"]
    for way in dict.fromkeys(way for way, _ in made):
        rows = []
        for seed in SEEDS:
            folder = made[way, seed]
            accuracy = column(read_metrics(folder / METRICS_FILE), "eval/accuracy")[-1]
            best = audit["rewards"][folder.name]["best_of"]
            rows.append((accuracy, *((best[k][judge][0] - mean) / deviation for k in ("16", "64"))))
        cells = (", ".join(f"{value:.2f}" for value in values) for values in zip(*rows, strict=True))
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=STEP2)
    parser.add_argument("output", type=Path)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="(all)")
    options = parser.parse_args()
    try:
        main(options.task, options.output.resolve(), options.ways)
    except UserError as error:
        sys.exit(f"error: {error}")
