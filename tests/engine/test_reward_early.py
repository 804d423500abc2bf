"""Responses that are scored while others are drawn: each once, by its text, and failures are told as at other times."""

import threading

import pytest
import torch

from engine.errors import RunStopped
from engine.reward.base import CombinedReward, RewardSource
from engine.reward.function import FunctionReward
from engine.rollout.decode import Sampler
from scripts.harness.models import BOS, EOS, PAD, make_causal_lm, make_tokenizer
from tests.engine.fake_models import rollout_of
from tests.engine.rollout.test_decode import BATCH, SAMPLING, answers, loaded, plainly

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
    reward.begin(early)  # drawn again
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
