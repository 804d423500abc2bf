"""Ranks of a program on the hosts, on CPUs, started without a launcher; what each prints goes into a file."""

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.two_hosts.hosts import TwoHosts

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 900.0  # seconds of one run


def run_ranks(hosts: TwoHosts, argv: Sequence[str], folder: Path, port: int, ranks: int) -> None:
    """Run so many ranks on each host, together one group; `folder` gets what they print. Raises: RuntimeError as
    `wait`."""
    world, first = ranks * len(hosts.names), hosts.address(hosts.names[0])
    processes = []
    for rank in range(world):
        own = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": ranks, "RANK": rank, "LOCAL_RANK": rank % ranks}
        where = own | {"MASTER_ADDR": first, "MASTER_PORT": port}
        processes.append(_start(hosts, hosts.names[rank // ranks], argv, where, folder / f"log_{rank}.txt"))
    wait(processes, folder)


def start_alone(hosts: TwoHosts, host: str, argv: Sequence[str], folder: Path, port: int) -> subprocess.Popen:
    """Start a rank that is a group by itself."""
    own = {"WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0}
    where = own | {"MASTER_ADDR": hosts.address(host), "MASTER_PORT": port}
    return _start(hosts, host, argv, where, folder / "log_0.txt")


def _start(hosts: TwoHosts, host: str, argv: Sequence[str], where: dict, log: Path) -> subprocess.Popen:
    settings = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    environment = {**os.environ, **settings, **{name: str(value) for name, value in where.items()}}
    with log.open("wb") as printed:
        return hosts.start(host, list(argv), env=environment, cwd=ROOT, stdout=printed)


def wait(processes: Sequence[subprocess.Popen], folder: Path) -> None:
    """Wait for all ranks to end well; where one does not, end the others. Raises: RuntimeError, with what the failed
    ones printed last."""
    deadline = time.monotonic() + PATIENCE
    while any(process.poll() is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
        if failed or time.monotonic() > deadline:
            for process in processes:
                process.kill()
            break
        time.sleep(0.1)
    failed = [rank for rank, process in enumerate(processes) if process.wait() != 0]
    if failed:
        tails = [f"--- rank {rank}\n{(folder / f'log_{rank}.txt').read_text()[-3000:]}" for rank in failed]
        raise RuntimeError("\n".join(tails))
