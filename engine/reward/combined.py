"""A score made of several: a reward model, functions, and a penalty for length.

reward = CombinedReward({"model": (models.reward, 1.0), "function": (FunctionReward(f, tokenizer), 0.5)},
                        length_penalty=0.01)
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from engine.experience import Rollout
from engine.reward.base import RewardSource


def sum_in_words(terms: Sequence[tuple[str, float]], length_penalty: float = 0.0) -> str:
    """What a CombinedReward computes, as people read it: "0.5 reward model + 0.5 right - 0.01 a token".

    terms: each source, in words, with its weight.
    """
    if length_penalty:
        terms = [*terms, ("a token", -length_penalty)]
    (first, weight), *others = terms
    if not others and weight == 1.0:
        return first
    signed = [f"{'-' if number < 0 else '+'} {abs(number):g} {what}" for what, number in others]
    return " ".join([f"{weight:g} {first}", *signed])


class CombinedReward(RewardSource):
    """sum over sources of weight * score - length_penalty * tokens

    What the dialect does with scores (scaling, missing ends, clipping) comes after the sum.

    Args:
        sources: name -> (source, weight).
        length_penalty: for each sampled token, EOS included.
    """

    def __init__(self, sources: Mapping[str, tuple[RewardSource, float]], *, length_penalty: float = 0.0):
        assert sources, "a score needs at least one source"
        self.sources, self.length_penalty = dict(sources), length_penalty

    def score(self, rollout: Rollout) -> Tensor:
        """(B,) float32."""
        weights = self.weights()
        parts = [weights.get(name, 1.0) * part for name, part in self.parts(rollout).items()]
        return torch.stack(parts).sum(0)

    def parts(self, rollout: Rollout) -> dict[str, Tensor]:
        """What adds up to the score, by name, each (B,) float32.

        "scores_NAME" of each source, before its weight, and "length_penalty" where there is one, with its sign.
        """
        parts = {f"scores_{name}": source.score(rollout).float() for name, (source, _) in self.sources.items()}
        if self.length_penalty:
            parts["length_penalty"] = -self.length_penalty * rollout.response_mask.sum(-1).float()
        return parts

    def weights(self) -> Mapping[str, float]:
        """Each source's, by the name of its part. One of weight 0 is measured alone."""
        return {f"scores_{name}": weight for name, (_, weight) in self.sources.items()}

    def begin(self, rollout: Rollout) -> None:
        """As in RewardSource, by each source."""
        for source, _ in self.sources.values():
            source.begin(rollout)

    def prepare(self, rollout: Rollout) -> None:
        """As in RewardSource, by each source."""
        for source, _ in self.sources.values():
            source.prepare(rollout)

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Context in which every source is on the device."""
        with contextlib.ExitStack() as stack:
            for source, _ in self.sources.values():
                stack.enter_context(source.on_device())
            yield
