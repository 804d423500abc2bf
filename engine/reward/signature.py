"""How a reward function is called: by the names of its parameters.

    def f(prompts, responses): ...                       # texts
    def f(prompts, responses, answer, level=1): ...      # and columns of the data, each a list
    def f(prompts, responses, rows): ...                 # and whole rows, as dicts
    def f(completions, answer, **columns): ...           # as TRL calls reward functions, all by name

Source of the last form: `GRPOTrainer._calculate_rewards`, trl/trainer/grpo_trainer.py of TRL 1.16.0. Completions
are texts here, also of dialogues.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

TEXTS = ("prompts", "completions")
"""The names of the texts where all is given by name."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What a function is given beside its texts.

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
