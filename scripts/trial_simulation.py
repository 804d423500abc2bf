"""The simulation of engine/speed against measured steps on two hosts with a slow link between them.

    python scripts/trial_simulation.py                       # measures first (scripts/trial_links.py), and calibrates
    python scripts/trial_simulation.py --measured FILE       # a report of scripts/trial_links.py --json

Three things are measured apart, none of them on the step that is predicted: what a rank computes in a phase, of as many
ranks at once, each a world of its own, on hosts that exchange nothing, where it steps all numbers and not its share;
seconds of ZeRO-3's two collective calls alone over the shaped link, by their size, and of Adam's step; and, for the
table, the step on two hosts. How many calls a step makes, of which sizes, is what engine/speed/step.py says. Bytes are
predicted from gloo's trees and rings (engine/speed/crossings.py) and counted on the network card.

Seconds, predicted and measured, are of the fastest of several turns: a machine that others share only adds to them, and
for minutes at a time.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from engine.memory.blueprint import built
from engine.models.classes import CLASSIFIER, LANGUAGE_MODEL
from engine.speed.crossings import ring_crossings, tree_crossings
from engine.speed.decoding import Decoder
from engine.speed.measured import NO_ARITHMETIC, MeasuredRanks
from engine.speed.part import Part
from engine.speed.settings import ROLES
from engine.speed.step import ADAM, Step
from scripts import trial_links
from scripts.harness.host_launches import run_ranks, start_alone, wait
from scripts.harness.hosts import Link, TwoHosts

PHASES = {
    "generate": ("gather actor", "agree on rollouts"),
    "make_experience": ("gather reference", "gather critic", "gather reward", "agree on experience"),
    "train": ("train critic", "train actor", "agree on updates"),
}
"""By the phase that is measured, the parts of a step in which ranks exchange."""
OPTIONS = [name for name in trial_links.OPTIONS if name not in trial_links.NOT_SIMULATED]
WITHIN = 0.15
TURNS = 3  # in which everything is timed


def main() -> int:
    """Print the table; 1 if a step is further from its prediction than WITHIN, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", help="a report of scripts/trial_links.py --json; made anew without it")
    parser.add_argument("--options", nargs="+", choices=OPTIONS, default=OPTIONS, help="of the report; all of them")
    parser.add_argument("--master_port", type=int, default=29600, help="the first of 300 (29600)")
    parser.add_argument("--json", help="a file for what was calibrated and predicted")
    args = parser.parse_args()
    if reason := TwoHosts.refusal():
        print(f"two hosts cannot be had here: {reason}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        report = json.loads(Path(args.measured or measure(args, Path(folder))).read_text())
        names = [name for name in args.options if name in report["options"]]
        found = calibrated(report, names, Path(folder), args.master_port)
    if args.json:
        Path(args.json).write_text(json.dumps(found))
    rows, worst = compared(report, found, names)
    print(link_words(found))
    print("\n".join(rows))
    print(f"\nfurthest from a measured step: {worst:.0%} (wanted: {WITHIN:.0%})")
    return int(worst > WITHIN)


def measure(args: argparse.Namespace, folder: Path) -> Path:
    """Run scripts/trial_links.py and give its report."""
    path = folder / "links.json"
    argv = [sys.executable, str(ROOT / "scripts" / "trial_links.py"), "--json", str(path)]
    argv += ["--master_port", str(args.master_port + 200), "--options", *args.options]
    subprocess.run(argv, check=True)
    return path


def calibrated(report: Mapping, names: list[str], folder: Path, port: int) -> dict:
    """What ranks take for themselves by phase, and the curves of their collective calls under each option.

    Raises: RuntimeError where a rank failed.
    """
    import torch

    from scripts.benchmark_models import make_models

    given = report["settings"]
    ranks = report["ranks_per_host"]
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[given["dtype"]]
    actor, critic = make_models(folder / "models", given["size"], given["critic_size"] or given["size"], dtype)
    settings = {**given, "actor": str(actor), "critic": str(critic)}
    found: dict = {"decoders": decoders(settings)}
    with TwoHosts(link=Link(given["bits_per_s"], given["delay_s"])) as hosts:
        alone: dict[str, list[dict]] = {}
        turns: dict[str, list[dict]] = {}
        for turn in range(TURNS):
            for number, dtype_name in enumerate(dict.fromkeys(dtype_of(report, name) for name in names)):
                own = {**settings, "dtype": dtype_name}
                alone.setdefault(dtype_name, []).append(computed(hosts, own, folder, port + 4 * number, ranks))
            for number, what in enumerate(dict.fromkeys(map(by_node_of, names))):
                output = folder / f"curves_{turn}_{number}.json"
                argv = [sys.executable, str(ROOT / "scripts" / "trial_simulation_rank.py")]
                argv.append(json.dumps({"by_node": what, "output": str(output)}))
                run_ranks(hosts, argv, folder, port + 50 + number, ranks)
                turns.setdefault(what, []).append(json.loads(output.read_text()))
    curves = {what: fastest_calls(timed) for what, timed in turns.items()}
    found["curves"] = {name: curves[by_node_of(name)] for name in names}
    found["compute"] = {key: min(computes, key=lambda phases: phases["step"]) for key, computes in alone.items()}
    return found


def fastest_calls(turns: list[dict]) -> dict:
    """The curves of trial_simulation_rank.py, each size in the turn that was fastest."""
    merged: dict = {"adam": min(turn["adam"] for turn in turns)}
    for call in ("gathers", "reductions"):
        columns = zip(*(turn[call] for turn in turns), strict=True)
        merged[call] = [(column[0][0], min(seconds for _, seconds in column)) for column in columns]
    return merged


def by_node_of(name: str) -> str:
    """Which calls an option sends by node, all that their times depend on."""
    return trial_links.OPTIONS[name].get("by_node", "gathers")


def computed(hosts: TwoHosts, settings: Mapping, folder: Path, port: int, ranks: int) -> dict[str, float]:
    """Seconds by phase of ranks that are alone in the world, as many at once on each host as in the measured run."""
    world = ranks * len(hosts.names)
    outputs = [Path(tempfile.mkdtemp(dir=folder)) for _ in range(world)]
    alone = {**settings, "prompts": settings["prompts"] // world}
    program = [sys.executable, str(ROOT / "scripts" / "trial_links_rank.py")]
    processes = []
    for rank, output in enumerate(outputs):
        argv = [*program, json.dumps({**alone, "output": str(output)})]
        processes.append(start_alone(hosts, hosts.names[rank // ranks], argv, output, port + rank))
    for process, output in zip(processes, outputs, strict=True):
        wait([process], output)
    steps = [step for output in outputs for step in json.loads((output / "host_0.json").read_text())]
    return {name: statistics.median(step["phases"][name]["seconds"] for step in steps) for name in (*PHASES, "step")}


def decoders(settings: Mapping) -> dict[str, dict]:
    """The shapes of the models, by role, as keywords of Decoder."""
    shapes = {}
    for role, kind in (("actor", LANGUAGE_MODEL), ("critic", CLASSIFIER)):
        model = built(role, settings[role], kind, True, dtype=settings["dtype"], trust_remote_code=False)
        shapes[role] = asdict(Decoder.of(model))
    return shapes | {"reference": shapes["actor"], "reward": shapes["critic"]}


def exchanged(report: Mapping, found: Mapping, name: str) -> dict[str, Part]:
    """The parts of a step under an option; of arithmetic Adam's alone."""
    given = report["settings"]
    world = report["ranks_per_host"] * report["hosts"]
    curves = found["curves"][name]
    rows = given["prompts"] // world
    number = {"fp32": 4, "bf16": 2}[dtype_of(report, name)]
    step = Step(
        decoders={role: Decoder(**{**shape, "number": number}) for role, shape in found["decoders"].items()},
        rows=rows,
        decoded=rows,
        prompt=given["prompt_length"],
        response=given["response_length"],
        micro_batch=given["micro_batch"],
        updates=given["ppo_epochs"],
        whole=frozenset(ROLES),
        own=frozenset(ROLES),
        stays=True,
        scored=False,  # as far as ranks exchange anything
    )
    rates = replace(NO_ARITHMETIC, adam=ADAM / curves["adam"])
    return step.parts(rates, MeasuredRanks(world, curves["gathers"], curves["reductions"]))


def predicted(report: Mapping, found: Mapping, name: str) -> dict[str, tuple[float, float, float]]:
    """By phase: seconds that a rank computes, seconds in which ranks exchange, and 10^6 bytes that a host receives."""
    parts, compute = exchanged(report, found, name), dict(found["compute"][dtype_of(report, name)])
    crossings, around = crossings_of(report, name)
    # Alone in its world, a rank steps all numbers.
    others = report["hosts"] * report["ranks_per_host"] - 1
    compute["train"] -= others * sum(part.compute for key, part in parts.items() if key.startswith("step "))
    phases = {phase: list(chosen) for phase, chosen in PHASES.items()}
    hidden = 0.0
    if trial_links.OPTIONS[name].get("overlap_gather"):  # the copy is filled while the critic trains for the last time
        phases["generate"].remove("gather actor")
        phases["train"].append("gather actor")
        numbers = {role: shape["parameters"] for role, shape in found["decoders"].items()}
        share = numbers["critic"] / (numbers["critic"] + numbers["actor"]) / report["settings"]["ppo_epochs"]
        hidden = min(parts["gather actor"].exchange, compute["train"] * share)
    rows = {}
    for phase, chosen in phases.items():
        size = sum(parts[part].gathered * crossings + parts[part].reduced * around for part in chosen) / 1e6
        exchange = sum(parts[part].exchange for part in chosen) - (hidden if phase == "train" else 0.0)
        rows[phase] = compute[phase], exchange, size
    rest = max(0.0, compute["step"] - sum(found["compute"][dtype_of(report, name)][phase] for phase in PHASES))
    own, exchange, size = (sum(column) for column in zip(*rows.values(), strict=True))
    return rows | {"step": (own + rest, exchange + parts["metrics"].exchange, size)}


def compared(report: Mapping, found: Mapping, names: list[str]) -> tuple[list[str], float]:
    """The table's lines, and how far the furthest step is from its prediction, as a share of what was measured."""
    lines = [
        "| option | phase | computed | exchanged | predicted, s | measured, s | ratio | predicted, MB | counted, MB |",
        "| --- " * 9 + "|",
    ]
    worst = 0.0
    for name in names:
        turns = report["options"][name]
        fastest = min(turns, key=lambda steps: trial_links.seconds_of(steps, "step"))
        for phase, (own, exchange, size) in predicted(report, found, name).items():
            measured = trial_links.seconds_of(fastest, phase)
            ratio = (own + exchange) / measured
            cells = [name, phase, f"{own:.2f}", f"{exchange:.2f}", f"{own + exchange:.2f}", f"{measured:.2f}"]
            cells += [f"{ratio:.2f}", f"{size:.1f}", f"{trial_links.megabytes_of(fastest, phase):.1f}"]
            lines.append(f"| {' | '.join(cells)} |")
        worst = max(worst, abs(ratio - 1))  # of the step, which comes last
    return lines, worst


def dtype_of(report: Mapping, name: str) -> str:
    """That an option computes in."""
    return trial_links.OPTIONS[name].get("dtype", report["settings"]["dtype"])


def crossings_of(report: Mapping, name: str) -> tuple[float, float]:
    """How many times as many bytes as are gathered, and as are reduced, go to a host under an option."""
    hosts, ranks = report["hosts"], report["ranks_per_host"]
    what, share = by_node_of(name), (hosts - 1) / hosts
    gathered = tree_crossings(hosts, ranks) if what == "nothing" else share  # what a node lacks, once
    return gathered, share if what == "all" else ring_crossings(hosts, ranks)


def link_words(found: Mapping) -> str:
    """The curves, in words."""
    lines = []
    for name, curves in found["curves"].items():
        for kind in ("gathers", "reductions"):
            curve = curves[kind]
            told = ", ".join(f"{size / 1e6:.3g} MB {1e3 * seconds:.1f} ms" for size, seconds in curve)
            lines.append(f"{name}, {kind}: {told}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
