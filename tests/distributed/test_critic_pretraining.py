"""The critic's pretraining on two ranks: who learns, checkpoints, and the folder that another run starts from."""

import pytest
import torch

from tests.distributed.harness import run_ranks

RUNS = {"2": {"stage": 2, "config": "stage2.json"}, "3": {"stage": 3, "config": "stage3.json"}}


@pytest.fixture(scope="module")
def ranks(folder, output) -> list[dict]:
    return run_ranks("tests.distributed.work_critic_pretraining:all_runs", folder=folder, output=output, runs=RUNS)


def same(one: dict, other: dict) -> bool:
    assert one.keys() == other.keys() and one
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("run", RUNS)
def test_the_critic_alone_has_learned(ranks, run):
    for rank in ranks:
        found = rank[run]
        assert same(*found["actor stayed"]) and not same(*found["critic moved"])
        assert found["adam"] == {"actor": 0, "critic": 0}, "Adam is as before its first step"
        assert len(found["pretraining"]) == 3
        for metrics in found["pretraining"]:
            assert metrics["critic_pretrain/grad_norm"] > 0 and metrics["critic_pretrain/loss"] > 0
            assert all(name.startswith("critic_pretrain/") for name in metrics)
        returns, mask, scores = found["learned"]  # without discount all of a response is worth its score, and no KL
        expected = torch.where(mask, scores.unsqueeze(-1), torch.zeros_like(returns))
        assert scores.std() > 0.1
        torch.testing.assert_close(returns * mask, expected, rtol=0, atol=1e-6)
    assert ranks[0][run]["pretraining"] == ranks[1][run]["pretraining"]


@pytest.mark.parametrize("run", RUNS)
def test_a_run_that_goes_on_from_within_is_the_uninterrupted_one(ranks, run):
    for rank in ranks:
        found = rank[run]
        assert found["pretraining again"] == [pytest.approx(found["pretraining"][-1], rel=1e-6, abs=1e-9)]
        for role, weights in found["whole"]["state"].items():
            assert same(found["resumed"]["state"][role], weights), role


@pytest.mark.parametrize("run", RUNS)
def test_a_run_that_starts_from_its_folder_takes_the_same_course(ranks, run):
    for rank in ranks:
        whole, reused = rank[run]["whole"], rank[run]["reused"]
        for got, metrics in zip(reused["metrics"], whole["metrics"], strict=True):
            assert got == pytest.approx(metrics, rel=1e-6, abs=1e-9)
        for role, weights in whole["state"].items():
            assert same(reused["state"][role], weights), role
