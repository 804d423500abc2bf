"""Fingerprints of models, by which a run that goes on tells that other weights stand at a path than when it began."""

import hashlib
import json
from pathlib import Path

from engine.errors import UserError
from engine.json_objects import parsed
from engine.models.adapter_folders import BASE, SCORE, AdapterFolder, read_adapter
from engine.models.places import ADAPTER_CONFIG
from engine.models.weight_files import weight_files, weights_folder

BLOCK, BLOCKS = 1 << 16, 64  # bytes read at a time, and how many times a file
_OF_A_PLACE = ("base_model_name_or_path", "peft_version", "inference_mode")  # and of an adapter's configuration
_PASSING = ("transformers_version", "_name_or_path")  # what saving a model anew may change in its config.json


def fingerprint(path: str, what: str) -> str | None:
    """What the model at `path` is known by: a hash of its config.json and of its weight files; of a name on the Hub the
    commit that was fetched, or None before that.

    Of each weight file its name, its size, and 64 blocks of 64 KiB at even distances count, the first and the last
    bytes among them: the header, and a part of every large tensor. That is 4 MiB a file however large a model is, and
    all of a file up to that size. What it can miss are changes between these blocks: single numbers, or a few rows of a
    large model. Training changes every number.

    Of an adapter all of its file counts, and its base by the base's own fingerprint.

    Raises: UserError, naming `what` (a flag), where there are no weights.
    """
    adapter = read_adapter(path, what)
    if adapter is not None:
        digest, frozen = hashlib.sha256(), frozen_fingerprint(path, what)
        for file in (adapter.file, Path(path) / SCORE):
            digest.update(file.read_bytes() if file.is_file() else b"")
        return None if frozen is None else hashlib.sha256(f"{digest.hexdigest()} {frozen}".encode()).hexdigest()
    folder = weights_folder(path)
    if folder is not None and not Path(path).is_dir():
        return f"commit {folder.name}"
    return contents(path, what)


def contents(path: str, what: str) -> str | None:
    """A whole model's `fingerprint` as of a folder, of what was fetched of a name on the Hub too; None before that."""
    folder = weights_folder(path)
    if folder is None:
        return None
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kept = {name: value for name, value in config.items() if name not in _PASSING}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
    for file in weight_files(folder, what):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as content:
            for start in block_starts(size):
                content.seek(start)
                digest.update(content.read(BLOCK))
    return digest.hexdigest()


def frozen_fingerprint(path: str, what: str) -> str | None:
    """What stays as it is while LoRA's factors train is known by: a model's `fingerprint`; of an adapter its base's,
    and behind a space a hash of its settings (layers, ranks, scaling), but of none of its numbers. Raises as that."""
    adapter = read_adapter(path, what)
    if adapter is None:
        return fingerprint(path, what)
    settings = {name: value for name, value in adapter.config.to_dict().items() if name not in _OF_A_PLACE}
    text, base = json.dumps(settings, sort_keys=True, default=sorted), fingerprint(adapter.base, what)
    return None if base is None else f"{base} {hashlib.sha256(text.encode()).hexdigest()}"


def check_base(adapter: AdapterFolder) -> None:
    """Raise UserError where the adapter's folder knows its base by other `contents` than stand there now.

    Only what this program saves has that file. A base of the Hub is not looked at before it was fetched.
    """
    file = Path(adapter.path) / BASE
    if not file.is_file():
        return
    try:
        found = parsed(file.read_text(encoding="utf-8"))
        model, known = found["model"], found["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{adapter.what}: {file} is broken ({type(error).__name__}: {error}). Copy it again.") from None
    if contents(adapter.base, adapter.what) not in (None, known):
        raise UserError(
            f"{adapter.told} is not of the weights in its base {adapter.base}: it was trained on those that stood in "
            f"{model}, and weights or config.json are others now. Put that model there, or write where it stands as "
            f"base_model_name_or_path of its {ADAPTER_CONFIG}. If you know the two to be the same, delete {file}."
        )


def block_starts(size: int) -> list[int]:
    """Where the blocks of a file of so many bytes begin: the first at 0, and the last one ends with the file."""
    if size <= BLOCK * BLOCKS:
        return list(range(0, size, BLOCK))
    return [(size - BLOCK) * number // (BLOCKS - 1) for number in range(BLOCKS)]
