"""Bytes by the role whose they are and by their kind: what is alive at one moment, on a GPU or in host memory."""

from collections.abc import Iterator, Mapping

KINDS = (
    "weights",
    "gradients",
    "optimizer",
    "buffers",
    "gathered",
    "activations",
    "logits",
    "keys and values",
    "average",
)
"""In the order of tables. optimizer: float32 masters and Adam's moments. buffers: what communication, and a step of the
optimizer, need beside the rest. gathered: whole weights that ZeRO-3 joins from partitions for a while. average: EMA."""


class Bytes:
    """{role: {kind: bytes}}, to be added up."""

    def __init__(self, by_role: Mapping[str, Mapping[str, int]] | None = None):
        self.by_role: dict[str, dict[str, int]] = {}
        for role, kinds in (by_role or {}).items():
            for kind, size in kinds.items():
                self.add(role, kind, size)

    def add(self, role: str, kind: str, size: float) -> "Bytes":
        """Add so many bytes; returns itself."""
        assert kind in KINDS, kind
        if round(size):
            kinds = self.by_role.setdefault(role, {})
            kinds[kind] = kinds.get(kind, 0) + round(size)
        return self

    def __add__(self, other: "Bytes") -> "Bytes":
        both = Bytes(self.by_role)
        for role, kind, size in other:
            both.add(role, kind, size)
        return both

    def __iter__(self) -> Iterator[tuple[str, str, int]]:
        for role, kinds in self.by_role.items():
            for kind, size in kinds.items():
                yield role, kind, size

    @property
    def total(self) -> int:
        """Of all roles and kinds."""
        return sum(size for _, _, size in self)

    def of_role(self, role: str) -> int:
        """Of all kinds of one role."""
        return sum(self.by_role.get(role, {}).values())

    def of_kind(self, kind: str) -> int:
        """Of one kind of all roles."""
        return sum(kinds.get(kind, 0) for kinds in self.by_role.values())
