"""Held-out prompts are known to reward functions by the same indices while they are answered and afterwards; turns of
conversations, and variety, which is the policy's own.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from engine.algorithms import Algorithm, Dialect
from engine.errors import RunStopped
from engine.experience import Experience
from engine.rollout.base import RolloutBackend, SamplingConfig
from scripts.harness.models import EOS, PAD, make_tokenizer
from tests.engine.fake_models import conversation_of, rollout_of
from training.reporting.evaluation import Answers, Evaluator, PromptEvaluations, sample_rows, write_rows


@dataclass(frozen=True)
class Answered:
    """Of a rollout, what tells whose responses these are."""

    indices: torch.Tensor


class Rollouts(RolloutBackend):
    """Gives a rollout of the prompts' indices, and calls `finished` with it before."""

    def __init__(self, finished):
        self.finished = finished

    def generate(self, prompts, sampling):
        answered = Answered(prompts.indices)
        if self.finished is not None:
            self.finished(answered)
        return answered


class Scored(Exception):
    """Ends an evaluation when responses are scored."""


def make_experience(rollout):
    raise Scored(rollout.indices.tolist())


@pytest.mark.parametrize("listens", [True, False])
def test_what_is_done_early_and_what_is_scored_have_the_same_indices(listens):
    early = []

    def finished(rollout):
        early.append(rollout.indices.tolist())

    rollouts = Rollouts(finished if listens else None)
    evaluator = Evaluator(
        [torch.tensor([5, 6]), torch.tensor([7]), torch.tensor([8])],
        rollouts=rollouts,
        experience_maker=SimpleNamespace(make_experience=make_experience),
        sampling=SamplingConfig(max_new_tokens=2, stop_token_ids=(1,), pad_token_id=0),
        tokenizer=None,
        first_index=100,
    )
    with pytest.raises(Scored) as scored:
        evaluator.run(0)
    assert scored.value.args[0] == [100, 101, 102], "behind the 100 rows that are trained on"
    assert early == ([[100, 101, 102]] if listens else [])
    assert rollouts.finished is (finished if listens else None), "training's prompts are told as they are"


def test_a_link_in_the_place_of_samples_is_not_written_through(tmp_path):
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "after.jsonl").symlink_to(tmp_path / "theirs")
    write_rows(tmp_path / "after.jsonl", [{"score": 1.0}])
    assert (tmp_path / "after.jsonl").read_text() == '{"score": 1.0}\n'
    assert (tmp_path / "theirs").read_text() == "theirs"


@pytest.mark.parametrize("average", (None, object()))
def test_the_averages_curve_starts_where_the_actors_does(average, tmp_path):
    own = {"eval/score": 1.5, "eval/kl_se": 0.25}
    evaluator = SimpleNamespace(run=lambda step: (own, []))
    evaluations = PromptEvaluations(evaluator, average, tmp_path, last_step=4, every=0)
    expected = own if average is None else {**own, "eval/ema_score": 1.5, "eval/ema_kl_se": 0.25}
    assert evaluations.evaluate(0) == expected
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["before.jsonl"]
    assert [step for step in range(-1, 6) if evaluations.due(step)] == [0, 4]


@pytest.mark.parametrize(
    "by, kept",
    [
        ("eval/score", {0: 0.0, 2: 2.0}),
        ("eval/reward_judge", {0: 0.5, 2: 0.75}),
        ("eval/ema_score", {0: 0.0, 2: 1.0, 4: 3.0}),  # the average's own KL counts
    ],
)
def test_checkpoints_are_compared_by_any_number_within_a_kl(by, kept, tmp_path):
    evaluations = PromptEvaluations(None, None, tmp_path, 4, 2, by, best_max_kl=6.0)
    names = ("step", "eval/score", "eval/kl", "eval/reward_judge", "eval/ema_score", "eval/ema_kl")
    numbers = (0, 0.0, 0.0, 0.5, 0.0, 0.0), (2, 2.0, 6.0, 0.75, 1.0, 3.0), (4, 4.0, 6.1, 0.9, 3.0, 5.0)
    assert evaluations.scores([dict(zip(names, row, strict=True)) for row in numbers]) == kept


def test_a_number_that_no_evaluation_has_ends_the_run_before_its_first_step(tmp_path):
    evaluator = SimpleNamespace(run=lambda step: ({"eval/score": 1.5, "eval/score_se": 0.25, "eval/kl": 0.0}, []))
    evaluations = PromptEvaluations(evaluator, None, tmp_path, 4, 0, "eval/facts")
    with pytest.raises(RunStopped, match=r"no held-out number eval/facts. The evaluation has eval/score, eval/kl\."):
        evaluations.evaluate(0)


def test_turns_are_told_apart_by_who_drew_their_tokens():
    turns = [[[7, 8, EOS], [9, 10], [11], [12], [EOS]], [[13, 14]]]
    rollout = conversation_of([[5, 6], [5]], turns, PAD)
    rollout.turn_rewards[0, 5], rollout.turn_rewards[1, 1] = 0.0, -0.5  # else 1.0, 2.0 and 3.0; 1.0
    long, short = sample_rows(rollout, torch.zeros(2), torch.zeros(2), make_tokenizer())
    assert [(turn["by"], turn["text"].strip(), turn.get("reward")) for turn in long["turns"]] == [
        ("policy", "w07 w08", 1.0),
        ("environment", "w09 w10", None),
        ("policy", "w11", None),
        ("environment", "w12", None),
        ("policy", "", 3.0),
    ]
    assert "".join(turn["text"] for turn in long["turns"]) == long["response"] == " w07 w08 w09 w10 w11 w12"
    assert (long["tokens"], short["tokens"]) == (5, 2), "those that the policy drew"
    assert short["turns"] == [{"by": "policy", "text": " w13 w14", "reward": -0.5}]


def test_samples_of_single_responses_have_no_turns():
    rollout = rollout_of([[5]], [[7, EOS]], PAD)
    row = {"prompt": "w05", "response": " w07", "score": 0.5, "kl": 0.25, "tokens": 2}
    assert sample_rows(rollout, torch.tensor([0.5]), torch.tensor([0.25]), make_tokenizer()) == [row]


def test_what_an_environment_says_is_not_the_policys_variety(monkeypatch):
    said = [["call one", "the answer 1"], ["call one", "quite another text 2"]]
    numbers = {"score": 1.0, "kl": 0.0, "tokens": 2}
    rows = [
        {"prompt": "ask", "response": "".join(turns), **numbers}
        | {"turns": [{"by": by, "text": text} for by, text in zip(("policy", "environment", "policy"), [*turns, word])]}
        for turns, word in zip(said, ("answer", "zork"), strict=True)
    ]
    one, two = {"by": "policy", "text": "call one"}, {"by": "environment", "text": "the answer 1"}
    evaluator = Evaluator(
        [],
        rollouts=Rollouts(None),
        experience_maker=None,
        sampling=SamplingConfig(2, 0, ()),
        tokenizer=None,
        first=["call one"] * 2,
    )
    monkeypatch.setattr(Evaluator, "answers", lambda self, step: Answers(rows, [True] * 2, [0.0] * 2, [], []))
    metrics, _ = evaluator.run(1)
    # of "call one answer" and "call one zork": call-one, one-answer, one-zork; zork alone is new, as an environment
    # said "answer"
    assert metrics["eval/distinct_bigrams"] == 3 and metrics["eval/distinct_responses"] == 2
    assert metrics["eval/new_words"] == pytest.approx((0 + 1 / 3) / 2)
    for row in rows:
        row["turns"] = [one, two | {"text": row["response"]}]
    metrics, _ = evaluator.run(1)
    assert metrics["eval/distinct_responses"] == metrics["eval/distinct_bigrams"] == 1


def test_the_likelihood_is_measured_beside_the_score_and_not_in_it():
    rollout = rollout_of([[5], [6]], [[7, 8, EOS], [EOS]], PAD)
    zeros = torch.zeros(2, 3)
    experience = Experience(
        rollout=rollout,
        logprobs=zeros,
        entropy=zeros,
        ref_logprobs=torch.tensor([[-1.0, -2.0, -6.0], [-4.0, -9.0, -9.0]]),
        values=None,
        scores=torch.tensor([0.5, 1.5]),
        prompt_kl=torch.zeros(2),
    )

    class Drawn(RolloutBackend):
        def generate(self, prompts, sampling):
            return rollout

    found = {}
    for coef in (0.0, 0.5):
        algorithm = Algorithm(Dialect(likelihood_coef=coef), pad_token_id=PAD)
        evaluator = Evaluator(
            [torch.tensor([5]), torch.tensor([6])],
            rollouts=Drawn(),
            experience_maker=SimpleNamespace(make_experience=lambda rollout: experience, algorithm=algorithm),
            sampling=SamplingConfig(max_new_tokens=3, stop_token_ids=(EOS,), pad_token_id=PAD),
            tokenizer=make_tokenizer(),
        )
        found[coef], rows = evaluator.run(0)
    assert found[0.5]["eval/score"] == found[0.0]["eval/score"] == 1.0
    assert found[0.5]["eval/likelihood"] == -3.5 and [row["likelihood"] for row in rows] == [-3.0, -4.0]
    assert not [name for name in found[0.0] if "likelihood" in name]
