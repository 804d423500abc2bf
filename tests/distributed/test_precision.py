"""Training in fp16 and bf16: loss scales, overflows, and what masters and averages are held in."""

import contextlib

import pytest
import torch

from engine import distributed
from engine.engine_spec import OptimizerSpec
from engine.zero.engines import TrainedModel
from engine.zero.training_state import MOMENTS, moment_of
from scripts.harness.ranks import run_ranks
from tests.distributed import plain
from tests.distributed.tiny_run import DIALECT, TinyPrompts, build_trainer, engine_spec, timeless
from tests.engine.zero.inspecting import masters, moments, pretend_cpus_have_fp16, weights
from tests.engine.zero.shard_memory import InMemory, whole
from training.ppo_trainer import PPOTrainer
from training.reporting.metrics import Accumulator

STEADY = DIALECT.override(lr_schedule="constant", warmup_steps=0)
STILL = STEADY.override(actor_lr=0.0, critic_lr=0.0)
ROUNDS = 6


def all_stages(folder: str, dtype: str, stages: tuple[int, ...]) -> dict[int, dict]:
    """What the functions below return, by stage."""
    pretend_cpus_have_fp16()
    return {
        stage: training(folder, dtype, stage)
        | repeated_gradient(folder, dtype, stage)
        | (joint_skips(folder, dtype, stage) if dtype == "fp16" else {})
        for stage in stages
    }


def training(folder: str, dtype: str, stage: int) -> dict:
    """One step, then ROUNDS - 1 more optimizer steps on the same experience."""
    trainer = build_trainer(engine_spec(folder, stage, dtype=dtype, config=f"stage{stage}.json"), dialect=STEADY)
    before = everything(trainer)
    report = trainer.step(TinyPrompts(8).prompts(0))
    rounds = [timeless(report.metrics)]
    for _ in range(ROUNDS - 1):
        metrics = Accumulator()
        trainer.train_actor_and_critic(report.batch, 0.0, metrics)
        rounds.append(metrics.reduce())
    return {"experience": report.batch, "rounds": rounds, "untrained": before, "trained": everything(trainer)}


def repeated_gradient(folder: str, dtype: str, stage: int) -> dict:
    """Adam's first moments after ROUNDS unclipped steps at learning rate 0, in which the fp16 loss scale has grown."""
    still = OptimizerSpec(lr=0.0, betas=STILL.betas, max_grad_norm=0.0)
    spec = engine_spec(
        folder, stage, dtype=dtype, config=f"stage{stage}_growing.json", actor_optimizer=still, critic_optimizer=still
    )
    trainer = build_trainer(spec, dialect=STILL)
    report = trainer.step(TinyPrompts(8).prompts(0))
    for _ in range(ROUNDS - 1):
        trainer.train_actor_and_critic(report.batch, 0.0, Accumulator())
    found = {
        name: {"moments": moments(model), "weights": weights(model), "loss_scale": model.loss_scale}
        for name, model in (("actor", trainer.models.actor), ("critic", trainer.models.critic))
    }
    return {"repeated": found | {"experience": report.batch}}


def joint_skips(folder: str, dtype: str, stage: int) -> dict:
    """What everything is after a step, one in which the critic overflows, one in which the actor does, and a step."""
    spec = engine_spec(folder, stage, dtype=dtype, config=f"stage{stage}.json", ema_decay=0.5)
    trainer = build_trainer(spec, dialect=STEADY)
    feed, states = TinyPrompts(8), {}
    events = {
        "first step": None,
        "critic overflows": trainer.models.critic,
        "actor overflows": trainer.models.actor,
        "last step": None,
    }
    for event, overflowing in events.items():
        with overflow_on_last_rank(overflowing):
            report = trainer.step(feed.prompts(len(states)))
        states[event] = everything(trainer) | {"metrics": timeless(report.metrics)}
    return {"events": states}


@contextlib.contextmanager
def overflow_on_last_rank(model: TrainedModel | None):
    """Within this context the model's gradients are infinite on the last rank; the others' are as they should be."""
    if model is None:
        yield
        return
    factor = 1e12 if distributed.rank() == distributed.world_size() - 1 else 1.0
    model.backward = lambda loss, last: TrainedModel.backward(model, loss * factor, last)
    yield
    del model.backward


def everything(trainer: PPOTrainer) -> dict:
    """All that a step may change in the engines (all ranks call this)."""
    engine = trainer.models
    found = {"ema": [shard.clone() for shard in engine.ema.means] if engine.ema else []}
    for name, model in (("actor", engine.actor), ("critic", engine.critic)):
        found[name] = {
            "weights": weights(model),
            "masters": masters(model),
            "loss_scale": model.loss_scale,
            "version": model.version,
        }
    return found


STAGES = (0, 2, 3)
MODELS = ("actor", "critic")
LOSS_SCALE = 2.0**8  # what the JSON files start with


@pytest.fixture(scope="module")
def fp16(folder) -> list[dict]:
    return run_ranks("tests.distributed.test_precision:all_stages", folder=folder, dtype="fp16", stages=STAGES)


@pytest.fixture(scope="module")
def bf16(folder) -> list[dict]:
    return run_ranks("tests.distributed.test_precision:all_stages", folder=folder, dtype="bf16", stages=STAGES)


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


MASTER_ROUNDS = 6


def both(folder: str, stages: tuple[int, ...]) -> dict[int, dict]:
    """What `with_masters` returns, by stage."""
    return {stage: with_masters(folder, stage) for stage in stages}


def with_masters(folder: str, stage: int) -> dict:
    """A step and more rounds on its experience; then what everything is, while the averages are swapped in, after
    that, and in new engines that have been given the shards."""
    spec = engine_spec(folder, stage, dtype="bf16", config=f"stage{stage}_bf16.json", ema_decay=0.5)
    trainer = build_trainer(spec, dialect=STEADY)
    actor, ema, metrics = trainer.models.actor, trainer.models.ema, Accumulator()
    untrained = masters(actor)
    report = trainer.step(TinyPrompts(8).prompts(0))
    for _ in range(MASTER_ROUNDS - 1):
        metrics = Accumulator()
        trainer.train_actor_and_critic(report.batch, 0.0, metrics)
    found = {"losses": (report.metrics["policy/loss"], metrics.reduce()["policy/loss"]), "untrained": untrained}
    found["trained"] = actor_state(trainer)
    means = [mean.clone() for mean in ema.means]
    with ema.swapped():
        swapped = [shard.clone() for shard in actor.master_shards()]
        found["swapped"] = all(shard.equal(mean.to(shard.dtype)) for shard, mean in zip(swapped, means, strict=True))
    found["after"] = actor_state(trainer)
    other = build_trainer(spec, dialect=STEADY)
    other.models.actor.load_shards(_source(actor.shards()), actor.scalars())
    other.models.ema.load_shards(_source(ema.shards()))
    found["restored"] = actor_state(other)
    return found


def actor_state(trainer) -> dict:
    """The actor's state (all ranks call this)."""
    actor = trainer.models.actor
    held = [(master.adam, master.tensor) for master in actor.state.stage.masters()]
    return {
        "weights": weights(actor),
        "masters": [shard.clone() for shard in actor.master_shards()],
        "moments": [moment_of(adam, tensor, moment).clone() for adam, tensor in held for moment in MOMENTS],
        "means": [mean.clone() for mean in trainer.models.ema.means],
    }


def _source(shards) -> InMemory:
    return InMemory(whole([shard for part in distributed.all_gather_objects(shards) for shard in part]))


MASTER_STAGES = (1, 2, 3)


@pytest.fixture(scope="module")
def masters_of_ranks(folder) -> list[dict]:
    return run_ranks("tests.distributed.test_precision:both", folder=folder, stages=MASTER_STAGES)


@pytest.mark.parametrize("stage", MASTER_STAGES)
def test_masters_and_moments_are_in_16_bits_and_averages_in_32(masters_of_ranks, stage):
    for rank in masters_of_ranks:
        found = rank[stage]["trained"]
        assert {tensor.dtype for name in ("weights", "masters", "moments") for tensor in _all(found[name])} == {
            torch.bfloat16
        }
        assert {mean.dtype for mean in found["means"]} == {torch.float32}
        assert any((mean != mean.bfloat16()).any() for mean in found["means"])  # more than bfloat16 holds


@pytest.mark.parametrize("stage", MASTER_STAGES)
def test_after_the_averages_were_swapped_in_all_is_as_before(masters_of_ranks, stage):
    for rank in masters_of_ranks:
        assert rank[stage]["swapped"] and _equal(rank[stage]["trained"], rank[stage]["after"])


@pytest.mark.parametrize("stage", MASTER_STAGES)
def test_a_restart_point_has_all_of_it(masters_of_ranks, stage):
    for rank in masters_of_ranks:
        assert _equal(rank[stage]["trained"], rank[stage]["restored"])


def _all(tensors) -> list[torch.Tensor]:
    return list(tensors.values()) if isinstance(tensors, dict) else tensors


def _equal(one: dict, other: dict) -> bool:
    return all(
        len(one[name]) == len(other[name])
        and all(torch.equal(a, b) for a, b in zip(_all(one[name]), _all(other[name])))
        for name in one
    )


POWER, UPDATES, RESPONSES = 40, 4, 8
