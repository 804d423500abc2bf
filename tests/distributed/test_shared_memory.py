"""Runs leave nothing in shared memory, however they end, and remove what dead processes have left there and no more."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine import distributed
from engine.zero.communication import BUFFERS, SHARED_MEMORY, clear_dead_buffers
from scripts.harness.ranks import run_ranks


def buffers_and_sums(end: str) -> dict:
    """The run's own buffers and a sum over the ranks; `end` is "normal", or "kill" for SIGKILL to itself."""
    port = os.environ["MASTER_PORT"]
    found = {
        "buffers": [path.name for path in SHARED_MEMORY.glob(f"{BUFFERS}_*_{port}_*")],
        "sum": distributed.all_reduce_sum(torch.tensor(distributed.rank() + 1)).item(),
    }
    distributed.barrier()
    if end == "kill":
        Path(os.environ["SEEN"], str(distributed.rank())).write_text(port)
        os.kill(os.getpid(), signal.SIGKILL)
    return found


MAP = """
import mmap, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR)
mapped = mmap.mmap(descriptor, 4096)
os.close(descriptor)
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def launched(monkeypatch):
    """The environment as the deepspeed launcher sets it for two ranks, for which DeepSpeed would make buffers."""
    monkeypatch.setenv("LOCAL_SIZE", "2")


def left(port: str = "*") -> list[str]:
    return [path.name for path in SHARED_MEMORY.glob(f"{BUFFERS}_{os.getuid()}_127.0.0.1_{port}_*")]


def test_nothing_is_left_after_a_normal_end_or_sigkill_and_a_dead_processs_buffer_goes(launched, tmp_path, monkeypatch):
    dead = SHARED_MEMORY / f"{BUFFERS}_{os.getuid()}_127.0.0.1_{os.getpid()}_0"
    dead.write_bytes(bytes(4096))
    for rank in run_ranks("tests.distributed.test_shared_memory:buffers_and_sums", end="normal"):
        assert rank == {"buffers": [], "sum": 3}
    assert not dead.exists()
    monkeypatch.setenv("SEEN", str(tmp_path))
    with pytest.raises(RuntimeError, match="failed on rank"):
        run_ranks("tests.distributed.test_shared_memory:buffers_and_sums", end="kill")
    assert left(port=(tmp_path / "0").read_text()) == []


def test_only_what_nobody_has_open_is_removed(tmp_path):
    """The folder stands for /dev/shm; a file is mapped by a process that has closed it, or open in this one."""
    own = f"{BUFFERS}_{os.getuid()}_127.0.0.1"
    names = {
        "dead": f"{own}_1_0",
        "mapped": f"{own}_2_0",
        "open": f"{own}_3_0",
        "others": f"{BUFFERS}_{os.getuid() + 1}_127.0.0.1_4_0",
        "unrelated": "sem.mp-1",
    }
    for name in names.values():
        (tmp_path / name).write_bytes(bytes(4096))
    (tmp_path / f"{own}_5_0").symlink_to(names["unrelated"])
    process = subprocess.Popen(
        [sys.executable, "-c", MAP, str(tmp_path / names["mapped"])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "mapped\n"
        with (tmp_path / names["open"]).open("rb"):
            assert clear_dead_buffers(tmp_path) == [names["dead"]]
        kept = set(names.values()) - {names["dead"]} | {f"{own}_5_0"}
        assert {path.name for path in tmp_path.iterdir()} == kept
    finally:
        process.kill()
        process.wait()
    assert clear_dead_buffers(tmp_path) == [names["mapped"], names["open"]]  # whose processes are gone, or have closed


def test_a_machine_without_such_a_folder(tmp_path):
    assert clear_dead_buffers(Path(tmp_path / "none")) == []
