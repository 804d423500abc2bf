"""Merged weights: hand arithmetic, dtypes, shards, tied heads, adapters; what is written is what transformers loads."""

import json
import math
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.algo.weight_changes import mean_change, slerp, spherical_change
from engine.errors import UserError
from scripts.harness.models import make_adapter, make_causal_lm
from training.tools.merge.weights import NOTE, MergedWeights, save_merged, stored_weights


def test_the_change_is_the_mean_times_the_scale_in_the_dtype_of_the_sft_model():
    sft = {"w": torch.tensor([1.0, 2.0], dtype=torch.bfloat16), "ids": torch.tensor([3, 4])}
    one = {"w": torch.tensor([3.0, 2.0]), "ids": torch.tensor([3, 4])}
    two = {"w": torch.tensor([2.0, 6.0], dtype=torch.float64), "ids": torch.tensor([5, 4])}
    merged = MergedWeights(sft, [one, two], scale=1.5)  # changes (2, 0) and (1, 4): 1 + 1.5 * 1.5, 2 + 1.5 * 2
    assert merged["w"].tolist() == [3.25, 5.0] and merged["w"].dtype == torch.bfloat16
    assert merged["ids"].tolist() == [3, 4] and list(merged) == ["ids", "w"]
    assert MergedWeights(sft, [one], scale=0.0)["w"].tolist() == [1.0, 2.0]
    assert MergedWeights(sft, [one], scale=-0.5)["w"].tolist() == [0.0, 2.0]


def test_an_arc_keeps_the_length_of_changes_at_right_angles():
    one, two = torch.tensor([[3.0], [0.0]]), torch.tensor([[0.0], [3.0]])
    assert spherical_change([one, two]).flatten().tolist() == pytest.approx([3 * math.sqrt(0.5)] * 2)
    assert mean_change([one, two]).flatten().tolist() == [1.5, 1.5]
    third = slerp(one, two, 1 / 3)  # 30 of the 90 degrees
    assert third.flatten().tolist() == pytest.approx([3 * math.cos(math.pi / 6), 3 * math.sin(math.pi / 6)])
    same = torch.tensor([1.0, 2.0])
    assert spherical_change([same, 3 * same]).tolist() == [2.0, 4.0]  # of one direction: the straight line
    assert spherical_change([same, 0 * same]).tolist() == [0.5, 1.0]
    assert slerp(same, -same, 0.5).tolist() == [0.0, 0.0]


def test_of_three_each_has_its_share_of_the_arc():
    axes = [torch.eye(3)[index] for index in range(3)]
    half = math.sqrt(0.5)  # of the first two; a third of the way, 30 degrees, from there to the third
    expected = [math.cos(math.pi / 6) * half, math.cos(math.pi / 6) * half, math.sin(math.pi / 6)]
    assert spherical_change(axes).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_saved_is_what_transformers_loads(tmp_path, tied):
    sft, run = (
        make_causal_lm(tmp_path / name, "llama", tied=tied, seed=seed) for seed, name in enumerate(["sft", "run"])
    )
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16) for path in (sft, run)]
    models[0].save_pretrained(tmp_path / "half", max_shard_size="20KB")  # in several files
    AutoTokenizer.from_pretrained(sft).save_pretrained(tmp_path / "half")
    half = str(tmp_path / "half")
    assert len(list(Path(half).glob("model-*.safetensors"))) > 1
    weights = MergedWeights(stored_weights(half, "--sft"), [stored_weights(run, "--trained")], scale=0.25)
    tokenizer = AutoTokenizer.from_pretrained(half)
    folder = save_merged(weights, half, tokenizer, tmp_path / "merged", {"scale": 0.25}, "15KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    found, start = AutoModelForCausalLM.from_pretrained(folder), models[0].state_dict()
    run_state = AutoModelForCausalLM.from_pretrained(run).state_dict()
    assert found.dtype == torch.bfloat16
    for name, tensor in found.state_dict().items():
        expected = start[name].float() + 0.25 * (run_state[name].float() - start[name].float())
        assert torch.equal(tensor, expected.bfloat16()), name
    assert json.loads((folder / NOTE).read_text()) == {"scale": 0.25}
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == AutoTokenizer.from_pretrained(sft).get_vocab()
    with pytest.raises(UserError, match=r"merged is there already\. Move it away"):
        save_merged(weights, half, tokenizer, tmp_path / "merged", {}, "50GB")
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_adapter_is_merged_as_peft_merges_it(tmp_path, family):
    base = make_causal_lm(tmp_path / "sft", family)
    adapter = make_adapter(tmp_path / "run", base)
    expected = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).merge_and_unload()
    given, found = load_file(Path(base) / "model.safetensors"), stored_weights(adapter, "--trained")
    merged = MergedWeights(stored_weights(base, "--sft"), [found], scale=2.0)
    changed = 0
    for name, tensor in expected.state_dict().items():
        if name in given:
            doubled = given[name] + 2 * (tensor - given[name])
            assert torch.allclose(merged[name], doubled, atol=1e-5), name
            changed += not torch.equal(merged[name], given[name])
    assert changed >= 8


def test_numbers_that_the_dtype_does_not_hold_are_refused():
    sft, run = {"w": torch.ones(2, dtype=torch.float16)}, {"w": torch.full((2,), 60000.0)}
    with pytest.raises(UserError, match=r"--scales 2: w has numbers that are NaN or infinite in torch.float16"):
        MergedWeights(sft, [run], scale=2.0)["w"]


def test_files_without_weights_are_named(tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"^--trained .*holds a config.json but no weights"):
        stored_weights(str(folder), "--trained")
    save_file({"w": torch.ones(3)}, folder / "model.safetensors")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(UserError, match=r"is a broken safetensors file"):
        stored_weights(str(folder), "--trained")
