"""Every dialect on the quickstart's task: what it learns, how far it moves, what variety it keeps, how long it takes.

    python scripts/compare_dialects.py                              # all of them, about 25 minutes on two CPU cores
    python scripts/compare_dialects.py openai trlx --overwrite      # these two, anew
    python scripts/compare_dialects.py --docs                       # the table goes into docs/dialects.md, too

Runs in the environment that is active. It takes the SFT and the reward model that scripts/quickstart.sh left in its
folder, or makes them. A dialect makes its own choices; SETTINGS has what is set apart: learning rates, sizes, and what
a system has its user say about the texts. One whose folder holds the same run, complete, is not run again.

Exit code 1 if a held-out score rises by less than 1, which is its standard deviation over the SFT model's responses.
"""

import argparse
import os
import shlex
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.algorithms import DIALECTS, get_dialect
from engine.errors import UserError
from training.reporting.compare_runs import evaluations
from training.reporting.metrics_file import METRICS_FILE, read_metrics
from training.reporting.run_record import RUN_FILE, read_run_record

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs" / "dialects.md"
BEGIN, END = "<!-- made by scripts/compare_dialects.py -->", "<!-- made so far -->"
LEAST_RISE = 1.0


@dataclass(frozen=True, slots=True)
class Setting:
    """What is not a dialect's own choice: steps, prompts a step (over all ranks), response slots, peak learning rates;
    fields that say something about the texts."""

    steps: int
    prompts: int
    response: int
    actor_lr: float
    critic_lr: float | None  # None: there is no critic
    texts: tuple[str, ...] = ()


# The model has 0.2 million parameters and learns at rates that would break a large one. Responses have 14 tokens on
# average and end within 32. Systems that always sample to the last slot get fewer, or most of what they learned from
# would be what follows an end.
SETTINGS = {
    "default": Setting(30, 128, 32, 1.5e-3, 2e-3),
    # Where EOS pads, as DeepSpeed-Chat would have it, scores are read before EOS, and the reward model has learned to
    # read EOS. Learning rates rise for 100 steps.
    "deepspeed_chat": Setting(150, 64, 32, 2e-3, 2e-3, ("pad_token=tokenizer",)),
    "deepspeed_chat_2023": Setting(160, 128, 16, 1.2e-3, 2e-3),
    # Prompts are beginnings without a full stop, so that queries cannot start or end at one; and the reward model has
    # learned to read the EOS token, not the full stop before it.
    "openai": Setting(
        30, 128, 20, 1e-3, 3e-3, ("query_start=", "query_end=", "truncate_token=eos", "truncate_after=0")
    ),
    "summarize": Setting(20, 128, 20, 1e-3, 2e-3),
    "trlx": Setting(26, 128, 32, 1e-3, 1e-3),  # 16 optimizer steps each
    "trl_ppo": Setting(40, 128, 20, 1e-3, 3e-3),
    "trl_rloo": Setting(50, 128, 20, 7e-4, None),
}


@dataclass(frozen=True, slots=True)
class Result:
    """A finished run: responses it learned from, held-out measures before and after, seconds of its training steps."""

    responses: int
    before: dict[str, float]
    after: dict[str, float]
    seconds: float

    @property
    def rise(self) -> float:
        """Of the held-out score, in its standard deviations over the SFT model's responses."""
        return self.after["eval/score"] - self.before["eval/score"]


def step3_words(name: str, setting: Setting, models: Path, folder: Path, ranks: int) -> list[str]:
    """The program and flags of a dialect's run."""
    rows = setting.prompts * get_dialect(name).samples_per_prompt
    words = [
        "training/step3_rlhf.py",
        "--dialect",
        name,
        "--actor_model_name_or_path",
        models / "sft",
        "--critic_model_name_or_path",
        models / "reward",
        "--data_path",
        models / "data" / "prompts.jsonl",
        "--output_dir",
        folder,
        "--overwrite_output_dir",
        "--eval_data_path",
        models / "data" / "eval_prompts.jsonl",
        "--num_eval_prompts",
        256,
        "--max_prompt_seq_len",
        12,
        "--max_answer_seq_len",
        setting.response,
        "--per_device_generation_batch_size",
        setting.prompts // ranks,
        "--per_device_training_batch_size",
        rows // ranks,
        "--max_steps",
        setting.steps,
        "--actor_learning_rate",
        setting.actor_lr,
        "--print_answers_interval",
        20,
        "--dtype",
        "fp32",
    ]
    if setting.critic_lr is not None:
        words += ["--critic_learning_rate", setting.critic_lr]
    if setting.texts:
        words += ["--set", *setting.texts]
    return [str(word) for word in words]


def is_complete(folder: Path, words: list[str], steps: int) -> bool:
    """Whether `folder` holds a run of exactly these words that came to its end."""
    if not (folder / RUN_FILE).is_file() or not (folder / METRICS_FILE).is_file():
        return False
    command = shlex.split(read_run_record(folder / RUN_FILE)[-1]["command"])
    ends = [row["step"] for row in read_metrics(folder / METRICS_FILE) if "eval/score" in row]
    return command[-len(words) :] == words and ends[-1:] == [steps]


def read_result(folder: Path) -> Result:
    """What a run's metrics say; raises UserError if it has not two evaluations."""
    before, *_, after = evaluations(folder)
    steps = read_metrics(folder / METRICS_FILE)
    return Result(after["samples"], before, after, sum(row.get("time/step", 0.0) for row in steps))


def table(results: dict[str, Result]) -> str:
    """In Markdown, a line a dialect."""
    lines = [
        "| dialect | actor and critic rate | responses | score before | after | rise | KL | bigrams before | "
        "after | seconds |",
        "| --- " * 10 + "|",
    ]
    for name, result in results.items():
        setting, before, after = SETTINGS[name], result.before, result.after
        rates = f"{setting.actor_lr:g}, {'-' if setting.critic_lr is None else f'{setting.critic_lr:g}'}"
        lines.append(
            f"| `{name}` | {rates} | {result.responses} | {before['eval/score']:.2f} | {after['eval/score']:.2f} | "
            f"{result.rise:+.2f} | {after['eval/kl']:.2f} | {before['eval/distinct_bigrams']:.0f} | "
            f"{after['eval/distinct_bigrams']:.0f} | {result.seconds:.0f} |"
        )
    return "\n".join(lines)


def between_markers(text: str, made: str) -> str:
    """`text` with what stands between the two markers replaced; raises UserError unless each is there once."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise UserError(f"{DOCS}: the table goes between the lines {BEGIN!r} and {END!r}, once each. Put them back.")
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return f"{text[:start]}\n{made}\n{text[end:]}"


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run_dialect(words: list[str], ranks: int, port: int | None, log: Path) -> None:
    """Start a run and wait for it; what it prints goes into `log`. Raises UserError if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    launcher = [
        "deepspeed",
        "--log_level",
        "critical",
        "--num_gpus",
        str(ranks),
        "--master_port",
        str(port or free_port()),
    ]
    with log.open("w") as printed:
        ended = subprocess.run([*launcher, *words], cwd=ROOT, stdout=printed, stderr=subprocess.STDOUT)
    if ended.returncode:
        raise UserError(f"{shlex.join(words)} ended with exit code {ended.returncode}; {log} has what it printed.")


def compare(options: argparse.Namespace) -> dict[str, Result]:
    """Make the models where they are missing, run what is not there yet, read all results."""
    models = options.models_dir.resolve()
    if not (models / "reward" / "config.json").is_file():
        subprocess.run(["scripts/quickstart_models.sh", models, str(options.ranks)], cwd=ROOT, check=True)
    results = {}
    for name in options.dialects or DIALECTS:
        folder, setting = models / "dialects" / name, SETTINGS[name]
        words = step3_words(name, setting, models, folder, options.ranks)
        if options.overwrite or not is_complete(folder, words, setting.steps):
            print(f"{name}: {setting.steps} steps, log in {folder}.log", flush=True)
            run_dialect(words, options.ranks, options.master_port, folder.with_name(f"{name}.log"))
        results[name] = read_result(folder)
        print(f"{name}: rise {results[name].rise:+.2f}", flush=True)
    return results


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dialects", nargs="*", metavar="DIALECT", help="by default all")
    parser.add_argument(
        "--models_dir",
        type=Path,
        default=ROOT / "quickstart",
        help="the quickstart's folder; runs go into its dialects/ (default: quickstart/)",
    )
    parser.add_argument("--ranks", type=int, default=2, choices=(1, 2, 4, 8), help="processes (default: 2)")
    parser.add_argument("--master_port", type=int, help="of the launcher; by default a free one")
    parser.add_argument("--overwrite", action="store_true", help="run again what is complete")
    parser.add_argument("--docs", action="store_true", help=f"write the table into {DOCS.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        for name in options.dialects:
            get_dialect(name)
        if options.docs and options.dialects:
            raise UserError("--docs writes the table of all dialects: name none.")
        results = compare(options)
        made = table(results)
        print(f"\n{made}")
        if options.docs:
            DOCS.write_text(between_markers(DOCS.read_text(encoding="utf-8"), made), encoding="utf-8")
    except (UserError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    short = [name for name, result in results.items() if result.rise < LEAST_RISE]
    if short:
        print(f"scores that rise by less than {LEAST_RISE:g}: {', '.join(short)}", file=sys.stderr)
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
