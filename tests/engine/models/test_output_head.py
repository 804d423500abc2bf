"""Models whose config.json ties output head and embedding, and whose files hold two matrices, or one twice."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.memory.blueprint import module_on_meta
from engine.models.loading import empty_like, load_policy
from engine.models.reading import LANGUAGE_MODEL, read_config, read_tokenizer
from engine.models.saving import save_model
from scripts.harness.models import make_causal_lm
from scripts.harness.weights import full_state
from tests.distributed.conftest import write_stage_files
from tests.distributed.harness import run_ranks


def make_folder(parent: Path, family: str = "llama", **settings) -> Path:
    """A model with two matrices, and this in its config.json; None for an entry that is to go."""
    folder = Path(make_causal_lm(parent / family, family))
    edit(folder, **settings)
    return folder


def edit(folder: Path, **settings) -> None:
    file = folder / "config.json"
    entries = json.loads(file.read_text()) | settings
    file.write_text(json.dumps({name: value for name, value in entries.items() if value is not None}))


def pickle(folder: Path, state: dict) -> None:
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("form", ["safetensors", "without the trunk's prefix", "pickled", "in shards", "half of it"])
def test_two_matrices_in_the_files_are_two_whatever_config_json_says(tmp_path, family, form):
    folder = make_folder(tmp_path, family, tie_word_embeddings=True)
    state, trunk = load_file(folder / "model.safetensors"), {"llama": "model.", "gpt2": "transformer."}[family]
    if form == "without the trunk's prefix":
        bare = {name.removeprefix(trunk): tensor for name, tensor in state.items()}
        save_file(bare, folder / "model.safetensors", {"format": "pt"})
    elif form == "pickled":
        pickle(folder, state)
    elif form == "in shards":
        AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="8KB", state_dict=state)
        (folder / "model.safetensors").unlink()
        edit(folder, tie_word_embeddings=True)
    elif form == "half of it":  # the last number alone is another one
        embedding = next(name for name in state if "embed" in name or "wte" in name)
        state["lm_head.weight"] = state[embedding].clone()
        state["lm_head.weight"][-1, -1] += 0.5
        save_file(state, folder / "model.safetensors", {"format": "pt"})
    assert read_config(str(folder), "model").tie_word_embeddings is False


def test_one_matrix_stays_one(tmp_path):
    folder = Path(make_causal_lm(tmp_path / "tied", tied=True))
    assert read_config(str(folder), "model").tie_word_embeddings is True
    pickle(folder, AutoModelForCausalLM.from_pretrained(folder).state_dict())  # under both names
    assert read_config(str(folder), "model").tie_word_embeddings is True
    (folder / "pytorch_model.bin").unlink()  # of which memory can be planned
    assert read_config(str(folder), "model").tie_word_embeddings is True


def test_a_head_that_the_file_has_under_its_older_name_counts(tmp_path):
    folder = make_folder(tmp_path, "gpt_neox", tie_word_embeddings=True)
    assert "embed_out.weight" in load_file(folder / "model.safetensors")
    assert read_config(str(folder), "model").tie_word_embeddings is False


def test_the_default_of_a_family_counts_where_config_json_is_silent(tmp_path):
    folder = make_folder(tmp_path, "gpt2", tie_word_embeddings=None)
    assert read_config(str(folder), "model").tie_word_embeddings is False


def test_whatever_is_built_has_the_head_and_it_is_saved(tmp_path):
    folder = make_folder(tmp_path, tie_word_embeddings=True)
    policy = load_policy(str(folder), torch.float32)
    for module in (empty_like(policy, torch.device("cpu")), module_on_meta(str(folder), LANGUAGE_MODEL, "fp32", "")):
        assert "lm_head.weight" in dict(module.model.named_parameters())
    save_model(policy, full_state(policy.model), read_tokenizer(str(folder), "model"), tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["tie_word_embeddings"] is False
    given, saved = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "saved"))
    assert given.keys() == saved.keys() and all(torch.equal(given[name], saved[name]) for name in given)


def test_weights_that_are_not_contiguous_in_their_file_are_compared(tmp_path):
    folder = make_folder(tmp_path)
    state = load_file(folder / "model.safetensors")
    pickle(
        folder, {name: tensor.t().contiguous().t() if tensor.dim() == 2 else tensor for name, tensor in state.items()}
    )
    assert load_policy(str(folder), torch.float32).model.lm_head.weight.equal(state["lm_head.weight"])


def test_engines_refuse_another_model_than_the_folder_has(tmp_path):
    folder = make_folder(tmp_path, tie_word_embeddings=True)
    write_stage_files(tmp_path)
    target, config = "tests.distributed.work_loaded_check:verdicts", str(tmp_path / "stage3.json")
    for found in run_ranks(target, path=str(folder), stage=3, config=config):
        assert found["as it is"] == "it was loaded" and found["random numbers"] is True
        assert "1 of the weights" in found["by weights"] and "(lm_head.weight)" in found["by weights"]
        assert "other log-probs than the model" in found["by results"]
