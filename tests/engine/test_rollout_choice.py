"""Which backend `build_rollouts` takes at which stage and with how much free memory, and what it says of it."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from engine.errors import UserError
from engine.models.policy import Policy
from engine.models.scorer import Scorer
from engine.rollout import ReplicaRollouts, Zero3Rollouts, build_rollouts
from engine.rollout.choice import check_backend
from tests.tiny_models import make_tokenizer

WIDTH, VOCABULARY, LAYERS, HEADS, KEPT_HEADS = 16, 100, 2, 4, 2
# By hand: a layer has four projections (keys and values half as wide), three of the MLP, two norms.
LAYER = 2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH // 2 + 3 * WIDTH * 24 + 2 * WIDTH
TRUNK = VOCABULARY * WIDTH + LAYERS * LAYER + WIDTH
POLICY, SCORER = TRUNK + VOCABULARY * WIDTH, TRUNK + WIDTH
OWN = 2 * 4 * (POLICY + SCORER)  # bytes: a copy of each of the four models
COPIES = OWN // 2  # actor and reference share one module, critic and reward model another
ROWS, LENGTH = 3, 20
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
    return [SimpleNamespace(stage=stage, module=module, lender=None) for module in (*learning, *frozen)]


def chosen(models: list, free: float, monkeypatch, **how):
    monkeypatch.setattr("engine.distributed.free_memory", lambda: int(free))
    return build_rollouts(
        "auto", models[0], make_tokenizer(), others=models, rows_at_once=ROWS, row_length=LENGTH, **how
    )


@pytest.mark.parametrize("stage", (0, 1, 2))
def test_whole_weights_generate_as_they_are(monkeypatch, stage):
    rollouts = chosen(engines(stage), 1, monkeypatch)  # free memory does not matter
    assert type(rollouts) is ReplicaRollouts and rollouts.replicas.between_steps == "keep"
    assert rollouts.why == "rollouts by replica: no weights are partitioned, so the models' own modules compute"


@pytest.mark.parametrize("between_steps, when_tight", [("keep", "free"), ("free", "free"), ("host", "host")])
def test_free_memory_decides_over_copies_of_partitioned_weights(monkeypatch, between_steps, when_tight):
    """Copies, cache and gradients may take 0.2 of it if each model has its own copy, 0.4 if models share them and they
    stay while training, 0.8 if they do not stay."""
    needed, models = COPIES + LATER, engines(3)

    def choice(free):
        rollouts = chosen(models, free, monkeypatch, between_steps=between_steps)
        assert rollouts.sampler.rows_at_once == ROWS
        replicas = getattr(rollouts, "replicas", None)
        return type(rollouts), replicas and replicas.between_steps, replicas and replicas.shared

    assert choice(100 * needed) == choice((OWN + LATER) / 0.2 + 8) == (ReplicaRollouts, between_steps, False)
    assert choice((OWN + LATER) / 0.2 - 8) == choice(needed / 0.4 + 4) == (ReplicaRollouts, between_steps, True)
    assert choice(needed / 0.4 - 4) == choice(needed / 0.8 + 4) == (ReplicaRollouts, when_tight, True)
    assert choice(needed / 0.8 - 4) == choice(0) == (Zero3Rollouts, None, None)


def test_the_reason_names_the_sizes(monkeypatch):
    models = engines(3)
    monkeypatch.setattr("engine.rollout.choice.replica_bytes", lambda models, shared: 3_000_000_000 * (2 - shared))
    monkeypatch.setattr("engine.rollout.choice.cache_bytes", lambda model, slots: 1_000_000_000)
    monkeypatch.setattr("engine.rollout.choice.gradient_bytes", lambda model: 0)
    room = "with keys, values and gradients, of {} GB free on each rank"
    for free, why in (
        (40e9, "replica: a whole copy of each model takes 7.00 GB " + room.format("40.0")),
        (20e9, "replica: a whole copy for models of one shape takes 4.00 GB " + room.format("20.0")),
        (
            8e9,
            "replica: a whole copy for models of one shape takes 4.00 GB "
            + room.format("8.0")
            + ", and is given back while training",
        ),
        (4e9, "zero3: whole copies would take 4.00 GB " + room.format("4.0")),
    ):
        assert chosen(models, free, monkeypatch).why == f"rollouts by {why}"


def test_copies_are_lent_to_all_models_and_by_zero3_to_none(monkeypatch):
    models = engines(3)
    rollouts = chosen(models, 1e12, monkeypatch)
    assert all(model.lender is rollouts.replicas for model in models)
    models = engines(3)
    chosen(models, 1, monkeypatch)
    assert all(model.lender is None for model in models)


def test_a_backend_that_was_asked_for_is_taken(monkeypatch):
    monkeypatch.setattr("engine.distributed.free_memory", lambda: 1)
    for name, kind in (("replica", ReplicaRollouts), ("zero3", Zero3Rollouts)):
        rollouts = build_rollouts(name, engines(3)[0], make_tokenizer(), between_steps="host")
        assert type(rollouts) is kind and rollouts.why == f"rollouts by {name}: as asked"
    with pytest.raises(KeyError):
        build_rollouts("vllm", engines(3)[0], make_tokenizer())


def test_hybrid_is_refused_with_one_message():
    messages = []
    for refused in (lambda: check_backend("hybrid"), lambda: build_rollouts("hybrid", engines(3)[0], make_tokenizer())):
        with pytest.raises(UserError) as error:
            refused()
        messages.append(str(error.value))
    assert messages[0] == messages[1] and messages[0].startswith("--rollout_backend hybrid: ")
    assert "auto or replica" in messages[0] and "\n" not in messages[0]
    for name in ("auto", "replica", "zero3"):
        check_backend(name)


def test_the_size_of_copies_is_that_of_their_parameters():
    policy, scorer = (model.module for model in engines(3)[:2])
    assert [sum(p.numel() for p in module.parameters()) for module in (policy, scorer)] == [POLICY, SCORER]
    assert torch.float32.itemsize == 4
