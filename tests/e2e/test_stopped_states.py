"""A run that stops with sound weights saves them, with --save_steps 0 too, and its message names what is there."""

import pytest

from scripts.harness.programs import lasting_metrics, metric_lines, run_here, snapshot

RAISING = """
from pathlib import Path

import torch

from engine.reward.base import RewardSource


def score(prompts, responses):
    folder = Path(__file__).parent
    calls = int((folder / "calls").read_text()) + 1
    (folder / "calls").write_text(str(calls))
    if (folder / "raise_at").read_text() == str(calls):
        raise ConnectionError("the judge does not answer")
    return [float(len(set(response.split()))) for response in responses]


class Source(RewardSource):
    def __init__(self, tokenizer):
        pass

    def score(self, rollout):
        return torch.tensor(score([], ["a b"] * len(rollout)))
"""
STEPS = 4
AT_STEP_3, AT_LAST_EVALUATION = 5, 7  # calls: two before the first step, one in each step of four responses


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judge")
    (folder / "raising_judge.py").write_text(RAISING)
    return folder


@pytest.fixture
def runs(tiny, tmp_path, judge, capfd):
    def run(name: str, raise_at: int = 0, **flags):
        (judge / "calls").write_text("0")
        (judge / "raise_at").write_text(str(raise_at))
        given = {
            "output_dir": tmp_path / name,
            "reward_function": f"{judge / 'raising_judge.py'}:score",
            "critic_model_name_or_path": None,
            "max_steps": STEPS,
        }
        return run_here(3, tiny.flags(3, **{**given, **flags}), capfd)

    return run


def assert_equal_ends(whole, other) -> None:
    for name in ("actor", "critic", "samples"):
        assert snapshot(whole / name) == snapshot(other / name)
    lines = lasting_metrics(whole)
    assert lines == lasting_metrics(other) and [line["step"] for line in lines] == list(range(STEPS + 1))


def test_what_a_reward_function_stops_is_gone_on_with_bit_by_bit(runs, tmp_path):
    assert runs("whole").code == 0
    stopped = runs("step", raise_at=AT_STEP_3)
    point = tmp_path / "step" / "checkpoints" / "step_000002"
    assert stopped.code == 1 and "ConnectionError: the judge does not answer" in stopped.stderr
    assert f"The state after step 2 is saved: go on from it with --resume {point}." in stopped.stderr
    assert runs("step", resume=point).code == 0
    assert_equal_ends(tmp_path / "whole", tmp_path / "step")

    stopped = runs("last", raise_at=AT_LAST_EVALUATION)
    point = tmp_path / "last" / "checkpoints" / f"step_{STEPS:06d}"
    assert stopped.code == 1 and f"The state after step {STEPS} is saved: go on from it with --resume {point}." in (
        stopped.stderr
    )
    assert f"its models are saved: {tmp_path / 'last' / 'actor'}" in stopped.stderr
    assert [line["step"] for line in metric_lines(tmp_path / "last")] == list(range(STEPS + 1))
    assert runs("last", resume="auto").code == 0
    assert_equal_ends(tmp_path / "whole", tmp_path / "last")


def test_before_the_first_step_there_is_nothing_to_name(runs, tmp_path):
    stopped = runs("begun", raise_at=1)
    assert stopped.code == 1 and "There is no checkpoint of a sound step" in stopped.stderr
    assert not (tmp_path / "begun" / "checkpoints").exists()


def test_what_a_reward_source_raises_is_saved_before_too(runs, tmp_path, judge):
    stopped = runs("source", raise_at=AT_STEP_3, reward_function=f"{judge / 'raising_judge.py'}:Source")
    point = tmp_path / "source" / "checkpoints" / "step_000002"
    assert stopped.code == 1 and "Source raised ConnectionError: the judge does not answer" in stopped.stderr
    assert f"The state after step 2 is saved: go on from it with --resume {point}." in stopped.stderr
    assert "Traceback" not in stopped.stderr
