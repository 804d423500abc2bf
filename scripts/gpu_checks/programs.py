"""The three programs, run in a check's own process."""

import contextlib
import importlib
import io
import json
import random
import sys
from pathlib import Path
from typing import TextIO
from unittest import mock

from scripts.gpu_checks.trial import Trial
from training.program.startup import run

PROGRAMS = {
    1: ("training.step1_sft", "SFTFlags"),
    2: ("training.step2_reward", "RewardFlags"),
    3: ("training.step3_rlhf", "RLHFFlags"),
}


def program(step: int, **flags: object) -> str:
    """Run the program of this step with these flags; returns what it printed, errors included.

    A flag that is True stands alone, a list gives several values. Nothing is written for TensorBoard and no curves are
    drawn, for which a machine that fetches nothing may lack packages. The process group is kept, because DeepSpeed
    cannot go on with a second one. Raises: RuntimeError for an exit code that is not 0.
    """
    module_name, flags_name = PROGRAMS[step]
    module = importlib.import_module(module_name)
    printed = _Copied(sys.stdout)
    with (
        mock.patch("engine.distributed.shutdown"),
        mock.patch("training.program.session.plot_curves"),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        words = words_of({"enable_tensorboard": "false", **flags})
        code = run(module.main, getattr(module, flags_name), module.__doc__ or "", words)
    if code:
        lines = printed.getvalue().strip().splitlines()[-1:]
        raise RuntimeError(f"{module_name} ended with exit code {code}: {' '.join(lines)}")
    return printed.getvalue()


class _Copied(io.StringIO):
    """Keeps what is printed, and prints it at once: a check that is ended leaves it in its log."""

    def __init__(self, stream: TextIO):
        super().__init__()
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(text)
        self.stream.flush()
        return super().write(text)


def words_of(flags: dict[str, object]) -> list[str]:
    """A command line's words."""
    words = []
    for name, value in flags.items():
        values = [] if value is True else value if isinstance(value, list) else [value]
        words += [f"--{name}", *map(str, values)]
    return words


def write_prompts(path: Path, count: int, length: int, vocabulary: int) -> Path:
    """Save so many prompts of `length` words that scripts/benchmark_models.py's tokenizer knows."""
    rng = random.Random(0)
    rows = [" ".join(f"w{rng.randrange(4, vocabulary)}" for _ in range(length)) for _ in range(count)]
    path.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    return path


def metrics_of(trial: Trial, output: Path) -> dict[int, dict[str, float]]:
    """The lines of metrics.jsonl by their step; a failure where decoding fell back to the model's own code."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    fell_back = [line["step"] for line in lines if line.get("speed/decoding_fallback")]
    trial.expect(not fell_back, f"{output.name}: in steps {fell_back} the model's own code read single tokens")
    return {line["step"]: line for line in lines}
