"""Where the reference log-probs come from. A Protocol, since a reference need not be a model of its own."""
import contextlib
from typing import Protocol

from torch import Tensor

from engine.ds_engine import FrozenModel
from engine.experience import Rollout


class Reference(Protocol):
    """Log-probs of a rollout's tokens under the policy that training started from."""

    def ref_logprobs(self, rollout: Rollout, temperature: float) -> Tensor:
        """(B, T) float32. All ranks call this together."""
        ...

    def resident(self) -> contextlib.AbstractContextManager:
        """Context in which whatever is needed is on the device."""
        ...


class EngineReference:
    """A frozen copy of the SFT model in an engine of its own."""

    def __init__(self, model: FrozenModel):
        self.model = model

    def ref_logprobs(self, rollout: Rollout, temperature: float) -> Tensor:
        """(B, T) float32."""
        logprobs, _ = self.model(rollout.sequences, rollout.attention_mask, rollout.position_ids,
                                 response_length=rollout.response_length, temperature=temperature)
        return logprobs

    def resident(self):
        """Context in which the weights are on the device."""
        return self.model.resident()
