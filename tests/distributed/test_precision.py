"""fp16 and bf16 train at stages 0, 2 and 3; in fp16 actor and critic are skipped together when one overflows."""

import pytest
import torch

from scripts.harness.ranks import run_ranks
from tests.distributed import plain
from tests.distributed.work_precision import ROUNDS, STEADY

STAGES = (0, 2, 3)
MODELS = ("actor", "critic")
LOSS_SCALE = 2.0**8  # what the JSON files start with


@pytest.fixture(scope="module")
def fp16(folder) -> list[dict]:
    return run_ranks("tests.distributed.work_precision:all_stages", folder=folder, dtype="fp16", stages=STAGES)


@pytest.fixture(scope="module")
def bf16(folder) -> list[dict]:
    return run_ranks("tests.distributed.work_precision:all_stages", folder=folder, dtype="bf16", stages=STAGES)


@pytest.fixture(params=("fp16", "bf16"))
def ranks(request) -> list[dict]:
    """What both ranks found, by stage."""
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("stage", STAGES)
def test_losses_fall(ranks, stage):
    rounds = ranks[0][stage]["rounds"]
    assert len(rounds) == ROUNDS
    assert rounds[-1]["policy/loss"] < rounds[0]["policy/loss"] - 0.02
    assert rounds[-1]["value/loss"] < 0.95 * rounds[0]["value/loss"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stage", STAGES)
def test_every_weight_moves_and_stays_finite(ranks, stage, model):
    for rank in ranks:
        before, after = rank[stage]["untrained"][model], rank[stage]["trained"][model]
        assert after["version"] == before["version"] + ROUNDS
        for name, master in after["masters"].items():
            assert master.isfinite().all() and not torch.equal(master, before["masters"][name]), name
            dtype = after["weights"][name].dtype
            assert dtype != torch.float32 and torch.equal(after["weights"][name], master.to(dtype)), name


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_have_the_same_weights(ranks, stage):
    one, other = (rank[stage]["trained"] for rank in ranks)
    for model in MODELS:
        assert all(torch.equal(other[model]["weights"][name], weight) for name, weight in one[model]["weights"].items())


def plain_gradients(folder: str, both: list, weights: dict[str, dict]) -> dict[str, dict]:
    """Of the mean over the tokens of both ranks' experiences, at these weights, for actor and critic."""
    models = {"actor": plain.policy(folder), "critic": plain.critic(folder)}
    for name, model in models.items():
        model.load_state_dict({key: tensor.double() for key, tensor in weights[name].items()})
    sums = {
        "actor": sum(plain.policy_losses(models["actor"], part, 1.0, STEADY.clip_range).sum() for part in both),
        "critic": sum(plain.value_losses(models["critic"], part, STEADY.value_clip_range).sum() for part in both),
    }
    counts = {
        "actor": sum(part.policy_mask.sum() for part in both),
        "critic": sum(part.value_mask.sum() for part in both),
    }
    return {name: plain.gradients(model, sums[name] / counts[name]) for name, model in models.items()}


@pytest.mark.parametrize("stage", STAGES)
def test_gradient_norms_are_reported_without_the_loss_scale(ranks, folder, stage):
    weights = {model: ranks[0][stage]["untrained"][model]["weights"] for model in MODELS}
    expected = plain_gradients(folder, [rank[stage]["experience"] for rank in ranks], weights)
    first = ranks[0][stage]["rounds"][0]
    for model, name in (("actor", "policy"), ("critic", "value")):
        assert first[f"{name}/grad_norm"] == pytest.approx(plain.norm(expected[model]), rel=0.1)


@pytest.mark.parametrize("stage", STAGES)
def test_the_optimizer_is_given_the_gradient_without_the_loss_scale(ranks, folder, stage):
    """Also in steps after which the scale grows: halved there, the mean of six gradients would be off by 20 %."""
    found = ranks[0][stage]["repeated"]
    expected = plain_gradients(
        folder,
        [rank[stage]["repeated"]["experience"] for rank in ranks],
        {model: found[model]["weights"] for model in MODELS},
    )
    for model in MODELS:
        fp16 = found[model]["weights"]["score.weight" if model == "critic" else "lm_head.weight"].dtype == torch.float16
        assert found[model]["loss_scale"] > LOSS_SCALE if fp16 else found[model]["loss_scale"] == 1
        got = {name: moment / (1 - STEADY.betas[0] ** ROUNDS) for name, moment in found[model]["moments"].items()}
        assert plain.relative_error(got, expected[model]) < (0.02 if fp16 else 0.1)


def assert_unchanged(before: dict, after: dict, model: str) -> None:
    for kind in ("weights", "masters"):
        assert all(torch.equal(after[model][kind][name], tensor) for name, tensor in before[model][kind].items())
    assert after[model]["version"] == before[model]["version"]


def assert_moved(before: dict, after: dict, model: str) -> None:
    assert all(
        not torch.equal(after[model]["masters"][name], tensor) for name, tensor in before[model]["masters"].items()
    )
    assert after[model]["version"] == before[model]["version"] + 1


@pytest.mark.parametrize("overflowing", MODELS)
@pytest.mark.parametrize("stage", STAGES)
def test_overflow_in_one_model_on_one_rank_skips_both(fp16, stage, overflowing):
    events = list(fp16[0][stage]["events"])
    for rank in fp16:
        states = rank[stage]["events"]
        after = states[f"{overflowing} overflows"]
        before = states[events[events.index(f"{overflowing} overflows") - 1]]
        for model in MODELS:
            assert_unchanged(before, after, model)
            factor = 0.5 if model == overflowing else 1.0
            assert after[model]["loss_scale"] == factor * before[model]["loss_scale"]
        assert all(torch.equal(one, other) for one, other in zip(after["ema"], before["ema"], strict=True))
        assert not {"policy/grad_norm", "value/grad_norm"} & after["metrics"].keys()


@pytest.mark.parametrize("stage", STAGES)
def test_steps_around_the_overflows_train_both(fp16, stage):
    for rank in fp16:
        states = rank[stage]["events"]
        for model in MODELS:
            assert states["first step"][model]["loss_scale"] == LOSS_SCALE
            assert_moved(rank[stage]["untrained"], states["first step"], model)
            assert_moved(states["actor overflows"], states["last step"], model)
        assert not any(
            torch.equal(one, other) for one, other in zip(states["last step"]["ema"], states["actor overflows"]["ema"])
        )
        assert {"policy/grad_norm", "value/grad_norm"} <= states["last step"]["metrics"].keys()
