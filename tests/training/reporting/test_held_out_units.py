"""What is measured of held-out texts and pairs, and the metrics that it comes to; numbers worked out by hand."""

import math

import pytest
import torch

from training.reporting.standard_errors import gathered
from training.step1_sft import held_out_loss
from training.step2_reward import held_out_pairs


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
