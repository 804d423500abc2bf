"""What a finished run's held-out metrics are judged to be; thresholds worked out by hand."""

import math

import pytest

from engine.errors import RunStopped
from training.reporting.guards import Kind, Verdict, conclude, of_ppo, of_reward, of_sft

VOCABULARY = 1000  # a uniform guess has ln 1000 = 6.908 nats


def rows(**metrics) -> list[dict]:
    """Two evaluations, before the first step and after the last; a metric's value in each by its name behind eval/."""
    return [
        {"step": step, "samples": step, **{f"eval/{name}": values[place] for name, values in metrics.items()}}
        for place, step in enumerate((0, 10))
    ]


@pytest.mark.parametrize(
    "before, after, kind",
    [
        (3.0, 2.0, Kind.FINE),
        (3.0, 3.019, Kind.FINE),
        (3.0, 3.021, Kind.WORSE),
        (3.0, 6.9, Kind.WORSE),
        (3.0, 6.91, Kind.BROKEN),
        (7.3, 7.31, Kind.FINE),  # an untrained model that stays one
        (7.3, 9.0, Kind.BROKEN),
        (3.0, math.nan, Kind.BROKEN),  # as infinity is read, too
    ],
)
def test_step_1(before, after, kind):
    verdict = of_sft(rows(loss=(before, after)), VOCABULARY)
    assert verdict.kind == kind
    assert bool(verdict.seen) == (kind != Kind.FINE)
    if verdict.seen:
        assert f"was {before:.4g}" in verdict.seen[0] and "--learning_rate" in verdict.seen[0]


@pytest.mark.parametrize(
    "accuracy, loss, std, kind",
    [
        ((0.5, 0.7), (0.70, 0.55), (0.1, 0.5), Kind.FINE),
        ((0.5, 0.7), (0.70, 0.75), (0.1, 0.5), Kind.FINE),  # noise: 2 sqrt(0.01 + 0.25) / 10 = 0.102
        ((0.5, 0.7), (0.70, 0.81), (0.1, 0.5), Kind.WORSE),  # orders better, and is too sure
        ((0.5, 0.5), (0.70, 0.58), (0.1, 0.5), Kind.FINE),
        ((0.5, 0.5), (0.70, 0.60), (0.1, 0.5), Kind.WORSE),
        ((0.5, 0.0), (0.70, math.log(2)), (0.1, 0.0), Kind.WORSE),  # all scores equal
        ((0.5, 0.48), (0.70, 4.0), (0.1, 5.0), Kind.BROKEN),
        ((0.9, 0.5), (0.30, 0.69), (0.1, 0.1), Kind.WORSE),  # no better than a coin, nor worse than one
        ((0.5, 0.48), (0.70, math.nan), (0.1, math.nan), Kind.BROKEN),
    ],
)
def test_step_2(accuracy, loss, std, kind):
    errors = {"pair_loss_se": (std[0] / 10, std[1] / 10), "pair_loss_change_se": (0.0, math.hypot(*std) / 10)}
    assert of_reward(rows(accuracy=accuracy, pair_loss=loss, **errors)).kind == kind  # of 100 pairs


GOOD = {
    "score": (0.0, 1.0),
    "score_change_se": (0.0, 2**0.5 / 10),
    "kl": (0.0, 20.0),
    "response_length": (20.0, 18.0),
    "distinct_responses": (100.0, 60.0),
}


@pytest.mark.parametrize(
    "changes, kind, word",
    [
        ({}, Kind.FINE, ""),
        ({"score": (0.0, -0.28)}, Kind.FINE, ""),  # noise: 2 sqrt(2) / 10 = 0.283
        ({"score": (0.0, -0.29)}, Kind.WORSE, "score was 0"),
        ({"kl": (0.0, 36.1)}, Kind.WORSE, "beyond reason"),  # 2.006 a token
        ({"kl": (0.0, 35.9)}, Kind.FINE, ""),
        ({"kl": (0.0, 29.0), "response_length": (5.0, 5.0)}, Kind.FINE, ""),
        ({"distinct_responses": (100.0, 1.0)}, Kind.WORSE, "all the same"),
        ({"distinct_responses": (3.0, 1.0)}, Kind.FINE, ""),
        ({"distinct_responses": (100.0, 1.0), "score": (0.0, -3.0)}, Kind.BROKEN, "all the same"),
        ({"response_length": (20.0, 1.0), "kl": (0.0, 3.0)}, Kind.BROKEN, "empty"),
        ({"response_length": (1.0, 1.0), "kl": (0.0, 1.0)}, Kind.FINE, ""),  # answers of one word
    ],
)
def test_step_3(changes, kind, word):
    verdict = of_ppo(rows(**GOOD | changes), prompts=100)
    assert verdict.kind == kind
    assert word in " ".join(verdict.seen)


@pytest.mark.parametrize(
    "score, error, kind",
    [
        (-0.21, 0.1, Kind.WORSE),
        (-0.19, 0.1, Kind.FINE),
        (-0.35, 0.2, Kind.FINE),
    ],
)
def test_noise_is_two_standard_errors_of_the_change(score, error, kind):
    assert of_ppo(rows(**GOOD | {"score": (0.0, score), "score_change_se": (0.0, error)}), prompts=100).kind == kind
    pairs = {"accuracy": (0.5, 0.7), "pair_loss": (0.7, 0.7 - score)}
    assert of_reward(rows(**pairs, pair_loss_change_se=(0.0, error))).kind == kind
    texts = rows(loss=(3.0, 3.0 - score), loss_change_se=(math.nan, error))
    assert of_sft(texts, VOCABULARY).kind == kind


def curve(scores: list[float], kl: float) -> list[dict]:
    metrics = {"objective/kl": kl, "rollout/response_length": 10.0}
    return [{"step": i, "samples": i, "objective/scores": score, **metrics} for i, score in enumerate(scores, 1)]


@pytest.mark.parametrize(
    "scores, kl, kind",
    [
        ([0.0, 0.01] * 5 + [1.0, 1.01] * 5, 5.0, Kind.FINE),
        ([1.0, 1.01] * 5 + [0.0, 0.01] * 5, 5.0, Kind.WORSE),
        ([0.0, 0.01] * 5 + [1.0, 1.01] * 5, 31.0, Kind.WORSE),
    ],
)
def test_without_held_out_prompts_the_training_curves_are_judged(scores, kl, kind):
    assert of_ppo(curve(scores, kl), prompts=0).kind == kind


def test_last_words(capsys):
    conclude(Verdict, "out")
    assert capsys.readouterr().out == "done: saved in out\n"
    conclude(lambda: Verdict(Kind.WORSE, ("It fell.",)), "out")
    said = capsys.readouterr().out
    assert said.startswith("WARNING: ") and "saved in out.\n  It fell.\n" in said and "done" not in said
    with pytest.raises(RunStopped, match=r"broken the model[^\n]*saved in out\.\n  It fell\."):
        conclude(lambda: Verdict(Kind.BROKEN, ("It fell.",)), "out")
