"""Merged weights: hand arithmetic, dtypes, shards, tied heads, adapters; what is written is what transformers loads.
Models that cannot be merged get one message each, which names the flag and what differs.
"""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.algo.weight_changes import mean_change, slerp, spherical_change
from engine.errors import UserError
from scripts.harness.models import make_adapter, make_causal_lm
from training.tools.measuring import check_same_tokens
from training.tools.merge.weights import (
    NOTE,
    SFT,
    TRAINED,
    MergedWeights,
    check_change,
    check_paths,
    check_weights,
    save_merged,
    stored_weights,
)


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
    source = {"sft": half, "trained": [run], "method": "linear", "scale": 0.25}
    folder = save_merged(weights, half, tokenizer, tmp_path / "merged", source, "15KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    found, start = AutoModelForCausalLM.from_pretrained(folder), models[0].state_dict()
    run_state = AutoModelForCausalLM.from_pretrained(run).state_dict()
    assert found.dtype == torch.bfloat16
    for name, tensor in found.state_dict().items():
        expected = start[name].float() + 0.25 * (run_state[name].float() - start[name].float())
        assert torch.equal(tensor, expected.bfloat16()), name
    assert json.loads((folder / NOTE).read_text()) == source
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == AutoTokenizer.from_pretrained(sft).get_vocab()
    with pytest.raises(UserError, match=r"merged exists already\. Move it away"):
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


@pytest.fixture
def sft(tmp_path) -> str:
    """An SFT model with a head of its own."""
    return make_causal_lm(tmp_path / "sft", "llama")


def copy_of(sft: str, name: str, change=lambda state: state) -> str:
    """A folder beside it with the same files and other weights."""
    folder = Path(sft).with_name(name)
    shutil.copytree(sft, folder)
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def checked(sft: str, *trained: str) -> None:
    """Look at their weights."""
    check_weights((sft, stored_weights(sft, "--sft")), [(path, stored_weights(path, "--t")) for path in trained])


def test_a_trained_model_is_not_the_sft_model(sft):
    run = copy_of(sft, "run")
    with pytest.raises(UserError, match=r"sft/\.: that is the SFT model itself"):
        check_paths(sft, [run, f"{sft}/."])
    check_paths(sft, [run])


def test_names_and_shapes_are_the_sft_models(sft):
    head, norm = "lm_head.weight", "model.norm.weight"
    without = copy_of(sft, "without", lambda state: {name: state[name] for name in state if name != norm})
    with pytest.raises(UserError, match=rf"--trained_model_name_or_path {without}: .* \(it lacks {norm}\)"):
        checked(sft, copy_of(sft, "good"), without)
    more = copy_of(sft, "more", lambda state: {**state, "v_head.weight": torch.ones(1)})
    with pytest.raises(UserError, match=r"it also has v_head\.weight"):
        checked(sft, more)
    wider = copy_of(sft, "wider", lambda state: {**state, head: torch.ones(65, 32)})
    with pytest.raises(UserError, match=rf"wider: {head} is 65 x 32 there and 64 x 32 in --sft"):
        checked(sft, wider)


def test_a_tied_head_that_one_file_holds_too_is_no_difference(tmp_path):
    tied = make_causal_lm(tmp_path / "sft", "llama", tied=True)
    embedding = "model.embed_tokens.weight"
    beside = copy_of(tied, "beside", lambda state: {**state, "lm_head.weight": state[embedding].clone()})
    checked(tied, beside)
    checked(beside, tied)
    another = copy_of(tied, "another", lambda state: {**state, "lm_head.weight": state[embedding] + 1})
    with pytest.raises(UserError, match=r"it also has lm_head\.weight"):
        checked(tied, another)


def test_vocabularies_are_the_sft_models(sft):
    run = copy_of(sft, "run")
    check_same_tokens((SFT, sft), (TRAINED, run), "Why.")
    tokenizer = AutoTokenizer.from_pretrained(run)
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(run)
    with pytest.raises(UserError, match=r"differs from that of .* \(65 and 64 tokens; more\)"):
        check_same_tokens((SFT, sft), (TRAINED, run), "Why.")


def test_a_model_that_was_not_trained_is_refused(sft):
    same, run = copy_of(sft, "same"), copy_of(sft, "run", lambda state: {k: v + 0.5 for k, v in state.items()})
    stored = {path: stored_weights(path, "--t") for path in (sft, same, run)}
    check_change(stored[sft], [(run, stored[run])])
    with pytest.raises(UserError, match=rf"{same}: all its weights are those of the SFT model"):
        check_change(stored[sft], [(run, stored[run]), (same, stored[same])])
