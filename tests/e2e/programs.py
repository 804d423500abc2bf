"""The three programs in a test: in this process, or as the launcher starts them.

    result = run_here(3, tiny.flags(3, output_dir=tmp_path / "out", actor_zero_stage=4), capfd)
    result = launch(1, tiny.flags(1, output_dir=tmp_path / "out"))
    assert result.code == 0, result.stderr

`Tiny` is a world to run them in: models of tests/tiny_models.py, and files of texts that their tokenizer knows.
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from unittest import mock

import torch

from tests import tiny_models
from tests.ports import free_port
from training import step1_sft, step2_reward, step3_rlhf
from training.flags.rlhf_arguments import RLHFFlags
from training.program.startup import run

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 300.0  # seconds
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
        return run(module.main, flags_class, module.__doc__, words)


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
    """Run the program of this step by DeepSpeed's launcher, the way users do; raises TimeoutError."""
    return launch_words(step, command_line(flags), ranks)


def launch_words(step: int, words: list[str], ranks: int = 2) -> Result:
    """The same, with the words as they are; raises TimeoutError."""
    return _launched(_program(step), words, ranks)


def launch_program(path: Path, flags: dict, ranks: int) -> Result:
    """The same of a program of a trial's own; raises TimeoutError."""
    return _launched(path, command_line(flags), ranks)


def launch_module(module: str, flags: dict, ranks: int) -> Result:
    """The same of a program that is a module, `deepspeed --module training.merge`; raises TimeoutError."""
    return _launched("--module", [module, *command_line(flags)], ranks)


def _launched(program: Path | str, words: list[str], ranks: int) -> Result:
    return _started(_launcher(program, words, ranks), ranks)


def _launcher(program: Path | str, words: list[str], ranks: int) -> list[str]:
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", str(ranks)]
    return [*launcher, "--master_port", str(free_port()), str(program), *words]


def begin(step: int, flags: dict, log: Path, ranks: int = 2) -> subprocess.Popen:
    """Begin what `launch` runs, in a process group of its own, as a shell does; all that it prints goes to the log."""
    with log.open("wb") as file:
        command = _launcher(_program(step), command_line(flags), ranks)
        return _begun(command, ranks, stdout=file, stderr=subprocess.STDOUT)


def start_words(step: int, words: list[str]) -> Result:
    """Run the program of this step in one process of its own, without a launcher; raises TimeoutError."""
    return _started([sys.executable, str(_program(step)), *words], 1)


def _program(step: int) -> Path:
    return Path(PROGRAMS[step][0].__file__)


def _begun(command: list[str], ranks: int, **options) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if torch.cuda.device_count() < ranks:
        environment["DS_ACCELERATOR"] = "cpu"
    return subprocess.Popen(command, env=environment, start_new_session=True, **options)


def _started(command: list[str], ranks: int) -> Result:
    process = _begun(
        command, ranks, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="backslashreplace"
    )
    try:
        stdout, stderr = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the ranks, too
        raise TimeoutError(f"{command} did not end") from None
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


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below the folder, with what it holds; empty folders, and one that does not exist, hold nothing.

    Python's own cache beside a file that was imported is left out: whether there is one is up to the environment.
    """
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.parent.name != "__pycache__"
    }


class Tiny:
    """A folder with sft/, reward/, sft.jsonl, pairs.jsonl and prompts.jsonl, and flags that run on them."""

    def __init__(self, folder: Path):
        self.folder = folder
        tiny_models.make_causal_lm(folder / "sft", "gpt2", tied=True)
        tiny_models.make_scorer(folder / "reward", "gpt2", offset=0.3)
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
