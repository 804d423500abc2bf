"""Scores from a function of the user's.

def exact_answer(prompts: list[str], responses: list[str], rows: list[dict]) -> list[float]:
    return [float(response.strip() == row["answer"]) for response, row in zip(responses, rows)]

reward = FunctionReward(exact_answer, tokenizer, rows=ConcatDataset([training_rows, held_out_rows]))
"""

import numbers
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from engine.errors import shortened
from engine.experience import Rollout
from engine.reward.agreed import described, stop_together
from engine.reward.base import RewardSource
from engine.reward.early import EarlyCalls, Numbers
from engine.reward.signature import Signature
from engine.reward.texts import decoded
from engine.trace import traced


class FunctionReward(RewardSource):
    """Calls `function(prompts, responses)`, with the data's columns that it has parameters for, or with whole `rows`.

    Each rank calls it with its own responses, a micro-batch at a time, so that what it says of one response must not
    depend on the others. The texts are those of `engine.reward.texts.decoded`.

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
        values, problem = self._early.taken(_keys(rollout), texts)
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
        self._early.begin(_keys(rollout), texts, partial(self._called, texts, rollout.indices.tolist()))

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


def _keys(rollout: Rollout) -> list[tuple[int, int]]:
    return list(zip(rollout.indices.tolist(), rollout.samples.tolist(), strict=True))


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
