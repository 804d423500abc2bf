"""A part of a step: seconds in which a rank computes, and in which ranks exchange."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Part:
    """Seconds of a part of a step. compute: arithmetic and reading. latency, transfer: of what ranks exchange, what it
    takes whatever its bytes, and what its bytes take. overlaps: whether both go on side by side. gathered, reduced:
    bytes that each rank has of all ranks in the end, and of which it has its part of the sum."""

    compute: float = 0.0
    latency: float = 0.0
    transfer: float = 0.0
    overlaps: bool = False
    gathered: float = 0.0
    reduced: float = 0.0

    @property
    def exchange(self) -> float:
        """Seconds in which ranks exchange."""
        return self.latency + self.transfer

    @property
    def seconds(self) -> float:
        """Altogether."""
        return max(self.compute, self.exchange) if self.overlaps else self.compute + self.exchange

    def then(self, other: "Part") -> "Part":
        """This part and another one of its kind, one after the other."""
        return Part(
            self.compute + other.compute,
            self.latency + other.latency,
            self.transfer + other.transfer,
            self.overlaps,
            self.gathered + other.gathered,
            self.reduced + other.reduced,
        )

    def computing(self, seconds: float, overlaps: bool = False) -> "Part":
        """What ranks exchange, with arithmetic of so many seconds."""
        return replace(self, compute=seconds, overlaps=overlaps)
