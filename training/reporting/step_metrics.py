"""What a step measures: seconds by phase, memory, and metrics. A metric of your own is a function and a line:
STEP_METRICS.append(function).

The most that tensors take of this rank's GPU in each phase of a run stands beside what was planned. It is what torch's
allocator counts, without what it holds in reserve. A CPU's counts no peaks: there nothing is counted.
"""

import contextlib
import resource
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.profiler import record_function

from engine import distributed
from engine.algo.corrections import bounded, importance_ratios
from engine.algo.kl import kl_estimate
from engine.algo.rewards import groups_alike
from engine.algorithms import Algorithm
from engine.experience import Experience, TrainingBatch
from engine.zero.accelerator import on_gpu
from training.reporting.metrics import Accumulator
from training.runtime import phases


class PhaseMemory:
    """Peaks by phase, as long as it is `counting`; of a phase that comes again, the latest.

    The allocator's count begins anew with each phase: `most` is over all of them.
    """

    def __init__(self):
        self.bytes: dict[str, int] = {}
        self.counting = False
        self._most = 0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's peak."""
        if not self.counting:
            yield
            return
        self.begin()
        yield
        self.bytes[name] = self.end()

    def begin(self) -> None:
        """Count from here on; on CPUs nothing happens."""
        if on_gpu():
            self.end()
            torch.cuda.reset_peak_memory_stats()

    def end(self) -> int:
        """The peak since `begin`."""
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        self._most = max(self._most, peak)
        return peak

    def most(self) -> int:
        """The most that tensors have taken in this process."""
        return max(self._most, torch.cuda.max_memory_allocated())


phase_memory = PhaseMemory()
"""This process's."""


USUAL_RATIOS = (0.5, 2.0)  # of the actor's probability over the sampler's; what is outside is counted

# Adds sums and counts of this rank's batch, under one or more names; all ranks call it, and reduce afterwards.
StepMetric = Callable[[Accumulator, TrainingBatch, Algorithm], None]


class StepLog:
    """What one step of training measures: seconds of wall-clock time by phase, and sums that become metrics.

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
        """What happens in this context is of this phase; at both ends the device's queue is emptied.

        In a trace phases are ranges, for the watch over the run they are its places, and `phase_memory` counts them.
        """
        with phase_memory.phase(name), record_function(name), phases.phase(name):
            started = _now()
            yield
            self.seconds[name] = self.seconds.get(name, 0.0) + _now() - started

    def end(self, tokens: Tensor) -> dict[str, float]:
        """All metrics over all ranks, which call this together. Times are the slowest rank's.

        tokens: () int64, how many this rank generated.
        """
        for name, seconds in self.seconds.items():
            self.metrics.add_max(f"time/{name}", seconds)
        self.metrics.add_max("time/step", sum(self.seconds.values()))
        generated = tokens * distributed.world_size()
        self.metrics.add("rollout/tokens_per_second", generated, self.seconds["generate"])
        self.metrics.add_max("memory/peak_gb", peak_memory_gb())
        return self.metrics.reduce()


def _now() -> float:
    if on_gpu():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_memory_gb() -> float:
    """The most memory this process has held, in 10^9 bytes: of the GPU if there is one, else of the host."""
    if on_gpu():
        return phase_memory.most() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def add_objective(metrics: Accumulator, batch: TrainingBatch, algorithm: Algorithm) -> None:
    """The metrics of objective and rollout; sums over responses or over their tokens."""
    dialect, rollout, count = algorithm.dialect, batch.rollout, len(batch)
    mask, tokens = rollout.response_mask, rollout.response_mask.sum()
    total_rewards = batch.rewards.sum()
    metrics.add("objective/kl", batch.kl.sum(), count)
    metrics.add("objective/kl_per_token", batch.kl.sum(), tokens)
    metrics.add_max("objective/kl_coef", batch.kl_coef)
    metrics.add("objective/entropy", (batch.entropy * mask).sum(), tokens)
    metrics.add("objective/scores", batch.scores.sum(), count)
    metrics.add("objective/rlhf_reward", total_rewards, count)
    metrics.add("objective/non_score_reward", total_rewards - batch.processed_scores.sum(), count)
    clipped = algorithm.clipped(batch.scores)
    if clipped is not None:
        metrics.add("objective/clipped", clipped.sum(), count)
    if dialect.missing_end == "subtract" and dialect.missing_end_value:
        metrics.add("objective/missing_eos_penalty", -dialect.missing_end_value * (~rollout.ended).sum(), count)
    if dialect.overlong_buffer:
        metrics.add("objective/overlong_penalty", algorithm.overlong_penalties(mask.sum(-1)).sum(), count)
    metrics.add("rollout/response_length", tokens, count)
    metrics.add("rollout/eos_rate", rollout.ended.sum(), count)
    masked = ~rollout.ended if dialect.mask_truncated else torch.zeros_like(rollout.ended)
    metrics.add_sum("rollout/degenerate", (~batch.policy_mask.any(-1) & ~masked).sum())
    if dialect.samples_per_prompt > 1:
        alike = groups_alike(batch.scores, dialect.samples_per_prompt)
        metrics.add("rollout/groups_alike", alike.sum(), len(alike))


def add_advantages(metrics: Accumulator, batch: TrainingBatch, algorithm: Algorithm) -> None:
    """The moments of advantages and returns, over tokens or, where there is one for each, over responses."""
    advantages, returns, mask = batch.advantages, batch.returns, batch.policy_mask
    if algorithm.estimator.per_response:  # the same in all positions of a row
        advantages, returns, mask = advantages[:, 0], returns[:, 0], algorithm.valid_responses(mask)
    elif algorithm.estimator.needs_critic:
        # Before whitening, after which they would always be 0 and 1.
        advantages = returns - batch.values
        if algorithm.dialect.decouples_lambdas:
            advantages, _ = algorithm.estimates(batch.rewards, batch.values, batch.masks)
        metrics.add_explained_variance("value/explained_variance", batch.values, returns, batch.value_mask)
        add_calibration(metrics, batch, algorithm)
    metrics.add_moments(advantages, mask, mean="advantages/mean", std="advantages/std")
    metrics.add_moments(returns, mask, mean="returns/mean", variance="returns/var")


def add_calibration(metrics: Accumulator, batch: TrainingBatch, algorithm: Algorithm) -> None:
    """How well the values that a rollout had say what followed: the returns with lambda 1, in which no value stands."""
    values, mask = batch.values, batch.value_mask
    outcomes = algorithm.outcomes(batch.rewards, batch.masks)
    metrics.add_explained_variance("value/explained_outcome", values, outcomes, mask)
    metrics.add_slope("value/slope", values, outcomes, mask)
    metrics.add("value/bias", ((values - outcomes) * mask).sum(), mask.sum())


def add_correction(metrics: Accumulator, batch: TrainingBatch, algorithm: Algorithm) -> None:
    """What the policy's loss is multiplied by where another policy drew, over the positions of that loss."""
    if batch.correction is None or batch.cut is None:
        return
    mask = batch.policy_mask
    metrics.add("policy/correction", (batch.correction * mask).sum(), mask.sum())
    metrics.add("policy/correction_cut", (batch.cut & mask).sum(), mask.sum())


STEP_METRICS: list[StepMetric] = [add_objective, add_advantages, add_correction]


def add_parts(metrics: Accumulator, experience: Experience) -> None:
    """What only exists where there is something to it: the score's parts, with their weights and before these, and how
    far the sampler is from the actor."""
    for name, part in experience.score_parts.items():
        metrics.add(f"objective/{name}", part.sum(), len(part))
    for name, reward in experience.rewards.items():
        metrics.add(f"reward/{name}", reward.sum(), len(reward))
    if experience.log_ratios is not None and len(experience.log_ratios):
        add_sampler_distance(metrics, experience.log_ratios)


def add_sampler_distance(metrics: Accumulator, log_ratios: Tensor) -> None:
    """How far the sampler's probabilities are from the actor's: their distance, KL(sampler || actor) by two estimators,
    and the extremes of the ratio actor over sampler, of which none is far from 1 where both compute alike.

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
    """All ranks' scores and response lengths, for histograms: tag -> (N,) float32 on the CPU (all ranks call this)."""
    own = {
        "objective/scores_histogram": batch.scores.float().cpu(),
        "rollout/length_histogram": batch.rollout.response_mask.sum(-1).float().cpu(),
    }
    gathered = distributed.all_gather_objects(own)
    return {tag: torch.cat([part[tag] for part in gathered]) for tag in own}
