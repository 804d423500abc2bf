"""What scripts/benchmark_step3.py has found, as text and as Markdown tables."""

from dataclasses import dataclass
from statistics import median, quantiles

PHASES = ("generate", "make_experience", "train")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All numbers of one setting.

    lines: what was measured, in words. prompts, response: a step's prompts over all ranks and new tokens of each.
    floor: seconds by phase and "step". steps: of "ours" and, unless it was left out, "plain", one dict a step with
    seconds by phase and "step", and bytes of "memory". flops: of all ranks, by phase.
    matrix_rate, decode_rate: FLOP/s of a rank; copy_rate: bytes a second; peak_flops: by the data sheet, or None.
    decode_seconds, decode_bytes: of all decoding steps of a rank. decoding, fallback: as of the rollout backend.
    backends: seconds of each one's generations, where several were compared; same_tokens: whether they drew the same.
    """

    name: str
    lines: list[str]
    prompts: int
    response: int
    ranks: int
    floor: dict[str, float]
    steps: dict[str, list[dict[str, float]]]
    flops: dict[str, int]
    matrix_rate: float
    decode_rate: float
    copy_rate: float
    peak_flops: float | None
    decode_seconds: float
    decode_bytes: int
    decoding: str
    fallback: str | None
    backends: dict[str, list[float]]
    same_tokens: bool

    def seconds(self, side: str, phase: str) -> float:
        """The median of a phase, or of "step"."""
        return median(step[phase] for step in self.steps[side])

    def ratio(self, phase: str) -> str:
        """Ours over plain: of the medians, and the quartiles of the pairs' ratios."""
        pairs = [ours[phase] / plain[phase] for ours, plain in zip(self.steps["ours"], self.steps["plain"])]
        low, _, high = quantiles(pairs, n=4, method="inclusive") if len(pairs) > 1 else pairs * 3
        return f"{self.seconds('ours', phase) / self.seconds('plain', phase):.2f} ({low:.2f} to {high:.2f})"

    def text(self) -> list[str]:
        """Everything, in lines."""
        return [
            *self.lines,
            f"a rank, while all work: matrices {self.matrix_rate / 1e9:.4g} GFLOP/s, decode "
            f"{self.decode_rate / 1e9:.4g} GFLOP/s, copies {self.copy_rate / 1e9:.3g} GB/s",
            "",
            *self.phase_table(),
            "",
            *self.further(),
        ]

    def phase_table(self) -> list[str]:
        """Medians of each phase, beside the plain step and the floor."""
        rows = [
            (
                "phase",
                "floor, s",
                *(f"{side}, s" for side in self.steps),
                *(f"{side} / floor" for side in self.steps),
                *(["ours / plain"] if "plain" in self.steps else []),
            )
        ]
        for phase in (*PHASES, "step"):
            taken = [self.seconds(side, phase) for side in self.steps]
            rows.append(
                (
                    "whole step" if phase == "step" else phase.replace("_", " "),
                    f"{self.floor[phase]:.3g}",
                    *(f"{seconds:.3g}" for seconds in taken),
                    *(f"{seconds / self.floor[phase]:.2f}" for seconds in taken),
                    *([self.ratio(phase)] if "plain" in self.steps else []),
                )
            )
        return markdown(rows)

    def further(self) -> list[str]:
        """Tokens a second, memory, what share of the machine is used, and the backends beside each other."""
        tokens = self.prompts * self.response
        speeds = (f"{side} {tokens / self.seconds(side, 'generate'):.0f}" for side in self.steps)
        peaks = (f"{side} {max(step['memory'] for step in steps) / 1e9:.3g}" for side, steps in self.steps.items())
        trained = self.flops["train"] / self.ranks / self.seconds("ours", "train")
        peak = f", {100 * trained / self.peak_flops:.1f} % of the data sheet's" if self.peak_flops else ""
        steps = self.response - 1
        read = self.decode_bytes / self.decode_seconds
        lines = [
            f"generation, tokens/s: {', '.join(speeds)}",
            f"peak memory of a rank in a step, GB, the models of all there: {', '.join(peaks)}",
            f"training: {100 * trained / self.matrix_rate:.1f} % of the matrix rate{peak}",
            f"decode: {1e3 * self.decode_seconds / steps:.3g} ms a token of all rows ({self.decoding}), "
            f"{read / 1e9:.3g} GB/s, {100 * read / self.copy_rate:.1f} % of the copies' rate",
        ]
        if self.backends:
            taken = {name: median(seconds) for name, seconds in self.backends.items()}
            first = next(iter(taken))
            lines.append(
                "generation by backend, s: "
                + ", ".join(
                    f"{name} {seconds:.3g} ({seconds / taken[first]:.2f} x {first})" for name, seconds in taken.items()
                )
                + (": the same tokens" if self.same_tokens else ": OTHER TOKENS")
            )
        return lines


def markdown(rows: list[tuple[str, ...]]) -> list[str]:
    """The rows as a Markdown table; the first is its head."""
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return [head, "| " + " | ".join(["---"] * len(rows[0])) + " |", *body]
