"""Engines on two ranks: what is built without a critic, and hydra actors of every family."""

import pytest
import torch
from safetensors.torch import load_file

from scripts.harness.models import make_causal_lm
from scripts.harness.ranks import run_ranks

STAGES = (0, 3)
TIED = ("opt", "gpt2", "bloom")
FAMILIES = ("llama", "mistral", "qwen2", "gpt2", "gpt_neox", "opt", "bloom")


@pytest.fixture(scope="module")
def alone(folder, output) -> list[dict]:
    return run_ranks("tests.distributed.work_engines:without_critic", folder=folder, output=output, stages=STAGES)


@pytest.mark.parametrize("stage", STAGES)
def test_without_a_critic_there_are_the_bytes_of_exactly_one_model_fewer(alone, folder, stage):
    stored = load_file(f"{folder}/reward/model.safetensors")
    whole = sum(tensor.numel() * 4 for tensor in stored.values())
    for rank in alone:
        gae, rloo = rank[stage]["gae"], rank[stage]["rloo"]
        assert rank[stage]["critic"] is None
        assert gae.keys() - rloo.keys() == {"critic"} and rank[stage]["trained"] == ["actor"]
        assert rank[stage]["models"] == len(rloo) == 3
        assert sum(gae.values()) - sum(rloo.values()) == whole / (2 if stage == 3 else 1)  # two ranks hold half each
        assert all(torch.equal(rank[stage]["reward"][name], tensor) for name, tensor in stored.items())


@pytest.mark.parametrize("stage", STAGES)
def test_no_compiler_is_imported_for_an_engine_and_one_may_be_later(alone, stage):
    assert all(not rank[stage]["compiler"] and rank[stage]["may compile"] for rank in alone)


@pytest.mark.parametrize("stage", STAGES)
def test_without_a_critic_a_run_goes_on_from_a_restart_point(alone, output, stage):
    for rank in alone:
        found = rank[stage]
        assert "actor" in found["files"] and "critic" not in found["files"]
        assert found["saved"] == ["actor"]
        (weights, shards), (again, average) = found["end"], found["resumed"]
        assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())
        assert all(torch.equal(one, other) for one, other in zip(average, shards, strict=True))
    saved = load_file(f"{output}/{stage}/actor/model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in alone[0][stage]["end"][0].items())


@pytest.fixture(scope="module")
def hydras(folder, tmp_path_factory) -> list[dict]:
    root = tmp_path_factory.mktemp("hydras")
    folders = {family: make_causal_lm(root / family, family, tied=family in TIED) for family in FAMILIES}
    return run_ranks("tests.distributed.work_engines:families", folders=folders, config=f"{folder}/stage3.json")


@pytest.mark.parametrize("family", FAMILIES)
def test_partitioned_hydras_train_their_top_and_refer_to_the_untouched_model(hydras, family):
    for rank in hydras:
        found = rank[family]
        assert torch.equal(found["reference"], found["untouched"])
        assert (found["actor"] - found["untouched"]).abs().max() > 0.05
        layer, norm, *head = found["parts"]
        assert layer.endswith(".1") and norm.endswith(("norm", "ln_f")) and len(head) == (family not in TIED)
        for name, before in found["before"].items():
            moves = name.startswith(tuple(f"{part}." for part in found["parts"]))
            # Keys' biases move no attention weight; all that is left of their gradient is rounding.
            assert torch.equal(found["after"][name], before) != moves or ("bias" in name and moves), name
