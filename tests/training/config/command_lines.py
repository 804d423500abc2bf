"""Command lines for the tests of flags: those that each program needs, and a small class with one flag of each kind."""

from dataclasses import dataclass

import pytest

from engine.errors import UserError
from training.config.flags import REQUIRED, RunFlags, flag
from training.config.parsing import parse_flags
from training.config.step3 import RLHFFlags
from training.config.supervised import RewardFlags, SFTFlags

SUPERVISED = ["--data_path", "d.jsonl", "--output_dir", "out", "--model_name_or_path", "m"]
REQUIRED_FLAGS = {
    SFTFlags: SUPERVISED,
    RewardFlags: SUPERVISED,
    RLHFFlags: [
        "--data_path",
        "d.jsonl",
        "--output_dir",
        "out",
        "--actor_model_name_or_path",
        "sft",
        "--critic_model_name_or_path",
        "reward",
    ],
}


@dataclass(kw_only=True)
class Flags(RunFlags):
    """One flag of each kind."""

    size: int = flag(REQUIRED, "a number that must be given")
    rate: float | None = flag(None, "a number that may be left out")
    color: str = flag("red", "one of two", choices=("red", "blue"))
    quick: bool = flag(False, "off unless given")
    checked: bool = flag(True, "on unless said otherwise")
    center: bool | None = flag(None, "neither, unless said")
    stop: list[str] = flag([], "texts")


def parse(*words: str, flags_class: type = Flags):
    given = REQUIRED_FLAGS.get(flags_class, ["--output_dir", "out", "--size", "3"])
    if "--ema_decay" in words:
        given = [*given, "--enable_ema"]
    return parse_flags(flags_class, [*given, *words], "a program")


def step3(**values) -> RLHFFlags:
    return parse(*(word for name, value in values.items() for word in (f"--{name}", str(value))), flags_class=RLHFFlags)


def refusal(*words: str, flags_class: type = Flags) -> str:
    with pytest.raises(UserError) as caught:
        parse(*words, flags_class=flags_class)
    return str(caught.value)


def with_rewards(*words: str):
    """Flags of a run with a reward model and no critic's path."""
    return parse_flags(
        RLHFFlags,
        [
            "--data_path",
            "d",
            "--output_dir",
            "o",
            "--actor_model_name_or_path",
            "a",
            "--reward_model_name_or_path",
            "r",
            *words,
        ],
        "a program",
    )


def dialect_refusal(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        with_rewards(*words)
    return str(caught.value)
