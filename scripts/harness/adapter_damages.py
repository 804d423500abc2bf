"""The damages that scripts/damage_models.py tries on an adapter's folder and on its base, by name.

Each takes the folder of a sound adapter of rank 4 in all linear layers, whose base stands in base/ beside it, and the
folder of a sound adapter of the other kind of model, and changes the first or its base.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from scripts.harness import model_damages as by
from scripts.harness.models import make_causal_lm

Damage = Callable[[Path, Path], object]
PREFIX = "base_model.model.model.layers.0.mlp.up_proj.lora_"
A, B = f"{PREFIX}A.weight", f"{PREFIX}B.weight"
HEAD = "base_model.model.score.weight"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def _state(edit: Callable[[dict], dict]) -> Damage:
    def damage(folder: Path, other: Path) -> None:
        save_file(edit(load_file(folder / WEIGHTS)), folder / WEIGHTS, {"format": "pt"})

    return damage


def edit_json(file: Path, **changes) -> None:
    """Change values in a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _json(name: str, **changes) -> Damage:
    return lambda folder, other: edit_json(folder / name, **changes)


def _config(**changes) -> Damage:
    return _json(CONFIG, **changes)


def _text(name: str, text: str) -> Damage:
    return lambda folder, other: (folder / name).write_text(text)


def _cut(name: str, share: float) -> Damage:
    return lambda folder, other: by.cut(folder / name, share)


def _zeros(name: str) -> Damage:
    return lambda folder, other: (folder / name).write_bytes(bytes((folder / name).stat().st_size))


def _gone(name: str) -> Damage:
    return lambda folder, other: (folder / name).unlink()


def _spoilt(name: str, value: float) -> Damage:
    return _state(lambda state: state | {name: state[name].index_fill(0, torch.tensor(1), value)})


def _head(edit: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return _state(lambda state: state | {HEAD: edit(state[HEAD])})


def _as_pickle(content: Callable[[dict], object]) -> Damage:
    def damage(folder: Path, other: Path) -> None:
        torch.save(content(load_file(folder / WEIGHTS)), folder / "adapter_model.bin")
        (folder / WEIGHTS).unlink()

    return damage


def _base(edit: Callable[[Path], object]) -> Damage:
    return lambda folder, other: edit(folder.with_name("base_of_both"))


def _spoilt_base(folder: Path) -> None:
    by.edit_weights(folder, lambda state: state | {name: torch.full_like(state[name], torch.nan) for name in [UP]})


def _whole_model_too(folder: Path, other: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder.with_name("base_of_both") / name, folder / name)


UP = "model.layers.0.mlp.up_proj.weight"

ADAPTERS: dict[str, Damage] = {
    "configuration cut": _cut(CONFIG, 0.5),
    "configuration empty": _text(CONFIG, ""),
    "configuration zeroed": _zeros(CONFIG),
    "configuration a list": _text(CONFIG, "[1, 2]"),
    "configuration of no UTF-8": lambda folder, other: (folder / CONFIG).write_bytes(b"\xff\xfe{}"),
    "configuration gone": _gone(CONFIG),
    "no kind": _config(peft_type=None),
    "another kind": _config(peft_type="PREFIX_TUNING"),
    "rank too large": _config(r=8),
    "rank too small": _config(r=2),
    "rank 0": _config(r=0),
    "rank negative": _config(r=-4),
    "rank of one layer another": _config(rank_pattern={"up_proj": 2}),
    "fewer targets": _config(target_modules=["q_proj"]),
    "more targets": _config(
        target_modules="all-linear", exclude_modules=None, rank_pattern={}, layers_to_transform=[0]
    ),
    "targets of no layer": _config(target_modules=["none_such"]),
    "targets that are no pattern": _config(target_modules="(up_proj"),
    "no targets": _config(target_modules=None),
    "targets embeddings": _config(target_modules=["embed_tokens"]),
    "DoRA": _config(use_dora=True),
    "biases": _config(bias="all"),
    "whole modules": _config(modules_to_save=["embed_tokens"]),
    "factors drawn from the base": _config(init_lora_weights="pissa"),
    "no base": _config(base_model_name_or_path=None),
    "base a number": _config(base_model_name_or_path=5),
    "base that is gone": _config(base_model_name_or_path="/none/such"),
    "base an adapter": _config(base_model_name_or_path="../model"),
    "weights gone": _gone(WEIGHTS),
    "weights empty": _cut(WEIGHTS, 0.0),
    "weights cut in the header": _cut(WEIGHTS, 0.02),
    "weights cut in the data": _cut(WEIGHTS, 0.7),
    "weights zeroed": _zeros(WEIGHTS),
    "weights a folder": lambda folder, other: ((folder / WEIGHTS).unlink(), (folder / WEIGHTS).mkdir()),
    "weights of the other kind": lambda folder, other: shutil.copy(other / WEIGHTS, folder / WEIGHTS),
    "no tensors": _state(lambda state: {}),
    "one A missing": _state(lambda state: {name: tensor for name, tensor in state.items() if name != A}),
    "one B missing": _state(lambda state: {name: tensor for name, tensor in state.items() if name != B}),
    "a layer's factors under other names": _state(
        lambda state: {name.replace("layers.1.", "layers.7."): tensor for name, tensor in state.items()}
    ),
    "names without a prefix": _state(lambda state: {name[5:]: tensor for name, tensor in state.items()}),
    "a tensor too many": _state(lambda state: state | {"base_model.model.extra.weight": torch.ones(2)}),
    "one A transposed": _state(lambda state: state | {A: state[A].T.contiguous()}),
    "one A flat": _state(lambda state: state | {A: state[A].flatten()}),
    "one A int32": _state(lambda state: state | {A: state[A].to(torch.int32)}),
    "all factors uint8": _state(lambda state: {name: tensor.to(torch.uint8) for name, tensor in state.items()}),
    "NaN in A": _spoilt(A, float("nan")),
    "infinity in B": _spoilt(B, float("inf")),
    ".bin cut": lambda folder, other: (
        _as_pickle(dict)(folder, other),
        by.cut(folder / "adapter_model.bin", 0.7),
    ),
    ".bin of other bytes": lambda folder, other: (
        _as_pickle(dict)(folder, other),
        (folder / "adapter_model.bin").write_bytes(bytes(range(256)) * 64),
    ),
    ".bin that holds no dict": _as_pickle(lambda state: [1, 2]),
    "NaN in a .bin": _as_pickle(lambda state: state | {A: state[A] * float("nan")}),
    "base.json cut": _cut("base.json", 0.5),
    "base.json zeroed": _zeros("base.json"),
    "base.json a list": _text("base.json", "[]"),
    "base.json of another base": _json("base.json", fingerprint="0" * 64),
    "base of other weights": _base(lambda base: make_causal_lm(base, seed=5)),
    "base of more layers": _base(lambda base: make_causal_lm(base, layers=3)),
    "base of another family": _base(lambda base: make_causal_lm(base, "gpt2")),
    "base without weights": _base(lambda base: (base / "model.safetensors").unlink()),
    "base cut": _base(lambda base: by.cut(base / "model.safetensors", 0.7)),
    "base without configuration": _base(lambda base: (base / "config.json").unlink()),
    "NaN in the base": lambda folder, other: (_gone("base.json")(folder, other), _base(_spoilt_base)(folder, other)),
    "a whole model beside the adapter": _whole_model_too,
    "tokenizer.json cut": _cut("tokenizer.json", 0.5),
}

OF_SCORERS: dict[str, Damage] = {
    "score.json cut": _cut("score.json", 0.5),
    "score.json empty": _text("score.json", ""),
    "score.json zeroed": _zeros("score.json"),
    "no head": _state(lambda state: {name: tensor for name, tensor in state.items() if name != HEAD}),
    "NaN in the head": _head(lambda head: head * float("nan")),
    "a head of two scores": _head(lambda head: torch.cat([head, head])),
}
