"""Scores from a function of the user's.

def exact_answer(prompts: list[str], responses: list[str], rows: list[dict]) -> list[float]:
    return [float(response.strip() == row["answer"]) for response, row in zip(responses, rows)]

reward = FunctionReward(exact_answer, tokenizer, rows=ConcatDataset([training_rows, held_out_rows]))
"""

import inspect
import numbers
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.errors import shortened
from engine.experience import Rollout
from engine.reward.agreed import described, stop_together
from engine.reward.base import RewardSource
from engine.reward.texts import decoded
from engine.trace import traced


class FunctionReward(RewardSource):
    """Calls `function(prompts, responses)`, with `rows` too where it has a parameter of that name.

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
        wants_rows = "rows" in inspect.signature(function).parameters
        assert not wants_rows or rows is not None, f"{self.name} asks for rows, and none were given"
        self.rows = rows if wants_rows else None

    @traced("reward function")
    def score(self, rollout: Rollout) -> Tensor:
        """(B,) float32, as the function gave them.

        Raises: RunStopped on all ranks where the function fails on one.
        """
        prompts, responses = decoded(rollout, self.tokenizer)
        named = {} if self.rows is None else {"rows": [self.rows[index] for index in rollout.indices.tolist()]}
        values: list[float] = []
        problem, dtype = None, torch.get_default_dtype()
        try:
            values, problem = _numbers(self.function(prompts, responses, **named), len(responses))
        except BaseException as error:  # whatever the user's code raises, sys.exit too
            problem = f"raised {described(error)}"
        finally:
            torch.set_default_dtype(dtype)  # which belongs to the whole process
        contract = "It is called with lists of texts and returns one number a response. Mend it."
        stop_together(problem, f"the reward function {self.name}", contract)
        return torch.tensor(values, dtype=torch.float32, device=rollout.sequences.device)


def _numbers(returned, count: int) -> tuple[list[float], str | None]:
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
