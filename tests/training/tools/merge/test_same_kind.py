"""Models that cannot be merged: one message each, that names the flag and what differs."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from engine.errors import UserError
from scripts.harness.models import make_causal_lm
from training.tools.measuring import check_same_tokens
from training.tools.merge.weights import SFT, TRAINED, check_change, check_paths, check_weights, stored_weights


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


def test_a_model_is_given_once_and_is_not_the_sft_model(sft):
    run = copy_of(sft, "run")
    with pytest.raises(UserError, match=r"sft/\.: that is the SFT model itself"):
        check_paths(sft, [run, f"{sft}/."])
    with pytest.raises(UserError, match="one model is given twice"):
        check_paths(sft, [run, f"{run}/."])
    check_paths(sft, [run])


def test_names_and_shapes_are_the_sft_models(sft):
    head, norm = "lm_head.weight", "model.norm.weight"
    without = copy_of(sft, "without", lambda state: {name: state[name] for name in state if name != norm})
    with pytest.raises(UserError, match=rf"--trained_model_name_or_path {without}: .* \(it lacks {norm}\)"):
        checked(sft, copy_of(sft, "good"), without)
    more = copy_of(sft, "more", lambda state: {**state, "v_head.weight": torch.ones(1)})
    with pytest.raises(UserError, match=r"it has v_head\.weight beside them"):
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
    with pytest.raises(UserError, match=r"it has lm_head\.weight beside them"):
        checked(tied, another)


def test_vocabularies_are_the_sft_models(sft):
    run = copy_of(sft, "run")
    check_same_tokens((SFT, sft), (TRAINED, run), "Why.")
    tokenizer = AutoTokenizer.from_pretrained(run)
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(run)
    with pytest.raises(UserError, match=r"another one than that of .* \(65 and 64 tokens; more\)"):
        check_same_tokens((SFT, sft), (TRAINED, run), "Why.")


def test_a_model_that_was_not_trained_is_refused(sft):
    same, run = copy_of(sft, "same"), copy_of(sft, "run", lambda state: {k: v + 0.5 for k, v in state.items()})
    stored = {path: stored_weights(path, "--t") for path in (sft, same, run)}
    check_change(stored[sft], [(run, stored[run])])
    with pytest.raises(UserError, match=rf"{same}: all its weights are those of the SFT model"):
        check_change(stored[sft], [(run, stored[run]), (same, stored[same])])
