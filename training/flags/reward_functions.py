"""What the score of a run is made of: the reward model, what --reward_function names, and reward servers, each with its
weight and the name that metrics have for it."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from engine.errors import UserError
from engine.reward.base import OBJECTIVE
from engine.reward.built_in import BUILT_IN, BuiltInSettings
from engine.reward.function import Signature
from training.data.examples import Prompts
from training.flags.model_flags import ModelFlags
from training.flags.user_function import is_source, load_function
from training.reporting.standard_errors import ENDINGS

MODEL = "model"  # how metrics call the reward model
ALONE = "function"  # a function, or class, that nothing else scores beside
SERVER = "server"  # those of --reward_url


@dataclass(frozen=True, slots=True)
class Part:
    """One of the things whose weighted sum is the score.

    name: in metrics, as reward/NAME and objective/scores_NAME. what: as people read it. given: of a function, as the
    flag names it.
    """

    name: str
    what: str
    weight: float
    given: str | None = None


def score_parts(args: ModelFlags) -> list[Part]:
    """Those of a run: the reward model, the functions as they are given, the reward servers."""
    given, others = args.reward_function, args.other_rewards
    weights = args.reward_weights or [1.0] * len(others)
    alone = args.reward_path is None and others == given[:1]
    parts = [] if args.reward_path is None else [Part(MODEL, "reward model", args.reward_model_weight)]
    for name, function, weight in zip([ALONE] if alone else names(given), given, weights):
        parts.append(Part(name, _what(name, function), weight, function))
    if args.reward_url:
        hosts = " and ".join(urlsplit(url).netloc for url in args.reward_url)  # paths and queries may hold keys
        parts.append(Part(SERVER, f"reward server {hosts}", weights[-1]))
    return parts


def _what(name: str, given: str) -> str:
    """A function's own name; and where it stands, if metrics call it otherwise."""
    own = given.rpartition(":")[2]
    return own if name in (own, ALONE) else f"{name} ({given})"


def load_functions(args: ModelFlags) -> dict[str, Callable]:
    """The functions and classes of a run, as they are given; raises UserError for one that cannot be loaded."""
    functions = {name: load_given(name, args) for name in args.reward_function}
    for name, function in functions.items():
        if args.overlap_rewards and is_source(function):
            raise UserError(
                f"--overlap_rewards with --reward_function {name}: that is a class, and only functions are called "
                "early. Leave the flag out, or give a function."
            )
    return functions


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
    """How metrics call functions that have others beside them: each by its own name, with a number where another, the
    reward model or a server has it."""
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
    """Whether no metric of another meaning has this name."""
    return name not in (*taken, MODEL, SERVER) and f"scores_{name}" not in OBJECTIVE and not name.endswith(ENDINGS)


def check_columns(functions: Mapping[str, Callable], data: Mapping[str, Prompts]) -> None:
    """Raise UserError for a column that a function asks for and that was not read, or that the data's first row lacks.

    functions: as they are given. data: by what a message calls it.
    """
    for given, function in functions.items():
        if is_source(function):
            continue
        signature = Signature.of(function)
        for where, prompts in data.items():
            asked = (*signature.required, *signature.optional)
            prompts.refuse_unread(asked, f"--reward_function {given} asks {where} for")
            row = {name: value for name, value in prompts.rows[0].items() if value is not None}
            if missing := signature.missing(row):
                flag = " (--answer_column says which)" if given in BUILT_IN else ""
                raise UserError(
                    f"--reward_function {given} asks for the column {missing[0]}{flag}, which {where} lack: they "
                    f"have {', '.join(row)}. Add the column, or name one that is there."
                )


def short_names(given: Sequence[str]) -> str | None:
    """The functions as restart points know them, without folders, which may be moved; None where there are none."""
    return " ".join(Path(name).name for name in given) or None
