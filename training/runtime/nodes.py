"""Compares the ranks of a run at its start, before a model is loaded.

Before the process group exists, each rank writes its host and device into the store at which the ranks meet
(`roll_call`): if a rank does not come, or computes on another device, the group cannot form, and would only wait.
Once the group exists, the ranks compare versions, environment variables, models and data (`check_nodes`).
"""

import hashlib
import json
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from engine import distributed
from engine.errors import SharedError, UserError
from engine.models.checking import BLOCK, block_starts, fingerprint
from engine.models.model_paths import can_be_hub_name, one_line
from engine.zero.accelerator import on_gpu, ranks_of_this_machine
from training.config.flags import CODE, RunFlags
from training.config.reward import names_file
from training.data.sources import DEEPSPEED_CHAT_FILES, is_path, name_and_split
from training.reporting.run_record import versions
from training.runtime.environment import print_line
from training.runtime.ranks import open_store, start_key

QUIET = 45.0  # seconds in which no further rank comes, after which rank 0 names those that are missing
BETWEEN = 0.2  # seconds between two looks into the store
FILES_READ = 256  # how many files of a folder are read; of the other files only names and sizes count
NEEDED = ("python", "torch", "deepspeed", "transformers")
MAY_DIFFER = re.compile(r"(NCCL|TORCH_NCCL|GLOO)_\w+|OMP_NUM_THREADS|CUDA_HOME|GPU")  # facts that are only told


def roll_call(patience: float, environment: Mapping[str, str] = os.environ):
    """Wait until all ranks have begun (all ranks call this, before the process group exists). Returns the store, which
    rank 0 has to keep until the group exists: its process serves it.

    patience: seconds without a further rank, after which rank 0 gives up.
    Raises: UserError on rank 0, which names ranks that have not come, or hosts that compute on another device.
    """
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    store = None
    while store is None:
        try:
            store = open_store(environment, serve=rank == 0)
        except (OSError, RuntimeError) as error:
            if rank == 0:
                reason = str(error).splitlines()[0]
                raise UserError(f"nothing can listen at MASTER_PORT ({reason}). Give another --master_port.") from None
            time.sleep(BETWEEN)  # rank 0 is not there yet; the watch thread ends a wait that is too long
    store.set(start_key(f"came/{rank}", environment), json.dumps([socket.gethostname(), "GPU" if on_gpu() else "CPU"]))
    came: dict[int, tuple[str, str]] = {}
    latest, told = time.monotonic(), False
    while rank == 0 and (missing := [other for other in range(world) if other not in came]):
        for other in missing:
            key = start_key(f"came/{other}", environment)
            if store.check([key]):
                came[other] = _parsed(store.get(key))
                latest = time.monotonic()
                told = False
        quiet = time.monotonic() - latest
        if quiet > patience:
            raise UserError(
                f"no answer from {absent(came, world)} within {quiet:.0f} s. Look at what the launcher prints for "
                "them, and for a firewall between the nodes."
            )
        if quiet > QUIET and not told:
            print_line(f"no answer yet from {absent(came, world)}")
            told = True
        time.sleep(BETWEEN)
    usual = Counter(device for _, device in came.values()).most_common(1)
    other = {device: host for host, device in reversed(came.values()) if device != usual[0][0]}
    for device, host in other.items():
        raise UserError(
            f"{host} computes on {device}, the others on {usual[0][0]}. Look there at nvidia-smi and DS_ACCELERATOR."
        )
    return store


def _parsed(posted: bytes) -> tuple[str, str]:
    """(host, device) that a rank has written. Anybody who reaches the store may write into it."""
    try:
        host, device = json.loads(posted)
        return str(host), str(device)
    except (ValueError, TypeError):
        return "a host", "an unknown device"


def absent(came: Mapping[int, tuple[str, str]], world: int) -> str:
    """The ranks that have not come, by their nodes' places: "ranks 8 to 15 (node 2 of 4)"."""
    here, nodes = ranks_of_this_machine(), []
    for node in range((world + here - 1) // here):
        ranks = range(node * here, min(world, (node + 1) * here))
        missing = [rank for rank in ranks if rank not in came]
        if missing:
            last = f" to {missing[-1]}" if len(missing) > 1 else ""
            nodes.append(f"rank{'s' * (len(missing) > 1)} {missing[0]}{last} (node {node + 1} of {world // here})")
    return listed(nodes)


def listed(names: Iterator[str] | Sequence[str]) -> str:
    """The different names, at most four of them."""
    each = list(dict.fromkeys(names))
    return ", ".join(each[:4]) + (f" and {len(each) - 4} more" if len(each) > 4 else "")


def check_nodes(args: RunFlags) -> None:
    """Compare the ranks' facts; rank 0 prints which nodes there are (all ranks call this).

    Raises: SharedError on all ranks if versions, models or data differ. Different GPUs and environment variables are
    only told.
    """
    gathered = distributed.all_gather_objects((socket.gethostname(), facts_of_rank(args)))
    nodes = [(host, facts) for host, facts in gathered if facts]
    faults, notes = [], []
    for fact in dict.fromkeys(name for _, facts in nodes for name in facts):
        values = [facts.get(fact, "none") for _, facts in nodes]
        usual = Counter(values).most_common(1)[0][0]
        for value in dict.fromkeys(value for value in values if value != usual):
            hosts = listed(host for (host, _), own in zip(nodes, values, strict=True) if own == value)
            text = f"{hosts}: has {fact} {value}, the others {usual}"
            (notes if MAY_DIFFER.fullmatch(fact) else faults).append(text)
    if distributed.is_main():
        own = nodes[0][1]
        hosts = listed(host for host, _ in nodes)
        print(f"{len(nodes)} nodes ({hosts}): torch {own['torch']}, deepspeed {own['deepspeed']}", flush=True)
        for note in notes:
            print_line(f"warning: {note}")
    if faults:
        raise SharedError(f"the nodes of this run do not fit together: {'; '.join(faults)}. Make them alike.")


def facts_of_rank(args: RunFlags) -> dict[str, str]:
    """{fact: value} of this node, from its first rank; {} from the others."""
    if distributed.local_rank() != 0:
        return {}
    found = {name: versions().get(name) or "none" for name in NEEDED}
    found["python"] = ".".join(found["python"].split(".")[:2])
    found["CUDA"] = torch.version.cuda or "none"
    if on_gpu():
        found["GPU"] = torch.cuda.get_device_name()
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    variables = {name: value for name, value in os.environ.items() if MAY_DIFFER.fullmatch(name)}
    own = {name: value for name, value in variables.items() if not name.endswith("_IFNAME")}
    return found | own | {f"--{name} {value}": looked_at(name, value) for name, value in named_files(args)}


def named_files(args: RunFlags) -> Iterator[tuple[str, str]]:
    """(flag, value) of each model, data set, function, template and configuration file that the flags name."""
    files = ("model_name_or_path", "data_path", "dataset_name", "ds_config", "chat_template", "response_template")
    for name, value in args.as_dict().items():
        if name.endswith(files) or name in CODE:
            yield from ((name, one) for one in (value if isinstance(value, list) else [value]) if one)


def looked_at(name: str, value: str) -> str:
    """The first letters of a hash of what a flag names; "" for a name on the Hub; or why it cannot be read."""
    try:
        if name.endswith("model_name_or_path"):
            found = fingerprint(value, f"--{name}") or ""
        elif name in CODE:
            where = value.rpartition(":")[0]
            found = content(Path(where)) if names_file(where) else ""
        else:
            path = name_and_split(value)[0] if name.endswith(("data_path", "dataset_name")) else value
            path = "data" if path == DEEPSPEED_CHAT_FILES else path
            here = Path(path).expanduser()
            found = content(here) if here.exists() or is_path(path) or not can_be_hub_name(path) else ""
    except (UserError, OSError) as error:
        return f"not readable ({one_line(error)})"
    return found.rpartition(" ")[2][:8]


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
