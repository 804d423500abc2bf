"""What can go wrong with a model's folder.

First the changes themselves, each to a sound folder; then the damages that scripts/damage_models.py tries, by name.
Each damage takes the folder of a sound Llama of 2 layers and a folder with a sound model of the other kind, and changes
the first: `WEIGHTS` and `HEADERS` its weight files, `CONFIGURATIONS` config.json, generation_config.json and the
tokenizer's files; `CODE` adds what would run.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

Damage = Callable[[Path, Path], object]
UP = "model.layers.0.mlp.up_proj.weight"


def edit_config(folder: str | Path, **changes) -> None:
    """Change config.json; None takes a key out."""
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def edit_weights(folder: str | Path, edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Replace model.safetensors by what `edit` makes of its tensors."""
    path = Path(folder) / "model.safetensors"
    save_file(edit(load_file(path)), path, {"format": "pt"})


def rename(state: dict) -> dict:
    """One layer's tensors under other names."""
    return {name.replace("layers.1.", "blocks.1."): tensor for name, tensor in state.items()}


def drop_layer(state: dict) -> dict:
    """Without the last layer's tensors."""
    return {name: tensor for name, tensor in state.items() if "layers.1." not in name}


def integers(state: dict) -> dict:
    """One tensor as int32."""
    name = "model.layers.0.mlp.up_proj.weight"
    return state | {name: state[name].to(torch.int32)}


def pack(state: dict) -> dict:
    """All matrices of the layers as one byte a number, as quantized models have them."""
    return {
        name: tensor.to(torch.uint8) if "layers" in name and tensor.dim() == 2 else tensor
        for name, tensor in state.items()
    }


def weights_of(other: str | Path) -> Callable[[str | Path], None]:
    """The weights of another folder in place of its own."""
    return lambda folder: shutil.copy(Path(other) / "model.safetensors", Path(folder) / "model.safetensors")


def as_pickle(folder: str | Path) -> Path:
    """The same weights in pytorch_model.bin."""
    path = Path(folder) / "model.safetensors"
    torch.save(load_file(path), Path(folder) / "pytorch_model.bin")
    path.unlink()
    return Path(folder) / "pytorch_model.bin"


def in_shards(folder: str | Path) -> Path:
    """The same weights in several files with an index; returns the index."""
    scores = "score.weight" in load_file(Path(folder) / "model.safetensors")
    kind = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32)
    (Path(folder) / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    return Path(folder) / "model.safetensors.index.json"


def cut(path: Path, share: float) -> None:
    """Keep the first part of a file."""
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


def edit_header(path: Path, edit: Callable[[dict], dict]) -> None:
    """Change the JSON header of a safetensors file, whose first 8 bytes are its length."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.dumps(edit(json.loads(content[8 : 8 + size]))).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])


def _state(edit: Callable[[dict], dict]) -> Damage:
    return lambda folder, other: edit_weights(folder, edit)


def _config(**changes) -> Damage:
    return lambda folder, other: edit_config(folder, **changes)


def _text(name: str, edit: Callable[[str], str]) -> Damage:
    def damage(folder: Path, other: Path) -> None:
        (folder / name).write_text(edit((folder / name).read_text()))

    return damage


def _json(name: str, **changes) -> Damage:
    return _text(name, lambda text: json.dumps(json.loads(text) | changes))


def _gone(name: str) -> Damage:
    return lambda folder, other: (folder / name).unlink()


def _cut(share: float) -> Damage:
    return lambda folder, other: cut(folder / "model.safetensors", share)


def _cut_pickle(share: float) -> Damage:
    return lambda folder, other: cut(as_pickle(folder), share)


def _index(edit: Callable[[Path], object]) -> Damage:
    return lambda folder, other: edit(in_shards(folder))


def _spoilt(value: float) -> Damage:
    return _state(lambda state: state | {UP: state[UP].index_fill(0, torch.tensor(3), value)})


WEIGHTS: dict[str, Damage] = {
    "a layer's tensors under other names": _state(rename),
    "the last layer missing": _state(drop_layer),
    "one tensor missing": _state(lambda state: {name: tensor for name, tensor in state.items() if name != UP}),
    "a tensor too many": _state(lambda state: state | {"model.extra.weight": torch.ones(2)}),
    "weights of the other kind of model": lambda folder, other: weights_of(other)(folder),
    "a tensor of another shape": _state(lambda state: state | {UP: state[UP].T.contiguous()}),
    "one tensor int32": _state(integers),
    "matrices packed as uint8": _state(pack),
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
    ".bin of other bytes": lambda folder, other: as_pickle(folder).write_bytes(bytes(range(256)) * 64),
    ".bin that holds no dict": lambda folder, other: torch.save([1, 2], as_pickle(folder)),
    "a missing shard": _index(lambda index: max(index.parent.glob("*.safetensors")).unlink()),
    "a missing index": _index(Path.unlink),
    "an empty index": _index(lambda index: index.write_text("")),
    "an index that is cut": _index(lambda index: cut(index, 0.5)),
    "an index without weight_map": _index(lambda index: index.write_text('{"metadata": {}}')),
}


def _header(edit: Callable[[dict], dict]) -> Damage:
    return lambda folder, other: edit_header(folder / "model.safetensors", edit)


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
    path = as_pickle(folder)
    torch.save(torch.load(path, weights_only=True) | {"bomb": _Bomb(folder.parent / RAN)}, path)


def _own_code(folder: Path, other: Path) -> None:
    (folder / "own.py").write_text(f"import os\nos.mkdir({str(folder.parent / RAN)!r})\n")
    edit_config(folder, model_type="their_own", auto_map={"AutoConfig": "own.Config"})


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
