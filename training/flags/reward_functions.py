"""The reward functions of a run: what --reward_function names, with the weights, and the names that metrics have."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine.errors import UserError
from engine.reward.base import HELD_OUT
from engine.reward.built_in import BUILT_IN, BuiltInSettings
from engine.reward.signature import Signature
from training.flags.reward_function_flags import RewardFunctionFlags
from training.flags.user_function import is_source, load_function
from training.reporting.standard_errors import ENDINGS

ALONE = "function"  # how metrics call the only one
SERVER = "server"  # and those of --reward_url


@dataclass(frozen=True, slots=True)
class NamedFunction:
    """A reward function, or a class of reward sources.

    name: in metrics, as reward/NAME and objective/scores_NAME. given: as the flag names it. weight: in the score.
    """

    name: str
    given: str
    function: Callable
    weight: float


def load_functions(args: RewardFunctionFlags) -> list[NamedFunction]:
    """Those of a run, in the order in which they are given; raises UserError for one that cannot be loaded."""
    given = args.reward_function
    functions = [load_given(name, args) for name in given]
    for name, function in zip(given, functions):
        if args.overlap_rewards and is_source(function):
            raise UserError(
                f"--overlap_rewards with --reward_function {name}: that is a class, and only functions are called "
                "early. Leave the flag out, or give a function."
            )
    weights = args.reward_weights[: len(given)] or [1.0] * len(given)
    return [NamedFunction(*each) for each in zip(names(given), given, functions, weights, strict=True)]


class BuiltInFlags(Protocol):
    """The flags of built-in functions."""

    answer_column: str | None
    response_format: str | None


def load_given(name: str, args: BuiltInFlags) -> Callable:
    """The built-in function of this name, or the user's; raises UserError where it cannot be had."""
    if name not in BUILT_IN:
        return load_function(name)
    given = {"answer_column": args.answer_column, "response_format": args.response_format}
    return BUILT_IN[name](BuiltInSettings(**{field: value for field, value in given.items() if value is not None}))


def names(given: Sequence[str]) -> list[str]:
    """How metrics call each function: by its own name, with a number where another, the reward model or a server has
    it."""
    if len(given) == 1:
        return [ALONE]
    found: list[str] = []
    for each in given:
        name = re.sub(r"\W", "_", each.rpartition(":")[2])
        found.append(name if _free(name, found) else _numbered(name, found))
    return found


def _numbered(name: str, taken: Collection[str]) -> str:
    number = 2
    while not _free(f"{name}_{number}", taken):
        number += 1
    return f"{name}_{number}"


def _free(name: str, taken: Collection[str]) -> bool:
    """Whether no metric of another meaning has this name; TensorBoard has a histogram of scores."""
    return name not in (*taken, "model", SERVER, "histogram", *HELD_OUT) and not name.endswith(ENDINGS)


def check_columns(functions: Sequence[NamedFunction], rows: Mapping[str, Mapping]) -> None:
    """Raise UserError for a column that a function asks for and the first row of its data lacks.

    rows: by what a message calls them.
    """
    for each in functions:
        if is_source(each.function):
            continue
        for where, row in rows.items():
            if missing := Signature.of(each.function).missing(row):
                flag = " (--answer_column says which)" if each.given in BUILT_IN else ""
                raise UserError(
                    f"--reward_function {each.given} asks for the column {missing[0]}{flag}, which {where} lack: they "
                    f"have {', '.join(row)}. Add the column, or name one that is there."
                )


def short_names(given: Sequence[str]) -> str | None:
    """The functions as restart points know them, without folders, which may be moved; None where there are none."""
    return " ".join(Path(name).name for name in given) or None
