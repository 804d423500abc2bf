"""DeepSpeed's C++ extensions, built at their first use by one process at a time. Also switches off needless
torch.compile."""

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import torch

from engine.errors import UserError
from engine.zero.accelerator import on_gpu

LOCK = "four_engine_rlhf.lock"
TELL_AFTER = 5.0  # seconds of waiting for another program's build
KILLED_AFTER = 1800.0  # seconds in which no file of a build has changed: no file takes so long to compile


def own_folder() -> Path | None:
    """Where this environment's extensions are built, unless TORCH_EXTENSIONS_DIR says otherwise: they belong to its
    DeepSpeed, and another one would build them anew. None outside of virtual environments, where torch chooses."""
    return Path(sys.prefix) / "torch_extensions" if sys.prefix != sys.base_prefix else None


def load_extension(builder: str) -> None:
    """Build (once) or load an extension of DeepSpeed's, one process at a time.

    torch marks a build by a file `lock` in its folder, and waits for as long as one is there: for that of a killed
    process for ever. Here the kernel's lock on a file is held meanwhile, which goes with its process, and this file
    says what is being built. An extension that it names when the lock has been taken is one that a process died over,
    and its mark is removed. The marks of other extensions, and those of other programs, are left alone.

    Raises: UserError without ninja, and for the mark of another program that was killed.
    """
    from deepspeed.accelerator import get_accelerator
    from torch.utils.cpp_extension import _get_build_directory, is_ninja_available

    if (own := own_folder()) is not None:
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(own))
    found = get_accelerator().create_op_builder(builder)
    if found is None or not found.is_compatible():
        return
    if not is_ninja_available():
        _load_installed(found)  # and no build of others is waited for
        return
    folder = Path(_get_build_directory(found.NAME, verbose=False))
    with (folder.parent / LOCK).open("a+", encoding="utf-8") as building:
        fcntl.flock(building, fcntl.LOCK_EX)
        building.seek(0)
        if died_over := building.read():
            (folder.parent / died_over / "lock").unlink(missing_ok=True)
        _wait_for_others(folder)
        _write(building, found.NAME)
        if not any(folder.glob("*.so")):
            print(f"building DeepSpeed's extension {found.NAME}, once; this takes about a minute", flush=True)
        try:
            found.load()
        finally:
            _write(building, "")


def _load_installed(found: Any) -> None:
    """Load an extension without ninja: one that was installed with DeepSpeed, but none that is built here."""
    try:
        found.load()
    except RuntimeError:
        raise UserError(
            f"ninja is not found in PATH ({os.environ.get('PATH')}), and DeepSpeed's extension {found.NAME} cannot "
            f"be used without it, even where it is built. Run: {sys.executable} -m pip install ninja"
        ) from None


def _wait_for_others(folder: Path) -> None:
    """Wait until no other program builds in the folder."""
    mark, since, told = folder / "lock", time.monotonic(), False
    while mark.exists():
        if _unchanged_for(folder) > KILLED_AFTER:
            raise UserError(
                f"{mark} says that another program builds DeepSpeed's extension {folder.name}, but no file there has "
                f"changed for {_unchanged_for(folder) / 60:.0f} minutes: that program was killed. Remove the file."
            )
        if not told and time.monotonic() > since + TELL_AFTER:
            told = True
            print(
                f"waiting for {mark}: another program builds DeepSpeed's extension {folder.name}. If none does, it was "
                "killed: remove the file.",
                flush=True,
            )
        time.sleep(0.1)


def _unchanged_for(folder: Path) -> float:
    """Seconds since a file of the folder was written; 0 where there is none."""
    changes = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # removed meanwhile
            changes.append(path.stat().st_mtime)
    return time.time() - max(changes) if changes else 0.0


def _write(file: TextIO, text: str) -> None:
    file.truncate(0)
    file.write(text)  # at the end, which is the beginning
    file.flush()


def load_for(ds_config: Mapping) -> None:
    """Load what DeepSpeed would otherwise build by itself, all ranks at once, for an engine of this configuration."""
    if _swaps(ds_config):
        load_extension("PinMemoryBuilder")  # which the other would build by itself
        load_extension("AsyncIOBuilder")


def can_swap() -> bool:
    """Whether this machine has libaio, by which DeepSpeed reads and writes disks."""
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder("AsyncIOBuilder")
    return builder is not None and builder.is_compatible()


def refuse_missing(ds_config: Mapping, path: str | None) -> None:
    """Raise UserError for what a file asks for and this machine has no extension of DeepSpeed's for."""
    if _swaps(ds_config) and not can_swap():
        raise UserError(
            f"{path}: zero_optimization.offload_param.device is 'nvme', but this machine has no libaio, by which "
            "DeepSpeed reads and writes disks. Install libaio-dev (libaio-devel), or leave offload_param out."
        )
    if ds_config["zero_optimization"].get("zero_quantized_nontrainable_weights") and not on_gpu():
        raise UserError(
            f"{path}: zero_optimization.zero_quantized_nontrainable_weights is True, but DeepSpeed's kernels for it "
            "are for GPUs. Leave it out of the file."
        )


def _swaps(ds_config: Mapping) -> bool:
    """Whether parameters are swapped to a disk."""
    return (ds_config.get("zero_optimization", {}).get("offload_param") or {}).get("device") == "nvme"


def offloaded_adamw(groups: list[dict], **settings) -> torch.optim.Optimizer:
    """DeepSpeed's AdamW in C++, for an optimizer state in host memory beside a GPU."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    load_extension("CPUAdamBuilder")
    return DeepSpeedCPUAdam(groups, adamw_mode=True, **settings)


@contextlib.contextmanager
def nothing_compiled() -> Iterator[None]:
    """Within the block torch.compile leaves functions as they are.

    DeepSpeed has it compile the kernels of an optimizer that is none of ours, for which torch imports its compiler:
    more than a second of each rank's start.
    """
    name, before = "TORCHDYNAMO_DISABLE", os.environ.get("TORCHDYNAMO_DISABLE")
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
