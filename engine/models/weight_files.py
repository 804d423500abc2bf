"""Which tensors a model's folder holds, read from the headers of its weight files, and whether the model has them.

`headers` returns names, shapes and dtypes. `tensors_of` returns tensors that are read piece by piece when they are
copied. transformers fills a model from a dictionary with all tensors of a file; with these lazy tensors the process
holds one piece of one tensor at a time, and neither a copy nor a mapping of the file.

transformers fills missing tensors with random numbers and ignores unknown ones, with a warning only. Here its loader
first runs on the meta device, without numbers, and its report is checked before the slow load. Prefixes, tied weights
and conversions of old names are handled as in the real load, whose report is checked too.
"""

import contextlib
import json
import pickle
import zipfile
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig, PreTrainedModel, modeling_utils

from engine import whole_files
from engine.errors import UserError, shortened
from engine.files import parsed_json, refuse_pointers
from engine.lazy import Lazy
from engine.models.places import WEIGHT_FILES, one_line

FLOATS = ("F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16")


class Header(NamedTuple):
    """What a file says of a tensor: its shape, and its dtype as the file's format calls it."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def is_float(self) -> bool:
        """Whether its numbers are plain floating-point ones, and not integers or quantized."""
        return self.dtype in FLOATS


def weights_folder(path: str) -> Path | None:
    """The folder on this machine with the weight files of the model at `path`: the path itself, or the fetched files of
    a name on the Hub; None before they were fetched."""
    if Path(path).is_dir():
        return Path(path)
    config = huggingface_hub.try_to_load_from_cache(path, "config.json")
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    try:
        files = weight_files(folder, path)
    except UserError:
        return None
    return folder if all(file.is_file() for file in files) else None


def headers(folder: Path, what: str) -> dict[str, Header]:
    """The tensors in the weight files of a model's folder, by name; no numbers are read.

    Raises: UserError, naming `what` (a flag) and the file, where there is none or one is missing, broken, cut off, or
    not what the index beside it says.
    """
    found: dict[str, dict[str, Header]] = {}
    for file in weight_files(folder, what):
        if not file.is_file():
            raise UserError(
                f"{what}: {file} is not there, of which the index beside it speaks. Copy it too, or write the model "
                "again."
            )
        refuse_pointers([file], what)
        found[file.name] = file_headers(file, what)
    index = _index(folder)
    for name, file_name in _weight_map(index, what).items() if index is not None else ():
        if name not in found[file_name]:
            raise UserError(
                f"{what}: {index} says that {name} is in {file_name}, which holds no such tensor. Write the model "
                "again."
            )
    return {name: header for tensors in found.values() for name, header in tensors.items()}


def file_headers(file: Path, what: str) -> dict[str, Header]:
    """The tensors in one weight file, by name; raises UserError, naming `what` (a flag), where it is broken."""
    return (_of_safetensors if file.suffix == ".safetensors" else _of_pickle)(file, what)


def mapped_tensors(folder: Path, what: str) -> dict[str, Tensor]:
    """The tensors of a model's files by name. The files are mapped: numbers are read when they are asked for.

    Raises: UserError as `headers` does.
    """
    headers(folder, what)
    found: dict[str, Tensor] = {}
    for file in weight_files(folder, what):
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as weights:
                found |= {name: weights.get_tensor(name) for name in weights.keys()}
        else:
            found |= torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    return found


def weight_files(folder: Path, what: str) -> list[Path]:
    """The files that a model's weights are read from, whether all of them are there or not.

    Raises: UserError, naming `what` (a flag), where there are none, or the index is broken.
    """
    for name in WEIGHT_FILES:
        if (folder / name).exists():
            return [folder / name]
        if (folder / f"{name}.index.json").exists():
            names = _weight_map(folder / f"{name}.index.json", what).values()
            return [folder / file for file in dict.fromkeys(names)]
    raise UserError(
        f"{what}: the folder {folder} holds a config.json but no weights (model.safetensors or pytorch_model.bin, or "
        "the index of several). Was its writing cut off? Write it again."
    )


def file_names(name: str, model: Any) -> tuple[str, ...]:
    """What a weight may be called in files, by its name in a model (or its class): transformers looks for all of
    these."""
    trunk = f"{model.base_model_prefix}."
    older = name.replace("lm_head.", "embed_out.")  # GPT-NeoX's
    return name, name.removeprefix(trunk), f"{trunk}{name}", older


def stored_name(name: str, model: Any, stored: Container[str]) -> str | None:
    """By which of its `file_names` the files have a weight, if they have it. stored: the names in them."""
    return next((other for other in file_names(name, model) if other in stored), None)


def _index(folder: Path) -> Path | None:
    for name in WEIGHT_FILES:
        if (folder / name).exists():
            return None
        if (folder / f"{name}.index.json").exists():
            return folder / f"{name}.index.json"
    return None


def _weight_map(index: Path, what: str) -> dict[str, str]:
    """Each tensor's file, by an index."""
    try:
        by_name = parsed_json(index.read_text(encoding="utf-8"))["weight_map"]
        files = {name: str(file) for name, file in by_name.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{what}: {index} is broken ({type(error).__name__}: {error}). It is to say in which file each tensor is; "
            "copy it again, or write the model again."
        ) from None
    outside = [
        file for file in files.values() if Path(file).name != file or not file.endswith(index.name.split(".")[1])
    ]
    if outside or not files:
        raise UserError(
            f"{what}: {index} names {shortened(outside[0]) if outside else 'no file'}, where it is to name weight "
            "files beside it. Write the model again."
        )
    return files


def _of_safetensors(file: Path, what: str) -> dict[str, Header]:
    try:
        with safe_open(file, "pt") as weights:
            slices = {name: weights.get_slice(name) for name in weights.keys()}
            return {name: Header(tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(
            f"{what}: {file} ({file.stat().st_size} bytes) is a broken safetensors file ({error}). Was its writing cut "
            "off? Copy it again, or write it again."
        ) from None


def _of_pickle(file: Path, what: str) -> dict[str, Header]:
    """Of a file by torch.save; only tensors are unpickled, and nothing in it can run."""
    try:
        state = torch.load(file, map_location="meta", weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(
            f"{what}: {file} is broken, or holds more than tensors and would run code when it is read. It was not "
            "read. Copy it again, or save the model as safetensors."
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{what}: {file} ({file.stat().st_size} bytes) is broken ({one_line(error)[:200]}). Was its "
            "writing cut off? Copy it again, or write it again."
        ) from None
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise UserError(
            f"{what}: {file} holds something else than tensors by their names. Give a model that save_pretrained wrote."
        )
    return {name: Header(tuple(value.shape), str(value.dtype).removeprefix("torch.")) for name, value in state.items()}


PIECE = 1 << 24  # bytes read at a time
# Those of weights, by safetensors' names; tensors of others are left to the libraries.
DTYPES = {name: dtype for dtype, name in whole_files.DTYPES.items() if dtype.is_floating_point}


@contextlib.contextmanager
def read_by_pieces() -> Iterator[None]:
    """Within this context the dictionaries that transformers reads from weight files hold `Lazy` tensors."""
    read = modeling_utils.load_state_dict

    def load_state_dict(checkpoint_file, map_location="cpu", **settings):
        state = read(checkpoint_file, map_location=map_location, **settings)
        return state if torch.device(map_location).type == "meta" else state | tensors_of(Path(checkpoint_file))

    modeling_utils.load_state_dict = load_state_dict
    try:
        yield
    finally:
        modeling_utils.load_state_dict = read


def tensors_of(file: Path) -> dict[str, Lazy]:
    """Those weights of a safetensors file, or of one by torch.save, that can be read by pieces."""
    if file.suffix == ".safetensors":
        return _lazy_of_safetensors(file)
    return _lazy_of_pickle(file) if zipfile.is_zipfile(file) else {}  # not of torch before 1.6


def _lazy_of_safetensors(file: Path) -> dict[str, Lazy]:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    return {
        name: _at(file, 8 + length + entry["data_offsets"][0], entry["shape"], DTYPES[entry["dtype"]])
        for name, entry in header.items()
        if entry.get("dtype") in DTYPES
    }


def _lazy_of_pickle(file: Path) -> dict[str, Lazy]:
    with FakeTensorMode():  # in which torch.load reads no numbers, and says where they stand
        state = torch.load(file, map_location="cpu", weights_only=True)
    found: dict[str, Lazy] = {}
    for name, tensor in state.items():
        if isinstance(tensor, Tensor) and tensor.dtype in DTYPES.values() and tensor.is_contiguous():
            start: Any = tensor.untyped_storage()._checkpoint_offset
            offset = start + int(tensor.storage_offset()) * tensor.dtype.itemsize
            found[name] = _at(file, offset, tensor.shape, tensor.dtype)
    return found


def _at(file: Path, offset: int, shape, dtype: torch.dtype) -> Lazy:
    return Lazy.of(tuple(shape), dtype, partial(_read, file, offset, dtype))


def _read(file: Path, offset: int, dtype: torch.dtype, target: Tensor) -> None:
    """Copy the numbers that stand from a byte of a file on to a contiguous tensor; raises OSError where it ends."""
    if not target.numel():
        return
    with file.open("rb", buffering=0) as opened:
        opened.seek(offset)
        for run in target.view(-1).split(PIECE // dtype.itemsize):
            piece = torch.empty(len(run), dtype=dtype)
            numbers: Any = piece.view(torch.uint8).numpy()
            rest = memoryview(numbers)
            while len(rest):
                count = opened.readinto(rest)
                if not count:
                    raise OSError(f"{file} ends within a tensor. Was its writing cut off? Copy it again.")
                rest = rest[count:]
            run.copy_(piece)


@torch.no_grad()
def restore_buffers(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give a Hugging Face model the buffers that it has where it is not partitioned.

    While ZeRO-3 builds a model, every tensor of floating-point numbers that is made is rounded to the weights' dtype
    (deepspeed.zero.Init). transformers computes rotary frequencies in float32, and not all its versions do so again
    once the model stands: rounded to bfloat16 they are off by up to 0.4 %, by which a token at position 1,000 turns as
    one four places from it should.

    Args:
        dtype: of the weights.
    """
    here, stored = dict(model.named_buffers()), model.state_dict().keys()
    names = [name for name in here if name not in stored]
    if not names:
        return
    with torch.device("meta"):
        kept_in = dict(type(model)._from_config(model.config, dtype=dtype).named_buffers())
    with init_empty_weights(include_buffers=False):
        exact = dict(type(model)._from_config(model.config, dtype=torch.float32).named_buffers())
    for name in names:
        owner, _, last = name.rpartition(".")
        buffer = exact[name].to(here[name].device, kept_in[name].dtype)
        setattr(model.get_submodule(owner), last, buffer)


SHOWN = 3  # names in a message


@dataclass(frozen=True, slots=True)
class Misfit:
    """Names of the model's tensors that are missing, of the files' that are left over, and (name, the file's shape, the
    model's shape) of those that differ."""

    missing: tuple[str, ...]
    left_over: tuple[str, ...]
    misshapen: tuple[tuple[str, tuple, tuple], ...]

    @classmethod
    def of(cls, loading_info: Mapping) -> "Misfit":
        """What transformers' `output_loading_info` says."""
        missing, left_over, misshapen = (
            tuple(sorted(loading_info[name])) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")
        )
        return cls(missing, left_over, misshapen)

    @property
    def difference(self) -> str:
        """What differs, with the first few names; "" where nothing does."""
        parts = []
        if self.missing:
            parts.append(f"{_counted(self.missing, 'is', 'are')} missing ({listed(self.missing)})")
        if self.left_over:
            parts.append(f"{_counted(self.left_over, 'is', 'are')} left over ({listed(self.left_over)})")
        if self.misshapen:
            shapes = [f"{name}: {tuple(has)}, not {tuple(needs)}" for name, has, needs in self.misshapen]
            parts.append(f"{_counted(shapes, 'has', 'have')} another shape ({listed(shapes)} by config.json)")
        return "; ".join(parts)

    def refuse(self, path: str, what: str) -> None:
        """Raise UserError, naming `what` (a flag) and the tensors, if there are any."""
        if self.difference:
            raise UserError(
                f"{what}: the weights in {path} are not those of the model that its config.json describes: "
                f"{self.difference}. {'What is missing would be random numbers. ' if self.missing else ''}Give the "
                "config.json and the weights that were written together."
            )


def listed(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _counted(names: tuple | list, one: str, several: str) -> str:
    return f"1 tensor {one}" if len(names) == 1 else f"{len(names)} tensors {several}"


def check_weights(
    path: str, config: PretrainedConfig, model_class, what: str, names: Mapping[str, str] | None = None
) -> None:
    """Raise UserError, naming `what` (a flag), unless the weight files at `path` hold all tensors of the model and no
    others, of its shapes, in floating-point numbers. Only headers are read.

    config, model_class: what is to be built. names: in the files, of tensors that the model has other names for. A name
    on the Hub of which nothing was fetched yet passes.
    """
    folder = weights_folder(path)
    if folder is None:
        return
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        raise UserError(
            f"{what}: {path} is quantized ({method or 'quantization_config in config.json'}). Training needs weights "
            "in fp32, fp16 or bf16: give the model as it was before, or dequantize it and save it again."
        )
    found = {(names or {}).get(name, name): header for name, header in headers(folder, what).items()}
    check_headers(found, path, config, model_class, what)


def check_headers(found: Mapping[str, Header], path: str, config: PretrainedConfig, model_class, what: str) -> None:
    """As `check_weights`, of tensors that were `found` under the model's names."""
    try:
        misfit, _ = _verdict(found, config, model_class)
        floats = {name: header for name, header in found.items() if header.is_float}
        lacking, model = (misfit, None) if len(floats) == len(found) else _verdict(floats, config, model_class)
    except Exception as error:  # whatever sizes that make no model lead transformers to
        raise UserError(
            f"{what}: no model can be built as {path}/config.json says ({type(error).__name__}: "
            f"{one_line(error)[:300]}). Mend it, or write the model again."
        ) from None
    weights = tuple(name for name in misfit.left_over if not _is_computed(name, found))
    replace(misfit, left_over=weights).refuse(path, what)
    if model is None:
        return
    state = model.state_dict()
    packed = [name for name in lacking.missing if name not in state or state[name].is_floating_point()]
    if packed:
        kinds = sorted({header.dtype for header in found.values() if not header.is_float})
        raise UserError(
            f"{what}: {_counted(packed, 'is', 'are')} of type {', '.join(kinds)} in {path} ({listed(packed)}), which "
            "is not what weights to train are: they are packed or quantized, or were converted by mistake. Give the "
            "model in fp32, fp16 or bf16."
        )


def _is_computed(name: str, found: Mapping[str, Header]) -> bool:
    """Whether a tensor that is left over is none that is learned: older versions of transformers saved attention's
    causal masks, (1, 1, S, S), and the frequencies of positions with the weights."""
    if name.endswith(("masked_bias", "inv_freq")):
        return True
    shape = next((header.shape for key, header in found.items() if key.endswith(name) or name.endswith(key)), ())
    return name.endswith(("attn.bias", "attention.bias")) and len(shape) == 4 and shape[:2] == (1, 1)


def _verdict(found: Mapping[str, Header], config: PretrainedConfig, model_class) -> tuple[Misfit, nn.Module]:
    state = {name: torch.empty(header.shape, device="meta") for name, header in found.items()}
    model, info = model_class.from_pretrained(
        None,
        config=config,
        state_dict=state,
        dtype=torch.float32,
        device_map="meta",
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    return Misfit.of(info), model
