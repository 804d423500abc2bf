"""Collects the facts about a node, on one of its ranks. Each fact becomes a cell of preflight's table."""

import hashlib
import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import huggingface_hub
import psutil
import torch

from engine.errors import UserError
from engine.models.checking import BLOCK, block_starts, fingerprint
from engine.models.places import base_of, can_be_hub_name, one_line, require_model
from engine.reward.server import is_this_machine
from engine.zero.accelerator import on_gpu, ranks_of_this_machine
from engine.zero.extensions import own_folder
from training.config.flags import RunFlags
from training.config.reward import names_file
from training.config.step3 import RLHFFlags
from training.data.sources import DEEPSPEED_CHAT_FILES, is_path, name_and_split
from training.data.tables import cache_folder
from training.reporting.records import versions
from training.runtime.memory_lines import planned_model, setting_here
from training.runtime.stopping import reason_of

MEMORY = "host memory"  # the row of host memory, in which nodes are compared by the amount
LEAST_SHARED = 1e9  # least size in bytes of /dev/shm, through which a node's GPU ranks exchange data without NVLink
LEAST_FREE = 1e9  # least number of free bytes on disks for files that are built or cached
FREE = 0.9  # least free share of a GPU's memory: if less is free, another process uses the GPU
PROBE = 1 << 20  # number of bytes that are written to test whether a disk can be written
FILES_READ = 256  # how many files of a folder are read; of the other files only names and sizes count
CONNECT_SECONDS = 5.0  # longest wait for the connection to a reward server
READ_BY_LIBRARIES = re.compile(r"(NCCL|TORCH_NCCL|GLOO|HF)_\w+|DS_ACCELERATOR|OMP_NUM_THREADS|CUDA_HOME")
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD")
OWN = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")  # variables that this program sets


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A fact about a node: a cell of the table.

    shown: the text of the cell. same: a value that must be equal on all nodes; None if nodes may differ. problem: what
    is wrong on this node, regardless of other nodes. remedy: what to do if nodes differ. warning: whether a run can go
    on in spite of the problem. amount: the fact as a number; if several nodes share a column of the table, the column
    shows the smallest number.
    """

    shown: str
    same: str | None = None
    problem: str = ""
    remedy: str = ""
    warning: bool = False
    amount: float | None = None

    def __post_init__(self) -> None:
        """Raise TypeError for fields of a wrong type: another process may have written them."""
        texts = (self.shown, self.same or "", self.problem, self.remedy)
        if not all(isinstance(text, str) for text in texts) or not isinstance(self.amount or 0.0, int | float):
            raise TypeError(f"{self} is no fact")


Facts = dict[str, Fact]  # {row of the table: fact}


def facts_of_node(args: RunFlags, thorough: bool = True) -> Facts:
    """The facts about this host (one of its ranks calls this).

    thorough: whether disks are tested, and models and data read. Otherwise only versions, GPUs and environment
    variables are looked at, which takes no time.
    """
    found = all_versions() | gpus(ranks_of_this_machine())
    if thorough:
        found |= tools(args) | memory() | disks(args) | inputs_of(args)
    return found | variables(os.environ)


def all_versions() -> Facts:
    """The versions that must be the same on all nodes. Only the first two numbers of Python's version have to be equal.
    Different drivers are only a warning."""
    found = {name: versions().get(name) or "none" for name in ("python", "torch", "deepspeed", "transformers")}
    found["CUDA"] = torch.version.cuda or "none"
    found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else "none"
    rows = {
        name: Fact(
            shown=version,
            same=".".join(version.split(".")[:2]) if name == "python" else version,
            remedy="Install the same on all nodes",
        )
        for name, version in found.items()
    }
    driver = Path("/proc/driver/nvidia/version")
    if driver.is_file() and (match := re.search(r"(\d+\.[\d.]+)", driver.read_text())):
        rows["driver"] = Fact(shown=match[1], same=match[1], warning=True)
    return rows


def gpus(ranks: int) -> Facts:
    """The device on which this host's ranks compute, and the number and kind of the GPUs that torch can use. ranks:
    number of ranks on this host."""
    device = "cuda" if on_gpu() else "cpu"
    rows = {"device": Fact(shown=device, same=device)}
    if not on_gpu():
        return rows
    seen, usable = torch.cuda.device_count(), 0
    problems = [f"torch sees {seen} GPUs for {ranks} ranks"] if seen < ranks else []
    kinds: Counter[str] = Counter()
    for index in range(min(seen, ranks)):
        try:
            card = torch.cuda.get_device_properties(index)
            kinds[f"{card.name} ({card.major}.{card.minor})"] += 1
            usable += 1
        except (RuntimeError, AssertionError) as error:
            problems.append(f"torch cannot use GPU {index}: {str(error).splitlines()[0]}")
    kind = ", ".join(f"{count} x {name}" for name, count in kinds.items()) or "none"
    rows["GPUs"] = Fact(shown=kind, same=kind, warning=True)
    rows["GPUs for ranks"] = Fact(shown=f"{usable} of {ranks}", problem="; ".join(problems))
    return rows


def own_gpu(index: int) -> Fact:
    """How much memory of a rank's own GPU is free, if torch can compute on it.

    Each rank asks only about its own GPU. If it asked about others, CUDA would take some hundred megabytes of each, and
    a GPU in exclusive mode would be closed to its own rank.
    """
    try:
        free, total = torch.cuda.mem_get_info(index)
        ones = torch.ones(2, 2, device=f"cuda:{index}")
        if float((ones @ ones).sum()) != 8.0:
            raise RuntimeError("it computes wrong numbers")
    except (RuntimeError, AssertionError) as error:
        return Fact(shown="none", problem=f"torch cannot use GPU {index}: {str(error).splitlines()[0]}")
    whole, taken = bytes_in_short(total), bytes_in_short(total - free)
    return Fact(
        shown=f"{bytes_in_short(free)} of {whole} free",
        problem=f"{taken} of {whole} of GPU {index} are taken: look who runs there" if free < FREE * total else "",
        warning=True,
        amount=free,
    )


def variables(environment: Mapping[str, str]) -> Facts:
    """The environment variables that libraries read. They should be equal on all nodes, except for names of network
    interfaces. For a secret, the fact shows only that the variable is set."""
    rows = {}
    for name, value in sorted(environment.items()):
        if READ_BY_LIBRARIES.fullmatch(name) and name not in OWN:
            shown = "set" if SECRET.search(name) else value
            remedy = "Have the launcher pass it on (.deepspeed_env), or unset it"
            same = None if name.endswith("_IFNAME") else shown
            rows[name] = Fact(shown=shown, same=same, remedy=remedy, warning=True)
    return rows


def tools(args: RunFlags) -> Facts:
    """The programs that build and load DeepSpeed's extensions: ninja and a C++ compiler. With ranks on CPUs or with
    offload, ninja is needed even to load an extension that is already built."""
    offloads = any(value is True for name, value in args.as_dict().items() if name.startswith("offload"))
    ninja, compiler = version_of("ninja"), version_of(os.environ.get("CXX", "c++"))
    return {
        "ninja": Fact(
            shown=ninja or "none",
            problem="" if ninja else "no ninja, which loads DeepSpeed's extensions. Run there: pip install ninja",
            warning=on_gpu() and not offloads,
        ),
        "c++": Fact(
            shown=compiler or "none",
            problem="" if compiler else "no C++ compiler: no extension can be built there that is not built yet",
            warning=True,
        ),
    }


def version_of(program: str) -> str:
    """The version number that a program prints; "" if the program cannot be run, "there" if it prints no number."""
    try:
        told = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=20, check=True, stdin=subprocess.DEVNULL
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    match = re.search(r"\d+(\.\d+)+", told)
    return match[0] if match else "there"


# Memory, network, disks


def memory() -> Facts:
    """The host's free memory, its /dev/shm, and the network that connects it with other hosts."""
    host = psutil.virtual_memory()
    shown = f"{bytes_in_short(host.available)} of {bytes_in_short(host.total)} free"
    rows = {MEMORY: Fact(shown=shown, amount=host.available, warning=True)}
    exchanges = on_gpu() and ranks_of_this_machine() > 1
    shared = "shared memory, by which ranks of a node exchange: --shm-size of a container"
    rows["/dev/shm"] = disk(Path("/dev/shm"), shared, LEAST_SHARED if exchanges else 0)
    network = network_cards(Path("/sys/class"))
    return rows | ({"network": Fact(shown=network)} if network else {})


def network_cards(classes: Path) -> str:
    """The network of this node: the active InfiniBand ports, or else the fastest network card (no virtual interface);
    "" if there is none. classes: the kernel's folder /sys/class."""

    def text(file: Path) -> str:
        try:
            return file.read_text().strip()
        except OSError:  # an interface that is down has no speed
            return ""

    ports = [port for port in classes.glob("infiniband/*/ports/*") if "ACTIVE" in text(port / "state")]
    if rates := [rate for port in sorted(ports) if (rate := text(port / "rate"))]:
        return f"{len(rates)} x {float(rates[0].split()[0]):.0f} Gb/s InfiniBand"
    cards = [card for card in classes.glob("net/*") if (card / "device").exists()]
    speeds = [(int(speed), card.name) for card in cards if (speed := text(card / "speed")).isdecimal()]
    return f"{max(speeds)[1]} {max(speeds)[0] / 1000:g} Gb/s" if speeds else ""


def disks(args: RunFlags) -> Facts:
    """The disks to which a run writes. Only one of them is optional: the disk for models from the Hub."""
    room = room_of(args)
    found = {
        "output": disk(
            Path(args.output_dir).absolute(),
            "output",
            room or LEAST_FREE,
            f"; models and a checkpoint take {bytes_in_short(room)}" if room else "",
            short_is_fault=room > 0,
        ),
        "models of the Hub": disk(Path(huggingface_hub.constants.HF_HUB_CACHE), "models of the Hub", optional=True),
        "torch extensions": disk(extensions_folder(), "torch extensions"),
        "tokenised data": disk(cache_folder(getattr(args, "data_output_path", None)), "tokenised data"),
    }
    return {f"free, {what}": fact for what, fact in found.items()}


def extensions_folder() -> Path:
    """The folder in which DeepSpeed's extensions are built: TORCH_EXTENSIONS_DIR, else this program's own folder, else
    torch's default."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    if given is None and (own := own_folder()) is not None:
        return own
    return Path(given) if given else Path.home() / ".cache" / "torch_extensions"


def room_of(args: RunFlags) -> int:
    """The size in bytes of the saved models and one checkpoint together. The checkpoint holds float32 weights and
    Adam's two moments. 0 if a model's configuration cannot be read; another row reports this."""
    try:
        rlhf = isinstance(args, RLHFFlags)
        plan = setting_here(args, args.resolved.dialect).planned() if rlhf else planned_model(args)
    except UserError:
        return 0
    models = [engine.model for engine in plan.engines.values()]
    return sum(model.numbers * (model.width + 12) for model in models if model.trains)


def nearest(folder: Path) -> Path:
    """This folder if it exists, else the nearest existing one above it."""
    return next(part for part in (folder, *folder.parents) if os.path.lexists(part))


def disk(
    folder: Path,
    what: str,
    least: float = LEAST_FREE,
    remark: str = "",
    optional: bool = False,
    short_is_fault: bool = False,
) -> Fact:
    """The free bytes on the disk of a folder, which need not exist yet. A test file is written to the disk and removed.

    what: the purpose of the folder. least: fewer free bytes are a problem. remark: text that is added to this problem.
    optional: whether a run can go on if the disk cannot be written. short_is_fault: whether fewer than `least` free
    bytes stop a run; if not, they are a warning.
    """
    place = nearest(folder)
    try:
        free = shutil.disk_usage(place).free
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(bytes(PROBE))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        reason = reason_of(error)
        problem = f"nothing can be written to {folder} ({what}): {reason}"
        return Fact(shown=reason.partition(":")[0], problem=problem, warning=optional, amount=0)
    problem = f"{bytes_in_short(free)} free at {folder} ({what}){remark}" if free < least else ""
    return Fact(shown=bytes_in_short(free), problem=problem, warning=not short_is_fault, amount=free)


def bytes_in_short(size: float) -> str:
    """A number of bytes as a short text: "512 GB", "1.5 MB"."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.0f} {name}" if size >= 10 * unit else f"{size / unit:.1f} {name}"
    return f"{size:.0f} B"


# What the run reads


def inputs_of(args: RunFlags) -> Facts:
    """Each model, data set, function, template and configuration file that the flags name, with its fingerprint."""
    return {f"--{name} {value}": looked_at(name, value) for name, value in _named(args)}


def _named(args: RunFlags) -> Iterator[tuple[str, str]]:
    files = ("model_name_or_path", "data_path", "dataset_name", "ds_config", "chat_template")
    for name, value in args.as_dict().items():
        if name.endswith(files) or name in ("reward_function", "reward_url"):
            yield from ((name, one) for one in (value if isinstance(value, list) else [value]) if one)


def looked_at(name: str, value: str) -> Fact:
    """The fact about the file, folder or Hub name that is the value of the flag `name`."""
    try:
        if name.endswith("model_name_or_path"):
            require_model(value, f"--{name}")
            base_of(value, f"--{name}")
            found = fingerprint(value, f"--{name}") or ""  # "" for a name on the Hub that is not downloaded yet
        elif name.endswith(("data_path", "dataset_name")):
            found = _data(name_and_split(value)[0])
        elif name == "reward_function":
            where = value.rpartition(":")[0]
            found = content(Path(where)) if names_file(where) else ""
        elif name == "reward_url":
            _connect(value)
            found = ""
        else:
            found = content(Path(value).expanduser())
    except (UserError, OSError) as error:
        return Fact(shown="not readable", problem=f"--{name} {value}: {one_line(error)}")
    return Fact(shown=found.rpartition(" ")[2][:8] or "-", same=found, remedy="Copy it again")


def _data(value: str) -> str:
    if value == DEEPSPEED_CHAT_FILES:
        return content(Path("data"))
    path = Path(value).expanduser()
    if path.exists() or is_path(value) or not can_be_hub_name(value):
        return content(path)
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return ""
    try:
        return f"commit {huggingface_hub.HfApi().dataset_info(value, timeout=10).sha}"
    except Exception as error:  # also errors of the HTTP library, which may be one of several
        reason = one_line(error)
        raise UserError(f"no such file, and no data set of that name on the Hub can be reached ({reason})") from None


def _connect(url: str) -> None:
    """Connect to a reward server, or to the proxy in front of it. Raises OSError if this fails."""
    parts = urlsplit(url)
    if not is_this_machine(url) and not proxy_bypass(str(parts.hostname)):
        parts = urlsplit(getproxies().get(parts.scheme, url))
    port = parts.port or {"https": 443}.get(parts.scheme, 80)
    socket.create_connection((parts.hostname, port), timeout=CONNECT_SECONDS).close()


def content(path: Path) -> str:
    """A hash of a file, or of the files in a folder. It covers the names and sizes of all files. For the first
    FILES_READ files, it also covers evenly spaced blocks of the content, as a model's fingerprint does.

    Raises: UserError if there is nothing at the path, OSError if it cannot be read.
    """
    if not path.exists():
        raise UserError(f"there is no {path}")
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for number, file in enumerate(files):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(path)} {size} ".encode())
        if number < FILES_READ:
            with file.open("rb") as opened:
                for start in block_starts(size):
                    opened.seek(start)
                    digest.update(opened.read(BLOCK))
    return digest.hexdigest()
