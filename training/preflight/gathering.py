"""The facts of this node and of this rank's GPU, as far as they can be had: what is missing is told, not raised."""

import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import huggingface_hub
import psutil
import torch

from engine.zero.accelerator import on_gpu
from engine.zero.extensions import own_folder
from training.data.cache import cache_folder
from training.flags.arguments import RunFlags
from training.preflight.inputs import inputs_of
from training.preflight.node import DATA, EXTENSIONS, HUB, OUTPUT, Card, Disk, Node
from training.program.unwritten import reason_of
from training.reporting.run_record import versions

PROBE = 1 << 20  # bytes that are written to see whether a disk takes them
READ_BY_LIBRARIES = re.compile(r"(NCCL|TORCH_NCCL|GLOO|HF)_\w+|DS_ACCELERATOR|OMP_NUM_THREADS|CUDA_HOME")
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD")
OWN = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")  # which this program sets
MEGABITS = 1e6 / 8  # bytes a second


def node(args: RunFlags, thorough: bool = True) -> Node:
    """This host's facts, by one of its ranks; `ranks`, `cards`, `clock` and `sees_output` are others' to add.

    thorough: with fingerprints of what is read, and disks written to; else nothing is read or written.
    """
    memory = psutil.virtual_memory()
    network, speed = network_cards(Path("/sys/class"))
    return Node(
        host=socket.gethostname(),
        versions=all_versions(),
        device="cuda" if on_gpu() else "cpu",
        seen=torch.cuda.device_count() if on_gpu() else 0,
        memory=memory.total,
        available=memory.available,
        shared_memory=disk(Path("/dev/shm"), thorough),
        disks={what: disk(path, thorough) for what, path in folders(args).items()},
        inputs=inputs_of(args) if thorough else {},
        tools=tools(),
        builds=not on_gpu()
        or any(value is True for name, value in args.as_dict().items() if name.startswith("offload")),
        environment=libraries_variables(os.environ),
        network=network,
        network_speed=speed,
    )


def card(index: int, thorough: bool = True) -> Card | None:
    """The GPU of this number, and whether torch can compute with it; None on CPUs.

    thorough: its free memory is asked for and a sum computed, for which CUDA takes some hundred megabytes.
    """
    if not on_gpu():
        return None
    try:
        found = torch.cuda.get_device_properties(index)
    except (RuntimeError, AssertionError) as error:
        return Card(name="none", capability="", free=0, total=0, problem=str(error).splitlines()[0])
    free, problem = found.total_memory, ""
    if thorough:
        try:
            free, _ = torch.cuda.mem_get_info(index)
            ones = torch.ones(2, 2, device=f"cuda:{index}")
            problem = "" if float((ones @ ones).sum()) == 8.0 else "it computes wrong numbers"
        except RuntimeError as error:
            problem = str(error).splitlines()[0]
    return Card(
        name=found.name, capability=f"{found.major}.{found.minor}", free=free, total=found.total_memory, problem=problem
    )


def all_versions() -> dict[str, str]:
    """Of what has to be the same on all nodes; "none" for what is not there."""
    packages = {name: version or "none" for name, version in versions().items()}
    found = {name: packages.get(name, "none") for name in ("python", "torch", "deepspeed", "transformers")}
    found["CUDA"] = torch.version.cuda or "none"
    found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else "none"
    driver = Path("/proc/driver/nvidia/version")
    match = re.search(r"(\d+\.[\d.]+)", driver.read_text()) if driver.is_file() else None
    return found | ({"driver": match[1]} if match else {})


def folders(args: RunFlags) -> dict[str, Path]:
    """Where a run writes, by what for."""
    return {
        OUTPUT: Path(args.output_dir).absolute(),
        HUB: Path(huggingface_hub.constants.HF_HUB_CACHE),
        EXTENSIONS: extensions_folder(),
        DATA: cache_folder(getattr(args, "data_output_path", None)),
    }


def extensions_folder() -> Path:
    """Where extensions are built."""
    given, own = os.environ.get("TORCH_EXTENSIONS_DIR"), own_folder()
    if given is None and own is not None:
        return own
    return Path(given) if given else Path.home() / ".cache" / "torch_extensions"  # as torch chooses


def nearest(folder: Path) -> Path:
    """The folder, or the first one above it that is there."""
    return next(part for part in (folder, *folder.parents) if os.path.lexists(part))


def disk(folder: Path, thorough: bool = True) -> Disk:
    """The disk that the folder is on, or will be; thorough: something is written to it and removed."""
    place = nearest(folder)
    try:
        free = shutil.disk_usage(place).free
        if thorough:
            with tempfile.TemporaryFile(dir=place) as file:
                file.write(bytes(PROBE))
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        return Disk(path=str(folder), free=0, problem=reason_of(error))
    return Disk(path=str(folder), free=free)


def tools() -> dict[str, str]:
    """The versions of what builds and loads extensions."""
    return {"ninja": version_of("ninja"), "c++": version_of(os.environ.get("CXX", "c++")), "nvcc": version_of(nvcc())}


def nvcc() -> str:
    """CUDA's compiler, in CUDA_HOME or in PATH."""
    home = os.environ.get("CUDA_HOME")
    return str(Path(home) / "bin" / "nvcc") if home else "nvcc"


def version_of(program: str) -> str:
    """What a program says of its version, the number alone; empty where it cannot be run."""
    try:
        told = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=20, check=True, stdin=subprocess.DEVNULL
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    match = re.search(r"\d+(\.\d+)+", told)
    return match[0] if match else "there"


def libraries_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Those that libraries read and all nodes should agree on; secrets by whether they are set."""
    return {
        name: "set" if SECRET.search(name) else value
        for name, value in sorted(environment.items())
        if READ_BY_LIBRARIES.fullmatch(name) and name not in OWN
    }


def network_cards(classes: Path) -> tuple[str, float]:
    """What connects this node with others, in words, and bytes a second: InfiniBand's active ports, or else the fastest
    interface, each as the kernel knows it (`classes` is /sys/class); ("", 0.0) where it tells none."""
    rates = [
        float(port.joinpath("rate").read_text().split()[0]) * 1e9 / 8
        for port in sorted(classes.glob("infiniband/*/ports/*"))
        if "ACTIVE" in _text(port / "state") and _text(port / "rate")
    ]
    if rates:
        return f"{len(rates)} x {rates[0] * 8 / 1e9:.0f} Gb/s InfiniBand", sum(rates)
    speeds = _speeds(classes.glob("net/*"))
    if not speeds:
        return "", 0.0
    speed, name = max(speeds)
    return f"{name} {speed / MEGABITS / 1000:g} Gb/s", speed


def _speeds(interfaces: Iterable[Path]) -> list[tuple[float, str]]:
    """Of those that are cards: virtual ones name a speed that nothing keeps to."""
    found = []
    for interface in interfaces:
        told = _text(interface / "speed")
        if (interface / "device").exists() and told.isdecimal():
            found.append((int(told) * MEGABITS, interface.name))
    return found


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # an interface that is down has no speed
        return ""
