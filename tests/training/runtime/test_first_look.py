"""The first look at a command line: it answers as the parser does, and imports no large library before it has."""

import subprocess
import sys
from pathlib import Path

import pytest

from training import commands
from training.config.parsing import help_text
from training.config.step3 import RLHFFlags
from training.config.supervised import RewardFlags, SFTFlags
from training.tools.audit.flags import AuditFlags
from training.tools.compare.flags import CompareFlags
from training.tools.memory.flags import MemoryFlags
from training.tools.merge.flags import MergeFlags
from training.tools.serve.flags import ServeFlags

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = {
    "training.step1_sft": SFTFlags,
    "training.step2_reward": RewardFlags,
    "training.step3_rlhf": RLHFFlags,
    "training.tools.memory": MemoryFlags,
    "training.tools.audit": AuditFlags,
    "training.tools.compare": CompareFlags,
    "training.tools.merge": MergeFlags,
    "training.tools.serve": ServeFlags,
    "training.tools.report": None,  # these two parse for themselves
    "training.tools.export": None,
}


@pytest.fixture
def started(tmp_path, monkeypatch):
    """A function that starts a program in which importing torch, DeepSpeed or transformers is an error."""
    for library in ("torch", "deepspeed", "transformers"):
        (tmp_path / f"{library}.py").write_text("raise ImportError('a large library is imported')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setenv("COLUMNS", "100")
    return lambda *words: subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)


COMMANDS = {module: name for name, (module, _) in commands.COMMANDS.items()}


@pytest.mark.parametrize("words", [["--help"], ["--help", "all"]], ids=" ".join)
@pytest.mark.parametrize("program", PROGRAMS)
def test_help_is_the_parsers(started, program, words):
    found = started("training.commands", COMMANDS[program], *words[: None if PROGRAMS[program] else 1])
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.startswith(f"usage: four-engine-rlhf {COMMANDS[program]} ")
    if flags := PROGRAMS[program]:
        usage, _, options = help_text(flags, "", "all" in words).partition("\n\n")
        assert usage.startswith("usage: ")
        assert found.stdout.endswith(options)


@pytest.mark.parametrize(
    "program, words, told",
    [
        ("training.step3_rlhf", ["--actor_learnig_rate", "1"], "Did you mean --actor_learning_rate?"),
        ("training.step3_rlhf", ["--learning_rate", "1"], "here --actor_learning_rate and --critic_learning_rate"),
        ("training.step2_reward", ["--data_path", "x"], "the following arguments are required: --output_dir"),
        ("training.tools.serve", ["--max_seq_len", "x"], "argument --max_seq_len: invalid int value: 'x'"),
    ],
)
def test_a_mistake_is_told(started, program, words, told):
    found = started(program, *words)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("error: ") and found.stderr.count("\n") == 1 and told in found.stderr


def test_a_sound_command_line_goes_on_to_the_libraries(started):
    found = started("training.step1_sft", *["--model_name_or_path", "a", "--data_path", "b", "--output_dir", "c"])
    assert found.returncode == 1 and found.stderr.endswith("ImportError: a large library is imported\n")
