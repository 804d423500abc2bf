"""A healthy node, by hand."""

from training.tools.preflight.facts import Fact
from training.tools.preflight.table import Node

MODEL = "--actor_model_name_or_path sft"


def healthy(host: str = "gpu01", first: int = 0, **changes: Fact | None) -> Node:
    """A node with two A100, whose ranks begin with `first`, and these changes of facts, None for one that it lacks."""
    kind, installed = "2 x NVIDIA A100-SXM4-80GB (8.0)", "Install the same on all nodes"
    facts = {
        "python": Fact(shown="3.12.1", same="3.12", remedy=installed),
        "torch": Fact(shown="2.13.0", same="2.13.0", remedy=installed),
        "driver": Fact(shown="580.1", same="580.1", warning=True),
        "device": Fact(shown="cuda", same="cuda"),
        "GPUs": Fact(shown=kind, same=kind, warning=True),
        "GPU memory": Fact(shown="84 GB of 85 GB free", amount=84e9, warning=True),
        "ninja": Fact(shown="1.13.0"),
        "host memory": Fact(shown="900 GB of 1.0 TB free", amount=900e9, warning=True),
        "free, output": Fact(shown="700 GB", amount=700e9),
        MODEL: Fact(shown="3f0c3f0c", same="3f0c" * 16, remedy="Copy it again"),
        "NCCL_DEBUG": Fact(shown="WARN", same="WARN", remedy="Have the launcher pass it on", warning=True),
        **changes,
    }
    return Node(host, (first, first + 1), {row: fact for row, fact in facts.items() if fact is not None})
