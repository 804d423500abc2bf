"""A score made of several: a reward model, functions, and penalties for length and for not coming to an end.

reward = CombinedReward({"model": (engine.reward, 1.0), "function": (FunctionReward(f, tokenizer), 0.5)},
                        missing_eos_penalty=1.0)
"""

import contextlib
from collections.abc import Mapping

import torch
from torch import Tensor

from engine.experience import Rollout
from engine.reward.base import RewardSource


class CombinedReward:
    """sum over sources of weight * score - length_penalty * tokens - missing_eos_penalty * [the response did not end]

    The order is: each source's own affine map, the sum, the penalties; ExperienceMaker clips the result.

    Args:
        sources: name -> (source, weight).
        length_penalty: for each sampled token, EOS included.
        missing_eos_penalty: for a response that neither a stop token nor a stop string ended. Source:
            `missing_eos_penalty` of TRL's PPOTrainer (huggingface/trl f2cd5771).
    """

    def __init__(
        self,
        sources: Mapping[str, tuple[RewardSource, float]],
        *,
        length_penalty: float = 0.0,
        missing_eos_penalty: float = 0.0,
    ):
        assert sources, "a score needs at least one source"
        self.sources = dict(sources)
        self.length_penalty, self.missing_eos_penalty = length_penalty, missing_eos_penalty

    def score(self, rollout: Rollout) -> Tensor:
        """(B,) float32."""
        return total(self.parts(rollout))

    def parts(self, rollout: Rollout) -> dict[str, Tensor]:
        """What adds up to the score, by name, each (B,) float32 and with its weight and sign.

        "scores_NAME" of each source; "length_penalty" and "missing_eos_penalty" where there is one.
        """
        parts = {
            f"scores_{name}": weight * source.score(rollout).float() for name, (source, weight) in self.sources.items()
        }
        if self.length_penalty:
            parts["length_penalty"] = -self.length_penalty * rollout.response_mask.sum(-1).float()
        if self.missing_eos_penalty:
            parts["missing_eos_penalty"] = -self.missing_eos_penalty * (~rollout.ended).float()
        return parts

    @contextlib.contextmanager
    def on_device(self):
        """Context in which every source is on the device."""
        with contextlib.ExitStack() as stack:
            for source, _ in self.sources.values():
                stack.enter_context(source.on_device())
            yield


def total(parts: Mapping[str, Tensor]) -> Tensor:
    """(B,) float32, the sum of all parts."""
    return torch.stack(list(parts.values())).sum(0)
