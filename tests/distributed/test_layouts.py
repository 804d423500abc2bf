"""The same run on one rank with 8 responses a pass, and on two ranks with 4; and twice in the same layout."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine import distributed
from engine.experience import PromptBatch, Rollout
from engine.rollout import RolloutBackend, SamplingConfig
from tests.distributed.tiny_run import DIALECT, SAMPLING, TinyPrompts, build_trainer, engine_spec, of_each, timeless
from tests.engine.zero.inspecting import weights

ROWS = 8  # responses of one forward pass over all ranks


class OffSampler(RolloutBackend):
    """Says of each token a log-prob that is off by up to 1.5 nats, by the token alone."""

    def __init__(self, rollouts: RolloutBackend):
        self.rollouts, self.release_memory = rollouts, rollouts.release_memory

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig) -> Rollout:
        """The rows of the backend itself."""
        rollout = self.rollouts.generate(prompts, sampling)
        assert rollout.logprobs is not None
        return replace(rollout, logprobs=rollout.logprobs + 1.5 * rollout.responses.sin() * rollout.response_mask)


def one_run(
    folder: str,
    stage: int,
    config: str,
    prompts: int,
    mini_batches: int,
    samples_per_prompt: int,
    ppo_epochs: int,
    correction: str = "none",
    **others,
) -> dict:
    """Three steps; the metrics of each, and the actor's and critic's weights at the end; others: the dialect's."""
    sizes = {"ppo_epochs": ppo_epochs, "mini_batches": mini_batches, "samples_per_prompt": samples_per_prompt}
    dialect = DIALECT.override(**sizes, correction=correction, **others)
    trainer = build_trainer(
        engine_spec(folder, stage, config=config),
        dialect=dialect,
        micro_batch_size=ROWS // distributed.data_parallel_size(),
        seed=5,
        sampling=replace(SAMPLING, logprob_temperature=None if correction == "none" else 1.0),
    )
    if correction != "none":
        trainer.rollouts = OffSampler(trainer.rollouts)
    reports = list(trainer.fit(TinyPrompts(prompts)))
    engine = trainer.models
    return {
        "metrics": [timeless(report.metrics) for report in reports],
        "samples": reports[-1].samples,
        "tokens": [_responses(report.batch.rollout) for report in reports],
        "weights": weights(engine.actor) | {f"critic {name}": w for name, w in weights(engine.critic).items()},
    }


def _responses(rollout) -> dict[tuple[int, int], list[int]]:
    """Each response's tokens by its prompt's index and its sample's number."""

    def tokens(row: int) -> Tensor:
        return rollout.responses[row][rollout.response_mask[row]]

    return {(int(rollout.indices[row]), int(rollout.samples[row])): tokens(row).tolist() for row in range(len(rollout))}


RUNS = {
    "plain": {
        "stage": 3,
        "config": "stage3.json",
        "prompts": 8,
        "mini_batches": 1,
        "samples_per_prompt": 1,
        "ppo_epochs": 2,
    },
    "mini_batches_and_samples": {
        "stage": 2,
        "config": "stage2.json",
        "prompts": 8,
        "mini_batches": 2,
        "samples_per_prompt": 2,
        "ppo_epochs": 2,
    },
    "critic_apart": {
        "stage": 2,
        "config": "stage2.json",
        "prompts": 8,
        "mini_batches": 1,
        "samples_per_prompt": 1,
        "ppo_epochs": 2,
        "critic_epochs": 3,
        "critic_mini_batches": 2,
        "value_lam": 1.0,
        "length_adaptive_alpha": 0.5,
        "whiten_rewards": True,
    },
    "corrected": {
        "stage": 0,
        "config": "stage0.json",
        "prompts": 8,
        "mini_batches": 1,
        "samples_per_prompt": 1,
        "ppo_epochs": 2,
        "correction": "token_mask",
    },
}
TARGET = "tests.distributed.test_layouts:one_run"
AGAIN = ("plain", "corrected")  # at stages 3 and 0


@pytest.fixture(scope="module")
def one_rank(folder) -> dict:
    return of_each(TARGET, RUNS, world=1, folder=folder)[0]


@pytest.fixture(scope="module")
def two_ranks(folder) -> list[dict]:
    return of_each(TARGET, RUNS, folder=folder)


@pytest.fixture(scope="module")
def two_ranks_again(folder) -> list[dict]:
    return of_each(TARGET, {name: RUNS[name] for name in AGAIN}, folder=folder)


@pytest.mark.parametrize("run", RUNS)
def test_metrics_do_not_depend_on_the_number_of_ranks(one_rank, two_ranks, run):
    for rank in two_ranks:
        assert rank[run]["samples"] == one_rank[run]["samples"] == 3 * 8 * RUNS[run]["samples_per_prompt"]
        for got, expected in zip(rank[run]["metrics"], one_rank[run]["metrics"], strict=True):
            assert got == pytest.approx(expected, rel=1e-4, abs=5e-6)  # the KL is a small difference of sums


@pytest.mark.parametrize("run", RUNS)
def test_the_runs_are_not_trivial(one_rank, run):
    first, *_, last = one_rank[run]["metrics"]
    assert abs(last["objective/kl"]) > 1e-3 and last["policy/clipfrac"] > 0 and last["value/clipfrac"] > 0
    assert first["policy/lr"] != last["policy/lr"] > 0
    assert 1 < first["rollout/response_length"] < 12 and 0 < first["rollout/eos_rate"] < 1


def test_the_corrected_run_has_something_to_correct(one_rank):
    for metrics in one_rank["corrected"]["metrics"]:
        assert 0.05 < metrics["policy/correction_cut"] < 0.6 and metrics["rollout/ratio_far"] > 0.1


@pytest.mark.parametrize("run", RUNS)
def test_samples_do_not_depend_on_the_number_of_ranks(one_rank, two_ranks, run):
    for step, expected in enumerate(one_rank[run]["tokens"]):
        one, other = (rank[run]["tokens"][step] for rank in two_ranks)
        assert not one.keys() & other.keys()
        assert one | other == expected
        assert len({tuple(tokens) for tokens in expected.values()}) > len(expected) // 2


@pytest.mark.parametrize("run", AGAIN)
def test_two_runs_of_one_layout_are_bit_identical(two_ranks, two_ranks_again, run):
    for rank, again in zip(two_ranks, two_ranks_again):
        assert again[run]["metrics"] == rank[run]["metrics"]
        assert again[run]["tokens"] == rank[run]["tokens"]
        assert all(torch.equal(again[run]["weights"][name], weight) for name, weight in rank[run]["weights"].items())


@pytest.mark.parametrize("run", RUNS)
def test_both_ranks_report_the_same_metrics(two_ranks, run):
    one, other = two_ranks
    assert one[run]["metrics"] == other[run]["metrics"]
