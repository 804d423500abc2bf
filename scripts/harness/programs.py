"""The three programs in a test or a trial: in this process, on ranks that are forked, or as a launcher starts them.

    result = run_here(3, tiny.flags(3, output_dir=tmp_path / "out", actor_zero_stage=4), capfd)
    result = forked(1, tiny.flags(1, output_dir=tmp_path / "out"))
    result = launch(1, tiny.flags(1, output_dir=tmp_path / "out"))
    assert result.code == 0, result.stderr

`Tiny` is a world to run them in: models of scripts/harness/models.py, and files of texts that their tokenizer knows.
`differences` says in what two runs are not the same.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO
from unittest import mock

import torch

from scripts.harness import ROOT, free_port, models
from scripts.harness.ranks import ForkedProgram
from training import step1_sft, step2_reward, step3_rlhf, tools
from training.config.step3 import RLHFFlags
from training.runtime.launch import run

TIMEOUT = 300.0  # seconds
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "backslashreplace"}
MACHINE = ("time/", "speed/", "memory/", "checkpoint/", "rollout/tokens_per_second")
"""Metrics that differ between two runs of the same numbers."""
PROGRAMS = {1: (step1_sft, step1_sft.SFTFlags), 2: (step2_reward, step2_reward.RewardFlags), 3: (step3_rlhf, RLHFFlags)}


@dataclass(frozen=True)
class Result:
    """How a program ended, and what it printed."""

    code: int
    stdout: str
    stderr: str


def command_line(flags: dict) -> list[str]:
    """The words of a command line: None leaves a flag out, True gives it bare, a list gives it several values."""
    words = []
    for name, value in flags.items():
        if value is not None:
            values = [] if value is True else value if isinstance(value, list) else [value]
            words += [f"--{name}", *map(str, values)]
    return words


def run_words(step: int, words: list[str]) -> int:
    """The exit code of the program of this step, run in this process.

    The process group is kept, because DeepSpeed cannot go on with a second one.
    """
    module, flags_class = PROGRAMS[step]
    with mock.patch("engine.distributed.shutdown"):
        return run(partial(module.main, callbacks=tools.callbacks()), flags_class, module.__doc__, words)


def run_here(step: int, flags: dict, capfd) -> Result:
    """Run the program of this step in this process: fast, and as often as is wanted."""
    capfd.readouterr()
    code = run_words(step, command_line(flags))
    return Result(code, *capfd.readouterr())


def run_caught(step: int, words: list[str]) -> Result:
    """Run the program of this step in this process, where no capfd is: whoever writes, and nothing on stdin."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        with Path(os.devnull).open("rb") as nothing, _redirected(nothing, stdout, stderr):
            try:
                code = run_words(step, words)
            except BaseException as error:  # what Python would do with it, were it a process of its own
                traceback.print_exc()
                code = error.code if isinstance(error, SystemExit) else 1
        for stream in (stdout, stderr):
            stream.seek(0)
        return Result(code, *(stream.read().decode(errors="backslashreplace") for stream in (stdout, stderr)))


@contextlib.contextmanager
def _redirected(*files: IO) -> Iterator[None]:
    """File descriptors 0, 1 and 2 are these files'."""
    kept = [os.dup(number) for number in range(3)]
    try:
        for number, file in enumerate(files):
            os.dup2(file.fileno(), number)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in enumerate(kept):
            os.dup2(copy, number)
            os.close(copy)


def launch(step: int, flags: dict, ranks: int = 2) -> Result:
    """Run the program of this step by DeepSpeed's launcher, as users do; raises TimeoutError."""
    return launch_words(step, command_line(flags), ranks)


def launch_words(step: int, words: list[str], ranks: int = 2) -> Result:
    """The same, with the words as they are; raises TimeoutError."""
    return ended(begun(by_deepspeed(program(step), words, ranks), ranks, **PIPES))


def forked(step: int, flags: dict, ranks: int = 2) -> Result:
    """Run the program of this step on so many ranks without a launcher, in a tenth of the time; raises TimeoutError."""
    return forked_program(program(step), flags, ranks)


def forked_program(file: Path | str, flags: dict, ranks: int) -> Result:
    """The same of another program: its file, or its module's name."""
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder) / "stdout", Path(folder) / "stderr"
        code = ForkedProgram(file, command_line(flags), ranks, stdout=stdout, stderr=stderr).wait(TIMEOUT)
        return Result(code, *(file.read_text(errors="backslashreplace") for file in (stdout, stderr)))


def begin(step: int, flags: dict, log: Path, ranks: int = 2) -> subprocess.Popen:
    """Begin what `launch` runs; all that it prints goes to the log."""
    with log.open("wb") as file:
        command = by_deepspeed(program(step), command_line(flags), ranks)
        return begun(command, ranks, stdout=file, stderr=subprocess.STDOUT)


def program(step: int) -> Path:
    """The file of the program of this step."""
    return Path(PROGRAMS[step][0].__file__)


def by_deepspeed(program: Path | str, words: list[str], ranks: int = 2) -> list[str]:
    """The command of DeepSpeed's launcher."""
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", str(ranks)]
    return [*launcher, "--master_port", str(free_port()), str(program), *words]


def by_torchrun(program: Path | str, words: list[str], ranks: int = 2) -> list[str]:
    """The command of torch's launcher."""
    launcher = [str(Path(sys.executable).with_name("torchrun")), "--nproc_per_node", str(ranks)]
    return [*launcher, "--master_port", str(free_port()), str(program), *words]


def begun(command: list[str], ranks: int, environment: Mapping[str, str] | None = None, **options) -> subprocess.Popen:
    """Begin a command that has so many ranks, in a process group of its own, as a shell does, and return at once.

    environment: beside this process's own. options: subprocess.Popen's.
    """
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if torch.cuda.device_count() < ranks:
        own["DS_ACCELERATOR"] = "cpu"
    return subprocess.Popen(
        command, env={**os.environ, **own, **(environment or {})}, start_new_session=True, **options
    )


def ended(process: subprocess.Popen, timeout: float = TIMEOUT) -> Result:
    """The end of what has begun with PIPES; after so many seconds it is killed, and TimeoutError raised."""
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the ranks, too
        raise TimeoutError(f"{process.args} did not end") from None
    return Result(process.returncode, stdout, stderr)


def assert_one_message(result: Result, expected: list[str], code: int = 2) -> None:
    """Nothing on stderr but one line that holds all of `expected`."""
    assert result.code == code, result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.rstrip()[-1] in ".?", f"no sentence that says what to do: {result.stderr}"
    assert result.stdout.count("error: ") == 0
    for part in expected:
        assert part in result.stderr, f"{part!r} is missing in {result.stderr!r}"


def metric_lines(output_dir: Path) -> list[dict]:
    """What a run wrote into metrics.jsonl."""
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def lasting_metrics(output_dir: Path) -> list[dict]:
    """The same without what times and memory are: the numbers of the computation."""
    lines = metric_lines(output_dir)
    return [{name: value for name, value in line.items() if not name.startswith(MACHINE)} for line in lines]


def differences(whole: Path, other: Path) -> list[str]:
    """What of a run's results is not another's to the last bit: saved weights, held-out samples, metrics."""
    assert (whole / "actor" / "model.safetensors").is_file()
    files = [*whole.glob("*/*.safetensors"), *whole.glob("samples/before.jsonl"), *whole.glob("samples/after*.jsonl")]
    names = sorted(str(file.relative_to(whole)) for file in files)
    found = [
        name
        for name in names
        if not (other / name).is_file() or (whole / name).read_bytes() != (other / name).read_bytes()
    ]
    return found + ["metrics.jsonl"] * (lasting_metrics(whole) != lasting_metrics(other))


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below the folder, with what it holds; empty folders, and one that does not exist, hold nothing.

    Python's own cache beside a file that was imported is left out: whether there is one is up to the environment.
    """
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.parent.name != "__pycache__"
    }


def write_partitioned(path: Path) -> Path:
    """Write the shipped JSON of ZeRO-3, in which small parameters, too, are partitioned; returns the path."""
    shipped = json.loads((ROOT / "configs" / "ds" / "zero3.json").read_text())
    limits = {"stage3_param_persistence_threshold": 0, "stage3_model_persistence_threshold": 0}
    path.write_text(json.dumps(shipped | {"zero_optimization": shipped["zero_optimization"] | limits}))
    return path


class Tiny:
    """A folder with sft/, reward/, sft.jsonl, pairs.jsonl and prompts.jsonl, and flags that run on them."""

    def __init__(self, folder: Path):
        self.folder = folder
        models.make_causal_lm(folder / "sft", "gpt2", tied=True)
        models.make_scorer(folder / "reward", "gpt2", offset=0.3)
        rng = random.Random(0)

        def text(words: int) -> str:
            return " ".join(f"w{rng.randrange(4, 64):02d}" for _ in range(words))

        self.write("prompts", [{"prompt": text(4)} for _ in range(40)])
        self.write("sft", [{"prompt": text(4), "response": text(rng.randrange(3, 7))} for _ in range(40)])
        self.write("pairs", [{"prompt": text(4), "chosen": text(5), "rejected": text(4)} for _ in range(40)])

    def write(self, name: str, rows: list[dict]) -> Path:
        """Save rows as JSON lines."""
        path = self.folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def flags(self, step: int, **changes) -> dict:
        """Flags of a run of a few steps, with these changes."""
        supervised = {
            "max_seq_len": 16,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 4,
            "held_out": 8,
            "model_name_or_path": self.folder / "sft",
        }
        short = {"max_prompt_seq_len": 6, "max_answer_seq_len": 8}
        flags = {
            1: {**supervised, "data_path": self.folder / "sft.jsonl"},
            2: {**supervised, **short, "data_path": self.folder / "pairs.jsonl", "normalization_samples": 16},
            3: {
                **short,
                "data_path": self.folder / "prompts.jsonl",
                "num_eval_prompts": 8,
                "max_steps": 2,
                "actor_model_name_or_path": self.folder / "sft",
                "critic_model_name_or_path": self.folder / "reward",
                "per_device_generation_batch_size": 4,
                "per_device_training_batch_size": 4,
            },
        }[step]
        return {**flags, **changes}
