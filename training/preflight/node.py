"""What is known of a node: facts, and no judgement of them."""

import dataclasses
from dataclasses import dataclass, field

GB = 1e9
OUTPUT, HUB, EXTENSIONS, DATA = "output", "models of the Hub", "torch extensions", "tokenised data"  # disks


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The GPU of one rank. capability: of CUDA's, as "8.0". free, total: bytes. problem: why torch cannot compute with
    it; empty where it can, or where that was not tried."""

    name: str
    capability: str
    free: int
    total: int
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The file system that a folder stands, or would stand, on. free: bytes. problem: why nothing can be written."""

    path: str
    free: int
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A model, data set or file that the run reads. content: a fingerprint, equal where the same can be read; empty
    where there is none. problem: why it cannot be read."""

    content: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """How many seconds a node's clock is ahead of rank 0's, and by how many that may be wrong."""

    ahead: float
    within: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One host of the run, as its ranks find it.

    ranks: their numbers. versions: by package. device: what the ranks compute on, "cuda" or "cpu"; seen: GPUs that
    torch counts. cards: of the ranks, in their order. memory, available: bytes of the host's. shared_memory: /dev/shm.
    disks: by what they are for. inputs: by flag and value. tools: versions of what builds extensions, empty where one
    is not found; builds: whether this run needs them. environment: variables that libraries of communication and models
    read. network: its cards, in words; network_speed: bytes a second of them together, 0 where that is not told.
    sees_output: whether it sees what rank 0 writes beside the output folder; None where that was not tried.
    """

    host: str
    ranks: tuple[int, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    device: str = "cpu"
    seen: int = 0
    cards: tuple[Card, ...] = ()
    memory: int = 0
    available: int = 0
    shared_memory: Disk = Disk(path="/dev/shm", free=0)
    disks: dict[str, Disk] = field(default_factory=dict)
    inputs: dict[str, Input] = field(default_factory=dict)
    tools: dict[str, str] = field(default_factory=dict)
    builds: bool = True
    environment: dict[str, str] = field(default_factory=dict)
    network: str = ""
    network_speed: float = 0.0
    sees_output: bool | None = None
    clock: Clock | None = None

    def as_json(self) -> dict:
        """What `of_json` makes the same node of."""
        return dataclasses.asdict(self)

    @classmethod
    def of_json(cls, told: dict) -> "Node":
        """A node as another process has told it."""
        parts = {
            "ranks": tuple(told["ranks"]),
            "cards": tuple(Card(**card) for card in told["cards"]),
            "shared_memory": Disk(**told["shared_memory"]),
            "disks": {what: Disk(**disk) for what, disk in told["disks"].items()},
            "inputs": {name: Input(**one) for name, one in told["inputs"].items()},
            "clock": told["clock"] and Clock(**told["clock"]),
        }
        return cls(**{**told, **parts})
