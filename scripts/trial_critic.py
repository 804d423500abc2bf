"""What helps the critic, and what a better critic is good for: the quickstart's task with each of the means, by seeds.

    python scripts/trial_critic.py QUICKSTART_DIR OUTPUT_DIR                        all of them, three seeds
    python scripts/trial_critic.py QUICKSTART_DIR OUTPUT_DIR --only plain pretrained --seeds 1 2

QUICKSTART_DIR: with data/, sft/ and reward/, as scripts/quickstart_models.sh writes them. Each run is a process of its
own on this machine, and has a folder in OUTPUT_DIR; one that is there and whole is read and not run again. Runs of 30
steps of 64 responses, one of which takes about a minute on a CPU core. Means over seeds, with their standard errors:

    step 1, 1-5, 1-10     explained variance of what really followed (value/explained_outcome) in these steps
    score, KL             of held-out prompts after the last step
    objective             score less kl_coef times KL, which is what is maximised
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KL_COEF = 0.15
PRETRAIN = ("--critic_pretrain_steps", "10")
MEANS = {  # name: flags; "sft" in the name of those whose critic is the SFT model with a head of zeros
    "plain": (),
    "pretrained": PRETRAIN,
    "value_lam=1": ("--set", "value_lam=1"),
    "length_adaptive_alpha=1": ("--set", "length_adaptive_alpha=1"),
    "length_adaptive_alpha=0.05": ("--set", "length_adaptive_alpha=0.05"),
    "critic_epochs=4": ("--set", "critic_epochs=4"),
    "value_clip_range=none": ("--set", "value_clip_range=none"),
    "pretrained, value_lam=1": (*PRETRAIN, "--set", "value_lam=1"),
    "all": (
        *(*PRETRAIN, "--set", "value_lam=1", "length_adaptive_alpha=1"),
        *("critic_epochs=4", "value_clip_range=none"),
    ),
    "sft, plain": ("--set", "critic_start=zero_head"),
    "sft, pretrained": (*PRETRAIN, "--set", "critic_start=zero_head"),
}
COLUMNS = ("step 1", "1-5", "1-10", "score", "KL", "objective")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, metavar="QUICKSTART_DIR")
    parser.add_argument("output", type=Path, metavar="OUTPUT_DIR")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", nargs="+", choices=MEANS, default=list(MEANS))
    options = parser.parse_args(arguments)
    found: dict[str, list[dict]] = {name: [] for name in options.only}
    for seed in options.seeds:  # the outer loop: what is there after a while compares all
        for name in options.only:
            folder = options.output / f"{name.replace(' ', '').replace(',', '+')}_{seed}"
            run(folder, options.models, MEANS[name], seed, options.steps)
            found[name].append(measured(folder / "metrics.jsonl"))
            print(f"seed {seed}, {name}: {told(found[name][-1])}", file=sys.stderr, flush=True)
    print("\n".join(table(found)))
    return 0


def run(folder: Path, models: Path, flags: Sequence[str], seed: int, steps: int) -> None:
    """A run of step 3, unless the folder holds it whole; raises CalledProcessError where it fails."""
    if (folder / "actor" / "config.json").is_file():
        return
    command = [sys.executable, str(ROOT / "training" / "step3_rlhf.py"), "--actor_model_name_or_path", f"{models}/sft"]
    critic = "reward" if "critic_start=zero_head" in flags else "critic"
    command += [f"--{critic}_model_name_or_path", f"{models}/reward", "--data_path", f"{models}/data/prompts.jsonl"]
    command += ["--eval_data_path", f"{models}/data/eval_prompts.jsonl", "--num_eval_prompts", "256"]
    command += ["--output_dir", str(folder), "--overwrite_output_dir", "--dtype", "fp32", "--seed", str(seed)]
    command += ["--max_prompt_seq_len", "12", "--max_answer_seq_len", "32", "--max_steps", str(steps)]
    command += ["--per_device_generation_batch_size", "64", "--per_device_training_batch_size", "64"]
    command += ["--ppo_epochs", "2", "--kl_coef", str(KL_COEF), "--lr_scheduler_type", "cosine"]
    command += ["--actor_learning_rate", "1.5e-3", "--critic_learning_rate", "2e-3", "--print_answers_interval", "0"]
    folder.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with folder.with_name(f"{folder.name}.log").open("w") as log:
        subprocess.run([*command, *flags], check=True, stdout=log, stderr=subprocess.STDOUT, env=environment)


def measured(path: Path) -> dict[str, float]:
    """What a run's metrics say, by COLUMNS."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    explained = [row["value/explained_outcome"] for row in rows if row["step"] > 0]
    last = [row for row in rows if "eval/score" in row][-1]
    score, kl = last["eval/score"], last["eval/kl"]
    means = (explained[0], statistics.fmean(explained[:5]), statistics.fmean(explained[:10]))
    return dict(zip(COLUMNS, (*means, score, kl, score - KL_COEF * kl), strict=True))


def told(row: Mapping[str, float]) -> str:
    """A run in one line."""
    return ", ".join(f"{name} {value:.3g}" for name, value in row.items())


def table(found: Mapping[str, Sequence[Mapping[str, float]]]) -> list[str]:
    """Means over seeds, as a table of Markdown."""
    lines = [f"| | {' | '.join(COLUMNS)} |", f"| --- |{' --- |' * len(COLUMNS)}"]
    for name, rows in found.items():
        cells = [mean_and_error([row[column] for row in rows]) for column in COLUMNS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def mean_and_error(values: Sequence[float]) -> str:
    """ "0.42 ± 0.03"; of one value alone."""
    mean = f"{statistics.fmean(values):.2f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values) / len(values) ** 0.5:.2f}"


if __name__ == "__main__":
    sys.exit(main())
