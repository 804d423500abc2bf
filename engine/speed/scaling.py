"""A step of PPO on 8 to 1,024 GPUs, on paper: seconds by phase, what fits, where it stops scaling and why.

python -m engine.speed.scaling                            # docs/scaling.md; some minutes
python -m engine.speed.scaling --models llama-2-7b --gpu h100-80g --network 12.5e9 --rows 512
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.errors import UserError
from engine.memory import Cluster
from engine.memory.data_sheets import DataSheet, Link, data_sheet
from engine.memory.gpus import gpu_bytes
from engine.speed.machines import INFINIBAND_8X200G
from engine.speed.part import Part
from engine.speed.published import published_table
from engine.speed.rates import LINKS, Rates, assumed
from engine.speed.settings import Setting, Task, fitting
from engine.speed.shapes import SHAPES

GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
A_NODE = 8
HOST = 1_000_000_000_000
"""Bytes of a node's host memory."""
PHASES = {
    "gather": ("gather ",),
    "prompts": ("prompts",),
    "tokens": ("tokens",),
    "experience": ("actor", "reference", "critic", "reward"),
    "train": ("train ",),
    "optimizer": ("step ",),
}
"""Columns of the table, and how the parts of a step that they add up begin. Calls in which ranks agree on a number, and
that add metrics up, take milliseconds and have none: they count in the step alone."""
WORTH = 0.75
"""Of twice the speed, what twice the GPUs must give for the step to count as scaling."""
NOTED = 0.97
"""From when on nothing is said of what is lost."""


@dataclass(frozen=True)
class Point:
    """A step on so many GPUs."""

    gpus: int
    rows: int
    setting: Setting
    parts: Mapping[str, Part]

    @property
    def seconds(self) -> float:
        """Of the step."""
        return sum(part.seconds for part in self.parts.values())

    @property
    def rows_a_second(self) -> float:
        """Responses, over all GPUs."""
        return self.rows * self.gpus / self.seconds

    def phase(self, name: str) -> Part:
        """The parts of a phase, added up: arithmetic, and what ranks wait for each other beyond it."""
        parts = [self.parts[key] for key in self.parts if key.startswith(PHASES[name])]
        shares = [(part.seconds - part.compute) / part.exchange if part.exchange else 0.0 for part in parts]
        exposed = list(zip(parts, shares, strict=True))
        return Part(
            sum(part.compute for part in parts),
            sum(part.latency * share for part, share in exposed),
            sum(part.transfer * share for part, share in exposed),
        )


def measured(task: Task, gpus: int, rates: Rates, network: Link, gpu: str) -> Point | None:
    """The step on so many GPUs of this name; None where no setting fits."""
    nodes = max(1, gpus // A_NODE)
    cluster = Cluster(gpus=min(gpus, A_NODE), nodes=nodes, gpu=gpu_bytes(gpu), host=HOST)
    setting = fitting(task, cluster)
    if setting is None:
        return None
    machines = rates.machines(cluster.gpus, nodes, network)
    return Point(gpus, task.rows, setting, setting.step.parts(rates, machines))


def why(before: Point, after: Point) -> str:
    """What keeps the second point from twice the first one's speed: the phase that lost most, and what it waits for."""
    fewer = after.rows / before.rows  # rows of a rank

    def lost(name: str) -> float:
        return after.phase(name).seconds - fewer * before.phase(name).seconds

    worst = max(PHASES, key=lost)
    now, then = after.phase(worst), before.phase(worst)
    grown = {kind: getattr(now, kind) - fewer * getattr(then, kind) for kind in ("compute", "latency", "transfer")}
    kind = max(grown, key=lambda kind: grown[kind])
    reasons = {
        "compute": "weights are read for each token, whatever the rows" if worst == "tokens" else "passes of few rows",
        "latency": "steps of rings, as many as ranks",
        "transfer": "bytes, the same on each rank whatever their number",
    }
    return f"{worst}: {reasons[kind]}"


def table(points: Sequence[tuple[int, Point | None]]) -> str:
    """Markdown: a row for each number of GPUs."""
    lines = [
        "| GPUs | rows a GPU | setting | "
        + " | ".join(PHASES)
        + " | step, s | rows/s | of ideal | lost since the row before, and why |",
        "| --- " * (len(PHASES) + 7) + "|",
    ]
    first = previous = None
    stopped = False
    for gpus, point in points:
        if point is None:
            lines.append(f"| {gpus} | | does not fit |" + " |" * (len(PHASES) + 4))
            continue
        first = first or point
        ideal = first.rows_a_second * gpus / first.gpus
        cells = [str(gpus), str(point.rows), point.setting.words]
        cells += [_seconds(point.phase(name).seconds) for name in PHASES]
        cells += [_seconds(point.seconds), f"{point.rows_a_second:.0f}", f"{point.rows_a_second / ideal:.2f}"]
        gain = 1.0 if previous is None else point.rows_a_second / previous.rows_a_second * previous.gpus / point.gpus
        stops = gain < WORTH and not stopped
        stopped = stopped or stops
        cells.append("" if previous is None or gain >= NOTED else _lost(gain, stops, previous, point))
        lines.append(f"| {' | '.join(cells)} |")
        previous = point
    return "\n".join(lines)


def _lost(gain: float, stops: bool, before: Point, after: Point) -> str:
    slower = " slower than half as many," if after.rows_a_second < before.rows_a_second else ""
    return f"{1 - gain:.0%},{' **stops here**,' if stops else ''}{slower} {why(before, after)}"


def _seconds(value: float) -> str:
    return f"{value:.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


def sheet_of(gpu: str) -> DataSheet:
    """The data sheet of a GPU that the planner calls so. Raises: UserError where there is none."""
    sheet = data_sheet(re.sub(r"(\d+)g$", r"\1GB", gpu))
    if sheet is None:
        raise UserError(f"--gpu {gpu}: no data sheet of it is known (engine/memory/data_sheets.py).")
    return sheet


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser("python -m engine.speed.scaling", description=str(__doc__).splitlines()[0])
    models = [name for name in SHAPES if name.startswith("llama")]
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=models, help="actors (Llama-2's)")
    parser.add_argument("--scorer", choices=SHAPES, default="llama-2-7b", help="critic and reward model (llama-2-7b)")
    parser.add_argument("--gpu", default="a100-80g", help="as training/memory_plan.py has them (a100-80g)")
    parser.add_argument("--gpus", nargs="+", type=int, default=GPUS, help="powers of two, 8 a node")
    network = INFINIBAND_8X200G.bandwidth
    parser.add_argument("--network", type=float, default=network, help="bytes/s of a node (eight cards of 200 Gb/s)")
    parser.add_argument("--latency", type=float, default=INFINIBAND_8X200G.latency, help="seconds from node to node")
    parser.add_argument("--prompt", type=int, default=256, help="tokens (256)")
    parser.add_argument("--response", type=int, default=256, help="tokens (256)")
    parser.add_argument("--rows", type=int, default=1024, help="responses of a step over all GPUs (1024)")
    parser.add_argument("--rows_a_gpu", type=int, default=16, help="the same of each GPU, in the other table (16)")
    args = parser.parse_args()
    try:
        rates = assumed(sheet_of(args.gpu))
    except UserError as error:
        parser.error(str(error))
    link = Link(LINKS * args.network, args.latency)
    for model in args.models:
        for title, rows_of in (
            (f"{args.rows:,} responses a step", lambda gpus: args.rows // gpus),
            (f"{args.rows_a_gpu} responses a GPU", lambda gpus: args.rows_a_gpu),
        ):
            points = []
            for gpus in args.gpus:
                task = Task(
                    actor=model, scorer=args.scorer, prompt=args.prompt, response=args.response, rows=rows_of(gpus)
                )
                points.append((gpus, measured(task, gpus, rates, link, args.gpu) if task.rows else None))
            print(f"\n### {model}, {title}\n\n{table(points)}", flush=True)
    print(f"\n### Beside what others have published\n\n{published_table()}")


if __name__ == "__main__":
    main()
