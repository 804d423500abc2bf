"""Memory that runs out in one process: rows that are halved, and where a run ends with a message."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from engine import distributed
from engine.copies import TensorParallelCopies, WholeCopies
from engine.errors import RunStopped
from engine.experience import position_ids
from engine.models.loading import load_policy
from engine.models.lora import LoraSpec, adapt
from engine.rollout import Zero3Rollouts, build_rollouts
from engine.rollout.decode import Draws, Sampler
from scripts.harness.models import make_causal_lm, make_tokenizer
from tests.engine.rollout.test_decode import BATCH, PROMPTS, SAMPLING, answers

ROWS = 8
TOKENS = torch.arange(4, 20).view(2, 8)


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory) -> str:
    return make_causal_lm(tmp_path_factory.mktemp("policy"), "llama")


@pytest.fixture(scope="module")
def policy(policy_folder):
    return load_policy(policy_folder, torch.float32).eval()


def engine(policy, stage: int = 3) -> SimpleNamespace:
    """What copies and backends ask of an engine; its weights stand whole."""
    found = SimpleNamespace(module=policy.requires_grad_(False), stage=stage, version=0, role="actor", copies=None)
    found.host = found
    return found


def fails(times: int, then=lambda *args, **kwargs: None):
    """A function without memory for its first calls."""
    calls = []

    def call(*args, **kwargs):
        calls.append(None)
        if len(calls) <= times:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return then(*args, **kwargs)

    return call


@pytest.mark.parametrize("times", (1, 2, 3))
def test_fewer_rows_are_decoded_at_once_to_the_same_responses(policy, monkeypatch, times):
    expected = answers(Sampler(make_tokenizer(), ROWS).responses(policy.model, BATCH, SAMPLING))
    sampler = Sampler(make_tokenizer(), ROWS)
    monkeypatch.setattr(Draws, "draw", fails(times, Draws.draw))
    with pytest.warns(UserWarning, match="decoded side by side do not fit on rank 0") as told:
        found = answers(sampler.responses(policy.model, BATCH, SAMPLING))
    assert found == expected and len(found) == len(PROMPTS) > ROWS
    halves = [(8, 4), (4, 2), (2, 1)][:times]
    assert [str(one.message) for one in told] == [
        f"{before} responses decoded side by side do not fit on rank 0 (CUDA out of memory): {after} are from now on"
        for before, after in halves
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert answers(sampler.responses(policy.model, BATCH, SAMPLING)) == expected


@pytest.mark.parametrize("how", ({}, {"agree": distributed.largest}), ids=("alone", "together"))
def test_an_eighth_of_the_rows_is_the_fewest_and_ranks_that_wait_keep_theirs(policy, monkeypatch, how):
    sampler = Sampler(make_tokenizer(), 2 * ROWS, **how)
    monkeypatch.setattr(Draws, "draw", fails(100))
    with warnings.catch_warnings(record=True) as told, pytest.raises(torch.OutOfMemoryError):
        warnings.simplefilter("always")
        sampler.responses(policy.model, BATCH.repeat(2), SAMPLING)
    assert sampler.rows_at_once == (2 * ROWS if how else 2) and len(told) == (0 if how else 3)


def test_a_rank_that_cannot_fall_back_alone_ends_the_run_with_a_message(policy, monkeypatch):
    model, rows = engine(policy), (TOKENS, torch.ones_like(TOKENS), position_ids(torch.ones_like(TOKENS)))
    help_ = "rank 0, when {}.*other ranks wait.*--rollout_backend zero3"
    monkeypatch.setattr("engine.copies.copy_weights", fails(1))
    with pytest.raises(RunStopped, match="copy of the actor does not fit.*" + help_.format("it was filled")):
        WholeCopies().of(model)
    together = TensorParallelCopies(1)
    assert together.inferred(model, *rows, response_length=3) is not None
    monkeypatch.setattr("engine.copies._inferred", fails(1))
    with pytest.raises(RunStopped, match=help_.format("experience was made with it")):
        together.inferred(model, *rows, response_length=3)


def test_a_divided_copy_takes_the_place_of_an_actor_with_adapters_where_it_generates_alone(policy_folder, monkeypatch):
    """Its updates are merged there for good; experience wants them beside the matrices."""
    adapted = load_policy(policy_folder, torch.float32).eval()
    adapt(adapted, LoraSpec(dim=4, alpha=6.0, only=True, targets="all-linear"), "actor")
    model = SimpleNamespace(module=adapted, stage=3, version=0, role="actor")
    together = TensorParallelCopies(1)
    whole, released = WholeCopies("free", smaller=lambda model: together), []
    monkeypatch.setattr("engine.copies._merged", fails(1))
    whole.let_go = lambda: released.append(True)
    with pytest.warns(UserWarning, match="when adapters were merged.: 1 ranks hold one together from now on"):
        copy = whole.of(model, merged=True)
    assert copy is together.of(model, merged=True) and whole.group_of(model) is together.group
    assert whole.of(model) is None and not whole._modules and released == [True]
    whole.release_memory()
    assert together._parts  # which it keeps


def test_no_copy_to_generate_with_is_made_without_room_for_keys_and_values(policy, monkeypatch):
    cache, empty = 12345, torch.empty
    full = fails(100)
    monkeypatch.setattr(torch, "empty", lambda *size, **how: full() if size == (cache,) else empty(*size, **how))
    copies, model = TensorParallelCopies(1, cache=cache), engine(policy)
    assert copies.of(model) is not None  # for experience
    copies.free()
    with pytest.warns(UserWarning, match="copy of the actor does not fit .*: it computes through its partitions"):
        assert copies.of(model, merged=True) is None
    assert not copies._parts


def test_a_number_of_ranks_that_does_not_divide_the_machines_is_told(policy, monkeypatch):
    monkeypatch.setattr("engine.zero.accelerator.free_memory", lambda: 0)
    monkeypatch.setattr("engine.zero.accelerator.ranks_of_this_machine", lambda: 8)
    told = "; no 3 ranks hold a copy together, since that does not divide the 8 of a machine"
    for stage, asked, ending in ((3, 3, told), (3, 1, ""), (0, 3, "")):
        why = build_rollouts("auto", engine(policy, stage), make_tokenizer(), tensor_parallel=asked).why
        assert (told in why) == bool(ending), why


def test_other_copies_are_released_by_a_backend_without_its_own(policy):
    released = []
    other = WholeCopies()
    other.release_memory = lambda: released.append(True)
    Zero3Rollouts(engine(policy), make_tokenizer(), others=[other]).release_memory()
    assert released == [True]
