"""Chooses the responses that a step learns from: all that were drawn, or, with dynamic sampling, groups whose scores
differ.

    sampled = GroupSampler(experience_maker, dialect, sampling).sample(rollouts, prompts, log, feed, first=1)
    experience = experience_maker.make_experience(sampled.rollout, sampled.scores)

A group is the set of responses to one prompt. Where the responses of a group are compared with each other, a group of
equal scores teaches nothing. Dynamic sampling scores the drawn responses, keeps the groups with different scores, and
draws for further prompts until such groups fill the step. The other models are run on these groups alone.

Source: Yu et al. 2025, "DAPO: an open-source LLM reinforcement learning system at scale", section 3.2, and
volcengine/verl 53971be5, recipe/dapo/dapo_ray_trainer.py, `fit` (`filter_groups` with the metric "seq_reward"): batches
of prompts are drawn whole, groups are taken in the order of their prompts, and those that are too many are thrown away.
It departs from verl where the batch is not full after `max_num_gen_batches`. There the run ends with an error; here the
step takes as many groups without a difference as are missing, those that were drawn first, as every step does without
dynamic sampling. (OpenRLHF draws one further prompt in place of each group that it leaves out, by their mean score, and
ends the epoch where prompts run out: OpenRLHF/OpenRLHF db825a24, openrlhf/trainer/ppo_utils/samples_generator.py.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine import distributed
from engine.algo.rewards import groups_alike
from engine.algorithms import Dialect
from engine.experience import PromptBatch, Rollout
from engine.experience_maker import ExperienceMaker, Scores
from engine.rollout.base import RolloutBackend, SamplingConfig
from engine.rollout.request import copied, joined
from training.reporting.metrics import Accumulator
from training.reporting.step_metrics import StepLog


class PromptFeed(Protocol):
    """This rank's prompts."""

    def prompts(self, batch: int) -> PromptBatch:
        """A batch of prompts, counted from 0; equally many on all ranks. A step takes one; with dynamic sampling it may
        take more."""
        ...


@dataclass(frozen=True, slots=True)
class Sampled:
    """The responses that a step learns from, and all that were drawn for it.

    rollout: this rank's responses, equally many on all ranks; the rows of a group are adjacent. scores: their scores;
    None where they are not computed yet. drawn: this rank's rollouts, batch by batch. drawn_scores: the scores of all
    drawn responses; None as for `scores`.
    """

    rollout: Rollout
    scores: Scores | None
    drawn: Sequence[Rollout]
    drawn_scores: Scores | None = None

    @property
    def responses(self) -> int:
        """How many responses were drawn, over all ranks."""
        return distributed.data_parallel_size() * sum(map(len, self.drawn))

    @property
    def tokens(self) -> Tensor:
        """() int64, how many of responses this rank drew."""
        return torch.stack([rollout.response_mask.sum() for rollout in self.drawn]).sum()

    def add_to(self, metrics: Accumulator, group_size: int) -> None:
        """Add metrics of the responses that were drawn but not learned from, and the scores of those learned from."""
        if self.scores is None or self.drawn_scores is None:
            return
        learned, drawn = self.scores.scores, self.drawn_scores.scores
        count = len(drawn) - len(learned)
        # Drawn minus learned is right over all ranks together; on one rank it need not be, as groups are exchanged.
        metrics.add("objective/scores", drawn.sum() - learned.sum(), count)
        for name, part in self.drawn_scores.parts.items():
            metrics.add(f"objective/{name}", part.sum() - self.scores.parts[name].sum(), count)
        for name, reward in self.drawn_scores.rewards.items():
            metrics.add(f"reward/{name}", reward.sum() - self.scores.rewards[name].sum(), count)
        metrics.add("objective/scores_learned", learned.sum(), len(learned))
        metrics.add_sum("rollout/groups_drawn", len(drawn) // group_size)
        metrics.add_sum("rollout/groups_left_out", count // group_size)
        metrics.add_max("rollout/batches_drawn", len(self.drawn))


@dataclass(frozen=True, slots=True)
class _Scored:
    """Rows and their scores."""

    rollout: Rollout
    scores: Scores

    def group(self, place: int, size: int) -> "_Scored":
        """The rows of one group."""
        rows = slice(place * size, (place + 1) * size)
        return _Scored(self.rollout.select(rows), self.scores.changed(lambda column: column[rows]))

    def copied(self, device: torch.device | str) -> "_Scored":
        """The same rows on this device."""
        scores = self.scores.changed(lambda column: column.to(device, copy=True))
        return _Scored(copied(self.rollout, device), scores)


@dataclass(frozen=True, slots=True)
class _Group:
    """Where a group is: in which batch of the step, on which rank, at which place among its groups."""

    batch: int
    rank: int
    place: int


class GroupSampler:
    """Draws the responses of a step."""

    def __init__(self, experience_maker: ExperienceMaker, dialect: Dialect, sampling: SamplingConfig):
        self.experience_maker, self.sampling = experience_maker, sampling
        self.group_size, self.most_batches = dialect.samples_per_prompt, dialect.dynamic_sampling

    def sample(
        self, rollouts: RolloutBackend, prompts: PromptBatch, log: StepLog, feed: PromptFeed | None, first: int
    ) -> Sampled:
        """The responses to these prompts. With dynamic sampling some are replaced by responses to further prompts, and
        their number stays (all ranks call this together, with equally many prompts each).

        The chosen groups do not depend on the number of ranks: they are the first ones with different scores, in the
        order of the batches and of each batch's prompts over all ranks. In this order they are divided among the ranks.

        feed: gives further prompts, from its batch number `first` on; needed for dynamic sampling only.
        """
        if self.most_batches == 1:
            rollout = self._responses(rollouts, prompts, log)
            return Sampled(rollout, None, [rollout])
        assert feed is not None, "dynamic sampling draws further prompts, and no feed was given"
        wanted = len(prompts) * distributed.data_parallel_size()
        batches = [self._scored(rollouts, prompts, log)]
        differing, alike = self._groups(batches)
        while len(differing) < wanted and len(batches) < self.most_batches:
            batches.append(self._scored(rollouts, feed.prompts(first + len(batches) - 1), log))
            more = self._groups(batches)
            differing, alike = differing + more[0], alike + more[1]
        with log.phase("make_experience"):
            own = self._exchanged(batches, (differing + alike)[:wanted])
        drawn_scores = Scores.joined([batch.scores for batch in batches])
        return Sampled(own.rollout, own.scores, [batch.rollout for batch in batches], drawn_scores)

    def _responses(self, rollouts: RolloutBackend, prompts: PromptBatch, log: StepLog) -> Rollout:
        asked = prompts.to(distributed.device()).repeat(self.group_size)
        with log.phase("generate"):
            return rollouts.generate(asked, self.sampling)

    def _scored(self, rollouts: RolloutBackend, prompts: PromptBatch, log: StepLog) -> _Scored:
        rollout = self._responses(rollouts, prompts, log)
        with log.phase("make_experience"):
            return _Scored(rollout, self.experience_maker.score(rollout))

    def _groups(self, batches: Sequence[_Scored]) -> tuple[list[_Group], list[_Group]]:
        """The groups of the last batch, of all ranks, in the order of their prompts: those with a difference in their
        scores, and those without."""
        own = groups_alike(batches[-1].scores.scores, self.group_size).tolist()
        differing: list[_Group] = []
        alike: list[_Group] = []
        for rank, flags in enumerate(distributed.data_parallel_objects(own)):
            for place, without in enumerate(flags):
                (alike if without else differing).append(_Group(len(batches) - 1, rank, place))
        return differing, alike

    def _exchanged(self, batches: Sequence[_Scored], chosen: Sequence[_Group]) -> _Scored:
        """This rank's share of the chosen groups, some of which other ranks have drawn (all ranks call this)."""
        own = range(len(chosen))[distributed.rank_share(len(chosen))]
        groups = {
            number: batches[group.batch].group(group.place, self.group_size)
            for number, group in enumerate(chosen)
            if group.rank == distributed.data_parallel_rank()
        }
        sent = {number: group.copied("cpu") for number, group in groups.items() if number not in own}
        for arrived in distributed.all_gather_objects(sent):
            groups |= {number: group.copied(distributed.device()) for number, group in arrived.items() if number in own}
        mine = [groups[number] for number in own]
        rollout = joined([group.rollout for group in mine], self.sampling.pad_token_id)
        return _Scored(rollout, Scores.joined([group.scores for group in mine]))
