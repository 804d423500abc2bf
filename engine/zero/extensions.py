"""Builds and loads DeepSpeed's C++ extensions, one process at a time. `nothing_compiled` switches off torch.compile."""

import contextlib
import fcntl
import functools
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import torch

from engine import distributed
from engine.errors import UserError

LOCK = "four_engine_rlhf.lock"
TELL_AFTER = 5.0  # seconds of waiting for another program's build after which a message is printed
KILLED_AFTER = 1800.0  # seconds without a change in any file after which a build counts as killed


def own_folder() -> Path | None:
    """The folder for the extensions of this virtual environment's DeepSpeed, unless TORCH_EXTENSIONS_DIR names another
    folder. If several environments shared a folder, each DeepSpeed would build the extensions again. Outside of virtual
    environments the result is None, and torch chooses the folder."""
    return Path(sys.prefix) / "torch_extensions" if sys.prefix != sys.base_prefix else None


def load_extension(builder: str) -> None:
    """Load an extension of DeepSpeed, and build it first if necessary. Only one process at a time does this.

    During a build torch keeps a file named `lock` in the extension's folder, and other processes wait until this file
    is removed. If the building process is killed, the others wait forever. To prevent this, a build here also holds a
    kernel lock (flock) on the file LOCK, which is released when the process ends, and writes the extension's name into
    LOCK. A process that gets the kernel lock and finds a name in LOCK knows that the build of the named extension was
    killed, and removes torch's `lock` file of this extension. The `lock` files of other extensions are not touched.

    builder: the name of DeepSpeed's builder class for the extension.

    Raises: UserError if ninja is missing, or if a killed build of another program has left its `lock` file.
    """
    from deepspeed.accelerator import get_accelerator
    from torch.utils.cpp_extension import _get_build_directory, is_ninja_available

    if (own := own_folder()) is not None:
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(own))
    found = get_accelerator().create_op_builder(builder)
    if found is None or not found.is_compatible():
        return
    if not is_ninja_available():
        _load_installed(found)
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
    """Load an extension without ninja. Raises: UserError unless the extension was installed with DeepSpeed."""
    try:
        found.load()
    except RuntimeError:
        raise UserError(
            f"ninja is not found in PATH ({os.environ.get('PATH')}), and DeepSpeed's extension {found.NAME} cannot "
            f"be used without it, even where it is built. Run: {sys.executable} -m pip install ninja"
        ) from None


def _wait_for_others(folder: Path) -> None:
    """Wait until no other program builds an extension in the folder."""
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
    """The number of seconds since a file in the folder last changed; 0 if there are no files."""
    changes = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # removed meanwhile
            changes.append(path.stat().st_mtime)
    return time.time() - max(changes) if changes else 0.0


def _write(file: TextIO, text: str) -> None:
    file.truncate(0)
    file.write(text)  # the file is empty now, so append mode writes at its start
    file.flush()


def load_for(ds_config: Mapping) -> None:
    """Load the extensions that an engine with this configuration needs. If DeepSpeed loaded them itself, all ranks
    would build them at the same time."""
    if _swaps(ds_config):
        load_extension("PinMemoryBuilder")  # otherwise AsyncIOBuilder would build it on its own
        load_extension("AsyncIOBuilder")


def can_swap() -> bool:
    """Whether this machine has libaio, which DeepSpeed uses to read and write disks."""
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder("AsyncIOBuilder")
    return builder is not None and builder.is_compatible()


def refuse_missing(ds_config: Mapping, path: str | None) -> None:
    """Raise UserError if the DeepSpeed file at `path` needs an extension that cannot be built on this machine."""
    if _swaps(ds_config) and not can_swap():
        raise UserError(
            f"{path}: zero_optimization.offload_param.device is 'nvme', but this machine has no libaio, with which "
            "DeepSpeed reads and writes disks. Install libaio-dev (libaio-devel), or leave offload_param out."
        )


def _swaps(ds_config: Mapping) -> bool:
    """Whether this configuration swaps parameters to a disk."""
    return (ds_config.get("zero_optimization", {}).get("offload_param") or {}).get("device") == "nvme"


def offloaded_adamw(groups: list[dict], **settings) -> torch.optim.Optimizer:
    """DeepSpeed's AdamW in C++, for an optimizer state in host memory on a machine with GPUs (all ranks call this
    together)."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    load_extension("CPUAdamBuilder")
    share_cores()
    return DeepSpeedCPUAdam(groups, adamw_mode=True, **settings)


@functools.cache  # for the first of a run's optimizers
def share_cores() -> None:
    """Let torch and DeepSpeed's extensions compute with as many threads as this rank has cores, unless the user has set
    OMP_NUM_THREADS; and print the number (all ranks call this together).

    A rank has the cores that it may use, divided by the number of the node's ranks that may use some of them. A
    launcher may have bound each rank to cores of its own.

    torchrun sets OMP_NUM_THREADS to 1 for several ranks on a node (torch/distributed/run.py), which therefore counts as
    not set. With `deepspeed` each rank would use all cores. torch and the extensions share one OpenMP runtime. It is
    loaded with torch and reads the variable at that time, so the number is changed through torch.
    """
    given, host, cores = os.environ.get("OMP_NUM_THREADS"), socket.gethostname(), os.sched_getaffinity(0)
    ranks = distributed.all_gather_objects((host, cores))
    sharing = sum(there == host and bool(cores & own) for there, own in ranks)
    if given is None or (given == "1" and "TORCHELASTIC_RUN_ID" in os.environ):
        torch.set_num_threads(max(1, len(cores) // sharing))
    if distributed.is_main():
        print(f"Adam in host memory: {torch.get_num_threads()} threads on each rank", flush=True)


@contextlib.contextmanager
def nothing_compiled() -> Iterator[None]:
    """Within this context torch.compile compiles nothing.

    DeepSpeed calls torch.compile for kernels of an optimizer that is not used here. Torch would then import its
    compiler, which takes more than a second on each rank.
    """
    name, before = "TORCHDYNAMO_DISABLE", os.environ.get("TORCHDYNAMO_DISABLE")
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
