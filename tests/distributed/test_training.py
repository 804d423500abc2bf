"""Three training steps on two ranks: what is partitioned, what is frozen, what is averaged, what is whitened."""

import itertools
import math

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.reference import EMA
from engine.zero.engines import TrainedModel
from tests.distributed import plain
from tests.distributed.tiny_run import DIALECT, TinyPrompts, build_trainer, engine_spec, of_each, prompt_batch, timeless
from tests.engine.zero.inspecting import masters, partitioned, weights

EMA_DECAY = 0.9


def one_run(folder: str, stage: int, config: str, dtype: str = "fp32") -> dict:
    """Train three steps of 12 prompts in two generation batches, with an EMA."""
    trainer = build_trainer(engine_spec(folder, stage, config=config, dtype=dtype, ema_decay=EMA_DECAY))
    engine = trainer.models
    frozen = {"reference": engine.reference.model, "reward": engine.rewards[0].model}
    result = {
        "before": {name: weights(model) for name, model in frozen.items()},
        "critic": weights(engine.critic),
        "actor_after_steps": [masters(engine.actor)],
    }
    _watch_updates(engine.ema, result["actor_after_steps"])
    reports = list(trainer.fit(TinyPrompts(12)))
    result["metrics"] = [timeless(report.metrics) for report in reports]
    result["experience"] = reports[0].batch
    result["after"] = {name: weights(model) for name, model in frozen.items()}
    everyone = {"actor": engine.actor, "critic": engine.critic, **frozen}
    result["at_rest"] = {name: partitioned(model) for name, model in everyone.items()}
    result |= swapped(engine.actor, engine.ema)
    result["at_rest_after_swap"] = partitioned(engine.actor)
    return result


def _watch_updates(ema: EMA, log: list) -> None:
    def update():
        EMA.update(ema)
        log.append(masters(ema.actor))

    ema.update = update


def swapped(actor: TrainedModel, ema: EMA) -> dict:
    """Masters, weights, log-probs and the EMA's shards before, within and after `ema.swapped`."""

    def now() -> dict:
        return {"masters": masters(actor), "weights": weights(actor), "logprobs": _logprobs(actor)}

    shards = [shard.clone() for shard in ema.means]
    before = now()
    with ema.swapped():
        within = now()
    return {
        "before_swap": before,
        "within_swap": within,
        "after_swap": now(),
        "shards_before_swap": shards,
        "shards_after_swap": ema.means,
    }


def _logprobs(actor: TrainedModel) -> Tensor:
    """Of the last token of four prompts."""
    prompts = prompt_batch([0, 1, 2, 3])
    positions = prompts.attention_mask.cumsum(-1) - prompts.attention_mask
    return actor(prompts.input_ids, prompts.attention_mask, positions, response_length=1)[0].detach()


FLOAT32 = {
    "0": {"stage": 0, "config": "stage0.json"},
    "1": {"stage": 1, "config": "stage1.json"},
    "2": {"stage": 2, "config": "stage2.json"},
    "3": {"stage": 3, "config": "stage3.json"},
    "3_persistent": {"stage": 3, "config": "stage3_persistent.json"},
}
BFLOAT16 = {f"{name}_bf16": {**FLOAT32[name], "dtype": "bf16"} for name in ("2", "3_persistent")}
RUNS = FLOAT32 | BFLOAT16


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict]:
    """What both ranks found, by the names in RUNS."""
    return of_each("tests.distributed.test_training:one_run", RUNS, folder=folder)


def assert_same_bits(got: dict | list, expected: dict | list) -> None:
    """All tensors equal in dtype and bits."""
    assert len(got) == len(expected) > 0
    pairs = ((got[key], expected[key]) for key in expected) if isinstance(expected, dict) else zip(got, expected)
    for one, other in pairs:
        assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("model", ("actor", "critic", "reference", "reward"))
def test_zero3_parameters_are_partitioned_at_rest(ranks, model):
    for rank in ranks:
        rows = rank["3"]["at_rest"][model]
        assert len(rows) == 2 * 9 + 3  # nine of each layer; embedding, last norm and head
        for name, is_partitioned, here, whole in rows:
            assert is_partitioned, name
            assert here == math.ceil(whole / 2), name


def test_zero3_partitions_the_actor_again_after_a_swap(ranks):
    for rank in ranks:
        assert all(partitioned for _, partitioned, *_ in rank["3"]["at_rest_after_swap"])
        statuses = {name: partitioned for name, partitioned, *_ in rank["3_persistent"]["at_rest_after_swap"]}
        assert {name for name, partitioned in statuses.items() if not partitioned} == {
            name for name in statuses if "norm" in name
        }, "vectors, and only they, are below the threshold"


@pytest.mark.parametrize("model", ("reference", "reward"))
@pytest.mark.parametrize("run", RUNS)
def test_frozen_weights_are_bit_identical_to_the_files_after_training(ranks, folder, run, model):
    stored = load_file(f"{folder}/{'actor' if model == 'reference' else 'reward'}/model.safetensors")
    dtype = torch.bfloat16 if run.endswith("bf16") else torch.float32
    for rank in ranks:
        assert_same_bits(rank[run]["before"][model], {name: tensor.to(dtype) for name, tensor in stored.items()})
        assert_same_bits(rank[run]["after"][model], rank[run]["before"][model])


@pytest.mark.parametrize("run", RUNS)
def test_critic_starts_as_the_reward_model(ranks, run):
    for rank in ranks:
        assert_same_bits(rank[run]["critic"], rank[run]["before"]["reward"])


@pytest.mark.parametrize("run", RUNS)
def test_actor_is_trained_on_both_ranks_alike(ranks, run):
    one, other = (rank[run]["actor_after_steps"] for rank in ranks)
    assert len(one) == len(other) == 4
    for before, after in itertools.pairwise(one):
        assert all(not torch.equal(before[name], after[name]) for name in before)
    for left, right in zip(one, other):
        assert_same_bits(left, right)


@pytest.mark.parametrize("run", RUNS)
def test_ema_is_that_of_the_actors_weights_in_float64(ranks, run):
    for rank in ranks:
        steps = rank[run]["actor_after_steps"]
        average = {name: tensor.double() for name, tensor in steps[0].items()}
        for step in steps[1:]:
            average = {name: EMA_DECAY * average[name] + (1 - EMA_DECAY) * step[name].double() for name in average}
        within = rank[run]["within_swap"]
        moved = {name: average[name] - steps[0][name] for name in average}
        got = {name: within["masters"][name].double() - steps[0][name] for name in average}
        assert plain.relative_error(got, moved) < 1e-4  # of the movement; float32 rounds at 1e-7 of the weights
        assert plain.relative_error(within["masters"], average) < 1e-7
        assert plain.relative_error(got, {name: moved[name] * EMA_DECAY for name in moved}) > 1e-2


@pytest.mark.parametrize("run", RUNS)
def test_swapped_computes_with_the_averaged_weights(ranks, folder, run):
    rank = ranks[0][run]
    dtype = torch.bfloat16 if run.endswith("bf16") else torch.float32
    assert_same_bits(
        rank["within_swap"]["weights"],
        {name: tensor.to(dtype) for name, tensor in rank["within_swap"]["masters"].items()},
    )
    model, prompts = plain.policy(folder), prompt_batch([0, 1, 2, 3])
    model.load_state_dict({name: tensor.double() for name, tensor in rank["within_swap"]["weights"].items()})
    mask = prompts.attention_mask
    with torch.no_grad():
        logits = model(
            input_ids=prompts.input_ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)
        ).logits[:, -2]
    expected = logits.log_softmax(-1).gather(-1, prompts.input_ids[:, -1:])
    tolerance = 0.2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(rank["within_swap"]["logprobs"].double(), expected, rtol=0, atol=tolerance)
    assert not torch.equal(rank["within_swap"]["logprobs"], rank["before_swap"]["logprobs"])


@pytest.mark.parametrize("run", RUNS)
def test_swapped_puts_everything_back(ranks, run):
    for rank in ranks:
        found = rank[run]
        assert_same_bits(found["after_swap"]["masters"], found["before_swap"]["masters"])
        assert_same_bits(found["after_swap"]["weights"], found["before_swap"]["weights"])
        assert torch.equal(found["after_swap"]["logprobs"], found["before_swap"]["logprobs"])
        assert_same_bits(found["shards_after_swap"], found["shards_before_swap"])


@pytest.mark.parametrize("run", FLOAT32)
def test_ratio_is_one_before_each_rollouts_first_update(ranks, run):
    """With one epoch and one mini-batch every update is its rollout's first."""
    for metrics in ranks[0][run]["metrics"]:
        assert metrics["policy/ratio_mean"] == pytest.approx(1, abs=1e-5)
        assert metrics["policy/ratio_max"] == pytest.approx(1, abs=1e-4)
        assert metrics["policy/approxkl"] < 1e-9
        assert metrics["policy/clipfrac"] == 0


@pytest.mark.parametrize("run", FLOAT32)
def test_stages_give_the_same_curves(ranks, run):
    for got, expected in zip(ranks[1][run]["metrics"], ranks[0]["0"]["metrics"], strict=True):
        assert got == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("run", ("0", "3"))
def test_advantages_are_whitened_over_both_ranks(ranks, run):
    """GAE by its definition as a sum, then one mean and one variance over the tokens of both ranks."""
    both = [rank[run]["experience"] for rank in ranks]
    raw = [advantages_by_sums(experience) for experience in both]
    tokens = torch.cat([advantages[experience.policy_mask] for advantages, experience in zip(raw, both)])
    shift, scale = tokens.mean(), tokens.std(correction=0)
    for experience, advantages in zip(both, raw):
        mask = experience.policy_mask
        expected = ((advantages - shift) / scale)[mask]
        torch.testing.assert_close(experience.advantages[mask].double(), expected, rtol=1e-4, atol=1e-5)
        own = ((advantages - advantages[mask].mean()) / advantages[mask].std(correction=0))[mask]
        assert (own - expected).abs().max() > 1e-2, "the ranks' own statistics would not have done"


def advantages_by_sums(experience) -> torch.Tensor:
    """A_t = sum over k of (gamma lambda)^k d_{t+k}, d_t = r_t + gamma V_{t+1} - V_t, all zero after the response."""
    rewards, values = experience.rewards.double(), experience.values.double()
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
    errors = rewards + DIALECT.gamma * following - values
    slots = torch.arange(errors.shape[1])
    distance = slots.unsqueeze(0) - slots.unsqueeze(1)  # [t, s] = s - t
    decay = torch.where(distance >= 0, (DIALECT.gamma * DIALECT.lam) ** distance.clamp(min=0).double(), 0.0)
    return errors @ decay.T
