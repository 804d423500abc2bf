"""A rank that is busy for longer than the group's calls may wait."""

import sys
from pathlib import Path
from subprocess import PIPE, Popen

from scripts.harness import free_port

RANK = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from engine import distributed
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=int(sys.argv[1]), world_size=2,
                        timeout=timedelta(seconds=3))
with distributed.waiting(timedelta(minutes=2)):
    if distributed.rank() == 0:
        time.sleep(6)
print("together", flush=True)
distributed.barrier()
"""


def test_the_others_wait_for_longer_than_the_groups_own_time():
    port, root = str(free_port()), Path(__file__).parents[2]
    ranks = [
        Popen([sys.executable, "-c", RANK, str(rank), port], cwd=root, stdout=PIPE, stderr=PIPE) for rank in (0, 1)
    ]
    found = [each.communicate(timeout=120) for each in ranks]
    assert [(each.returncode, said) for each, (said, _) in zip(ranks, found, strict=True)] == [(0, b"together\n")] * 2
