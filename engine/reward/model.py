"""Scores from a reward model in a frozen engine."""

from torch import Tensor

from engine.experience import Rollout
from engine.reward.base import RewardSource
from engine.trace import traced
from engine.zero.engines import FrozenModel


class RewardModel(RewardSource):
    """The frozen reward model, read at the token that it was trained to be read at."""

    def __init__(self, model: FrozenModel):
        self.model = model

    @traced("reward model")
    def score(self, rollout: Rollout) -> Tensor:
        """(B,) float32, with the stored normalisation."""
        token_scores = self.model(rollout.sequences, rollout.attention_mask, rollout.position_ids)
        return self.model.module.sequence_scores(token_scores, rollout.sequences, rollout.attention_mask)

    def parts(self, rollout: Rollout) -> dict[str, Tensor]:
        """The score alone."""
        return {"scores": self.score(rollout)}

    def on_device(self):
        """Context in which the weights are on the device."""
        return self.model.on_device()
