"""What the engines should compute, by one process, with Hugging Face models and without DeepSpeed.

Weights, and all that this file computes, are float64; the models themselves drop to float32 in some places (norms,
rotary angles).
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from engine.experience import Rollout, TrainingBatch


def policy(folder: str, name: str = "actor"):
    """The language model in `folder`, in float64."""
    return AutoModelForCausalLM.from_pretrained(Path(folder) / name, dtype=torch.float64).eval()


def critic(folder: str):
    """The reward model in `folder`, in float64."""
    return AutoModelForSequenceClassification.from_pretrained(Path(folder) / "reward", dtype=torch.float64).eval()


def logprobs(model, rollout: Rollout, temperature: float) -> Tensor:
    """(B, T) float64, log-probs of the response tokens."""
    logits = model(**_inputs(rollout)).logits.double() / temperature
    start = rollout.prompt_length - 1
    labels = rollout.sequences[:, start + 1 :]
    return F.log_softmax(logits[:, start:-1], -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def entropies(model, rollout: Rollout, temperature: float) -> Tensor:
    """(B, T) float64, the entropy of the distributions from which the response tokens are drawn."""
    logits = model(**_inputs(rollout)).logits.double()[:, rollout.prompt_length - 1 : -1]
    return torch.distributions.Categorical(logits=logits / temperature).entropy()


def values(model, rollout: Rollout) -> Tensor:
    """(B, T) float64, the score head's output before each response token."""
    hidden = model.model(**_inputs(rollout)).last_hidden_state.double()
    every = F.linear(hidden, model.score.weight).squeeze(-1) + model.config.score_offset
    return every[:, rollout.prompt_length - 1 : -1]


def _inputs(rollout: Rollout) -> dict[str, Tensor]:
    mask = rollout.attention_mask
    return {"input_ids": rollout.sequences, "attention_mask": mask, "position_ids": mask.cumsum(-1) - mask}


def policy_losses(model, batch: TrainingBatch, temperature: float, clip: float) -> Tensor:
    """(B, T) float64, the clipped loss of every token; 0 outside the mask."""
    ratio = (logprobs(model, batch.rollout, temperature) - batch.logprobs.double()).exp()
    gain = batch.advantages.double()
    losses = -torch.min(gain * ratio, gain * ratio.clip(1 - clip, 1 + clip))
    return losses.masked_fill(~batch.policy_mask, 0.0)


def value_losses(model, batch: TrainingBatch, clip: float) -> Tensor:
    """(B, T) float64, the clipped loss of every token; 0 outside the mask."""
    new, old, target = values(model, batch.rollout), batch.values.double(), batch.returns.double()
    near = old + (new - old).clip(-clip, clip)
    losses = 0.5 * torch.max((new - target) ** 2, (near - target) ** 2)
    return losses.masked_fill(~batch.value_mask, 0.0)


def gradients(model, loss: Tensor) -> dict[str, Tensor]:
    """The loss's gradient, by parameter name."""
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values()))))


def norm(tensors: dict[str, Tensor]) -> float:
    """The length of all of them as one vector."""
    return torch.cat([tensor.double().flatten() for tensor in tensors.values()]).norm().item()


def relative_error(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The norm of the difference over the norm of what is expected, all tensors as one vector."""
    assert got.keys() == expected.keys(), got.keys() ^ expected.keys()
    return norm({name: got[name].double() - expected[name].double() for name in expected}) / norm(expected)
