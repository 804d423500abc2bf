"""What a source of the user's raises on one rank stops all, with sound weights."""

import math
import re
from pathlib import Path

import pytest
import torch

from engine import distributed
from engine.errors import RunStopped
from engine.reward.base import TAKEN, AgreedReward, RewardSource
from scripts.harness.models import EOS, PAD, make_tokenizer
from tests.engine.fake_models import rollout_of
from training.reporting.evaluation import sample_rows

ROLLOUT = rollout_of([[5], [6], [7]], [[20, EOS], [21, 22, 23], [EOS]], PAD)


class Given(RewardSource):
    def __init__(self, returned):
        self.returned = returned

    def score(self, rollout):
        if isinstance(self.returned, BaseException):
            raise self.returned
        return self.returned


class InParts(Given):
    def parts(self, rollout):
        return {"kind": self.returned, "short": 2 * self.returned}


def test_scores_and_parts_are_the_sources():
    values = torch.tensor([1.0, 2.0, 3.0])
    assert AgreedReward(Given(values.double()), "judge").score(ROLLOUT).tolist() == [1.0, 2.0, 3.0]
    assert list(AgreedReward(Given(values), "judge").parts(ROLLOUT)) == ["scores"]
    parts = AgreedReward(InParts(values), "judge").parts(ROLLOUT)
    assert parts["kind"].tolist() == [1.0, 2.0, 3.0] and parts["short"].tolist() == [2.0, 4.0, 6.0]


@pytest.mark.parametrize(
    "returned, told",
    [
        (ConnectionError("no answer"), r"judge raised ConnectionError: no answer \(.*test_reward_agreed.py, line \d+"),
        (SystemExit(0), "judge raised SystemExit: 0"),
        ([1.0, 2.0, 3.0], "which is no tensor"),
        (torch.zeros(3, 1), r"shape \(3, 1\) for 3 responses"),
    ],
)
def test_a_failure_stops_the_run(returned, told):
    with pytest.raises(RunStopped, match=told) as stop:
        AgreedReward(Given(returned), "judge").parts(ROLLOUT)
    assert stop.value.good_until == math.inf


class Unmade(RewardSource):
    def __init__(self, raised):
        if raised is not None:
            raise raised

    def score(self, rollout):
        return torch.zeros(len(rollout))


def test_a_source_that_cannot_be_made_stops_the_run():
    """The tokenizer's place is taken by what is raised."""
    assert AgreedReward.made(Unmade, None, "judge").score(ROLLOUT).tolist() == [0.0, 0.0, 0.0]
    for raised, told in (
        (ConnectionError("no answer"), "ConnectionError: no answer"),
        (SystemExit(0), "SystemExit: 0"),
    ):
        with pytest.raises(
            RunStopped, match=rf"judge raised {told} \(.*test_reward_agreed.py, line \d+.*as it was made"
        ):
            AgreedReward.made(Unmade, raised, "judge")


def test_a_source_that_another_rank_cannot_make(monkeypatch):
    monkeypatch.setattr(distributed, "all_gather_objects", lambda problem: [problem, "raised ValueError: 3"])
    with pytest.raises(RunStopped, match="judge raised ValueError: 3"):
        AgreedReward.made(Unmade, None, "judge")


def test_a_failure_of_another_rank(monkeypatch):
    monkeypatch.setattr(distributed, "all_gather_objects", lambda problem: [problem, "raised ValueError: 3"])
    with pytest.raises(RunStopped, match="judge raised ValueError: 3"):
        AgreedReward(Given(torch.zeros(3)), "judge").score(ROLLOUT)


class Prepared(Given):
    def prepare(self, rollout):
        if isinstance(self.returned, BaseException):
            raise self.returned
        self.prepared = rollout


def test_a_source_is_told_what_comes_next():
    source = Prepared(None)
    AgreedReward(source, "judge").prepare(ROLLOUT)
    assert source.prepared is ROLLOUT
    with pytest.raises(RunStopped, match="^judge raised ValueError: 3 .*It is told which responses come next"):
        AgreedReward(Prepared(ValueError("3")), "judge").prepare(ROLLOUT)
    AgreedReward(Given(ValueError("3")), "judge").prepare(ROLLOUT)  # which has nothing to prepare


class Named(RewardSource):
    def __init__(self, *names):
        self.names = names

    def score(self, rollout):
        return torch.zeros(len(rollout))

    def parts(self, rollout):
        return {name: self.score(rollout) for name in self.names}


@pytest.mark.parametrize(
    "name", ["kl", "score", "tokens", "prompt", "response", "response_length", "entropy", "scores", "kl_se"]
)
def test_a_part_is_not_called_like_what_is_measured_anyway(name):
    with pytest.raises(RunStopped, match=f"^judge calls a part of its score '{name}', which is the name of something"):
        AgreedReward(Named("short", name), "judge").parts(ROLLOUT)
    assert set(AgreedReward(Named("short", f"{name}_of_mine"), "judge").parts(ROLLOUT)) == {"short", f"{name}_of_mine"}


def test_every_name_that_would_take_anothers_place_is_known():
    columns = set(sample_rows(ROLLOUT, torch.zeros(3), torch.zeros(3), make_tokenizer())[0])
    documented = re.findall(r"`(?:eval|objective)/(\w+)`", Path("docs/metrics.md").read_text(encoding="utf-8"))
    of_step_3 = {name for name in documented if not name.startswith(("scores", "ema_"))}
    of_others = {"loss", "perplexity", "accuracy", "pair_loss", "pair_loss_std", "margin", "margin_std"}
    of_sources = {"length_penalty", "reward_model", "reward_function", "reward_NAME"}
    assert columns | of_step_3 <= TAKEN | of_others | of_sources
