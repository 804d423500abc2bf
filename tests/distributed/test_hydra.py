"""Hydra actors on two ranks: the reference is the untouched model at the cost of a few layers; below nothing moves."""

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed import plain
from tests.distributed.tiny_run import DIALECT, of_each
from tests.distributed.work_hydra import SAVED_AFTER

STAGE0 = {"stage": 0, "config": "stage0.json"}
STAGE2 = {"stage": 2, "config": "stage2.json"}
STAGE3 = {"stage": 3, "config": "stage3.json"}
FLOAT32 = {"0": STAGE0, "2_checkpointing": {**STAGE2, "checkpointing": True}, "3": STAGE3}
UNLENT = {
    "3_persistent": {"stage": 3, "config": "stage3_persistent.json", "backend": "zero3", "checkpointing": True},
}
OTHERS = {
    "3_tied_whole": {**STAGE3, "actor": "tied", "layers": 2},
}
HALF = {"0_fp16": {**STAGE0, "dtype": "fp16"}, "3_bf16": {**STAGE3, "dtype": "bf16"}}
RUNS = FLOAT32 | UNLENT | OTHERS | HALF
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# The tiny Llama, 32 wide: queries and output 32 x 32, keys and values 16 x 32, three matrices of 32 x 48, two norms.
LAYER, NORM, HEAD = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48 + 2 * 32, 32, 64 * 32
MODEL = 2 * LAYER + NORM + 2 * HEAD


@pytest.fixture(scope="module")
def ranks(folder, output) -> list[dict]:
    """What both ranks found, by the names in RUNS."""
    return of_each("tests.distributed.work_hydra:one_run", RUNS, folder=folder, output=output)


def trains(name: str, run: str) -> bool:
    """Whether this parameter is to move."""
    layers = ("model.layers.0.", "model.layers.1.")[-RUNS[run].get("layers", 1) :]
    return name.startswith((*layers, "model.norm.", "lm_head."))


def same(one: dict, other: dict) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], tensor) for name, tensor in other.items())


@pytest.mark.parametrize("run", RUNS)
def test_the_top_moves_and_the_rest_is_bit_identical(ranks, folder, run):
    stored = load_file(f"{folder}/{RUNS[run].get('actor', 'actor')}/model.safetensors")
    for rank in ranks:
        before, after = rank[run]["before"], rank[run]["after"]
        assert before.keys() == stored.keys()
        for name, tensor in stored.items():
            assert torch.equal(before[name], tensor.to(before[name].dtype)), name
            assert torch.equal(after[name], before[name]) != trains(name, run), name
    assert same(ranks[0][run]["after"], ranks[1][run]["after"])


@pytest.mark.parametrize("run", RUNS)
def test_reference_is_bit_equal_to_the_untouched_model_after_training(ranks, run):
    """Also while the actor computes with its average, and after a restart."""
    for rank in ranks:
        found = rank[run]
        for logprobs in (found["logprobs"], found["averaged"]["logprobs"], found["resumed"]["logprobs"]):
            assert logprobs["reference"].dtype == torch.float32
            assert torch.equal(logprobs["reference"], logprobs["untouched"])
            assert (logprobs["actor"] - logprobs["untouched"]).abs().max() > 0.05, "the actor has not moved"
        assert same(found["branch_after"], found["branch_before"])
        assert same(found["resumed"]["branch"], found["branch_before"])


@pytest.mark.parametrize("run", RUNS)
def test_the_reference_costs_the_bytes_of_what_trains(ranks, run):
    arguments = RUNS[run]
    copied = arguments.get("layers", 1) * LAYER + NORM + (0 if arguments.get("actor") == "tied" else HEAD)
    whole = MODEL - (HEAD if arguments.get("actor") == "tied" else 0)
    size = DTYPES[arguments.get("dtype", "fp32")].itemsize
    share = 2 if arguments["stage"] == 3 else 1  # all weights of even size, so two ranks hold half each
    for rank in ranks:
        found = rank[run]
        assert found["bytes"].keys() == {"actor", "critic", "reward"}, "no engine of the reference's own"
        assert found["models"] == 3
        assert found["own_bytes"] == whole * size / share
        assert found["bytes"]["actor"] - found["own_bytes"] == copied * size / share


@pytest.mark.parametrize("run", FLOAT32 | UNLENT)
def test_stages_give_the_same_curves(ranks, run):
    for got, expected in zip(ranks[1][run]["metrics"], ranks[0]["0"]["metrics"], strict=True):
        assert got == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("run", RUNS)
def test_gradient_norm_is_that_of_what_trains(ranks, folder, run):
    """Before the first step, by one process in float64 from the stored weights."""
    model = plain.policy(folder, RUNS[run].get("actor", "actor"))
    both = [rank[run]["first"] for rank in ranks]
    loss = sum(plain.policy_losses(model, part, 1.0, DIALECT.clip_range).sum() for part in both)
    gradients = plain.gradients(model, loss / sum(part.policy_mask.sum() for part in both))
    expected = plain.norm({name: gradient for name, gradient in gradients.items() if trains(name, run)})
    assert plain.norm(gradients) > 1.05 * expected, "the whole model's would not have done"
    tolerance = 1e-4 if RUNS[run].get("dtype", "fp32") == "fp32" else 0.15
    assert ranks[0][run]["metrics"][0]["policy/grad_norm"] == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("run", RUNS)
def test_saved_folders_are_whole_models_without_the_copies(ranks, output, run):
    found = ranks[0][run]
    for name, weights in (("actor", found["after"]), ("ema", found["averaged"]["weights"])):
        assert same(load_file(f"{output}/{run}/{name}/model.safetensors"), weights)


@pytest.mark.parametrize("run", RUNS)
def test_a_restart_goes_on_as_if_there_had_been_none(ranks, run):
    for rank in ranks:
        found = rank[run]
        assert same(found["resumed"]["after"], found["after"])
        assert all(torch.equal(one, other) for one, other in zip(found["resumed"]["ema"], found["ema"], strict=True))
        for got, expected in zip(found["resumed_metrics"], found["metrics"][SAVED_AFTER:], strict=True):
            assert got == pytest.approx(expected, rel=1e-6, abs=1e-9)
