"""Hugging Face folders from checkpoints: files split and indexed, other dtypes, and what is refused."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from engine.models.adapters import is_factor
from engine.models.loading import load_policy
from engine.models.lora import LoraSpec, adapt
from engine.models.saving import adapter_files, merged_state
from engine.zero.training_state import Shard
from scripts.harness.models import make_causal_lm
from tests.training.checkpoints.tiny_checkpoints import TinyRun, flip_bit
from training.checkpoints.files import damages
from training.tools.export.__main__ import main
from training.tools.export.model_folder import INDEX

CONFIG = {"dtype": "bfloat16", "model_type": "gpt2", "vocab_size": 3}


class TinyPolicy:
    """Float32 masters of a run in bfloat16, in two runs each, a head that is not part of the model, and a buffer."""

    def __init__(self):
        self.weights = {f"model.{name}": torch.randn(100, 3) for name in "abc"}
        self.buffer = torch.arange(3)

    def shards(self) -> list[Shard]:
        halves = [
            Shard(f"{kind}/{name}", (100, 3), start, tensor.view(-1)[start : start + 150])
            for kind in ("weights", "exp_avg")
            for name, tensor in {**self.weights, "branch.a": torch.zeros(100, 3)}.items()
            for start in (150, 0)
        ]
        return [*halves, Shard("frozen/model.places", (3,), 0, self.buffer)]

    def scalars(self) -> dict:
        return {"adam_steps": 0, "loss_scale": {}}


@pytest.fixture
def run(tmp_path):
    run = TinyRun(tmp_path / "out")
    run.model = TinyPolicy()
    run.checkpoints.models = {"actor": run.model}
    run.checkpoints.config_files = {"actor/config.json": json.dumps(CONFIG).encode(), "actor/tokenizer.json": b"{}"}
    run.step = 2
    run.point = run.checkpoints.save(2, wait=True)
    return run


def exported(*words) -> int:
    return main([str(word) for word in words])


def test_weights_are_rounded_to_what_the_run_computed_in(run, tmp_path):
    assert exported(run.point, tmp_path / "hf") == 0
    names = {path.name for path in (tmp_path / "hf").iterdir()}
    assert names == {"model.safetensors", "config.json", "tokenizer.json"}
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == {"a", "b", "c", "places"} and found["places"].tolist() == [0, 1, 2]
    for name in "abc":
        assert torch.equal(found[name], run.model.weights[f"model.{name}"].to(torch.bfloat16))
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == CONFIG


def test_large_files_are_split_and_indexed_and_another_dtype_is_said_in_the_config(run, tmp_path, capsys):
    assert exported(run.checkpoints.output_dir, tmp_path / "hf", "--dtype", "fp32", "--max_shard_size", "3KB") == 0
    assert capsys.readouterr().out == f"reads {run.point}\nwritten: {tmp_path / 'hf'}\n"
    index = json.loads((tmp_path / "hf" / INDEX).read_text())
    assert len(set(index["weight_map"].values())) == 2 and index["metadata"]["total_size"] == 3 * 1200 + 24
    for name, file in index["weight_map"].items():
        found = load_file(tmp_path / "hf" / file)[name]
        assert torch.equal(found, run.model.weights.get(f"model.{name}", run.model.buffer))
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == CONFIG | {"dtype": "float32"}


@pytest.mark.parametrize(
    "words, message",
    [
        (["--model", "critic"], "has no critic. It has: actor."),
        (["--max_shard_size", "1XB"], "--max_shard_size 1XB: give a number and KB, MB, GB or TB."),
        (["--ema"], "has no moving average of the actor. Leave --ema out."),
    ],
)
def test_what_is_not_there_is_said(run, tmp_path, capsys, words, message):
    assert exported(run.point, tmp_path / "hf", *words) == 2
    about = "" if message.startswith("--") else f"{run.point} "
    assert capsys.readouterr().err == f"error: {about}{message}\n"
    assert not (tmp_path / "hf").exists()


def test_damaged_points_and_folders_that_hold_something_are_refused(run, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("")
    assert exported(run.point, tmp_path / "mine") == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'mine'} is there and not an empty folder.")
    flip_bit(run.point / "actor" / "rank_00000.safetensors")
    assert exported(run.point, tmp_path / "hf") == 2
    assert capsys.readouterr().err.startswith(
        f"error: the checkpoint {run.point} is damaged: actor/rank_00000.safetensors holds other bytes"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "out"]


def test_a_point_is_not_exported_into_itself(run, capsys):
    assert exported(run.point, run.point / "actor_folder") == 2
    assert "lies in the checkpoint" in capsys.readouterr().err
    assert damages(run.point) == []


def test_a_link_to_itself_is_no_folder_to_export_into(run, tmp_path, capsys):
    (tmp_path / "loop").symlink_to("loop")
    assert exported(run.point, tmp_path / "loop") == 2
    assert f"error: {tmp_path}/loop cannot be written (" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loop", "out"]


def test_an_adapter_is_asked_for_where_there_is_none_and_a_base_that_has_moved(run, tmp_path, capsys):
    assert exported(run.point, tmp_path / "hf", "--adapter") == 2
    assert "has no adapter of the actor. Leave --adapter out." in capsys.readouterr().err
    config = {"peft_type": "LORA", "r": 2, "base_model_name_or_path": "/none/such/base"}
    run.checkpoints.config_files["actor/adapter_config.json"] = json.dumps(config).encode()
    point = run.checkpoints.save(3, wait=True)
    assert exported(point, tmp_path / "hf") == 2
    assert re.search(r"is not there: /none/such/base .* with --base", capsys.readouterr().err)
    assert exported(point, tmp_path / "hf", "--adapter") == 2
    assert re.search(r"beside the factors \w and others train", capsys.readouterr().err)
    assert not (tmp_path / "hf").exists()


class TinyLora:
    """A language model of a family, in bfloat16, of which factors train."""

    def __init__(self, base: str):
        self.module = load_policy(base, torch.bfloat16)
        adapt(self.module, LoraSpec(dim=2, only=True), "actor")
        self.state = dict(self.module.model.named_parameters())
        for name, weight in self.state.items():
            if is_factor(name):
                torch.nn.init.normal_(weight, std=0.2)

    def shards(self) -> list[Shard]:
        """Float32 masters of the factors."""
        factors = {name: weight.detach().float() for name, weight in self.state.items() if is_factor(name)}
        return [Shard(f"weights/model.{n}", tuple(f.shape), 0, f.reshape(-1)) for n, f in factors.items()]

    def scalars(self) -> dict:
        return {"adam_steps": 0, "loss_scale": {}}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_merged_model_is_written(run, tmp_path, family):
    model = TinyLora(make_causal_lm(tmp_path / "base", family, tied=family != "llama"))
    run.checkpoints.models = {"actor": model}
    texts = adapter_files(model.module) | {"config.json": json.dumps(model.module.model.config.to_dict())}
    run.checkpoints.config_files = {f"actor/{name}": text.encode() for name, text in texts.items()}
    run.step = 3
    point = run.checkpoints.save(3, wait=True)
    assert exported(point, tmp_path / "hf") == 0
    found = load_file(tmp_path / "hf" / "model.safetensors")
    expected = merged_state(model.module, model.state)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert found[name].dtype == torch.bfloat16 and torch.equal(found[name], weight + 0), name
    assert not all(
        torch.equal(found[n], w)
        for n, w in load_policy(str(tmp_path / "base"), torch.bfloat16).model.named_parameters()
    )
