"""Sums of rewards by hand, and their way into an experience; responses scored while others are drawn, each once; and
what a source raises on one rank stops all, with sound weights.
"""

import contextlib
import dataclasses
import json
import math
import re
import threading
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from engine import distributed
from engine.algorithms import Algorithm, get_dialect
from engine.errors import RunStopped
from engine.experience import Rollout
from engine.experience_maker import ExperienceMaker
from engine.reward.base import TAKEN, AgreedReward, CombinedReward, RewardSource, Standardisation
from engine.reward.function import FunctionReward
from engine.rollout.decode import Sampler
from scripts.harness.models import BOS, EOS, PAD, make_causal_lm, make_tokenizer
from tests.engine.fake_models import Row, TableModels, rollout_of
from tests.engine.rollout.test_decode import BATCH, SAMPLING, answers, loaded, plainly
from tests.training.given_rollouts import next_step, untrained
from training.reporting.evaluation import sample_rows


class Fixed(RewardSource):
    """A source that gives these scores, and only within its context."""

    def __init__(self, *scores: float):
        self.scores, self.present = scores, 0

    def score(self, rollout: Rollout) -> torch.Tensor:
        assert self.present == 1
        return torch.tensor(self.scores)

    @contextlib.contextmanager
    def on_device(self):
        self.present += 1
        yield
        self.present -= 1


def rollout() -> Rollout:
    """Responses of 2, 3 and 1 tokens; the second did not end."""
    made = rollout_of([[5], [6], [7]], [[20, EOS], [21, 22, 23], [EOS]], PAD)
    return dataclasses.replace(made, ended=torch.tensor([True, False, True]))


def asked(reward: CombinedReward) -> tuple[list[float], dict[str, list[float]]]:
    with reward.on_device():
        return reward.score(rollout()).tolist(), {name: part.tolist() for name, part in reward.parts(rollout()).items()}


# model 2 x (1, -2, 0.5) = 2, -4, 1; function -0.5 x (4, 2, 0) = -2, -1, 0;
# length -0.25 x (2, 3, 1) = -0.5, -0.75, -0.25. Sums: -0.5, -5.75, 0.75.
def test_a_weighted_sum_with_a_penalty_by_hand():
    reward = CombinedReward(
        {"model": (Fixed(1, -2, 0.5), 2.0), "function": (Fixed(4, 2, 0), -0.5)},
        length_penalty=0.25,
    )
    scores, parts = asked(reward)
    assert scores == [-0.5, -5.75, 0.75]
    assert parts == {
        "scores_model": [1, -2, 0.5],
        "scores_function": [4, 2, 0],
        "length_penalty": [-0.5, -0.75, -0.25],
    }
    assert reward.weights() == {"scores_model": 2.0, "scores_function": -0.5}
    assert all(source.present == 0 for source, _ in reward.sources.values())


class ByRow(Fixed):
    """The length of each response, so that micro-batches may be told apart."""

    def score(self, rollout: Rollout) -> torch.Tensor:
        assert self.present == 1
        return rollout.response_mask.sum(-1).float()


# Row 0: score 4 - 2 x 2 = 0. Row 1: 3 - 2 x 3 = -3; its missing end makes it -13 (TRL f2cd5771:
# `scores[~contain_eos_token] -= missing_eos_penalty`), and the clip of 5, which comes last, -5. KL is 0.
@pytest.mark.parametrize("micro_batch_size", [1, 8])
def test_into_the_rewards_of_a_step(micro_batch_size):
    table = {token: Row([-1.0] * 3, [-1.0] * 3, [0.0] * 3, score) for token, score in ((5, 2.0), (6, 0.0), (7, 1.0))}
    roles = TableModels(table).roles()
    roles["reward"] = CombinedReward({"model": (roles["reward"], 1.0), "function": (ByRow(), 1.0)}, length_penalty=2)
    dialect = get_dialect("default").override(
        whiten_advantages=False, missing_end="subtract", missing_end_value=10.0, score_clip=5.0
    )
    trainer = untrained(roles, dialect, rollout(), pad=PAD, micro_batch_size=micro_batch_size)
    report = next_step(trainer)
    assert report.batch.scores.tolist() == [0, -3, 0]  # row 2: 1 + 1 - 2
    assert report.batch.rewards.sum(-1).tolist() == [0, -5, 0]
    means = {name: value for name, value in report.metrics.items() if "scores_" in name or "penalty" in name}
    assert means == {
        "objective/scores_model": (2 + 0 + 1) / 3,
        "objective/scores_function": (2 + 3 + 1) / 3,
        "objective/length_penalty": (-4 - 6 - 2) / 3,
        "objective/missing_eos_penalty": -10 / 3,
    }
    lowered = dialect.override(score_clip=20.0)
    alone = next_step(untrained(roles, lowered, rollout(), pad=PAD, micro_batch_size=micro_batch_size)).batch
    assert alone.processed_scores.tolist() == [0, -13, 0]


def test_a_single_part_is_not_reported_twice_and_two_are_reported():
    roles = TableModels({5: Row([-1.0], [-1.0], [0.0], 2.0)}).roles()
    algorithm = Algorithm(get_dialect("default"), pad_token_id=PAD, end_token_id=EOS)
    one, two = (CombinedReward(dict.fromkeys(names, (roles["reward"], 1 / len(names)))) for names in ("a", "ab"))
    for reward, parts in ((roles["reward"], {}), (one, {}), (two, {"scores_a": 1.0, "scores_b": 1.0})):
        maker = ExperienceMaker(**{**roles, "reward": reward}, algorithm=algorithm, micro_batch_size=8)
        experience = maker.make_experience(rollout_of([[5]], [[20]], PAD))
        assert experience.scores.tolist() == [2] and experience.score_parts == parts


TOKENIZER = make_tokenizer()
ROLLOUT = rollout_of([[BOS, 5], [6, 7, 8], [9]], [[20, EOS], [EOS], [21, 22, 23]], PAD, width=5, prompt_width=4)


class Noted:
    """A function that returns the lengths of responses, and notes what it was given, and in which thread."""

    def __init__(self):
        self.calls: list[tuple[list[str], bool]] = []

    def __call__(self, prompts, responses, rows):
        assert [row["of"] for row in rows] == prompts
        self.calls.append((responses, threading.current_thread() is threading.main_thread()))
        return list(map(len, responses))


ROWS = [{"of": "w05"}, {"of": "w06 w07 w08"}, {"of": "w09"}]


def test_what_was_begun_is_not_called_again():
    function = Noted()
    reward = FunctionReward(function, TOKENIZER, ROWS)
    early = ROLLOUT.select(torch.tensor([2, 0]))
    reward.begin(early)
    assert reward.score(ROLLOUT).tolist() == [4, 0, 12]
    assert function.calls == [([" w21 w22 w23", " w20"], False), ([""], True)]
    assert reward.score(ROLLOUT).tolist() == [4, 0, 12]
    assert function.calls[2:] == [([" w20", "", " w21 w22 w23"], True)]


def test_a_response_that_was_cut_is_scored_as_it_is():
    function = Noted()
    reward = FunctionReward(function, TOKENIZER, ROWS)
    reward.begin(ROLLOUT)
    cut = rollout_of([[BOS, 5], [6, 7, 8], [9]], [[20, EOS], [EOS], [21]], PAD, width=5, prompt_width=4)
    assert reward.score(cut).tolist() == [4, 0, 4]
    assert [responses for responses, _ in function.calls] == [[" w20", "", " w21 w22 w23"], [" w21"]]


@pytest.mark.parametrize(
    "function, told",
    [
        (lambda prompts, responses: 1 / 0, "raised ZeroDivisionError"),
        (lambda prompts, responses: [1.0], "returned 1 values for 3 responses"),
    ],
)
def test_failures_stop_the_run_when_scores_are_asked_for(function, told):
    reward = FunctionReward(function, TOKENIZER)
    reward.begin(ROLLOUT)
    with pytest.raises(RunStopped, match=told):
        reward.score(ROLLOUT)


def test_each_source_of_a_combined_reward_begins():
    begun = []

    class Source(RewardSource):
        def begin(self, rollout):
            begun.append(rollout)

    CombinedReward({"one": (Source(), 1.0), "two": (Source(), 0.5)}).begin(ROLLOUT)
    assert begun == [ROLLOUT, ROLLOUT]


def test_the_default_dtype_of_a_model_that_is_being_made_is_left_alone():
    """transformers sets the process's default while it makes a model, the copy of the reference say; meanwhile a call
    may begin, or end."""
    started, go = threading.Event(), threading.Event()

    def slow(prompts, responses):
        started.set()
        go.wait(60)
        return [0.0] * len(responses)

    reward = FunctionReward(slow, TOKENIZER)
    torch.set_default_dtype(torch.bfloat16)
    try:
        reward.begin(ROLLOUT)
        assert started.wait(60)
    finally:
        torch.set_default_dtype(torch.float32)
    go.set()
    reward.score(ROLLOUT)
    try:
        assert torch.get_default_dtype() == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_each_response_is_told_once_as_it_is_done(tmp_path):
    model, told = loaded(make_causal_lm(tmp_path / "llama", "llama")), []
    rollout = Sampler(TOKENIZER, rows_at_once=2).responses(model, BATCH, SAMPLING, told.append)
    assert answers(rollout) == plainly(model, SAMPLING)
    assert len(told) > 2, "all came together, at the end"
    whole = {int(index): row[mask].tolist() for index, row, mask in _rows(rollout)}
    found = [(int(index), row[mask].tolist()) for part in told for index, row, mask in _rows(part)]
    assert len(found) == len(whole) and dict(found) == whole


def _rows(rollout):
    return zip(rollout.indices, rollout.responses, rollout.response_mask, strict=True)


AGREED_ROLLOUT = rollout_of([[5], [6], [7]], [[20, EOS], [21, 22, 23], [EOS]], PAD)


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
    assert AgreedReward(Given(values.double()), "judge").score(AGREED_ROLLOUT).tolist() == [1.0, 2.0, 3.0]
    assert list(AgreedReward(Given(values), "judge").parts(AGREED_ROLLOUT)) == ["scores"]
    parts = AgreedReward(InParts(values), "judge").parts(AGREED_ROLLOUT)
    assert parts["kind"].tolist() == [1.0, 2.0, 3.0] and parts["short"].tolist() == [2.0, 4.0, 6.0]


def test_numbers_of_tokens_are_taken_and_stay_numbers_of_tokens():
    source = Given(torch.arange(9.0).view(3, 3))
    judge = AgreedReward(source, "judge")
    assert judge.score(AGREED_ROLLOUT).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    source.returned = torch.zeros(3)
    with pytest.raises(RunStopped, match="^judge returned one number for some responses, and numbers of steps or tok"):
        judge.score(AGREED_ROLLOUT)


@pytest.mark.parametrize(
    "returned, told",
    [
        (ConnectionError("no answer"), r"judge raised ConnectionError: no answer \(.*test_base.py, line \d+"),
        (SystemExit(0), "judge raised SystemExit: 0"),
        ([1.0, 2.0, 3.0], "which is not a tensor"),
        (torch.zeros(3, 1), r"shape \(3, 1\) for 3 responses of 3 positions"),
        (torch.zeros(2), r"shape \(2,\) for 3 responses\. Have its score"),
    ],
)
def test_a_failure_stops_the_run(returned, told):
    with pytest.raises(RunStopped, match=told) as stop:
        AgreedReward(Given(returned), "judge").parts(AGREED_ROLLOUT)
    assert stop.value.good_until == math.inf


class Unmade(RewardSource):
    def __init__(self, raised):
        if raised is not None:
            raise raised

    def score(self, rollout):
        return torch.zeros(len(rollout))


def test_a_source_that_cannot_be_made_stops_the_run():
    """The tokenizer's place is taken by what is raised."""
    assert AgreedReward.made(Unmade, None, "judge").score(AGREED_ROLLOUT).tolist() == [0.0, 0.0, 0.0]
    for raised, told in (
        (ConnectionError("no answer"), "ConnectionError: no answer"),
        (SystemExit(0), "SystemExit: 0"),
    ):
        with pytest.raises(RunStopped, match=rf"judge raised {told} \(.*test_base.py, line \d+.*as it was made"):
            AgreedReward.made(Unmade, raised, "judge")


def test_a_failure_of_another_rank(monkeypatch):
    monkeypatch.setattr(distributed, "all_gather_objects", lambda problem: [problem, "raised ValueError: 3"])
    with pytest.raises(RunStopped, match="judge raised ValueError: 3"):
        AgreedReward(Given(torch.zeros(3)), "judge").score(AGREED_ROLLOUT)


class Prepared(Given):
    def prepare(self, rollout):
        if isinstance(self.returned, BaseException):
            raise self.returned
        self.prepared = rollout


def test_a_source_is_told_what_comes_next():
    source = Prepared(None)
    AgreedReward(source, "judge").prepare(AGREED_ROLLOUT)
    assert source.prepared is AGREED_ROLLOUT
    with pytest.raises(RunStopped, match="^judge raised ValueError: 3 .*It is told which responses come next"):
        AgreedReward(Prepared(ValueError("3")), "judge").prepare(AGREED_ROLLOUT)
    AgreedReward(Given(ValueError("3")), "judge").prepare(AGREED_ROLLOUT)  # which has nothing to prepare


class Named(RewardSource):
    def __init__(self, *names):
        self.names = names

    def score(self, rollout):
        return torch.zeros(len(rollout))

    def parts(self, rollout):
        return {name: self.score(rollout) for name in self.names}


@pytest.mark.parametrize("name", ["prompt", "kl_se"])
def test_a_part_is_not_called_like_what_is_measured_anyway(name):
    with pytest.raises(RunStopped, match=f"^judge calls a part of its score '{name}', which is the name of something"):
        AgreedReward(Named("short", name), "judge").parts(AGREED_ROLLOUT)
    assert set(AgreedReward(Named("short", f"{name}_of_mine"), "judge").parts(AGREED_ROLLOUT)) == {
        "short",
        f"{name}_of_mine",
    }


def test_every_name_that_would_take_anothers_place_is_known():
    columns = set(sample_rows(AGREED_ROLLOUT, torch.zeros(3), torch.zeros(3), make_tokenizer())[0])
    pages = "".join(path.read_text(encoding="utf-8") for path in Path("docs").glob("metrics*.md"))
    documented = re.findall(r"`(?:eval|objective)/(\w+)`", pages)
    of_step_3 = {name for name in documented if not name.startswith(("scores", "ema_"))}
    of_others = {"loss", "perplexity", "accuracy", "pair_loss", "pair_loss_std", "margin", "margin_std"}
    of_others |= {"step_loss", "bad_found", "good"}  # step 2 on labels of steps
    of_sources = {"length_penalty", "reward_model", "reward_function", "reward_NAME", "NAME"}
    assert columns | of_step_3 <= TAKEN | of_others | of_sources


class InTurn(Fixed):
    """A source whose context is entered only while no other source's is."""

    entered: ClassVar[list[str]] = []

    @contextlib.contextmanager
    def on_device(self):
        assert not self.entered
        self.entered.append("one")
        with super().on_device():
            yield
        self.entered.clear()


# Of 1, 2, 6 the mean is 3 and the deviation sqrt((4 + 1 + 9) / 2) = sqrt(7).
def test_scores_are_made_comparable_by_the_first_batch(capsys):
    other = InTurn(10.0, 20.0, 30.0)
    source = InTurn(1.0, 2.0, 6.0)
    reward = CombinedReward({"a": (source, 2.0), "b": (other, 1.0)}, standardised={"a": Standardisation("the judge")})
    unit = 7**-0.5
    torch.testing.assert_close(reward.parts(rollout())["scores_a"], torch.tensor([-2 * unit, -unit, 3 * unit]))
    assert capsys.readouterr().out == ("the judge: its scores become (score - 3) / 2.64575, by the first 3 responses\n")
    source.scores = (3.0, 10.0, -4.0)  # a later batch, by the first one's mean and deviation
    found = reward.score(rollout())
    torch.testing.assert_close(found, torch.tensor([10.0, 20 + 14 * unit, 30 - 14 * unit]))
    again = CombinedReward(reward.sources, standardised={"a": Standardisation("the judge")})
    again.load_state_dict(json.loads(json.dumps(reward.state_dict())))
    assert torch.equal(again.score(rollout()), found)


@pytest.mark.parametrize("scores", [(0.1, 0.1, 0.1), (0.1, 0.1, 0.1 + 5e-9)])
def test_equal_scores_cannot_be_made_comparable(scores):
    with pytest.raises(RunStopped, match="the judge gave the first 3 responses the same score, 0.1: without"):
        Standardisation("the judge")(torch.tensor(scores), rollout())


def test_scores_that_are_no_numbers_stay_for_what_ends_the_run():
    given = torch.tensor([1.0, math.nan, 2.0])
    assert Standardisation("the judge")(given, rollout()) is given
