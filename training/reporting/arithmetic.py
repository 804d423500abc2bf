"""What each phase of a step does a second: tokens, and the share of the GPU's arithmetic that it needed.

Model FLOPs utilisation (MFU) is the number of floating-point operations that the phase's tokens need, divided by what
the GPUs could have done in its time (Chowdhery et al. 2022, PaLM, appendix B). Padding, masked attention, what is
computed again under gradient checkpointing, and adapters' factors are no need. docs/performance.md has the formulas.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from engine import distributed
from engine.experience import Experience, Rollout
from engine.memory.gpus import data_sheet
from engine.models.policy import Backbone, Policy
from engine.rlhf_engine import RLHFEngine
from engine.zero.accelerator import on_gpu
from engine.zero.engines import TrainedModel
from engine.zero.gathering import full_shape
from training.reporting.metrics import Accumulator

MIXTURES = ("num_experts", "num_local_experts", "n_routed_experts")  # settings of models of experts


@dataclass(frozen=True, slots=True)
class Cost:
    """What a model's passes cost.

    matrices: numbers in the matrices of its layers; trained: of these, what trains; passed: those through which
    gradients go on to what is before them. attention: layers x heads x numbers a head. head: numbers of a language
    model's output layer, 0 for a scorer; head_trained: as `trained`.
    """

    matrices: int
    trained: int
    passed: int
    attention: int
    head: int
    head_trained: int

    @classmethod
    def of(cls, module: Backbone) -> "Cost | None":
        """A model's; None for mixtures of experts, of which a token goes through a part that the router chooses."""
        trunk, config = module.model.base_model, module.model.config.get_text_config()
        embeddings = {id(part.weight) for part in trunk.modules() if isinstance(part, nn.Embedding)}
        found = {
            name: weight
            for name, weight in trunk.named_parameters()
            if id(weight) not in embeddings and len(full_shape(weight)) > 1 and ".lora_" not in name
        }
        heads = getattr(config, "num_attention_heads", None)
        if any(getattr(config, name, None) for name in MIXTURES) or heads is None:
            return None
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        trained = sum(full_shape(weight).numel() for weight in found.values() if weight.requires_grad)
        matrices = sum(full_shape(weight).numel() for weight in found.values())
        head = module.model.get_output_embeddings() if isinstance(module, Policy) else None
        weight = getattr(head, "base_layer", head).weight if head is not None else None
        size = full_shape(weight).numel() if weight is not None else 0
        return cls(
            matrices=matrices,
            trained=trained,
            passed=matrices if module.adapters is not None else trained,
            attention=config.num_hidden_layers * heads * width,
            head=size,
            head_trained=size if weight is not None and weight.requires_grad else 0,
        )

    def forward(self, lengths: Tensor, predicted: Tensor) -> Tensor:
        """FLOPs of a forward pass. lengths: (B,) tokens of each row; predicted: how many log-probs are taken, (B,)
        or of all rows together."""
        tokens, pairs, labels = _sums(lengths, predicted)
        return 2 * self.matrices * tokens + 4 * self.attention * pairs + 2 * self.head * labels

    def training(self, lengths: Tensor, predicted: Tensor) -> Tensor:
        """FLOPs of a forward and backward pass."""
        tokens, pairs, labels = _sums(lengths, predicted)
        backward = 2 * (self.trained + self.passed) * tokens + 2 * (self.head + self.head_trained) * labels
        share = self.passed / max(self.matrices, 1)  # of layers, as they are alike
        backward = backward + 8 * self.attention * share * pairs
        return self.forward(lengths, predicted) + backward


def _sums(lengths: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, pairs of a token and one that it attends to, and log-probs; over all rows, float64."""
    exact = lengths.double()
    return exact.sum(), (exact * (exact + 1) / 2).sum(), predicted.double().sum()


class Arithmetic:
    """What the phases of a step of PPO need of this rank's GPU."""

    def __init__(self, models: RLHFEngine):
        self.models = models

    @cached_property
    def costs(self) -> tuple[Cost | None, ...]:
        """Of actor, critic and reward model; of one that is not there nothing."""
        models = self.models
        reward = models.reward.model if models.reward is not None else None
        each = models.actor, models.critic, reward
        return tuple(Cost.of(model.module) if model is not None else _NOTHING for model in each)

    @cached_property
    def peak(self) -> float | None:
        """As `peak_flops` has it."""
        return peak_flops(self.models.actor)

    def of_step(
        self, drawn: Sequence[Rollout], experience: Experience, epochs: int, critic_epochs: int
    ) -> dict[str, Tensor]:
        """FLOPs by phase, where they are known; without those of scoring responses that are left out.

        drawn: as they were generated. epochs, critic_epochs: how often actor and critic learned from its
            responses.
        """
        actor, critic, reward = self.costs
        if actor is None or critic is None or reward is None:
            return {}
        generated = torch.cat([rollout.attention_mask.sum(-1) for rollout in drawn])
        responses = torch.cat([rollout.response_mask.sum(-1) for rollout in drawn])
        learned = experience.rollout
        lengths, labels = learned.attention_mask.sum(-1), learned.response_mask.sum(-1)
        policies = 1 if experience.logprobs is learned.logprobs else 2  # the sampler's are not computed again
        training = critic_epochs * critic.training(lengths, labels) + epochs * actor.training(lengths, labels)
        scoring = critic.forward(lengths, labels) + reward.forward(lengths, labels)
        return {
            "generate": actor.forward(generated - 1, responses),  # the last token is read by no one
            "make_experience": policies * actor.forward(lengths, labels) + scoring,
            "train": training,
        }

    def add_to(
        self,
        metrics: Accumulator,
        seconds: Mapping[str, float],
        drawn: Sequence[Rollout],
        experience: Experience,
        epochs: int,
        critic_epochs: int,
    ) -> None:
        """Put the speed of each phase into the metrics; arguments as for `of_step`, seconds by phase."""
        tokens = experience.rollout.attention_mask.sum()
        for phase, times in (("make_experience", 1), ("train", epochs or critic_epochs)):
            _add_speed(metrics, phase, times * tokens, seconds[phase])
        if self.peak is None:
            return
        for phase, flops in self.of_step(drawn, experience, epochs, critic_epochs).items():
            _add_use(metrics, phase, flops, seconds[phase], self.peak)


class TrainingArithmetic:
    """What an optimizer step of steps 1 and 2, which train one model, needs of this rank's GPU."""

    def __init__(self, model: TrainedModel):
        self.model = model

    @cached_property
    def cost(self) -> Cost | None:
        """The model's."""
        return Cost.of(self.model.module)

    @cached_property
    def peak(self) -> float | None:
        """As `peak_flops` has it."""
        return peak_flops(self.model)

    def add_to(self, metrics: Accumulator, seconds: float, masks: Sequence[Tensor], predicted: Tensor) -> None:
        """Put the speed of an optimizer step, as that of the phase `train`, into the metrics.

        masks: (B, S) int64 each, attention masks of its micro-batches. predicted: (), how many log-probs are taken.
        """
        lengths = torch.cat([mask.sum(-1) for mask in masks])
        _add_speed(metrics, "train", lengths.sum(), seconds)
        if self.peak is not None and self.cost is not None:
            _add_use(metrics, "train", self.cost.training(lengths, predicted), seconds, self.peak)


def peak_flops(model: TrainedModel) -> float | None:
    """What this rank's GPU could do a second; None in float32, on GPUs whose data sheet is not listed, on CPUs."""
    if not on_gpu() or next(model.module.parameters()).dtype == torch.float32:
        return None
    sheet = data_sheet(torch.cuda.get_device_name())
    return sheet.flops if sheet is not None else None


def _add_speed(metrics: Accumulator, phase: str, tokens: Tensor, seconds: float) -> None:
    """The tokens a second of all ranks; `tokens` are this rank's."""
    metrics.add(f"speed/{phase}", distributed.world_size() * tokens, seconds)


def _add_use(metrics: Accumulator, phase: str, flops: Tensor, seconds: float, peak: float) -> None:
    metrics.add(f"mfu/{phase}", flops / peak, seconds)


_NOTHING = Cost(matrices=0, trained=0, passed=0, attention=0, head=0, head_trained=0)
