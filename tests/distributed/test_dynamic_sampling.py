"""Dynamic sampling on two ranks: the groups that are taken, resuming, and the run without it on the same prompts."""

import pytest
import torch

from engine import distributed
from engine.experience import PromptBatch, Rollout
from engine.reward.base import RewardSource
from scripts.harness.ranks import run_ranks
from tests.distributed.tiny_run import (
    DIALECT,
    TinyPrompts,
    build_trainer,
    engine_spec,
    prompt_batch,
    read_checkpoint,
    timeless,
    write_checkpoint,
)
from tests.engine.zero.inspecting import masters
from training.ppo_trainer import PPOTrainer, StepReport

STEPS, SAVED_AFTER, PER_BATCH, K, MOST = 4, 2, 4, 2, 3
GROUPS = {
    "samples_per_prompt": K,
    "dynamic_sampling": MOST,
    "old_logprobs": "forward",
    "overlong_buffer": 0.5,
    "mask_truncated": True,
    "mini_batches": 2,
}
RLOO = {"advantage_estimator": "rloo", "critic_start": "none", "critic_lr": 0.0}


class ByPrompt(RewardSource):
    """Two parts; their sum differs among the responses to one prompt where the prompt's number says so."""

    def parts(self, rollout: Rollout) -> dict[str, torch.Tensor]:
        """ "even" is of the prompt alone, "odd" of its second response."""
        return {
            "even": (rollout.indices % 2 == 0).float(),
            "odd": torch.tensor([float(differs(index)) for index in rollout.indices.tolist()]) * (rollout.samples % K),
        }


def differs(index: int) -> bool:
    """Two of five prompts, unevenly spread; in the third step there are too few."""
    return index % 5 in (1, 2) and not 24 <= index < 32


class GivenPrompts:
    """This rank's share of the prompts of each step, by their numbers."""

    def __init__(self, steps: list[list[int]]):
        self.steps = steps

    def prompts(self, batch: int) -> PromptBatch:
        """Those of a step."""
        return prompt_batch(self.steps[batch][distributed.rank_share(PER_BATCH)])


def runs(folder: str, output: str, chosen: list[list[int]]) -> dict[str, dict]:
    """Of each kind of run: whole, resumed, plain; chosen: the prompts that are learned from, step by step."""
    found = {}
    for name, stage, fields in (("gae", 0, GROUPS), ("rloo", 3, GROUPS | RLOO)):
        point = f"{output}/{name}"
        whole, resumed, plain = (
            new_trainer(folder, stage, fields | more) for more in ({}, {}, {"dynamic_sampling": 1})
        )
        reports = []
        for report in whole.fit(TinyPrompts(PER_BATCH)):
            reports.append(told(report))
            if report.step == SAVED_AFTER:
                write_checkpoint(point, whole.models, whole.state_dict())
        resumed.load_state_dict(read_checkpoint(point, resumed.models))
        found[name] = {
            "whole": {"reports": reports, "end": end(whole)},
            "resumed": {
                "reports": [told(report) for report in resumed.fit(TinyPrompts(PER_BATCH))],
                "end": end(resumed),
            },
            "plain": {"reports": [told(report) for report in plain.fit(GivenPrompts(chosen))], "end": end(plain)},
        }
    return found


def new_trainer(folder: str, stage: int, fields: dict) -> PPOTrainer:
    """A trainer with scores by prompt."""
    dialect = DIALECT.override(**fields)
    critic = {} if dialect.has_critic else {"with_critic": False, "critic_path": None}
    spec = engine_spec(folder, stage, config=f"stage{stage}.json", reward_paths=(), reward=None, **critic)
    return build_trainer(spec, dialect=dialect, reward=ByPrompt(), total_steps=STEPS)


def told(report: StepReport) -> dict:
    """A step: the keys of this rank's rows, what was learned from them, metrics."""
    batch = report.batch
    return {
        "keys": list(zip(batch.rollout.indices.tolist(), batch.rollout.samples.tolist(), strict=True)),
        "batch": [batch.rollout.sequences, batch.logprobs, batch.rewards, batch.advantages, batch.policy_mask],
        "samples": report.samples,
        "metrics": timeless(report.metrics),
    }


def end(trainer: PPOTrainer) -> dict:
    """The master weights of what trains, and the counters."""
    return {
        "weights": {name: masters(model) for name, model in trainer.models.trained.items()},
        "state": trainer.state_dict(),
    }


RUNS = ("gae", "rloo")
OF_ALL_DRAWN = ("objective/scores", "objective/even", "objective/odd")


def straight_line() -> tuple[list[list[int]], list[int]]:
    """The prompts of each step, and how many batches have been drawn after it."""
    chosen: list[list[int]] = []
    drawn, counts = 0, []
    for _ in range(STEPS):
        kept: list[int] = []
        alike: list[int] = []
        batches = 0
        while len(kept) < PER_BATCH and batches < MOST:
            for index in range(drawn * PER_BATCH, (drawn + 1) * PER_BATCH):
                (kept if differs(index) else alike).append(index)
            drawn, batches = drawn + 1, batches + 1
        chosen.append((kept + alike)[:PER_BATCH])
        counts.append(drawn)
    return chosen, counts


CHOSEN, DRAWN = straight_line()


@pytest.fixture(scope="module")
def ranks(folder, output) -> list[dict]:
    return run_ranks("tests.distributed.test_dynamic_sampling:runs", folder=folder, output=output, chosen=CHOSEN)


def test_the_case_has_full_steps_one_that_is_filled_up_and_groups_that_move():
    assert CHOSEN == [[1, 2, 6, 7], [11, 12, 16, 17], [21, 22, 20, 23], [32, 36, 37, 41]] and DRAWN == [2, 5, 8, 11]


@pytest.mark.parametrize("run", RUNS)
def test_the_first_groups_with_a_difference_are_taken_and_lie_on_one_rank_each(ranks, run):
    for rank, found in enumerate(ranks):
        for step, report in enumerate(found[run]["whole"]["reports"]):
            own = CHOSEN[step][2 * rank : 2 * rank + 2]
            assert report["keys"] == [(index, sample) for index in own for sample in range(K)]
            assert report["samples"] == DRAWN[step] * PER_BATCH * K
            metrics = report["metrics"]
            before = DRAWN[step - 1] if step else 0
            assert metrics["rollout/batches_drawn"] == DRAWN[step] - before
            assert metrics["rollout/groups_drawn"] == PER_BATCH * (DRAWN[step] - before)
            assert metrics["rollout/groups_left_out"] == PER_BATCH * (DRAWN[step] - before - 1)
            assert metrics["rollout/groups_alike"] == (0.5 if step == 2 else 0.0)
            asked = range(before * PER_BATCH, DRAWN[step] * PER_BATCH)
            assert metrics["objective/scores"] == pytest.approx(mean(asked, even=1, odd=1))
            assert metrics["objective/scores_learned"] == pytest.approx(mean(CHOSEN[step], even=1, odd=1))
            assert metrics["objective/even"] == pytest.approx(mean(asked, even=1))
            assert metrics["objective/odd"] == pytest.approx(mean(asked, odd=1))


def mean(prompts, even: int = 0, odd: int = 0) -> float:
    """The mean score of the responses to these prompts, with the parts that are asked for."""
    scores = [even * (i % 2 == 0) + odd * differs(i) * (sample % K) for i in prompts for sample in range(K)]
    return sum(scores) / len(scores)


@pytest.mark.parametrize("run", RUNS)
def test_a_run_without_it_on_the_same_prompts_learns_the_same(ranks, run):
    for found in ranks:
        whole, plain = found[run]["whole"], found[run]["plain"]
        for one, other in zip(whole["reports"], plain["reports"], strict=True):
            assert one["keys"] == other["keys"]
            assert all(torch.equal(a, b) for a, b in zip(one["batch"], other["batch"], strict=True))
            shared = {name: value for name, value in other["metrics"].items() if name not in OF_ALL_DRAWN}
            assert {name: one["metrics"][name] for name in shared} == pytest.approx(shared, rel=1e-12, abs=1e-12)
        assert_same_weights(whole["end"], plain["end"])


@pytest.mark.parametrize("run", RUNS)
def test_a_resumed_run_draws_on_where_it_was(ranks, run):
    for found in ranks:
        whole, resumed = found[run]["whole"], found[run]["resumed"]
        later = whole["reports"][SAVED_AFTER:]
        assert [report["keys"] for report in resumed["reports"]] == [report["keys"] for report in later]
        for one, other in zip(later, resumed["reports"], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one["batch"], other["batch"], strict=True))
        assert whole["end"]["state"] == resumed["end"]["state"] and whole["end"]["state"]["prompt_batches"] == DRAWN[-1]
        assert_same_weights(whole["end"], resumed["end"])


def assert_same_weights(one: dict, other: dict) -> None:
    """Bit for bit."""
    assert one["weights"].keys() == other["weights"].keys()
    for model, tensors in one["weights"].items():
        assert tensors and all(torch.equal(tensor, other["weights"][model][name]) for name, tensor in tensors.items())
