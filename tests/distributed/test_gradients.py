"""Gradients and updates of two ranks at every ZeRO stage are those of one process that sees the whole batch at once.

Rows and responses are ragged, and the ranks have three micro-batches and one. Without padding, and with rows that the
two ranks split, they are the same, too.
"""

import pytest
import torch

from engine.experience import TrainingBatch
from scripts.harness.ranks import run_ranks
from tests.distributed import plain
from tests.distributed.work_gradients import BONUS, LEARNING_RATE, MOVING, ROWS, STILL, TEMPERATURE

STAGES = {
    "0": (0, "stage0.json"),
    "1": (1, "stage1.json"),
    "2": (2, "stage2.json"),
    "3": (3, "stage3.json"),
    "3_persistent": (3, "stage3_persistent.json"),
    "3_packed": (3, "stage3.json", "packed"),
    "0_split": (0, "stage0.json", "packed", 2),
    "3_split": (3, "stage3.json", "packed", 2),
}
MODELS = ("actor", "critic")
MICRO_BATCHES = ((0, 2), (2, 4), (4, 5), (5, 7))  # of both ranks
CLOSE = 1e-5


@pytest.fixture(scope="session")
def ranks(folder, batch) -> list[dict]:
    """What both ranks found, by the names in STAGES."""
    return run_ranks("tests.distributed.work_gradients:all_stages", folder=folder, batch=batch, stages=STAGES)


def losses(name: str, model, batch: TrainingBatch, bonus: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of all tokens, and which of them count. bonus: the coefficient of the policy's entropies."""
    if name == "actor":
        entropies = plain.entropies(model, batch.rollout, TEMPERATURE).masked_fill(~batch.policy_mask, 0.0)
        each = plain.policy_losses(model, batch, TEMPERATURE, STILL.clip_range)
        return each - bonus * entropies, batch.policy_mask
    return plain.value_losses(model, batch, STILL.value_clip_range), batch.value_mask


def plain_model(name: str, folder: str, actor: str = "actor"):
    return plain.policy(folder, actor) if name == "actor" else plain.critic(folder)


@pytest.fixture(scope="session")
def expected(folder, batch) -> dict:
    """Gradients of one process: mean over all tokens, and mean of the micro-batches' means."""
    found = {}
    for name in MODELS:
        for kind, actor, bonus in (("right", "actor", 0.0), ("bonus", "actor", BONUS), ("tied", "tied", BONUS)):
            model = plain_model(name, folder, actor)
            each, counted = losses(name, model, batch, bonus)
            found[kind, name] = plain.gradients(model, each.sum() / counted.sum())
        model = plain_model(name, folder)
        each, counted = losses(name, model, batch)
        means = [each[start:end].sum() / counted[start:end].sum() for start, end in MICRO_BATCHES]
        found["mean_of_means", name] = plain.gradients(model, torch.stack(means).mean())
    return found


def test_the_case_is_hard_enough(folder, batch):
    """Both clips are active, the ranks' token counts differ by far, and micro-batches are unequally many."""
    with torch.no_grad():
        ratio = (plain.logprobs(plain.policy(folder), batch.rollout, TEMPERATURE) - batch.logprobs).exp()
        moved = plain.values(plain.critic(folder), batch.rollout) - batch.values
    mask = batch.policy_mask
    assert ((ratio - 1).abs() > STILL.clip_range)[mask].sum() >= 5
    assert (moved.abs() > STILL.value_clip_range)[batch.value_mask].sum() >= 5
    assert [int(mask[start:end].sum()) for start, end in ROWS] == [18, 3]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stage", STAGES)
def test_gradient_is_that_of_one_process(ranks, expected, stage, model):
    for rank in ranks:
        assert plain.relative_error(rank[stage]["right"][model], expected["right", model]) < CLOSE
        for name, gradient in expected["right", model].items():
            assert plain.relative_error({name: rank[stage]["right"][model][name]}, {name: gradient}) < 10 * CLOSE, name


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stage", STAGES)
def test_gradient_is_the_same_where_one_rank_has_all_the_rows(ranks, expected, stage, model):
    for rank in ranks:
        assert plain.relative_error(rank[stage]["one_sided"][model], expected["right", model]) < CLOSE


@pytest.mark.parametrize("kind", ("bonus", "one_sided_bonus"))
@pytest.mark.parametrize("stage", STAGES)
def test_gradient_with_an_entropy_bonus_is_that_of_one_process(ranks, expected, stage, kind):
    assert plain.relative_error(expected["right", "actor"], expected["bonus", "actor"]) > 0.05  # so that it is seen
    for rank in ranks:
        assert plain.relative_error(rank[stage][kind]["actor"], expected["bonus", "actor"]) < CLOSE


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stage", STAGES)
def test_gradient_with_tied_embeddings_and_checkpointing_is_that_of_one_process(ranks, expected, stage, model):
    for rank in ranks:
        assert plain.relative_error(rank[stage]["tied"][model], expected["tied", model]) < CLOSE


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("wrong", ("scaled", "mean_of_means"))
@pytest.mark.parametrize("stage", STAGES)
def test_a_wrong_loss_is_told_from_the_right_one(ranks, expected, stage, wrong, model):
    for rank in ranks:
        assert plain.relative_error(rank[stage][wrong][model], expected["right", model]) > 1e-3


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stage", STAGES)
def test_mean_of_means_where_a_dialect_wants_it(ranks, expected, stage, model):
    for rank in ranks:
        assert plain.relative_error(rank[stage]["mean_of_means"][model], expected["mean_of_means", model]) < CLOSE


@pytest.mark.parametrize("stage", STAGES)
def test_loss_and_gradient_norm_are_reported_as_they_are(ranks, expected, folder, batch, stage):
    for name, metric in (("actor", "policy"), ("critic", "value")):
        each, counted = losses(name, plain_model(name, folder), batch)
        for rank in ranks:
            metrics = rank[stage]["right"]["metrics"]
            assert metrics[f"{metric}/loss"] == pytest.approx((each.sum() / counted.sum()).item(), rel=CLOSE)
            assert metrics[f"{metric}/grad_norm"] == pytest.approx(plain.norm(expected["right", name]), rel=CLOSE)


@pytest.fixture(scope="session")
def moved(folder, batch) -> dict:
    """Weights before and after two steps of plain AdamW with clipping."""
    found = {}
    for name in MODELS:
        model = plain_model(name, folder, "tied")
        before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
        adam = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, betas=MOVING.betas, eps=MOVING.eps, weight_decay=0.0
        )
        for _ in range(2):
            each, counted = losses(name, model, batch, BONUS)
            adam.zero_grad()
            (each.sum() / counted.sum()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MOVING.max_grad_norm)
            adam.step()
        found[name] = before, dict(model.named_parameters())
    return found


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stage", STAGES)
def test_two_steps_move_the_weights_as_plain_adam_does(ranks, moved, stage, model):
    before, after = moved[model]
    expected = {name: after[name] - before[name] for name in before}
    for rank in ranks:
        got = {name: rank[stage]["moved"][model][name].double() - before[name] for name in before}
        assert plain.relative_error(got, expected) < 1e-3  # Adam blows up what is small: 1e-6 of a gradient, at most
