"""Standard errors, and what is measured of held-out texts and pairs; numbers worked out by hand."""

import math
import statistics

import pytest
import torch

from training.reporting.standard_errors import (
    Estimate,
    chance_text,
    change_text,
    gathered,
    metrics_text,
    with_error,
    with_errors,
    within_noise,
)
from training.step1_sft import held_out_loss
from training.step2_reward import held_out_pairs


def test_of_a_mean_and_of_its_change():
    before, after = Estimate.of([0.0, 2.0, 2.0, 4.0]), Estimate.of([1.0, 2.0, 3.0, 6.0])
    assert after.value == 3.0
    assert after.error == pytest.approx(math.sqrt(14 / 3 / 4))  # squares of -2 -1 0 3, over 3: the variance
    assert after.change_error(before) == pytest.approx(math.sqrt(2 / 3 / 4))  # of the differences 1 0 1 2


def test_of_a_ratio_is_over_units_not_over_what_they_hold():
    nats, tokens = [2.0, 6.0, 4.0], [1, 2, 3]
    loss = Estimate.of(nats, tokens)
    assert loss.value == 2.0
    assert loss.error == pytest.approx(math.sqrt(3 / 2 * 8) / 6)  # nats less 2 a token: 0 2 -2
    before = Estimate.of([3.0, 9.0, 6.0], tokens)  # 3 a token; 0 3 -3
    assert loss.change_error(before) == pytest.approx(math.sqrt(3 / 2 * 2) / 6)
    # Texts of one length: their means are as good.
    equal = Estimate.of([2.0, 6.0, 4.0], [2, 2, 2])
    assert equal.error == pytest.approx(statistics.stdev([1.0, 3.0, 2.0]) / math.sqrt(3))


def test_of_a_perplexity():
    loss = Estimate.of([1.0, 3.0, 2.0], [1, 1, 1])
    perplexity = loss.exp()
    assert perplexity.value == pytest.approx(math.exp(2.0))
    assert perplexity.error == pytest.approx(math.exp(2.0) * loss.error)
    too_large = Estimate.of([800.0, 900.0]).exp()
    assert too_large.value == math.inf and too_large.error is None


def test_metrics():
    before, after = {"eval/a": Estimate.of([0.0, 2.0])}, {"eval/a": Estimate.of([2.0, 2.0])}
    assert with_errors(before) == {"eval/a": 1.0, "eval/a_se": 1.0}
    assert with_errors(after, before) == {
        "eval/a": 2.0,
        "eval/a_se": 0.0,
        "eval/a_change": 1.0,
        "eval/a_change_se": 1.0,
    }


def test_what_does_not_tell_has_no_error():
    assert with_errors({"a": Estimate.of([2.0])}) == {"a": 2.0}  # one unit
    found = with_errors({"a": Estimate.of([2.0, math.nan])}, {"a": Estimate.of([1.0, 1.0])})
    assert set(found) == {"a", "a_change"} and math.isnan(found["a"])


def test_noise_is_two_standard_errors():
    assert within_noise(-0.2, 0.1) and not within_noise(-0.21, 0.1)
    assert within_noise(0.0, 0.0)
    assert with_error(1.25, 0.11) == "1.250 ± 0.110"
    assert with_error(1.25, None, sign="+") == "+1.250"
    assert with_error(1024.1234, 20.06) == "1024.1 ± 20.1" and with_error(-999.9, 1000.04) == "-999.9 ± 1000.0"


def test_last_words():
    metrics = {"a": 12.3456, "a_se": 0.2134, "a_change": -1.5, "a_change_se": 0.5, "b": 1.0}
    assert metrics_text(metrics) == "a 12.35 ± 0.21, b 1"
    assert change_text(metrics, "a") == " (changed by -1.5 ± 0.5)"
    assert (
        change_text(metrics | {"a_change": 0.75}, "a") == " (changed by +0.75 ± 0.5, within noise (2 standard errors))"
    )
    assert change_text(metrics, "b") == ""
    assert change_text({"a": 0.5, "a_change": 0.0, "a_change_se": 0.0}, "a") == " (unchanged)"


@pytest.mark.parametrize(
    "value, error, told", [(0.5, 0.093, True), (0.7, 0.1, True), (0.71, 0.1, False), (0.2, 0.0, True)]
)
def test_a_share_that_is_no_better_than_chance(value, error, told):
    """0.5 + 2 * 0.1 is 0.7."""
    assert chance_text({"a": value, "a_se": error}, "a", 0.5) == ("; no better than chance (0.5)" if told else "")


def test_what_rounds_to_nothing_has_no_sign():
    assert with_error(-4e-7, 0.0) == "0.000 ± 0.000"
    assert with_error(-4e-7, 0.0, sign="+") == "+0.000 ± 0.000"
    assert with_error(-0.0006, None) == "-0.001"


def test_examples_stand_in_their_order_and_what_fills_a_batch_up_is_left_out():
    parts = [
        ([2, 0], {"nats": torch.tensor([3.0, 1.0]), "tokens": torch.tensor([4, 2])}),
        ([1], {"nats": torch.tensor([2.0, math.nan]), "tokens": torch.tensor([3, 9])}),
        ([], {"nats": torch.tensor([math.nan]), "tokens": torch.tensor([9])}),
    ]
    assert gathered(3, parts) == {"nats": [1.0, 2.0, 3.0], "tokens": [2.0, 3.0, 4.0]}


def test_step_1_has_the_error_of_texts_not_of_tokens():
    before = {"nats": [3.0, 9.0, 6.0], "tokens": [1.0, 2.0, 3.0]}
    after = {"nats": [2.0, 6.0, 4.0], "tokens": [1.0, 2.0, 3.0]}
    metrics = held_out_loss(after, before)
    assert metrics["eval/loss"] == 2.0 and metrics["eval/loss_change"] == -1.0
    assert metrics["eval/loss_se"] == pytest.approx(math.sqrt(12) / 6)  # as test_standard_errors.py has it
    assert metrics["eval/loss_change_se"] == pytest.approx(math.sqrt(3) / 6)
    assert metrics["eval/perplexity"] == pytest.approx(math.e**2)
    assert metrics["eval/perplexity_se"] == pytest.approx(math.e**2 * math.sqrt(12) / 6)
    assert metrics["eval/perplexity_change"] == pytest.approx(math.e**2 - math.e**3)
    assert set(held_out_loss(after, None)) == {"eval/loss", "eval/loss_se", "eval/perplexity", "eval/perplexity_se"}
    assert held_out_loss({"nats": [800.0, 900.0], "tokens": [1.0, 1.0]}, None)["eval/perplexity"] == math.inf


def test_step_2():
    before, after = {"margin": [-1.0, 0.0, 1.0, 2.0]}, {"margin": [1.0, 1.0, -1.0, 3.0]}
    metrics = held_out_pairs(after, before)
    assert metrics["eval/accuracy"] == 0.75  # before: a half, as no margin is no better response
    assert metrics["eval/accuracy_se"] == pytest.approx(0.25)  # 1 1 0 1: squares 3/4, over 3 and 4
    assert metrics["eval/accuracy_change"] == 0.25
    assert metrics["eval/accuracy_change_se"] == pytest.approx(math.sqrt(11 / 4 / 3 / 4))  # of 1 1 -1 0
    assert metrics["eval/margin"] == 1.0 and metrics["eval/margin_change"] == 0.5
    assert metrics["eval/margin_std"] == pytest.approx(math.sqrt(2))  # squares of 0 0 -2 2, over 4
    assert metrics["eval/margin_se"] == pytest.approx(math.sqrt(8 / 3 / 4))
    losses = [math.log(1 + math.exp(-margin)) for margin in after["margin"]]
    assert metrics["eval/pair_loss"] == pytest.approx(sum(losses) / 4)
    assert held_out_pairs({"margin": [-2000.0, -2000.0]}, None)["eval/pair_loss"] == 2000.0


@pytest.mark.filterwarnings("error")
def test_a_loss_that_is_no_number_has_no_error():
    assert math.isinf(held_out_loss({"nats": [math.inf, 1.0], "tokens": [1.0, 1.0]}, None)["eval/perplexity"])
    assert math.isnan(held_out_pairs({"margin": [math.nan, 1.0]}, None)["eval/pair_loss"])
    assert "eval/pair_loss_se" not in held_out_pairs({"margin": [math.nan, 1.0]}, None)
