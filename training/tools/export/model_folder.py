"""Writes a checkpoint's model, one tensor at a time and without engines."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from engine.atomic_files import file_order, whole_folder
from engine.errors import UserError
from engine.files import without_links
from engine.models.adapter_folders import BASE, SCORE, WEIGHTS
from engine.models.model_paths import ADAPTER_CONFIG, is_adapter
from engine.models.reward_formats import STEP_END
from training.checkpoints.files import CONFIG, EMA, ShardFiles, write_bytes, write_tensors
from training.checkpoints.resuming import OF_MODELS, Checkpoint, CheckpointAdapter
from training.tools.cards import add_card

FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
INDEX = "model.safetensors.index.json"
WITHIN = "model."  # prefix of the names of the transformers model's weights within a Policy or Scorer
SHARD_SIZE = "50GB"  # the default of save_pretrained


class CheckpointTensors(Mapping):
    """The weights of one of a checkpoint's models, as a run would save them. Each tensor is read when it is asked for.

    files: the model's training state. averages: the moving average, if it replaces the weights. computed: the dtype in
    which the run computed. given: the dtype to which all float tensors are converted. If it is None, trained weights
    get the dtype `computed`, and frozen tensors keep their dtype.
    """

    def __init__(
        self, files: ShardFiles, averages: ShardFiles | None, computed: torch.dtype, given: torch.dtype | None
    ):
        self._computed, self._given = computed, given
        self._places: dict[str, tuple[ShardFiles, str]] = {}
        for name in files.shapes():
            kind, _, parameter = name.partition("/")
            if kind in ("weights", "frozen") and parameter.startswith(WITHIN):
                self._places[parameter.removeprefix(WITHIN)] = files, name
        for name in averages.shapes() if averages is not None else ():
            self._places[name.partition("/")[2].removeprefix(WITHIN)] = averages, name

    def shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a tensor, without reading it."""
        files, place = self._places[name]
        dtype = files.dtype(place)
        if dtype.is_floating_point:
            trained = not place.startswith("frozen/")
            dtype = self._given or (self._computed if trained else dtype)
        return files.shapes()[place], dtype

    def is_trained(self, name: str) -> bool:
        """Whether the tensor `name` is trained."""
        return not self._places[name][1].startswith("frozen/")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which trained weights are saved."""
        return self._given or self._computed

    def __getitem__(self, name: str) -> Tensor:
        files, place = self._places[name]
        return files.whole(place).to(self.shape_and_dtype(name)[1])

    def __iter__(self) -> Iterator[str]:
        """The names in the order in which the safetensors library writes them."""
        return iter(sorted(self._places, key=lambda name: file_order(name, self.shape_and_dtype(name)[1])))

    def __len__(self) -> int:
        return len(self._places)

    def only(self, names: Sequence[str]) -> "CheckpointTensors":
        """The tensors with these names."""
        part = CheckpointTensors.__new__(CheckpointTensors)
        part._computed, part._given = self._computed, self._given
        part._places = {name: self._places[name] for name in names}
        return part


def export(
    checkpoint: str | Checkpoint,
    output: str | Path,
    *,
    model: str = "actor",
    ema: bool = False,
    dtype: str | None = None,
    max_shard_size: str = SHARD_SIZE,
    adapter: bool = False,
    base: str | None = None,
) -> Path:
    """Write a model of a checkpoint as a Hugging Face folder; returns the folder.

    Args:
        checkpoint: a checkpoint's folder; or the output folder of a run, whose newest whole checkpoint is taken; or a
            Checkpoint. If there are several ranks, all of them must call this function, unless `checkpoint` is a
            Checkpoint: then one process may call it alone.
        output: a folder that does not exist or is empty.
        model: the model's name in the checkpoint.
        ema: whether the moving average is written instead of the weights.
        dtype: "fp32", "fp16" or "bf16"; by default the dtype in which the run computed.
        max_shard_size: the largest size of a weight file; larger models are split into several files.
        adapter: whether only the adapter of a LoRA run is written, without its model.
        base: the path of the model with which a LoRA run began; by default its path during the run.

    Raises: UserError if the checkpoint is damaged or does not have the model, if `output` is not empty, or if `output`
    lies in the checkpoint.
    """
    folder = Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there and not an empty folder. Give another one to write into.")
    found = checkpoint if isinstance(checkpoint, Checkpoint) else _found(checkpoint, folder)
    if without_links(folder).is_relative_to(without_links(found.folder)):
        raise UserError(f"{folder} lies in the checkpoint {found.folder}, which would be damaged. Give another one.")
    tensors = _tensors(found, model, ema, dtype)
    source = found.folder / CONFIG / model
    if adapter or is_adapter(source):
        weights = CheckpointAdapter(found, model, tensors, base)
        tensors = weights.adapter() if adapter else weights.merged()
    try:
        with whole_folder(folder) as partial:
            if adapter:
                write_tensors(partial / WEIGHTS, tensors, {"format": "pt"})
            else:
                write_weights(tensors, max_shard_size, partial)
            _write_config(source, dtype, partial, OF_MODELS if adapter else (ADAPTER_CONFIG, SCORE, BASE))
            add_card(partial, found.folder.parent.parent, _name(model, ema, adapter), found.steps_done)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}). Make room, or give another folder.") from None
    return folder


def _found(path: str, folder: Path) -> Checkpoint:
    """The checkpoint that a path names. Prints which checkpoint was chosen."""
    try:
        found = Checkpoint.find(path, str(folder), with_ema=True)
    except UserError as error:
        raise UserError(str(error).removeprefix("--resume").lstrip(": ")) from None  # this program has no flag --resume
    assert found is not None, "a path was given"
    for line in found.passed_over:
        print(f"PASSED OVER: {line}", file=sys.stderr)
    print(f"reads {found.folder}")
    return found


def _name(model: str, ema: bool, adapter: bool) -> str:
    """The name of the folder in which a run saves this model."""
    name = "." if model == "model" else f"{model}_ema" if ema else model
    return name if not adapter else "adapter" if name == "." else f"{name}_adapter"


def _tensors(checkpoint: Checkpoint, model: str, ema: bool, dtype: str | None) -> CheckpointTensors:
    if model not in checkpoint.state["models"]:
        raise UserError(f"{checkpoint.folder} has no {model}. It has: {', '.join(checkpoint.state['models'])}.")
    if ema and (model != "actor" or not checkpoint.state["ema"]):
        raise UserError(f"{checkpoint.folder} has no moving average of the {model}. Leave --ema out.")
    config = json.loads((checkpoint.folder / CONFIG / model / "config.json").read_text())
    if get_checkpoint_conversion_mapping(config["model_type"]) or STEP_END in config:
        kind = "process reward" if STEP_END in config else config["model_type"]
        raise UserError(
            f"{checkpoint.folder}: files of {kind} models hold the weights in another arrangement than "
            "models compute with, which needs the model. Go on from the checkpoint with --resume and --max_steps "
            f"{checkpoint.steps_done}, which saves it."
        )
    averages = ShardFiles(checkpoint.folder / EMA) if ema else None
    computed = getattr(torch, config["dtype"])
    return CheckpointTensors(
        ShardFiles(checkpoint.folder / model), averages, computed, FLOATS[dtype] if dtype else None
    )


def write_weights(tensors: Any, max_shard_size: str, folder: Path) -> None:
    """Write a model's weight files, one tensor at a time, and an index if there are several files.

    tensors: a mapping with the methods `shape_and_dtype(name)` and `only(names)`, in the order in which the tensors are
    written. Raises: UserError for an invalid `max_shard_size`.
    """
    described = {}
    for name in tensors:
        shape, dtype = tensors.shape_and_dtype(name)
        described[name] = torch.empty(shape, dtype=dtype, device="meta")
    try:
        split = split_torch_state_dict_into_shards(described, max_shard_size=max_shard_size)
    except ValueError:
        raise UserError(f"--max_shard_size {max_shard_size}: give a number and KB, MB, GB or TB.") from None
    for name, members in split.filename_to_tensors.items():
        write_tensors(folder / name, tensors.only(members), {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_bytes(folder / INDEX, json.dumps(index, indent=2, sort_keys=True).encode() + b"\n")


def _write_config(source: Path, dtype: str | None, folder: Path, left_out: Sequence[str]) -> None:
    for path in sorted(path for path in source.iterdir() if path.name not in left_out):
        data = path.read_bytes()
        if path.name == "config.json" and dtype is not None:
            config = json.loads(data) | {"dtype": str(FLOATS[dtype]).removeprefix("torch.")}
            data = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
        write_bytes(folder / path.name, data)
