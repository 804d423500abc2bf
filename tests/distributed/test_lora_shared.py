"""LoRA on two ranks: the frozen models are what the trained ones were, within their engines and at no cost."""

import pytest
import torch

from scripts.harness.ranks import run_ranks

RUNS = {
    "0": {"stage": 0},
    "2": {"stage": 2, "resumed": True},
    "3": {"stage": 3, "resumed": True},
    "3_hooks": {"stage": 3, "backend": "zero3", "checkpointing": True},
    "3_bf16": {"stage": 3, "dtype": "bf16"},
    "3_own": {"stage": 3, "shared": False},
}
SHARED = [name for name, arguments in RUNS.items() if arguments.get("shared", True)]
RESUMED = [name for name, arguments in RUNS.items() if arguments.get("resumed")]
DIALECTS = {"openai": ["actor", "critic", "reward"], "trl_rloo": ["actor", "reward"]}  # with their engines
# The tiny Llama, 32 wide: queries and output 32 x 32, keys and values 16 x 32, three matrices of 32 x 48, two norms.
TRUNK, HEAD = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48 + 2 * 32) + 32 + 64 * 32, 64 * 32
FACTORS = 2 * 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))  # two layers, dimension 4
SCORE = 32


@pytest.fixture(scope="module")
def ranks(folder, output) -> list[dict]:
    """What both ranks found, by the names in RUNS."""
    arguments = {"folder": folder, "output": output, "runs": RUNS, "dialects": list(DIALECTS)}
    return run_ranks("tests.distributed.work_lora_shared:all_runs", **arguments)


def trains(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name or name == "score.weight"


@pytest.mark.parametrize("run", RUNS)
def test_all_but_adapters_and_the_head_is_bit_identical_after_training(ranks, run):
    for rank in ranks:
        for role in ("actor", "critic"):
            before, after = rank[run]["before"][role], rank[run]["after"][role]
            for name, tensor in before.items():
                assert torch.equal(after[name], tensor) != trains(name), name
                assert torch.equal(after[name], ranks[0][run]["after"][role][name])


@pytest.mark.parametrize("run", SHARED)
def test_reference_and_reward_are_bit_equal_to_the_untouched_models(ranks, run):
    """Also while the actor computes and generates with its average, afterwards, and after a restart."""
    for rank in ranks:
        resumed = ["resumed"] if run in RESUMED else []
        for when in ("judged", "averaged", "judged after generating", *resumed):
            found = rank[run][when]
            assert torch.equal(found["reference"], found["untouched reference"])
            assert torch.equal(found["scores"], found["untouched scores"])
            assert (found["actor"] - found["reference"]).abs().max() > 0.05, "the actor has not moved"
            assert (found["values"] - found["token scores"]).abs().max() > 0.05, "the critic has not moved"
        assert not torch.equal(rank[run]["averaged"]["actor"], rank[run]["judged"]["actor"])
        for name in ("actor", "values"):
            assert torch.equal(rank[run]["judged after generating"][name], rank[run]["judged"][name])


@pytest.mark.parametrize("run", SHARED)
def test_nothing_is_held_twice(ranks, run):
    size, share = 2 if RUNS[run].get("dtype") == "bf16" else 4, 2 if RUNS[run]["stage"] == 3 else 1
    actor, critic = TRUNK + HEAD + FACTORS, TRUNK + FACTORS + 2 * SCORE  # its own head, and the reward model's
    for rank in ranks:
        found = rank[run]
        assert found["models"] == ["actor", "critic"]
        assert found["bytes"] == {"actor": actor * size / share, "critic": critic * size / share}
        copied = RUNS[run]["stage"] == 3 and RUNS[run].get("backend") != "zero3"
        assert found["copies"] == ([actor, critic] if copied else [])


def test_own_engines_of_the_frozen_models_were_two_more(ranks):
    assert ranks[0]["3_own"]["models"] == ["actor", "critic", "reference", "reward"]


@pytest.mark.parametrize("run", RUNS)
def test_the_first_step_learns_from_an_actor_that_is_the_reference(ranks, run):
    first, *later = ranks[0][run]["metrics"]
    assert first["objective/kl"] == pytest.approx(0, abs=1e-5)
    assert all(abs(metrics["objective/kl"]) > 1e-4 for metrics in later)


@pytest.mark.parametrize("run", ["2", "3", "3_hooks", "3_own"])
def test_stages_and_engines_give_the_same_curves(ranks, run):
    for got, expected in zip(ranks[1][run]["metrics"], ranks[0]["0"]["metrics"], strict=True):
        assert got == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("run", RESUMED)
def test_a_restart_goes_on_as_if_there_had_been_none(ranks, run):
    for rank in ranks:
        found = rank[run]
        for role, after in found["after"].items():
            assert all(torch.equal(found["resumed after"][role][name], tensor) for name, tensor in after.items())
        for got, expected in zip(found["resumed_metrics"], found["metrics"][2:], strict=True):
            assert got == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_dialects_with_fewer_or_other_models(ranks, dialect):
    for rank in ranks:
        found = rank["dialects"][dialect]
        assert found["models"] == DIALECTS[dialect]
        assert torch.equal(found["reference"], found["untouched reference"])
        assert torch.equal(found["scores"], found["untouched scores"])
        for role, before in found["before"].items():
            moved = {name for name, tensor in before.items() if not torch.equal(found["after"][role][name], tensor)}
            assert moved and all(trains(name) for name in moved)
