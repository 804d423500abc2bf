"""What can go wrong with the weights in a model's folder: each takes a sound folder and damages it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification


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
