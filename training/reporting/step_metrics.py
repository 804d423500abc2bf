"""Measures a step: seconds by phase, memory, metrics, speed, the share of the GPU's peak FLOPs, and traces.

To add a metric, write a function and append it: STEP_METRICS.append(function).

`PhaseMemory` measures the peak of the GPU memory that tensors take on this rank in each phase of a run. The peak is
printed beside the planned memory. It is torch's allocated memory; memory that torch only reserves does not count. On
CPUs nothing is measured.

Model FLOPs utilisation (MFU) is the number of floating-point operations that the tokens of a phase need, divided by the
number that the GPUs could have done in the phase's time (Chowdhery et al. 2022, PaLM, appendix B). Operations on
padding and masked attention, recomputation under gradient checkpointing, and operations of adapters' factors do not
count as needed. docs/performance.md has the formulas.

`Profiler` writes traces of single steps with torch.profiler: a file for each rank and step, which ui.perfetto.dev can
open. The phases of `StepLog` are ranges in the trace; the passes of each model are ranges within the phases
(`engine.trace.traced`). Shapes, memory and Python's stacks are not recorded: they make the file many times larger.
"""

import contextlib
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, record_function

from engine import distributed
from engine.algo.corrections import bounded, importance_ratios
from engine.algo.kl import kl_estimate
from engine.algo.rewards import groups_alike, mean_logprobs
from engine.algo.truncation import kept_positions
from engine.algorithms import Algorithm
from engine.errors import RunStopped
from engine.experience import Experience, Rollout, TrainingBatch
from engine.gpus import data_sheet
from engine.models.config_and_tokenizer import head_sizes
from engine.models.policy import Backbone, Policy
from engine.rlhf_engine import RLHFEngine
from engine.zero.accelerator import now, on_gpu
from engine.zero.engines import TrainedModel
from engine.zero.gathering import full_shape
from training.reporting.metrics import Accumulator
from training.runtime import processes
from training.runtime.stopping import unwritten_noted

LESS_MEMORY = {
    "generate": "a smaller --per_device_generation_batch_size, or --inference_tp_size, by which several ranks hold the "
    "actor's copy together",
    "make_experience": "a smaller --per_device_training_batch_size",
    "train": "--replicas_between_steps free, --actor_gradient_checkpointing --critic_gradient_checkpointing, or a "
    "smaller --per_device_training_batch_size",
}
"""{phase of a step: flags with which the phase takes less memory}."""


class PhaseMemory:
    """The peak memory of each phase, measured while `counting` is true. If a phase occurs again, the new peak replaces
    the earlier one.

    Each phase resets the allocator's peak. `most` is the peak over all phases.
    """

    def __init__(self):
        self.bytes: dict[str, int] = {}
        self.counting = False
        self._most = 0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the peak memory of this block, and record it for the phase `name`."""
        if not self.counting:
            yield
            return
        self.begin()
        yield
        self.bytes[name] = self.end()

    def begin(self) -> None:
        """Begin to measure. Does nothing on CPUs."""
        if on_gpu():
            self.end()
            torch.cuda.reset_peak_memory_stats()

    def end(self) -> int:
        """End the measurement; returns the peak memory since `begin`, in bytes."""
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        self._most = max(self._most, peak)
        return peak

    def most(self) -> int:
        """The largest number of bytes that tensors have taken in this process."""
        return max(self._most, torch.cuda.max_memory_allocated())


phase_memory = PhaseMemory()
"""The PhaseMemory of this process."""


USUAL_RATIOS = (0.5, 2.0)  # range of (actor's probability / sampler's probability); tokens outside of it are counted

# A function that adds sums and counts of this rank's batch to one or more metrics. All ranks call it.
StepMetric = Callable[[Accumulator, TrainingBatch, Algorithm], None]


class StepLog:
    """Collects the measurements of one training step: wall-clock seconds by phase, and metrics.

    log = StepLog()
    with log.phase("train"):
        log.metrics.add("policy/loss", loss, tokens)
    metrics = log.end(tokens)
    """

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.metrics = Accumulator()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time this block as the phase `name`. The device is synchronised at the beginning and at the end.

        The phase is a range in traces, `phase_memory` measures its peak memory, and messages of the watch thread name
        it.
        """
        with _flags_named(name), phase_memory.phase(name), record_function(name), processes.phase(name):
            started = now()
            yield
            self.seconds[name] = self.seconds.get(name, 0.0) + now() - started

    def end(self, tokens: Tensor) -> dict[str, float]:
        """All metrics, reduced over all ranks (all ranks call this). The time of a phase is that of the slowest rank.

        tokens: () int64, the number of tokens that this rank has generated.
        """
        for name, seconds in self.seconds.items():
            self.metrics.add_max(f"time/{name}", seconds)
        self.metrics.add_max("time/step", sum(self.seconds.values()))
        generated = tokens * distributed.data_parallel_size()
        self.metrics.add("rollout/tokens_per_second", generated, self.seconds["generate"])
        self.metrics.add_max("memory/peak_gb", peak_memory_gb())
        return self.metrics.reduce()


@contextlib.contextmanager
def _flags_named(phase: str) -> Iterator[None]:
    """If memory runs out within this block, end the run with a message that names this rank, the phase, and flags with
    which it takes less."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        first = str(error).split(". ")[0]
        raise RunStopped(
            f"{first} on rank {distributed.rank()}, in the phase {phase}. Give {LESS_MEMORY[phase]}."
        ) from error


def peak_memory_gb() -> float:
    """The peak memory of this process in GB (10^9 bytes): of the GPU if there is one, else of the host."""
    if on_gpu():
        return phase_memory.most() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def add_objective(metrics: Accumulator, batch: TrainingBatch, algorithm: Algorithm) -> None:
    """Add the metrics objective/... and rollout/..., which are means or sums over responses or over their drawn
    tokens."""
    dialect = algorithm.dialect
    rollout = batch.rollout
    count = len(batch)
    mask, tokens = rollout.actions, rollout.actions.sum()
    total_rewards = batch.rewards.sum()
    metrics.add("objective/kl", batch.kl.sum(), count)
    metrics.add("objective/kl_per_token", batch.kl.sum(), tokens)
    metrics.add_max("objective/kl_coef", batch.kl_coef)
    metrics.add("objective/entropy", (batch.entropy * mask).sum(), tokens)
    metrics.add("objective/scores", batch.scores.sum(), count)
    metrics.add("objective/rlhf_reward", total_rewards, count)
    metrics.add("objective/non_score_reward", total_rewards - batch.processed_scores.sum(), count)
    clipped = algorithm.clipped(batch.scores if batch.whole_scores is None else batch.whole_scores)
    if clipped is not None:
        metrics.add("objective/clipped", clipped.sum(), count)
    if dialect.missing_end == "subtract" and dialect.missing_end_value:
        metrics.add("objective/missing_eos_penalty", -dialect.missing_end_value * (~rollout.ended).sum(), count)
    if dialect.overlong_buffer:
        metrics.add("objective/overlong_penalty", algorithm.overlong_penalties(mask.sum(-1)).sum(), count)
    if dialect.likelihood_coef:
        likelihoods = mean_logprobs(batch.ref_logprobs, mask)
        metrics.add("objective/likelihood", likelihoods.sum(), count)
        metrics.add("objective/likelihood_part", algorithm.likelihood_part(likelihoods).sum(), count)
    metrics.add("rollout/response_length", tokens, count)
    if dialect.sampling != "without_eos" or dialect.truncate_token:
        metrics.add("rollout/eos_rate", rollout.ended.sum(), count)
    if dialect.sampling == "fixed" and not dialect.truncate_token and algorithm.end_token_id is not None:
        after = mask & ~kept_positions(torch.where(mask, rollout.responses, -1), algorithm.end_token_id)
        metrics.add("rollout/after_eos", after.sum(), tokens)
    masked = ~rollout.ended if dialect.mask_truncated else torch.zeros_like(rollout.ended)
    metrics.add_sum("rollout/degenerate", (~batch.policy_mask.any(-1) & ~masked).sum())
    if dialect.samples_per_prompt > 1:
        alike = groups_alike(batch.scores, dialect.samples_per_prompt)
        metrics.add("rollout/groups_alike", alike.sum(), len(alike))


def add_advantages(metrics: Accumulator, batch: TrainingBatch, algorithm: Algorithm) -> None:
    """Add mean and standard deviation of advantages and returns: over tokens, or, if all tokens of a response have the
    same advantage, over responses."""
    advantages = batch.advantages
    returns = batch.returns
    mask = batch.policy_mask
    if algorithm.estimator.per_response:  # all positions of a row have the same numbers
        advantages = advantages[:, 0]
        returns = returns[:, 0]
        mask = algorithm.valid_responses(mask)
    elif algorithm.estimator.needs_critic:
        # Advantages before whitening: after whitening, mean and deviation are always 0 and 1.
        advantages = returns - batch.values
        if algorithm.dialect.decouples_lambdas:
            advantages, _ = algorithm.estimates(batch.rewards, batch.values, batch.masks)
        metrics.add_explained_variance("value/explained_variance", batch.values, returns, batch.value_mask)
        add_calibration(metrics, batch, algorithm)
    metrics.add_moments(advantages, mask, mean="advantages/mean", std="advantages/std")
    metrics.add_moments(returns, mask, mean="returns/mean", variance="returns/var")


def add_calibration(metrics: Accumulator, batch: TrainingBatch, algorithm: Algorithm) -> None:
    """Add metrics of how well the critic's values predict the outcomes. An outcome is a return with lambda 1."""
    values, mask = batch.values, batch.value_mask
    outcomes = algorithm.outcomes(batch.rewards, batch.masks)
    metrics.add_explained_variance("value/explained_outcome", values, outcomes, mask)
    metrics.add_slope("value/slope", values, outcomes, mask)
    metrics.add("value/bias", ((values - outcomes) * mask).sum(), mask.sum())


def add_correction(metrics: Accumulator, batch: TrainingBatch, algorithm: Algorithm) -> None:
    """Add metrics of the importance weights with which the policy's loss is corrected, over the tokens of this loss."""
    if batch.correction is None or batch.cut is None:
        return
    mask = batch.policy_mask
    metrics.add("policy/correction", (batch.correction * mask).sum(), mask.sum())
    metrics.add("policy/correction_cut", (batch.cut & mask).sum(), mask.sum())


STEP_METRICS: list[StepMetric] = [add_objective, add_advantages, add_correction]


def add_parts(metrics: Accumulator, experience: Experience) -> None:
    """Add metrics that only some runs have: the parts of the score, weighted and unweighted, and the difference between
    the probabilities of sampler and actor."""
    for name, part in experience.score_parts.items():
        metrics.add(f"objective/{name}", part.sum(), len(part))
    for name, reward in experience.rewards.items():
        metrics.add(f"reward/{name}", reward.sum(), len(reward))
    if experience.log_ratios is not None and len(experience.log_ratios):
        add_sampler_distance(metrics, experience.log_ratios)


def add_counts(metrics: Accumulator, counts: Mapping[str, float], group: str) -> None:
    """Add what a rollout backend counted (`RolloutBackend.counts`) as metrics group/NAME: numbers for each response.
    The seconds of environments are those of the slowest rank."""
    for name, total in counts.items():
        if name == "environment_seconds":
            metrics.add_max(f"time/{group}_environments", total)
        elif name != "responses":
            metrics.add(f"{group}/{name}", total, counts["responses"])


def add_hidden_tokens(metrics: Accumulator, drawn: Rollout, learned: Rollout) -> None:
    """Add the share of the tokens which the sampler read, and which the dialect's attention mask hides from the models
    although others follow them. drawn: the sampler's rollout. learned: the same with the dialect's mask."""
    followed = learned.attention_mask.flip(1).cumsum(1).flip(1) > 0
    hidden = (drawn.attention_mask > learned.attention_mask) & followed
    metrics.add("rollout/hidden_tokens", hidden.sum(), drawn.attention_mask.sum())


def add_sampler_distance(metrics: Accumulator, log_ratios: Tensor) -> None:
    """Add metrics of the difference between the sampler's and the actor's probabilities: the mean difference of
    log-probs, KL(sampler || actor) by two estimators, and the smallest and largest ratio actor / sampler. If sampler
    and actor compute alike, both ratios are close to 1.

    log_ratios: (N,) float32, as in Experience.
    """
    log_ratios = log_ratios.double()
    tokens, zeros = len(log_ratios), torch.zeros_like(log_ratios)
    ratios = importance_ratios(log_ratios)
    lowest, highest = USUAL_RATIOS
    metrics.add("rollout/logprob_gap", log_ratios.abs().sum(), tokens)
    metrics.add("rollout/sampler_kl", kl_estimate(zeros, log_ratios, "k1").sum(), tokens)
    metrics.add("rollout/sampler_kl_k3", kl_estimate(zeros, bounded(log_ratios), "k3").sum(), tokens)
    metrics.add_min("rollout/ratio_min", ratios.min())
    metrics.add_max("rollout/ratio_max", ratios.max())
    metrics.add("rollout/ratio_far", ((ratios < lowest) | (ratios > highest)).sum(), tokens)


def distributions(batch: TrainingBatch) -> dict[str, Tensor]:
    """The scores and response lengths of all ranks, for histograms: {tag: (N,) float32 on the CPU} (all ranks call
    this)."""
    own = {
        "objective/scores_histogram": batch.scores.float().cpu(),
        "rollout/length_histogram": batch.rollout.actions.sum(-1).float().cpu(),
    }
    gathered = distributed.data_parallel_objects(own)
    return {tag: torch.cat([part[tag] for part in gathered]) for tag in own}


# Speed, and the share of the GPU's arithmetic.

MIXTURES = ("num_experts", "num_local_experts", "n_routed_experts")  # config entries of mixture-of-experts models


@dataclass(frozen=True, slots=True)
class Cost:
    """The sizes that determine the FLOPs of a model's passes.

    matrices: number of weights in the matrices of the layers. trained: how many of these are trained. passed: number of
    weights in those matrices through which gradients flow to earlier layers. attention: layers x heads x size of a
    head. head: number of weights in a language model's output layer; 0 for a scorer. head_trained: how many of these
    are trained.
    """

    matrices: int
    trained: int
    passed: int
    attention: int
    head: int
    head_trained: int

    @classmethod
    def of(cls, module: Backbone) -> "Cost | None":
        """The cost of a model; None for a mixture of experts, in which each token passes through a part of the weights
        only."""
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
        *_, width = head_sizes(config)
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
        """FLOPs of a forward pass. lengths: (B,), number of tokens of each row. predicted: number of log-probs that are
        computed, for each row, (B,), or for all rows together."""
        tokens, pairs, labels = _sums(lengths, predicted)
        return 2 * self.matrices * tokens + 4 * self.attention * pairs + 2 * self.head * labels

    def training(self, lengths: Tensor, predicted: Tensor) -> Tensor:
        """FLOPs of a forward and backward pass. Arguments: see `forward`."""
        tokens, pairs, labels = _sums(lengths, predicted)
        backward = 2 * (self.trained + self.passed) * tokens + 2 * (self.head + self.head_trained) * labels
        share = self.passed / max(self.matrices, 1)  # share of the layers, which are all alike
        backward = backward + 8 * self.attention * share * pairs
        return self.forward(lengths, predicted) + backward


def _sums(lengths: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(number of tokens, number of (token, attended token) pairs, number of log-probs) over all rows, float64."""
    exact = lengths.double()
    return exact.sum(), (exact * (exact + 1) / 2).sum(), predicted.double().sum()


class Arithmetic:
    """Computes the FLOPs that the phases of a PPO step need on this rank's GPU."""

    def __init__(self, models: RLHFEngine):
        self.models = models

    @cached_property
    def costs(self) -> tuple[Cost | None, ...]:
        """The costs of actor, critic and reward models; None for a model whose cost is not known."""
        models = self.models
        each = models.actor, models.critic, *(reward.model for reward in models.rewards)
        return tuple(Cost.of(model.module) if model is not None else _NOTHING for model in each)

    @cached_property
    def peak(self) -> float | None:
        """As `peak_flops`."""
        return peak_flops(self.models.actor)

    def of_step(
        self, drawn: Sequence[Rollout], experience: Experience, epochs: int, critic_epochs: int
    ) -> dict[str, Tensor]:
        """{phase: FLOPs}, for the phases whose FLOPs are known. The scoring of responses that dynamic sampling left out
        does not count. A reward model that reads texts is counted with the policy's tokens.

        drawn: the rollouts as they were generated. epochs, critic_epochs: number of epochs in which the actor and the
            critic learned from the responses.
        """
        if None in self.costs:
            return {}
        actor, critic, *rewards = cast("tuple[Cost, ...]", self.costs)
        generated = torch.cat([rollout.attention_mask.sum(-1) for rollout in drawn])
        responses = torch.cat([rollout.actions.sum(-1) for rollout in drawn])
        learned = experience.rollout
        lengths, labels = learned.attention_mask.sum(-1), learned.actions.sum(-1)
        policies = 1 if experience.logprobs is learned.logprobs else 2  # the sampler's log-probs are taken as they are
        training = critic_epochs * critic.training(lengths, labels) + epochs * actor.training(lengths, labels)
        scoring = sum((reward.forward(lengths, labels) for reward in rewards), critic.forward(lengths, labels))
        return {
            "generate": actor.forward(generated - 1, responses),  # the last token is never fed to the model
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
        """Add the speed of each phase to the metrics. seconds: {phase: its seconds}. Other arguments: see `of_step`."""
        tokens = experience.rollout.attention_mask.sum()
        for phase, times in (("make_experience", 1), ("train", epochs or critic_epochs)):
            metrics.add(f"speed/{phase}", distributed.data_parallel_size() * times * tokens, seconds[phase])
        if self.peak is None:
            return
        for phase, flops in self.of_step(drawn, experience, epochs, critic_epochs).items():
            metrics.add(f"mfu/{phase}", flops / self.peak, seconds[phase])


class TrainingArithmetic:
    """Computes the FLOPs that an optimizer step of training step 1 or 2 needs on this rank's GPU."""

    def __init__(self, model: TrainedModel):
        self.model = model

    @cached_property
    def cost(self) -> Cost | None:
        """The cost of the model."""
        return Cost.of(self.model.module)

    @cached_property
    def peak(self) -> float | None:
        """As `peak_flops`."""
        return peak_flops(self.model)

    def add_to(self, metrics: Accumulator, seconds: float, masks: Sequence[Tensor], predicted: Tensor) -> None:
        """Add the speed of an optimizer step to the metrics, as the speed of the phase `train`.

        masks: the attention masks of the step's micro-batches, each (B, S) int64. predicted: (), number of log-probs
        that are computed.
        """
        lengths = torch.cat([mask.sum(-1) for mask in masks])
        metrics.add("speed/train", distributed.data_parallel_size() * lengths.sum(), seconds)
        if self.peak is not None and self.cost is not None:
            metrics.add("mfu/train", self.cost.training(lengths, predicted) / self.peak, seconds)


def peak_flops(model: TrainedModel) -> float | None:
    """The peak FLOPs per second of this rank's GPU; None if the model computes in float32, if the GPU is not in the
    table of peaks, and on CPUs."""
    if not on_gpu() or next(model.module.parameters()).dtype == torch.float32:
        return None
    sheet = data_sheet(torch.cuda.get_device_name())
    return sheet.flops if sheet is not None else None


_NOTHING = Cost(matrices=0, trained=0, passed=0, attention=0, head=0, head_trained=0)


# Traces.

PROFILE = "profile"  # name of the folder of traces in the output folder


class Profiler:
    """Writes traces of some steps of a run.

    steps: numbers of these steps, from 1. say: function that is called on each rank with a line about the written file.
    """

    def __init__(self, steps: Sequence[int], output_dir: Path, say: Callable[[str], None]):
        self.steps = frozenset(steps)
        self.folder = output_dir / PROFILE
        self.say = say

    @contextlib.contextmanager
    def record(self, step: int) -> Iterator[None]:
        """Write a trace of this block if `step` is one of the steps to record. A step that raises an error leaves no
        trace."""
        if step not in self.steps:
            yield
            return
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu()
        with torch.profiler.profile(activities=activities) as profile:
            yield
        with unwritten_noted(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"step_{step:06d}_rank{distributed.rank()}.json.gz"
            path.unlink(missing_ok=True)  # a link would be followed
            profile.export_chrome_trace(str(path))
        self.say(
            f"step {step} recorded: {self.folder}/step_{step:06d}_rank*.json.gz, one file a rank. Open one in "
            "https://ui.perfetto.dev (it stays in your browser) or chrome://tracing."
        )
