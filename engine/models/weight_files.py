"""Reads weight files. Finds out which tensors the files hold and whether these are the model's tensors, and reads
tensors piece by piece.

`headers` returns names, shapes and dtypes. `tensors_of` returns lazy tensors: a lazy tensor is read piece by piece when
it is copied. transformers fills a model from a dictionary with all tensors of a file. If these are lazy tensors, the
process holds one piece of one tensor at a time, and neither a copy nor a memory mapping of the file.

transformers only warns about missing tensors, which get random numbers, and about unknown tensors. `check_weights`
therefore runs transformers' loader on the meta device, which reads no numbers, and checks the loader's report before
the slow load. Prefixes, tied weights and old names are handled as in the real load. The report of the real load is
checked too.
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

from engine import atomic_files
from engine.errors import UserError, shortened
from engine.files import parsed_json, refuse_pointers
from engine.lazy import Lazy
from engine.models.model_paths import WEIGHT_FILES, one_line

FLOATS = ("F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16")


class Header(NamedTuple):
    """A tensor's shape and dtype, read from the header of its file. The dtype is named as in the file's format."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def is_float(self) -> bool:
        """Whether the tensor has floating-point numbers of at least 16 bits, and not integers or quantized numbers."""
        return self.dtype in FLOATS


def weights_folder(path: str) -> Path | None:
    """The folder on this machine with the weight files of the model at `path`: the path itself, or the cache folder of
    a name on the Hub. None if the Hub's files have not been fetched."""
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
    """{name: header} of the tensors in the weight files of a model's folder; no numbers are read.

    Raises: UserError, with the flag `what` and the file in its message, if the folder has no weight file, if a file
    that the index lists is missing, or if a file is broken or cut off.
    """
    found: dict[str, Header] = {}
    for file in weight_files(folder, what):
        if not file.is_file():
            raise UserError(
                f"{what}: {file} does not exist, but the index beside it names this file. Copy it too, or write the "
                "model again."
            )
        refuse_pointers([file], what)
        found |= file_headers(file, what)
    return found


def file_headers(file: Path, what: str) -> dict[str, Header]:
    """{name: header} of the tensors in one weight file. Raises: UserError, with the flag `what` in its message, if the
    file is broken."""
    return (_of_safetensors if file.suffix == ".safetensors" else _of_pickle)(file, what)


def mapped_tensors(folder: Path, what: str) -> dict[str, Tensor]:
    """{name: tensor} of a model's files. The files are mapped into memory, so that numbers are read when they are first
    used.

    Raises: UserError, as `headers` does.
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
    """The files from which a model's weights are read. Files that an index lists are included even if they do not
    exist.

    Raises: UserError, with the flag `what` in its message, if there are no weight files, or the index is broken.
    """
    for name in WEIGHT_FILES:
        if (folder / name).exists():
            return [folder / name]
        if (folder / f"{name}.index.json").exists():
            names = _weight_map(folder / f"{name}.index.json", what).values()
            return [folder / file for file in dict.fromkeys(names)]
    raise UserError(
        f"{what}: the folder {folder} holds a config.json but no weights (model.safetensors or pytorch_model.bin, or "
        "the index of several). Was saving interrupted? Save the model again."
    )


TEXT_PARTS = ("language_model", "text_model")  # what composite models of transformers call their language model


def key_mapping(config: PretrainedConfig) -> dict[str, str] | None:
    """{pattern of names in the files: replacement} for the language model of a composite model
    (`config_and_tokenizer.text_part`): transformers' argument `key_mapping`. None for other models.

    Depending on the version of transformers that wrote the files, the layers are in `language_model.model`, in
    `model.language_model`, or, without the head, in `language_model`.
    """
    if not hasattr(config, "text_part_of"):
        return None
    parts = "|".join(TEXT_PARTS)
    return {rf"^model\.(?:{parts})\.": "model.", rf"^(?:{parts})\.": ""}


def file_names(name: str, model: Any) -> tuple[str, ...]:
    """The names under which a file may hold a weight; transformers looks for all of them. name: the weight's name in
    `model`. model: a model or its class."""
    trunk = f"{model.base_model_prefix}."
    inner = name.removeprefix(trunk)
    older = name.replace("lm_head.", "embed_out.")  # GPT-NeoX's old name
    within = [
        f"{outer}{part}.{rest}" for part in TEXT_PARTS for outer, rest in (("", name), (trunk, inner), ("", inner))
    ]
    return name, inner, f"{trunk}{name}", older, *within


def stored_name(name: str, model: Any, stored: Container[str]) -> str | None:
    """The first of a weight's `file_names` that is in `stored`, the names of the tensors in the files; None if none of
    them is."""
    return next((other for other in file_names(name, model) if other in stored), None)


def _weight_map(index: Path, what: str) -> dict[str, str]:
    """{name of a tensor: name of its file}, read from an index file."""
    try:
        by_name = parsed_json(index.read_text(encoding="utf-8"))["weight_map"]
        files = {name: str(file) for name, file in by_name.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{what}: {index} is broken ({type(error).__name__}: {error}). It has to say in which file each tensor is. "
            "Copy it again, or write the model again."
        ) from None
    outside = [
        file for file in files.values() if Path(file).name != file or not file.endswith(index.name.split(".")[1])
    ]
    if outside or not files:
        raise UserError(
            f"{what}: {index} names {shortened(outside[0]) if outside else 'no file'}, but has to name weight files "
            "in its own folder. Write the model again."
        )
    return files


def _of_safetensors(file: Path, what: str) -> dict[str, Header]:
    try:
        with safe_open(file, "pt") as weights:
            slices = {name: weights.get_slice(name) for name in weights.keys()}
            return {name: Header(tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(
            f"{what}: {file} ({file.stat().st_size} bytes) is a broken safetensors file ({error}). Was writing "
            "interrupted? Copy it again, or write it again."
        ) from None


def _of_pickle(file: Path, what: str) -> dict[str, Header]:
    """{name: header} of a file that torch.save wrote. Only tensors are unpickled; no code in the file can run."""
    try:
        state = torch.load(file, map_location="meta", weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(
            f"{what}: {file} is broken, or holds more than tensors and would run code when it is read. It was not "
            "read. Copy it again, or save the model as safetensors."
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{what}: {file} ({file.stat().st_size} bytes) is broken ({one_line(error)[:200]}). Was writing "
            "interrupted? Copy it again, or write it again."
        ) from None
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise UserError(f"{what}: {file} is not a dictionary of tensors. Give a model that save_pretrained wrote.")
    return {name: Header(tuple(value.shape), str(value.dtype).removeprefix("torch.")) for name, value in state.items()}


PIECE = 1 << 24  # the number of bytes read at a time
# {safetensors' name: dtype} for lazy tensors. Tensors of other dtypes are read by the libraries.
DTYPES = {name: dtype for dtype, name in atomic_files.DTYPES.items() if dtype.is_floating_point}


@contextlib.contextmanager
def read_by_pieces() -> Iterator[None]:
    """Within this context transformers gets `Lazy` tensors when it reads weight files."""
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
    """{name: tensor} of those tensors in a file that can be read piece by piece. The file may be a safetensors file or
    written by torch.save."""
    if file.suffix == ".safetensors":
        return _lazy_of_safetensors(file)
    return _lazy_of_pickle(file) if zipfile.is_zipfile(file) else {}  # torch before 1.6 wrote no zip files


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
    with FakeTensorMode():  # in this mode torch.load reads no numbers, only the offset of each tensor in the file
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
    """Fill `target`, a contiguous tensor, with the numbers that begin at byte `offset` of a file. Raises: OSError if
    the file ends too early."""
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
                    raise OSError(f"{file} ends within a tensor. Was writing interrupted? Copy it again.")
                rest = rest[count:]
            run.copy_(piece)


@torch.no_grad()
def restore_buffers(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Replace the buffers of a model that was built under ZeRO-3 by the buffers that it would have without ZeRO-3.

    While ZeRO-3 builds a model (deepspeed.zero.Init), every new floating-point tensor is rounded to the dtype of the
    weights. transformers computes rotary frequencies in float32, and some of its versions do not compute them again
    after the model is built. If the frequencies are rounded to bfloat16, they are wrong by up to 0.4 %, and a token at
    position 1,000 is rotated like a token up to four positions away.

    Args:
        dtype: the dtype of the weights.
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


SHOWN = 3  # how many names a message lists


@dataclass(frozen=True, slots=True)
class Misfit:
    """The differences between a model's tensors and those of its files.

    missing: the names of tensors that only the model has. left_over: the names of tensors that only the files have.
    misshapen: (name, shape in the file, shape in the model) of tensors whose shapes differ.
    """

    missing: tuple[str, ...]
    left_over: tuple[str, ...]
    misshapen: tuple[tuple[str, tuple, tuple], ...]

    @classmethod
    def of(cls, loading_info: Mapping) -> "Misfit":
        """The Misfit that transformers' `output_loading_info` describes."""
        missing, left_over, misshapen = (
            tuple(sorted(loading_info[name])) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")
        )
        return cls(missing, left_over, misshapen)

    @property
    def difference(self) -> str:
        """The differences as a text with the first few names; "" if there are none."""
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
        """Raise UserError, with the flag `what` and the tensors in its message, if there are differences."""
        if self.difference:
            raise UserError(
                f"{what}: the weights in {path} are not those of the model that its config.json describes: "
                f"{self.difference}. {'Missing tensors would be random numbers. ' if self.missing else ''}Give a "
                "config.json and weights that were written together."
            )


def listed(names: Iterable[str]) -> str:
    """A text with the first few names and the number of further names."""
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _counted(names: tuple | list, one: str, several: str) -> str:
    return f"1 tensor {one}" if len(names) == 1 else f"{len(names)} tensors {several}"


def check_weights(
    path: str, config: PretrainedConfig, model_class, what: str, names: Mapping[str, str] | None = None
) -> None:
    """Raise UserError, with the flag `what` in its message, unless the weight files at `path` hold exactly the model's
    tensors, with the model's shapes and in floating-point numbers. Only headers are read.

    If `path` is a name on the Hub whose files have not been fetched, nothing is checked.

    Args:
        config, model_class: configuration and class of the model.
        names: {name in the files: name in the model} of tensors whose names differ.
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
    """As `check_weights`, for headers that have already been read. found: {name in the model: header}."""
    try:
        misfit, whole = _verdict(found, config, model_class)
        floats = {name: header for name, header in found.items() if header.is_float}
        lacking, model = (misfit, None) if len(floats) == len(found) else _verdict(floats, config, model_class)
    except Exception as error:  # transformers may raise anything for sizes that contradict each other
        raise UserError(
            f"{what}: no model can be built from {path}/config.json ({type(error).__name__}: "
            f"{one_line(error)[:300]}). Correct config.json, or save the model again."
        ) from None
    weights = tuple(name for name in misfit.left_over if not _is_computed(name, found))
    if hasattr(config, "text_part_of"):  # the weights of the towers are not read
        parts = {_part(name, whole) for name in whole.state_dict()}
        weights = tuple(name for name in weights if _part(name, whole) in parts)
    replace(misfit, left_over=weights).refuse(path, what)
    if model is None:
        return
    state = model.state_dict()
    packed = [name for name in lacking.missing if name not in state or state[name].is_floating_point()]
    if packed:
        kinds = sorted({header.dtype for header in found.values() if not header.is_float})
        raise UserError(
            f"{what}: {_counted(packed, 'is', 'are')} of type {', '.join(kinds)} in {path} ({listed(packed)}). Such "
            "weights cannot be trained: they are packed or quantized, or were converted by mistake. Give the model in "
            "fp32, fp16 or bf16."
        )


def _part(name: str, model: Any) -> str:
    """The first part of a weight's name that tells anything: `layers`, `lm_head` or `vision_tower`, for example."""
    return name.removeprefix(f"{model.base_model_prefix}.").partition(".")[0]


def _is_computed(name: str, found: Mapping[str, Header]) -> bool:
    """Whether a tensor that only the files have is computed and not learned. Older versions of transformers saved the
    causal masks of attention, (1, 1, S, S), and rotary frequencies with the weights."""
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
        key_mapping=key_mapping(config),
        dtype=torch.float32,
        device_map="meta",
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    return Misfit.of(info), model
