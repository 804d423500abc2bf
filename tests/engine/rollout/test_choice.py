"""Which backend `build_rollouts` takes at which stage and with how much free memory, and what it says of it."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from engine.actor_copy import copies_bytes
from engine.errors import UserError
from engine.models.policy import Policy, Scorer
from engine.rollout import ReplicaRollouts, Zero3Rollouts, build_rollouts
from engine.rollout.placement import KEPT, MOST, place_copy
from scripts.harness.models import make_tokenizer

ROLES = ("actor", "critic", "reference", "reward model")
WIDTH, VOCABULARY, LAYERS, HEADS, KEPT_HEADS = 16, 100, 2, 4, 2
# By hand: a layer has four projections (keys and values half as wide), three of the MLP, two norms.
LAYER = 2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH // 2 + 3 * WIDTH * 24 + 2 * WIDTH
TRUNK = VOCABULARY * WIDTH + LAYERS * LAYER + WIDTH
POLICY, SCORER = TRUNK + VOCABULARY * WIDTH, TRUNK + WIDTH
GRADIENTS = 4 * (POLICY + SCORER)  # bytes, of actor and critic, on one rank
ROWS, LENGTH = 3, 20
SLOTS = LENGTH + 8 + 64  # of a row: what is drawn between two looks, and room for prompts that wait
CACHE = 4 * ROWS * SLOTS * 2 * LAYERS * KEPT_HEADS * WIDTH // HEADS


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEPT_HEADS,
        num_labels=1,
        pad_token_id=0,
    )


def engines(stage: int) -> list[SimpleNamespace]:
    """Actor, critic, reference, reward model as `build_rollouts` sees them."""
    learning, frozen = (
        (Policy(LlamaForCausalLM(config())), Scorer(LlamaForSequenceClassification(config()))) for _ in range(2)
    )
    for module in frozen:
        module.requires_grad_(False)
    found = [
        SimpleNamespace(stage=stage, module=module, role=role, copy=None)
        for role, module in zip(ROLES, (*learning, *frozen), strict=True)
    ]
    for engine in found:
        engine.host = engine
    return found


def chosen(models: list, free: float, monkeypatch, **how):
    monkeypatch.setattr("engine.zero.accelerator.free_memory", lambda: int(free))
    return build_rollouts(
        "auto", models[0], make_tokenizer(), others=models, rows_at_once=ROWS, row_length=LENGTH, **how
    )


@pytest.mark.parametrize("stage", (0, 1, 2))
def test_whole_weights_generate_as_they_are_however_little_is_free(monkeypatch, stage):
    models = engines(stage)
    for free, between_steps in ((CACHE / KEPT + 4, "keep"), (CACHE / KEPT - 4, "free"), (1, "free")):
        rollouts = chosen(models, GRADIENTS + free, monkeypatch)
        assert type(rollouts) is ReplicaRollouts and rollouts.copy.between_steps == between_steps


@pytest.mark.parametrize("between_steps, when_tight", [("keep", "free"), ("free", "free")])
def test_the_actors_copy_stays_with_much_free_memory_and_is_refused_with_little(monkeypatch, between_steps, when_tight):
    needed, models = 4 * POLICY + CACHE, engines(3)

    def choice(free):
        rollouts = chosen(models, GRADIENTS + free, monkeypatch, between_steps=between_steps)
        assert rollouts.sampler.rows_at_once == ROWS and models[0].copy is rollouts.copy
        assert all(model.copy is None for model in models[1:])
        return rollouts.copy.between_steps

    assert choice(100 * needed) == choice(needed / KEPT + 8) == between_steps
    assert choice(needed / KEPT - 8) == choice(needed / MOST + 8) == when_tight
    with pytest.raises(UserError, match="a copy, keys and values take 0.00 of 0.0 GB free beside .*or --rollout_backe"):
        choice(needed / MOST - 8)


GB = 10**9


@pytest.mark.parametrize(
    "free, ranks, between_steps, fits",
    [
        (250, 1, "keep", True),  # 150 of 250 are 0.6
        (200, 1, "free", True),  # 0.75
        (150, 2, "keep", True),  # one rank's 150 are too much; half the copy and 10 are 0.53
        (110, 2, "free", True),  # 0.73
        (80, 4, "keep", True),  # 35 and 10 are 0.56
        (61, 4, "free", True),  # 0.74
        (59, 4, "free", False),  # 0.76
    ],
)
def test_the_fewest_ranks_that_can_hold_a_70b_actor(free, ranks, between_steps, fits):
    """140 GB of weights in 16 bits, 10 GB of keys and values on each rank."""
    found = place_copy({1: 140 * GB, 2: 70 * GB, 4: 35 * GB}, 10 * GB, free * GB)
    assert (found.ranks, found.between_steps, found.fits) == (ranks, between_steps, fits)
    held = 140 // ranks + 10
    where = f"a copy, keys and values on {ranks} ranks" if ranks > 1 else "a copy, keys and values"
    assert found.why.startswith(f"{where} take {held}.00 of {free}.0 GB free beside gradients and moments")
    assert found.why.endswith("and are given back while training") == (fits and between_steps == "free")


def test_ranks_that_hold_a_copy_together_keep_the_states_of_all_their_rows():
    """60 GB of weights and 20 of the cache, 8 of them states: 80, or on each of two ranks 30 + 20 + 8."""
    for free, ranks in ((110, 1), (100, 2)):
        found = place_copy({1: 60 * GB, 2: 30 * GB}, 20 * GB, free * GB, states=8 * GB)
        assert found.ranks == ranks and f" {[80, 58][ranks - 1]}.00 of {free}.0 GB" in found.why


def test_a_backend_that_was_asked_for_is_taken(monkeypatch):
    monkeypatch.setattr("engine.zero.accelerator.free_memory", lambda: 1)
    for name, kind, plain in (
        ("replica", ReplicaRollouts, "the copy, keys and values do not stay between steps"),
        ("zero3", Zero3Rollouts, "ZeRO's hooks fetch each layer"),
    ):
        rollouts = build_rollouts(name, engines(3)[0], make_tokenizer(), between_steps="free", decoding="auto")
        assert type(rollouts) is kind and rollouts.why == f"rollouts by {name}: as asked; decoding plain: {plain}"
    with pytest.raises(KeyError):
        build_rollouts("none such", engines(3)[0], make_tokenizer())


@pytest.mark.parametrize(
    "free, gpu, asked, told",
    [
        (100, False, "auto", "recorded: auto on CPUs"),
        (100, True, "auto", "graphs: auto on GPUs"),
        (100, True, "recorded", "recorded: as asked"),
        (4, True, "auto", "plain: the copy, keys and values do not stay between steps"),
        (4, False, "plain", "plain: as asked"),
    ],
)
def test_how_tokens_are_decoded_is_told_and_why(monkeypatch, free, gpu, asked, told):
    monkeypatch.setattr("engine.rollout.choice.copies_bytes", lambda *_: {1: 3 * GB // 2})
    monkeypatch.setattr("engine.rollout.choice.cache_bytes", lambda module, slots, rows: GB)
    monkeypatch.setattr("engine.zero.accelerator.on_gpu", lambda: gpu)
    rollouts = chosen(engines(3), free * GB, monkeypatch, decoding=asked)
    assert rollouts.why.endswith(f"; decoding {told}")
    assert rollouts.sampler.decoding == told.split(":")[0]


def test_the_size_of_a_copy_is_that_of_its_parameters():
    policy, scorer = (model.module for model in engines(3)[:2])
    assert [sum(p.numel() for p in module.parameters()) for module in (policy, scorer)] == [POLICY, SCORER]
    assert copies_bytes(policy, 1) == {1: 4 * POLICY}
    assert torch.float32.itemsize == 4
