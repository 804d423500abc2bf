"""Scores from a user's function. The names of the function's parameters decide which arguments it gets.

    def exact_answer(prompts: list[str], responses: list[str], rows: list[dict]) -> list[float]:
        return [float(response.strip() == row["answer"]) for response, row in zip(responses, rows)]

    reward = FunctionReward(exact_answer, tokenizer, rows=ConcatDataset([training_rows, held_out_rows]))

    def f(prompts, responses): ...                       # texts
    def f(prompts, responses, answer, level=1): ...      # also columns of the data, each as a list
    def f(prompts, responses, rows): ...                 # also whole rows, as dicts
    def f(completions, answer, **columns): ...           # all by name, as TRL calls reward functions

A function returns a number for each response, or for each response a list of its steps: pairs (end of the step in
characters of the response's text, number).

Source of the last form: `GRPOTrainer._calculate_rewards`, trl/trainer/grpo_trainer.py of TRL 1.16.0. Unlike in TRL,
completions are texts in dialogues too.
"""

import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.errors import shortened
from engine.experience import Rollout
from engine.reward.base import (
    EarlyCalls,
    Numbers,
    RewardSource,
    Steps,
    decoded,
    described,
    keys_of,
    positions_of,
    stop_all_ranks,
    stop_if_mixed,
)
from engine.trace import traced


class FunctionReward(RewardSource):
    """Calls a user's function with prompts and responses, and with those columns or rows of the data for which the
    function has parameters.

    Each rank calls the function with its own responses, one micro-batch at a time. The score of a response must
    therefore not depend on other responses. The texts are those of `engine.reward.base.decoded`.

    Args:
        function: a function that returns one number for each response, as a sequence, an array or a tensor; or a list
            of steps for each response. NaN and infinity are passed on.
        rows: the rows of the data: rows[index] is the row of the prompt with this index. Any object that can be indexed
            will do, such as torch's ConcatDataset. `rows` is needed if the function takes columns or rows.
        name: the function's name in messages.
    """

    def __init__(self, function: Callable, tokenizer, rows: Sequence[dict] | None = None, name: str | None = None):
        self.function, self.tokenizer = function, tokenizer
        self.name = name or getattr(function, "__qualname__", repr(function))
        self.signature = Signature.of(function)
        assert not self.signature.needs_rows or rows is not None, f"{self.name} needs rows of the data"
        self.rows = rows if self.signature.takes_rows else None
        self._early, self._dtype = EarlyCalls(), torch.get_default_dtype()
        self._kinds: set[tuple[str, int]] = set()

    @traced("reward function")
    def score(self, rollout: Rollout) -> Tensor:
        """Returns the function's numbers unchanged: (B,) float32; or (B, T) float32, the numbers of steps at the tokens
        in which the steps end. Numbers of several steps that end in one token are added up.

        Raises: RunStopped on all ranks if the function fails on one rank.
        """
        indices, texts = rollout.indices.tolist(), list(zip(*decoded(rollout, self.tokenizer), strict=True))
        values, problem = self._early.taken(keys_of(rollout), texts)
        left = [place for place in range(len(texts)) if place not in values]
        if left and not problem:
            called, problem = self._called([texts[place] for place in left], [indices[place] for place in left])
            values |= dict(zip(left, called))
        torch.set_default_dtype(self._dtype)  # the function may have changed the default of the whole process
        contract = "It gets lists of texts and has to return one number for each response"
        contract += ", or a list of (end of a step in characters, number) pairs for each. Correct the function."
        name = f"the reward function {self.name}"
        stop_all_ranks(problem, name, contract)
        said = [values[place] for place in range(len(texts))]
        stop_if_mixed(self._kinds, {("scores", 2 if isinstance(each, list) else 1) for each in said}, name)
        steps = [each for each in said if isinstance(each, list)]
        if steps:
            return self._at_tokens(steps, rollout)
        return torch.tensor(said, dtype=torch.float32, device=rollout.sequences.device)

    def _at_tokens(self, steps: Sequence[Steps], rollout: Rollout) -> Tensor:
        scores = torch.zeros(rollout.response_mask.shape)
        for row, pairs in enumerate(steps):
            positions = positions_of(rollout, row, self.tokenizer, [end for end, _ in pairs])
            for position, (_, number) in zip(positions, pairs, strict=True):
                scores[row, position] += number
        return scores.to(rollout.sequences.device)

    def begin(self, rollout: Rollout) -> None:
        """As in RewardSource: the function begins to score these responses in another thread. If the dialect cuts
        responses, `score` may get other texts, and calls the function again for those."""
        texts = list(zip(*decoded(rollout, self.tokenizer), strict=True))
        self._early.begin(keys_of(rollout), texts, partial(self._called, texts, rollout.indices.tolist()))

    def _called(self, texts: list[tuple[str, str]], indices: list[int]) -> Numbers:
        prompts, responses = [prompt for prompt, _ in texts], [response for _, response in texts]
        rows = None if self.rows is None else [self.rows[index] for index in indices]
        for row in rows or ():
            if missing := self.signature.missing(row):
                return [], f"needs the column {missing[0]}, but a row has {', '.join(row)}: {shortened(row)}"
        positional, named = self.signature.arguments(prompts, responses, rows)
        try:
            said, problem = _numbers(self.function(*positional, **named), len(responses))
        except BaseException as error:  # the user's code may raise anything, also SystemExit
            return [], f"raised {described(error)}"
        for (prompt, response), each in zip(texts, said):
            if isinstance(each, list) and (wrong := _misplaced(each, len(response))):
                return [], f"returned {wrong}, for the response {shortened(response)} to {shortened(prompt)}"
        return said, problem


def _numbers(returned, count: int) -> Numbers:
    """Returns (the numbers or steps in `returned`, None), or ([], a text that says what is wrong with `returned`)."""
    values = returned.tolist() if hasattr(returned, "tolist") else returned  # arrays and tensors
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        return [], f"returned {shortened(returned)}, which is not a sequence of numbers"
    if len(values) != count:
        return [], f"returned {len(values)} values for {count} responses: {shortened(values)}"
    found: list[float | Steps] = []
    for place, value in enumerate(map(_plain, values)):
        said = float(value) if isinstance(value, numbers.Real) else _steps(value)
        if said is None:
            what = "neither a number nor a list of (end, number) pairs" if _is_list(value) else "not a number"
            return [], f"returned {shortened(value)} for response {place} of {count}, which is {what}"
        found.append(said)
    return found, None


def _plain(value: Any) -> Any:
    """A number of numpy or torch as a number of Python; anything else as it is."""
    return value.item() if getattr(value, "shape", None) == () else value


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _steps(value: Any) -> Steps | None:
    """The pairs (end of a step, number) in a list; None if it is not a list of these."""
    if not _is_list(value) or not all(_is_list(pair) and len(pair) == 2 for pair in value):
        return None
    pairs = [(_plain(end), _plain(number)) for end, number in value]
    if not all(isinstance(end, numbers.Integral) and isinstance(number, numbers.Real) for end, number in pairs):
        return None
    return [(int(end), float(number)) for end, number in pairs]


def _misplaced(steps: Steps, length: int) -> str | None:
    """The first step that ends outside of a response of `length` characters or before its forerunner, or None."""
    before = 0
    for step in steps:
        if not 0 <= step[0] <= length:
            return f"the step {step}, which ends outside of the response's {length} characters"
        if step[0] < before:
            return f"the step {step}, which comes after a step that ends at {before}"
        before = step[0]
    return None


def signature_of(function: Callable) -> inspect.Signature:
    """The parameters of a function; those of `forward` for a torch module, unless its class has a call of its own:
    torch's takes anything. Raises: ValueError or TypeError if they cannot be read."""
    if isinstance(function, torch.nn.Module) and type(function).__call__ is torch.nn.Module.__call__:
        function = function.forward
    return inspect.signature(function)


TEXTS = ("prompts", "completions")
"""The names of the parameters for texts, in a function that gets all arguments by name."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Which arguments a user's function is called with.

    by_name: the names of TEXTS that the function gets by name; empty if it gets prompts and responses by position.
    required, optional: the columns of the data that the function takes. An optional column is not passed if no row has
        a value for it.
    others: whether the function gets all other columns too (**columns).
    rows: whether the function gets whole rows.
    """

    by_name: tuple[str, ...]
    required: tuple[str, ...]
    optional: tuple[str, ...]
    others: bool
    rows: bool

    @classmethod
    def of(cls, function: Callable) -> "Signature":
        """The Signature of a function. If the function is an object with an attribute `columns`, this attribute lists
        the required columns, and the parameters are not read.

        Raises: TypeError if the function cannot be called with the arguments that its parameters ask for; ValueError if
            its parameters cannot be read.
        """
        if (columns := getattr(function, "columns", None)) is not None:
            return cls((), tuple(columns), (), False, False)
        signature = signature_of(function)
        kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
        others = inspect.Parameter.VAR_KEYWORD in kinds.values()
        if "completions" in kinds:
            by_name = tuple(name for name in TEXTS if name in kinds or others)
            texts: Sequence[str] = by_name
        else:
            by_name, texts = (), tuple(signature.bind_partial([], []).arguments)
        named = [
            parameter
            for name, parameter in signature.parameters.items()
            if name not in (*texts, "rows")
            and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ]
        required = tuple(parameter.name for parameter in named if parameter.default is parameter.empty)
        optional = tuple(parameter.name for parameter in named if parameter.default is not parameter.empty)
        found = cls(by_name, required, optional, others, "rows" in kinds)
        given = [*by_name, *required, *(["rows"] if found.rows else [])]
        signature.bind(*([] if by_name else ([], [])), **{name: [] for name in given})
        return found

    @property
    def takes_rows(self) -> bool:
        """Whether the function takes anything from the rows of the data."""
        return self.needs_rows or self.others or bool(self.optional)

    @property
    def needs_rows(self) -> bool:
        """Whether the function cannot be called without the rows of the data."""
        return self.rows or bool(self.required)

    def missing(self, row: Mapping) -> list[str]:
        """The required columns that are missing in a row. A column with the value None counts as missing."""
        return [name for name in self.required if row.get(name) is None]

    def arguments(
        self, prompts: list[str], responses: list[str], rows: Sequence[Mapping] | None
    ) -> tuple[list[list[str]], dict[str, list]]:
        """Returns (positional arguments, named arguments) for these texts. rows: a row of the data for each response,
        or None.

        Raises: KeyError if a row lacks a required column.
        """
        texts = dict(zip(TEXTS, (prompts, responses)))
        named: dict[str, list] = {name: texts[name] for name in self.by_name}
        if rows is not None:
            present = {name for row in rows for name, value in row.items() if value is not None}
            columns = [name for name in self.optional if name in present]
            if self.others:
                columns += sorted(present - {"prompt", "responses", "rows", *TEXTS, *self.required, *columns})
            named |= {name: [row[name] for row in rows] for name in self.required}
            named |= {name: [row.get(name) for row in rows] for name in columns}
            named |= {"rows": list(rows)} if self.rows else {}
        return ([] if self.by_name else [prompts, responses]), named
