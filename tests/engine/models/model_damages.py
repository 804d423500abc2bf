"""The damages that scripts/damage_models.py tries on a model's folder, by name.

Each takes the folder of a sound Llama of 2 layers and a folder with a sound model of the other kind, and changes the
first. `WEIGHTS` and `HEADERS` are of the weight files, `CONFIGURATIONS` of config.json, generation_config.json and the
tokenizer's files, `CODE` of what would run.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch

from tests.engine.models import damages as by

Damage = Callable[[Path, Path], object]
UP = "model.layers.0.mlp.up_proj.weight"


def _state(edit: Callable[[dict], dict]) -> Damage:
    return lambda folder, other: by.edit_weights(folder, edit)


def _config(**changes) -> Damage:
    return lambda folder, other: by.edit_config(folder, **changes)


def _text(name: str, edit: Callable[[str], str]) -> Damage:
    def damage(folder: Path, other: Path) -> None:
        (folder / name).write_text(edit((folder / name).read_text()))

    return damage


def _json(name: str, **changes) -> Damage:
    return _text(name, lambda text: json.dumps(json.loads(text) | changes))


def _gone(name: str) -> Damage:
    return lambda folder, other: (folder / name).unlink()


def _cut(share: float) -> Damage:
    return lambda folder, other: by.cut(folder / "model.safetensors", share)


def _cut_pickle(share: float) -> Damage:
    return lambda folder, other: by.cut(by.as_pickle(folder), share)


def _index(edit: Callable[[Path], object]) -> Damage:
    return lambda folder, other: edit(by.in_shards(folder))


def _spoilt(value: float) -> Damage:
    return _state(lambda state: state | {UP: state[UP].index_fill(0, torch.tensor(3), value)})


def _misnamed(index: Path) -> None:
    files = json.loads(index.read_text())
    files["weight_map"][UP] = next(file for file in files["weight_map"].values() if file != files["weight_map"][UP])
    index.write_text(json.dumps(files))


WEIGHTS: dict[str, Damage] = {
    "a layer's tensors under other names": _state(by.rename),
    "the last layer missing": _state(by.drop_layer),
    "one tensor missing": _state(lambda state: {name: tensor for name, tensor in state.items() if name != UP}),
    "a tensor too many": _state(lambda state: state | {"model.extra.weight": torch.ones(2)}),
    "weights of the other kind of model": lambda folder, other: by.weights_of(other)(folder),
    "a tensor of another shape": _state(lambda state: state | {UP: state[UP].T.contiguous()}),
    "one tensor int32": _state(by.integers),
    "matrices packed as uint8": _state(by.pack),
    "all tensors int64": _state(lambda state: {name: tensor.long() for name, tensor in state.items()}),
    "num_hidden_layers one too many": _config(num_hidden_layers=3),
    "num_hidden_layers one too few": _config(num_hidden_layers=1),
    "quantization_config": _config(quantization_config={"quant_method": "gptq", "bits": 4}),
    "an adapter's folder": lambda folder, other: (folder / "adapter_config.json").write_text("{}"),
    "NaN in a tensor": _spoilt(float("nan")),
    "infinity in a tensor": _spoilt(float("inf")),
    "no weight file": _gone("model.safetensors"),
    "empty .safetensors": _cut(0.0),
    ".safetensors cut in the header": _cut(0.02),
    ".safetensors cut in the data": _cut(0.7),
    "empty .bin": _cut_pickle(0.0),
    ".bin cut": _cut_pickle(0.7),
    ".bin of other bytes": lambda folder, other: by.as_pickle(folder).write_bytes(bytes(range(256)) * 64),
    ".bin that holds no dict": lambda folder, other: torch.save([1, 2], by.as_pickle(folder)),
    "a missing shard": _index(lambda index: max(index.parent.glob("*.safetensors")).unlink()),
    "a missing index": _index(Path.unlink),
    "an empty index": _index(lambda index: index.write_text("")),
    "an index that is cut": _index(lambda index: by.cut(index, 0.5)),
    "an index without weight_map": _index(lambda index: index.write_text('{"metadata": {}}')),
    "an index that names another file": _index(_misnamed),
}


def _header(edit: Callable[[dict], dict]) -> Damage:
    return lambda folder, other: by.edit_header(folder / "model.safetensors", edit)


def _field(name: str, change: Callable[[object], object]) -> Damage:
    return _header(lambda header: header | {UP: header[UP] | {name: change(header[UP][name])}})


def _bytes(edit: Callable[[bytes], bytes]) -> Damage:
    def damage(folder: Path, other: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(edit(path.read_bytes()))

    return damage


HEADERS: dict[str, Damage] = {
    "header length beyond the file": _bytes(lambda content: (1 << 40).to_bytes(8, "little") + content[8:]),
    "header length 0": _bytes(lambda content: bytes(8) + content[8:]),
    "header that is no JSON": _bytes(lambda content: content[:8] + b"x" + content[9:]),
    "header that is a list": _bytes(lambda content: (2).to_bytes(8, "little") + b"[]"),
    "unknown dtype": _field("dtype", lambda _: "F99"),
    "offsets beyond the file": _field("data_offsets", lambda ends: [ends[0], ends[1] + (1 << 30)]),
    "offsets that overlap": _field("data_offsets", lambda ends: [ends[0] - 64, ends[1] - 64]),
    "a negative size": _field("shape", lambda shape: [-shape[0], *shape[1:]]),
    "a size that is not the offsets'": _field("shape", lambda shape: [shape[0] + 1, *shape[1:]]),
}

CONFIGURATIONS: dict[str, Damage] = {
    "config.json cut": _text("config.json", lambda text: text[: len(text) // 2]),
    "config.json empty": _text("config.json", lambda text: ""),
    "config.json a list": _text("config.json", lambda text: "[1, 2]"),
    "no model_type": _config(model_type=None),
    "unknown model_type": _config(model_type="lamma"),
    "model_type of another family": _config(model_type="gpt2"),
    "model_type of no decoder": _config(model_type="bert"),
    "vocab_size too small": _config(vocab_size=60),
    "vocab_size a word": _config(vocab_size="many"),
    "hidden_size negative": _config(hidden_size=-32),
    "hidden_size 0": _config(hidden_size=0),
    "heads that do not divide": _config(num_attention_heads=3, head_dim=None),
    "key heads that do not divide": _config(num_key_value_heads=3),
    "num_hidden_layers missing": _config(num_hidden_layers=None),
    "num_hidden_layers a word": _config(num_hidden_layers="two"),
    "too few positions": _config(max_position_embeddings=4),
    "unknown hidden_act": _config(hidden_act="none_such"),
    "unknown rope_type": _config(rope_parameters={"rope_type": "none_such", "rope_theta": 1e4}),
    "pad_token_id out of the vocabulary": _config(pad_token_id=9999),
    "architectures a number": _config(architectures=7),
    "dtype unknown": _config(dtype="float99"),
    "tokenizer.json cut": _text("tokenizer.json", lambda text: text[: len(text) // 2]),
    "tokenizer.json empty": _text("tokenizer.json", lambda text: ""),
    "tokenizer.json gone": _gone("tokenizer.json"),
    "tokenizer_config.json cut": _text("tokenizer_config.json", lambda text: text[: len(text) // 2]),
    "neither pad nor EOS": _json("tokenizer_config.json", pad_token=None, eos_token=None),
    "a token beyond the embedding": _json("tokenizer_config.json", pad_token="<none such>"),
    "generation_config.json cut": _text("generation_config.json", lambda text: text[: len(text) // 2]),
    "another tokenizer's ids": _text(
        "tokenizer.json", lambda text: text.replace("w04", "others").replace("w05", "w04")
    ),
}

OF_ACTORS = ("generation_config.json cut",)  # a reward model has no such file


class _Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


RAN = "it_ran"  # what code that should not run makes beside the model's folder


def _bomb(folder: Path, other: Path) -> None:
    path = by.as_pickle(folder)
    torch.save(torch.load(path, weights_only=True) | {"bomb": _Bomb(folder.parent / RAN)}, path)


def _own_code(folder: Path, other: Path) -> None:
    (folder / "own.py").write_text(f"import os\nos.mkdir({str(folder.parent / RAN)!r})\n")
    by.edit_config(folder, model_type="their_own", auto_map={"AutoConfig": "own.Config"})


def _own_tokenizer(folder: Path, other: Path) -> None:
    (folder / "own.py").write_text(f"import os\nos.mkdir({str(folder.parent / RAN)!r})\n")
    path = folder / "tokenizer_config.json"
    words = {"tokenizer_class": "Their", "auto_map": {"AutoTokenizer": ["own.Their", None]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | words))


CODE: dict[str, Damage] = {
    "a pickle that runs code": _bomb,
    "auto_map of the configuration": _own_code,
    "auto_map of the tokenizer": _own_tokenizer,
}
