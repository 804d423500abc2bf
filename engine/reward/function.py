"""Scores from a function of the user's, called by the names of its parameters.

    def exact_answer(prompts: list[str], responses: list[str], rows: list[dict]) -> list[float]:
        return [float(response.strip() == row["answer"]) for response, row in zip(responses, rows)]

    reward = FunctionReward(exact_answer, tokenizer, rows=ConcatDataset([training_rows, held_out_rows]))

    def f(prompts, responses): ...                       # texts
    def f(prompts, responses, answer, level=1): ...      # and columns of the data, each a list
    def f(prompts, responses, rows): ...                 # and whole rows, as dicts
    def f(completions, answer, **columns): ...           # as TRL calls reward functions, all by name

Source of the last form: `GRPOTrainer._calculate_rewards`, trl/trainer/grpo_trainer.py of TRL 1.16.0. Completions
are texts here, also of dialogues.
"""

import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.errors import shortened
from engine.experience import Rollout
from engine.reward.base import EarlyCalls, Numbers, RewardSource, decoded, described, keys_of, stop_together
from engine.trace import traced


class FunctionReward(RewardSource):
    """Calls `function(prompts, responses)`, with the data's columns that it has parameters for, or with whole `rows`.

    Each rank calls it with its own responses, a micro-batch at a time, so that what it says of one response must not
    depend on the others. The texts are those of `engine.reward.base.decoded`.

    Args:
        function: returns one number a response: a sequence, an array or a tensor. NaN and infinity are passed on.
        rows: the data rows, rows[index] for the indices of the rollouts' prompts (no more than [] is needed of it, so
            torch's ConcatDataset will do); needed where the function asks for them.
        name: how messages call the function.
    """

    def __init__(self, function: Callable, tokenizer, rows: Sequence[dict] | None = None, name: str | None = None):
        self.function, self.tokenizer = function, tokenizer
        self.name = name or getattr(function, "__qualname__", repr(function))
        self.signature = Signature.of(function)
        assert not self.signature.needs_rows or rows is not None, f"{self.name} asks for rows, and none were given"
        self.rows = rows if self.signature.takes_rows else None
        self._early, self._dtype = EarlyCalls(), torch.get_default_dtype()

    @traced("reward function")
    def score(self, rollout: Rollout) -> Tensor:
        """(B,) float32, as the function gave them.

        Raises: RunStopped on all ranks where the function fails on one.
        """
        indices, texts = rollout.indices.tolist(), list(zip(*decoded(rollout, self.tokenizer), strict=True))
        values, problem = self._early.taken(keys_of(rollout), texts)
        left = [place for place in range(len(texts)) if place not in values]
        if left and not problem:
            called, problem = self._called([texts[place] for place in left], [indices[place] for place in left])
            values |= dict(zip(left, called))
        torch.set_default_dtype(self._dtype)  # the whole process's, which a function may have changed
        contract = "It is called with lists of texts and returns one number a response. Mend it."
        stop_together(problem, f"the reward function {self.name}", contract)
        scores = [values[place] for place in range(len(texts))]
        return torch.tensor(scores, dtype=torch.float32, device=rollout.sequences.device)

    def begin(self, rollout: Rollout) -> None:
        """As in RewardSource: the function is called in a thread of its own. Texts that `score` is then asked for may
        be others, where a dialect cuts responses: for those it is called again."""
        texts = list(zip(*decoded(rollout, self.tokenizer), strict=True))
        self._early.begin(keys_of(rollout), texts, partial(self._called, texts, rollout.indices.tolist()))

    def _called(self, texts: list[tuple[str, str]], indices: list[int]) -> Numbers:
        prompts, responses = [prompt for prompt, _ in texts], [response for _, response in texts]
        rows = None if self.rows is None else [self.rows[index] for index in indices]
        for row in rows or ():
            if missing := self.signature.missing(row):
                return [], f"asks for the column {missing[0]}, and a row has {', '.join(row)}: {shortened(row)}"
        positional, named = self.signature.arguments(prompts, responses, rows)
        try:
            return _numbers(self.function(*positional, **named), len(responses))
        except BaseException as error:  # whatever the user's code raises, sys.exit too
            return [], f"raised {described(error)}"


def _numbers(returned, count: int) -> Numbers:
    """The returned numbers, or what is wrong with them."""
    values = returned.tolist() if hasattr(returned, "tolist") else returned  # arrays and tensors
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        return [], f"returned {shortened(returned)}, which is no sequence of numbers"
    if len(values) != count:
        return [], f"returned {len(values)} values for {count} responses: {shortened(values)}"
    values = [value.item() if getattr(value, "shape", None) == () else value for value in values]
    for place, value in enumerate(values):
        if not isinstance(value, numbers.Real):
            return [], f"returned {shortened(value)} for response {place} of {count}, which is no number"
    return [float(value) for value in values], None


TEXTS = ("prompts", "completions")
"""The names of the texts where all is given by name."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The arguments that a function gets beside its texts.

    by_name: whether the texts, too, are given by name, and which. required, optional: columns; an optional one is left
    out where no row has it. others: whether it is given all other columns. rows: whether it is given whole rows.
    """

    by_name: tuple[str, ...]
    required: tuple[str, ...]
    optional: tuple[str, ...]
    others: bool
    rows: bool

    @classmethod
    def of(cls, function: Callable) -> "Signature":
        """That of a function. An object that has an attribute `columns` is given these, whatever its parameters.

        Raises: TypeError for one that cannot be called so, ValueError where its parameters cannot be read.
        """
        if (columns := getattr(function, "columns", None)) is not None:
            return cls((), tuple(columns), (), False, False)
        signature = inspect.signature(function)
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
        """Whether it is given anything of the data's rows where they have it."""
        return self.needs_rows or self.others or bool(self.optional)

    @property
    def needs_rows(self) -> bool:
        """Whether it cannot be called without the data's rows."""
        return self.rows or bool(self.required)

    def missing(self, row: Mapping) -> list[str]:
        """The required columns that a row lacks; null counts as absent."""
        return [name for name in self.required if row.get(name) is None]

    def arguments(
        self, prompts: list[str], responses: list[str], rows: Sequence[Mapping] | None
    ) -> tuple[list[list[str]], dict[str, list]]:
        """Positional and named arguments for these texts; rows: the data's, one a response, None where there are none.

        Raises: KeyError for a column that a row lacks.
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
