"""A number that is not finite on one rank stops all ranks, with a message that says where, before a weight changes."""
import pytest
import torch

from tests.distributed.harness import run_ranks

CASES = ("score", "value loss")


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict]:
    return run_ranks("tests.distributed.work_stops:all_stops", folder=folder, stage=3, config="stage3.json")


@pytest.mark.parametrize("case", CASES)
def test_both_ranks_stop_and_name_the_step(ranks, case):
    one, other = (rank[case] for rank in ranks)
    assert one["message"] == other["message"] is not None
    assert one["message"].startswith("step 2: ")
    assert "rank 1: not finite: " + case in one["message"]
    assert "rank 0" not in one["message"], "there all numbers were finite"


def test_the_bad_sample_is_shown(ranks):
    message = ranks[0]["score"]["message"]
    assert "score nan, prompt 'w" in message
    assert repr(ranks[1]["score"]["response"]) in message
    assert message.count("prompt '") == 1


@pytest.mark.parametrize("case", CASES)
def test_no_weight_has_changed(ranks, case):
    for rank in ranks:
        assert rank[case]["steps_done"] == 1
        for model, before in rank[case]["before"].items():
            assert all(torch.equal(rank[case]["after"][model][name], master) for name, master in before.items())
