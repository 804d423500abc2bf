"""A healthy node, by hand."""

from training.preflight.node import DATA, EXTENSIONS, HUB, OUTPUT, Card, Clock, Disk, Input, Node

MODEL = "--actor_model_name_or_path sft"
A100 = Card(name="NVIDIA A100-SXM4-80GB", capability="8.0", free=84_000_000_000, total=85_000_000_000)


def healthy(host: str = "gpu01", first: int = 0, **changes) -> Node:
    """A node with two A100, whose ranks begin with `first`, and these changes."""
    facts = {
        "ranks": (first, first + 1),
        "versions": {"python": "3.12.1", "torch": "2.13.0", "deepspeed": "0.19.8", "NCCL": "2.28.3", "driver": "580.1"},
        "device": "cuda",
        "seen": 2,
        "cards": (A100, A100),
        "memory": 1_000_000_000_000,
        "available": 900_000_000_000,
        "shared_memory": Disk(path="/dev/shm", free=500_000_000_000),
        "disks": {what: Disk(path=f"/{what}", free=700_000_000_000) for what in (OUTPUT, HUB, EXTENSIONS, DATA)},
        "inputs": {MODEL: Input(content="3f0c" * 16)},
        "tools": {"ninja": "1.13.0", "c++": "13.2"},
        "environment": {"NCCL_DEBUG": "WARN"},
        "sees_output": None if first == 0 else True,
        "clock": None if first == 0 else Clock(ahead=0.25, within=0.01),
    }
    return Node(host=host, **{**facts, **changes})
