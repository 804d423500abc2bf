"""Which backend `build_rollouts` takes at which stage and with how much free memory, and what it says of it."""

from types import SimpleNamespace

import pytest
import torch
from engine.memory.copies import CopyNeed
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from engine.models.policy import Policy, Scorer
from engine.rollout import ReplicaRollouts, Zero3Rollouts, build_rollouts
from scripts.harness.models import make_tokenizer

ROLES = ("actor", "critic", "reference", "reward model")
WIDTH, VOCABULARY, LAYERS, HEADS, KEPT_HEADS = 16, 100, 2, 4, 2
# By hand: a layer has four projections (keys and values half as wide), three of the MLP, two norms.
LAYER = 2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH // 2 + 3 * WIDTH * 24 + 2 * WIDTH
TRUNK = VOCABULARY * WIDTH + LAYERS * LAYER + WIDTH
POLICY, SCORER = TRUNK + VOCABULARY * WIDTH, TRUNK + WIDTH
OWN = 2 * 4 * (POLICY + SCORER)  # bytes: a copy of each of the four models
COPIES = OWN // 2  # actor and reference share one module, critic and reward model another
ROWS, LENGTH = 3, 20
UNKNOWN = "what training takes is not known, so no more than 0.4 of the free may stay"
SLOTS = LENGTH + 8 + 64  # of a row: what is drawn between two looks, and room for prompts that wait
GRADIENTS = COPIES  # of actor and critic, on one rank
LATER = GRADIENTS + 4 * ROWS * SLOTS * 2 * LAYERS * KEPT_HEADS * WIDTH // HEADS


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
        SimpleNamespace(stage=stage, module=module, role=role, copies=None)
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
def test_whole_weights_generate_as_they_are(monkeypatch, stage):
    """And keys and values stay while training, of which nothing is known, only where they and the gradients leave most
    of the memory free."""
    models = engines(stage)
    for free, between_steps, given_back in (
        (LATER / 0.4 + 4, "keep", ""),
        (LATER / 0.4 - 4, "free", f"; keys and values, 0.00 GB, are given back while training: {UNKNOWN}"),
    ):
        rollouts = chosen(models, free, monkeypatch)
        assert type(rollouts) is ReplicaRollouts and rollouts.copies.between_steps == between_steps
        why = f"rollouts by replica: no weights are partitioned, so the models' own modules compute{given_back}"
        assert rollouts.why == f"{why}; decoding plain: as asked"
    assert chosen(models, 1, monkeypatch, between_steps="host").copies.between_steps == "host"


@pytest.mark.parametrize("between_steps, when_tight", [("keep", "free"), ("free", "free"), ("host", "host")])
def test_free_memory_decides_over_copies_of_partitioned_weights(monkeypatch, between_steps, when_tight):
    """Copies, cache and gradients may take 0.2 of it if each model has its own copy, 0.4 if models share them and they
    stay while training, or the actor's does, 0.8 if they do not; with less than that for all, some have none."""
    needed, models = COPIES + LATER, engines(3)

    def choice(free):
        rollouts = chosen(models, free, monkeypatch, between_steps=between_steps)
        assert rollouts.sampler.rows_at_once == ROWS
        if all(model.copies is None for model in models):
            return type(rollouts), None, None
        others = models[1].copies or rollouts.copies
        return type(rollouts), (rollouts.copies.between_steps, others.between_steps), rollouts.copies.shared

    both = (between_steps, between_steps)
    assert choice(100 * needed) == choice((OWN + LATER) / 0.2 + 8) == (ReplicaRollouts, both, False)
    assert choice((OWN + LATER) / 0.2 - 8) == choice(needed / 0.4 + 4) == (ReplicaRollouts, both, True)
    actors = (4 * POLICY + LATER) / 0.4
    assert choice(needed / 0.4 - 4) == choice(actors + 4) == (ReplicaRollouts, (between_steps, when_tight), True)
    assert choice(actors - 4) == choice(needed / 0.8 + 4) == (ReplicaRollouts, (when_tight, when_tight), True)
    choice(needed / 0.8 - 4)
    assert 0 < sum(model.copies is not None for model in models) < len(models)
    smallest = 4 * SCORER + LATER
    assert choice(smallest / 0.8 - 4) == choice(0) == (Zero3Rollouts, None, None)


def test_the_reason_names_the_sizes(monkeypatch):
    models = engines(3)
    monkeypatch.setattr("engine.rollout.choice.copy_need", lambda model: need(model.role, 1_500_000_000, 0))
    monkeypatch.setattr("engine.rollout.choice.cache_bytes", lambda model, slots: 1_000_000_000)
    room = "with keys, values and gradients, of {} GB free on each rank"
    for free, why in (
        (40e9, "replica: a whole copy of each model takes 7.00 GB " + room.format("40.0")),
        (20e9, "replica: a whole copy for models of one shape takes 4.00 GB " + room.format("20.0")),
        (
            8e9,
            "replica: a whole copy for models of one shape takes 4.00 GB "
            + room.format("8.0")
            + f", and but for the actor's is given back while training: {UNKNOWN}",
        ),
        (
            6e9,
            "replica: a whole copy for models of one shape takes 4.00 GB "
            + room.format("6.0")
            + f", and is given back while training: {UNKNOWN}",
        ),
        (
            2e9,
            "zero3: whole copies would take 4.00 GB "
            + room.format("2.0")
            + f"; keys and values, 1.00 GB, are given back while training: {UNKNOWN}",
        ),
    ):
        assert chosen(models, free, monkeypatch).why == f"rollouts by {why}; decoding plain: as asked"


def test_copies_are_for_all_models_and_by_zero3_for_none(monkeypatch):
    models = engines(3)
    rollouts = chosen(models, 1e12, monkeypatch)
    assert all(model.copies is rollouts.copies for model in models)
    models = engines(3)
    chosen(models, 1, monkeypatch)
    assert all(model.copies is None for model in models)


def test_a_backend_that_was_asked_for_is_taken(monkeypatch):
    monkeypatch.setattr("engine.zero.accelerator.free_memory", lambda: 1)
    for name, kind, plain in (
        ("replica", ReplicaRollouts, "copies, keys and values do not stay between steps"),
        ("zero3", Zero3Rollouts, "ZeRO's hooks fetch each layer"),
    ):
        rollouts = build_rollouts(name, engines(3)[0], make_tokenizer(), between_steps="host", decoding="auto")
        assert type(rollouts) is kind and rollouts.why == f"rollouts by {name}: as asked; decoding plain: {plain}"
    with pytest.raises(KeyError):
        build_rollouts("none such", engines(3)[0], make_tokenizer())


GIVEN_BACK = "plain: copies, keys and values do not stay between steps"


@pytest.mark.parametrize(
    "training, gpu, asked, told",
    [
        (10, False, "auto", "recorded: auto on CPUs"),
        (10, True, "auto", "graphs: auto on GPUs"),
        (10, True, "recorded", "recorded: as asked"),
        (87, True, "auto", "graphs: auto on GPUs"),
        (88, True, "auto", GIVEN_BACK),
        (88, False, "recorded", GIVEN_BACK),
        (88, False, "plain", "plain: as asked"),
    ],
)
def test_how_tokens_are_decoded_is_told_and_why(monkeypatch, training, gpu, asked, told):
    """Beside 10 GB of training all copies stay, beside 87 the actor's of 1.5 with 1 of keys and values, beside 88 none:
    of 100 free 0.9 are counted on."""
    monkeypatch.setattr("engine.rollout.choice.copy_need", lambda model: need(model.role, 1_500_000_000, 0))
    monkeypatch.setattr("engine.rollout.choice.cache_bytes", lambda model, slots: 1_000_000_000)
    monkeypatch.setattr("engine.zero.accelerator.on_gpu", lambda: gpu)
    models = engines(3)
    rollouts = chosen(models, 100e9, monkeypatch, decoding=asked, training=training * 10**9)
    assert rollouts.why.endswith(f"; decoding {told}")
    assert rollouts.sampler.decoding == told.split(":")[0]


def test_the_actors_copy_stays_alone_and_all_are_released(monkeypatch):
    """1.5 GB and 1 of keys and values beside 87 of training are in 0.9 of 100 GB free, and no other copy is."""
    monkeypatch.setattr("engine.rollout.choice.copy_need", lambda model: need(model.role, 1_500_000_000, 0))
    monkeypatch.setattr("engine.rollout.choice.cache_bytes", lambda model, slots: 1_000_000_000)
    models, released = engines(3), []
    rollouts = chosen(models, 100e9, monkeypatch, training=87 * 10**9)
    actor, critic, reference, reward = (model.copies for model in models)
    assert actor is reference is rollouts.copies and critic is reward and critic is not actor
    assert (actor.between_steps, critic.between_steps) == ("keep", "free")
    for name, copies in (("actor", actor), ("critic", critic)):
        monkeypatch.setattr(copies, "release_memory", lambda name=name: released.append(name))
    rollouts.release_memory()
    assert released == ["actor", "critic"]


def need(role: str, size: int, gradients: int) -> CopyNeed:
    """Of actor and reference, which are of one architecture, or critic and reward model."""
    return CopyNeed(role, 3, role in ("actor", "reference"), size, gradients)


BIG, SMALL = ["actor", "reference"], ["critic", "reward model"]


@pytest.mark.parametrize(
    "free, copied, between_steps, why",
    [
        (250e9, BIG + SMALL, "free", "replica: {one} takes 172.00 GB {room}, {back}"),
        (
            200e9,
            BIG,
            "free",
            "replica: {one} takes 158.00 GB {room}, {back}; so it is with actor and reference, "
            "while critic and reward model compute through partitions: with all models it would be "
            "172.00 GB",
        ),
        (
            190e9,
            SMALL,
            "keep",
            "zero3: {one} takes 32.00 GB {room}; so it is with critic and reward model, while actor and "
            "reference compute through partitions: with all models it would be 172.00 GB",
        ),
        (
            64e9,
            SMALL,
            "free",
            "zero3: {one} takes 32.00 GB {room}, {back}; so it is with critic and reward model, "
            "while actor and reference compute through partitions: with all models it would be 172.00 GB",
        ),
        (
            39e9,
            [],
            "free",
            "zero3: whole copies would take 172.00 GB {room}; keys and values, 2.00 GB, are given back while training: "
            + UNKNOWN,
        ),
    ],
)
def test_a_model_too_large_for_a_copy_denies_no_other_its_own(monkeypatch, free, copied, between_steps, why):
    """Actor and reference of 70B in 16 bits, critic and reward model of 7B; 2 GB of keys and values, 4 of gradients for
    each. By hand: 0.8 of free memory must hold 140 + 18 for the large ones' copy, 14 + 18 for the small ones', 172 for
    both."""
    sizes = dict.fromkeys(BIG, 140_000_000_000) | dict.fromkeys(SMALL, 14_000_000_000)
    monkeypatch.setattr(
        "engine.rollout.choice.copy_need", lambda model: need(model.role, sizes[model.role], 4_000_000_000)
    )
    monkeypatch.setattr("engine.rollout.choice.cache_bytes", lambda model, slots: 2_000_000_000)
    models = engines(3)
    rollouts = chosen(models, free, monkeypatch)
    assert {model.role for model in models if model.copies is rollouts.copies} == set(copied)
    assert all(model.copies is None for model in models if model.role not in copied)
    assert type(rollouts) is (ReplicaRollouts if "actor" in copied else Zero3Rollouts)
    assert rollouts.copies.between_steps == between_steps
    words = {
        "one": "a whole copy for models of one shape",
        "back": f"and is given back while training: {UNKNOWN}",
        "room": f"with keys, values and gradients, of {free / 1e9:.1f} GB free on each rank",
    }
    assert rollouts.why == f"rollouts by {why.format(**words)}; decoding plain: as asked"


def test_copies_of_small_models_are_released_by_a_backend_without_one(monkeypatch):
    """The trainer tells the backend alone."""
    rollouts = build_rollouts("zero3", engines(3)[0], make_tokenizer())
    released = []
    monkeypatch.setattr(rollouts.copies, "release_memory", lambda: released.append(True))
    rollouts.release_memory()
    assert released == [True]


def test_the_size_of_copies_is_that_of_their_parameters():
    policy, scorer = (model.module for model in engines(3)[:2])
    assert [sum(p.numel() for p in module.parameters()) for module in (policy, scorer)] == [POLICY, SCORER]
    assert torch.float32.itemsize == 4
