"""Scores from a frozen reward model."""

from torch import Tensor

from engine.experience import Rollout
from engine.reward.base import RewardSource
from engine.trace import traced
from engine.zero.engines import FrozenModel, FrozenRole


class RewardModel(RewardSource):
    """The frozen reward model, read at the token that it was trained to be read at: in an engine of its own, or what
    the critic's engine still has of it.

    models: the engines of its own that it has.
    """

    def __init__(self, model: FrozenModel | FrozenRole):
        self.model = model
        self.models = [model] if isinstance(model, FrozenModel) else []

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
