"""A number that is not finite on one rank stops all ranks, with a message that says where, before a weight changes."""

import pytest
import torch

from scripts.harness.ranks import run_ranks

RUNS = {
    "score": {"stage": 3, "dtype": "fp32", "spoil": "score"},
    "value loss": {"stage": 3, "dtype": "fp32", "spoil": "value loss"},
}
RUNS |= {
    f"policy gradient, stage {stage}, {dtype}": {"stage": stage, "dtype": dtype, "spoil": "policy gradient"}
    for stage in (0, 2, 3)
    for dtype in ("fp32", "bf16")
}


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict]:
    return run_ranks("tests.distributed.work_stops:all_stops", folder=folder, runs=RUNS)


@pytest.mark.parametrize("run", RUNS)
def test_both_ranks_stop_and_name_the_step(ranks, run):
    one, other = (rank[run] for rank in ranks)
    assert one["message"] == other["message"] is not None
    assert one["message"].startswith("step 2: ")
    assert f"rank 1: not finite: {RUNS[run]['spoil']}" in one["message"]


@pytest.mark.parametrize("run", RUNS)
def test_no_weight_has_changed(ranks, run):
    for rank in ranks:
        assert rank[run]["steps_done"] == 1
        for model, before in rank[run]["before"].items():
            assert all(torch.equal(rank[run]["after"][model][name], master) for name, master in before.items())


def test_the_bad_sample_and_only_it_is_shown(ranks):
    message = ranks[0]["score"]["message"]
    assert "score nan, prompt 'w" in message
    assert repr(ranks[1]["score"]["response"]) in message
    assert message.count("prompt '") == 1 and "rank 0" not in message
