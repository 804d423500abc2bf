"""Reward functions that --reward_function names without a file or a module."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.reward.formats import THINK_ANSWER, Format
from engine.reward.math_answers import MathVerify


@dataclass(frozen=True, slots=True)
class BuiltInSettings:
    """What the flags of the same names say of built-in functions."""

    answer_column: str = "answer"
    response_format: str = THINK_ANSWER


BUILT_IN: dict[str, Callable[[BuiltInSettings], Callable]] = {
    "format": lambda settings: Format(settings.response_format),
    "math_verify": lambda settings: MathVerify(settings.answer_column),
}
