"""Chooses the responses that a step learns from: all that were drawn, or, with dynamic sampling, groups whose scores
differ.

    sampled = GroupSampler(experience_maker, dialect, sampling).sample(rollouts, prompts, log, feed, first=1)
    experience = experience_maker.make_experience(sampled.rollout, sampled.scores)

A group is the set of responses to one prompt. In dialects whose advantages compare the responses of a group with each
other, a group of equal scores has advantages of 0. Dynamic sampling scores the drawn responses, keeps the groups whose
scores differ, and draws responses to further prompts until there are enough such groups for the step. Actor, critic and
reference are run on the kept groups alone.

Source: Yu et al. 2025, "DAPO: an open-source LLM reinforcement learning system at scale", section 3.2, and
volcengine/verl 53971be5, recipe/dapo/dapo_ray_trainer.py, `fit` (`filter_groups` with the metric "seq_reward"): batches
of prompts are drawn whole, groups are taken in the order of their prompts, and surplus groups are thrown away. This
module differs from verl if there are too few groups after `max_num_gen_batches` batches: verl ends the run with an
error; this module fills the step with groups of equal scores, those that were drawn first. (OpenRLHF leaves groups out
by their mean score, draws one further prompt in place of each, and ends the epoch when prompts run out:
OpenRLHF/OpenRLHF db825a24, openrlhf/trainer/ppo_utils/samples_generator.py.)
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
    """Gives this rank's prompts."""

    def prompts(self, batch: int) -> PromptBatch:
        """The batch of prompts with this number, counted from 0; equally many prompts on all ranks. A step takes one
        batch; with dynamic sampling it may take several."""
        ...


@dataclass(frozen=True, slots=True)
class Sampled:
    """The responses that a step learns from, and all responses that were drawn for the step.

    rollout: the responses that this rank learns from, equally many on all ranks; the rows of a group are adjacent.
    scores: the scores of `rollout`; None if they are not computed yet. drawn: a rollout for each batch of prompts, with
    all responses that this rank drew. drawn_scores: the scores of `drawn`; None if they are not computed yet.
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
        """() int64, the number of response tokens that this rank drew."""
        return torch.stack([rollout.actions.sum() for rollout in self.drawn]).sum()

    def add_to(self, metrics: Accumulator, group_size: int) -> None:
        """Add metrics of the responses that were drawn but not learned from, and the scores of those learned from."""
        if self.scores is None or self.drawn_scores is None:
            return
        learned, drawn = self.scores.scores, self.drawn_scores.scores
        count = len(drawn) - len(learned)
        # These differences of sums are meaningful over all ranks only: ranks exchange groups, so a rank may learn from
        # responses that it did not draw.
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
    """Responses and their scores."""

    rollout: Rollout
    scores: Scores

    def group(self, place: int, size: int) -> "_Scored":
        """The responses of group number `place`. size: number of responses in a group."""
        rows = slice(place * size, (place + 1) * size)
        return _Scored(self.rollout.select(rows), self.scores.changed(lambda column: column[rows]))

    def copied(self, device: torch.device | str) -> "_Scored":
        """Copy the responses and scores to `device`."""
        scores = self.scores.changed(lambda column: column.to(device, copy=True))
        return _Scored(copied(self.rollout, device), scores)


@dataclass(frozen=True, slots=True)
class _Group:
    """Identifies a group by where it was drawn. batch: number of the step's batch of prompts. rank: the rank that drew
    the group. place: number of the group among those that this rank drew in this batch."""

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
        """Draw responses to these prompts. Dynamic sampling replaces some of the responses by responses to further
        prompts; the number of responses stays the same (all ranks call this together, with equally many prompts each).

        The chosen groups do not depend on the number of ranks. All groups are ordered by batch, and within a batch by
        the order of its prompts over all ranks. The first groups in which scores differ are chosen, and are divided
        among the ranks in this order.

        feed: gives further prompts; needed for dynamic sampling only. first: number of the feed's batch with which
        these further prompts begin.
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
        """(groups whose scores differ, groups of equal scores): the groups of all ranks in the last batch, in the order
        of their prompts."""
        own = groups_alike(batches[-1].scores.scores, self.group_size).tolist()
        differing: list[_Group] = []
        alike: list[_Group] = []
        for rank, flags in enumerate(distributed.data_parallel_objects(own)):
            for place, without in enumerate(flags):
                (alike if without else differing).append(_Group(len(batches) - 1, rank, place))
        return differing, alike

    def _exchanged(self, batches: Sequence[_Scored], chosen: Sequence[_Group]) -> _Scored:
        """This rank's share of the chosen groups. Each rank receives those of its groups that other ranks drew (all
        ranks call this)."""
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
