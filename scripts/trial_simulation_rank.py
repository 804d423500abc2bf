"""One rank of scripts/trial_simulation.py: times the collective calls of ZeRO-3 on CPUs, alone, by their size."""

import json
import os
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SIZES = (8, 4_096, 65_536, 1 << 20, 1 << 23, 1 << 25, 1 << 26)
"""Bytes."""


def main(options: dict) -> None:
    """Time both calls at all sizes, and write the medians of the slowest rank's times."""
    from scripts.harness.hosts import DEVICE

    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    import torch

    from engine import by_node, distributed
    from engine.zero.communication import init

    torch.set_num_threads(1)
    init(timeout_minutes=10, what_by_node=options.get("by_node", "gathers"))
    world = distributed.world_size()

    def gather(size: int) -> None:
        own = torch.zeros(max(1, size // 4 // world))
        by_node.zero_gather(own.new_empty(world * len(own)), own)

    def reduce(size: int) -> None:
        if size <= 4_096:  # what ranks agree on and count is summed as it is
            distributed.all_reduce_sum(torch.zeros(max(1, size // 4)))
            return
        parts = torch.zeros(size // 4)
        by_node.zero_reduce_scatter(parts.new_empty(len(parts) // world), parts)

    found = {}
    for name, call in (("gathers", gather), ("reductions", reduce)):
        found[name] = [(size, median_of(call, size, 4 + (12 if size <= 65_536 else 0))) for size in SIZES]
    found["adam"] = adam_seconds()
    if distributed.is_main():
        Path(options["output"]).write_text(json.dumps(found))
    distributed.barrier()
    distributed.shutdown()
    os._exit(0)  # in an orderly exit gloo's threads may abort


def adam_seconds(numbers: int = 1 << 22) -> float:
    """Seconds that an AdamW step of this rank takes for each number, the median; all ranks step at once."""
    import torch

    weight = torch.nn.Parameter(torch.ones(numbers))
    weight.grad = torch.ones(numbers)
    optimizer, seconds = torch.optim.AdamW([weight], fused=True), []
    for _ in range(12):
        started = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:]) / numbers


def median_of(call, size: int, times: int) -> float:
    """Seconds of a call on the slowest rank, the median of so many."""
    import torch

    from engine import distributed

    call(size)
    seconds = []
    for _ in range(times):
        distributed.barrier()
        started = time.perf_counter()
        call(size)
        seconds.append(time.perf_counter() - started)
    return statistics.median(distributed.all_reduce_max(torch.tensor(seconds)).tolist())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
