"""The simulation (scripts/simulation/step.py) beside measured steps, on two network hosts of this machine.

    python scripts/trial_simulation.py                    # a quarter of an hour on two cores with nothing else to do
    python scripts/trial_simulation.py --dtype bf16 --bits_per_s 1e8

Two ranks a host, actor, critic, reference and reward model at ZeRO-3, and between the hosts a link of 1 Gb/s and 5 ms
one way. Three things are timed apart, none of them on the step that is predicted: what a rank computes in a phase, of
as many ranks at once, each a world of its own, where it steps all numbers and not its share; ZeRO-3's two collective
calls alone over the link, by their size, and Adam's step; and, for the table, the step on two hosts. How many calls a
step makes, and of which sizes, is what the simulation says. Bytes are predicted from gloo's trees and rings and counted
on the network card.

Seconds, predicted and measured, are of the fastest of several turns: other programs only add to them, for minutes at a
time.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from engine.memory.blueprint import built
from engine.models.reading import CLASSIFIER, LANGUAGE_MODEL
from scripts.benchmark_models import make_models
from scripts.harness.host_launches import run_ranks, start_alone, wait
from scripts.harness.hosts import DEVICE, Link, TwoHosts
from scripts.simulation.step import ADAM, NO_ARITHMETIC, Decoder, MeasuredRanks, Step

RANKS_PER_HOST, HOSTS = 2, 2
WORLD = RANKS_PER_HOST * HOSTS
PROMPT = RESPONSE = 8  # tokens
PROMPTS = 8  # of a step, over all ranks
MICRO_BATCH, PPO_EPOCHS = 2, 2
STEPS, WARMUP, TURNS = 3, 1, 3  # STEPS count in each turn, after WARMUP
CALL_SIZES = (8, 4_096, 65_536, 1 << 20, 1 << 23, 1 << 25, 1 << 26)  # bytes
WITHIN = 0.15
PHASES = {
    "generate": ("gather actor", "agree on rollouts"),
    "make_experience": ("gather reference", "gather critic", "gather reward", "agree on experience"),
    "train": ("train critic", "train actor", "agree on updates"),
}
"""By the phase that is measured, the parts of a step in which ranks exchange."""


def main() -> int:
    """Print the table; 1 if the step is further from its prediction than WITHIN, 2 where there can be no hosts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="(fp32)")
    parser.add_argument("--size", default="9m", help="of all four models, as scripts/benchmark_models.py has them (9m)")
    parser.add_argument("--bits_per_s", type=float, default=1e9, help="of the link, in each direction (1e9)")
    parser.add_argument("--delay_s", type=float, default=0.005, help="of the link, one way (0.005)")
    parser.add_argument("--master_port", type=int, default=29600, help="the first of 50 (29600)")
    parser.add_argument("--json", help="a file for all that was timed")
    args = parser.parse_args()
    if reason := TwoHosts.refusal():
        print(f"two hosts cannot be had here: {reason}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as temporary:
        folder, dtype = Path(temporary), {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
        actor, critic = make_models(folder / "models", args.size, args.size, dtype)
        models = {"actor": str(actor), "critic": str(critic), "dtype": args.dtype}
        with TwoHosts(link=Link(args.bits_per_s, args.delay_s)) as hosts:
            timed = timings(hosts, models, folder, args.master_port)
        shapes = decoders(models)
    if args.json:
        Path(args.json).write_text(json.dumps(timed))
    lines, off = compared(timed, shapes)
    print("\n".join(lines))
    print(f"\nthe step is {off:.0%} from its prediction (wanted: {WITHIN:.0%})")
    return int(off > WITHIN)


# Timing


def timings(hosts: TwoHosts, models: Mapping, folder: Path, port: int) -> dict:
    """Seconds of the fastest turns. "steps": of the step on two hosts, by phase, and "megabytes" of it; "alone": of
    ranks that are each a world of its own; "gathers", "reductions": [bytes, seconds] of a call; "adam": of a number.

    Raises: RuntimeError where a rank failed.
    """
    turns: dict[str, list] = {"steps": [], "alone": [], "calls": []}
    program = [sys.executable, str(Path(__file__).resolve())]
    for turn in range(TURNS):
        for what in ("steps", "calls"):
            output = Path(tempfile.mkdtemp(dir=folder))
            job = {**models, "what": what, "prompts": PROMPTS // WORLD, "output": str(output)}
            first = port + 12 * turn + (0 if what == "steps" else 1)
            run_ranks(hosts, [*program, "rank", json.dumps(job)], output, first, RANKS_PER_HOST)
            found = [json.loads(path.read_text()) for path in sorted(output.glob("rank_*.json"))]
            turns[what].append(of_steps(found, max) if what == "steps" else found[0])
        outputs = [Path(tempfile.mkdtemp(dir=folder)) for _ in range(WORLD)]
        processes = []
        for rank, output in enumerate(outputs):
            job = {**models, "what": "steps", "prompts": PROMPTS // WORLD, "output": str(output)}
            argv, host = [*program, "rank", json.dumps(job)], hosts.names[rank // RANKS_PER_HOST]
            processes.append(start_alone(hosts, host, argv, output, port + 12 * turn + 2 + rank))
        for process, output in zip(processes, outputs, strict=True):
            wait([process], output)
        found = [json.loads((output / "rank_0.json").read_text()) for output in outputs]
        turns["alone"].append(of_steps(found, statistics.median))
        print(f"turn {turn + 1}: {turns['steps'][-1]['step']:.2f} s a step", file=sys.stderr, flush=True)
    steps, alone = (min(turns[what], key=lambda phases: phases["step"]) for what in ("steps", "alone"))
    timed = {"steps": steps, "alone": alone, "adam": min(turn["adam"] for turn in turns["calls"])}
    for call in ("gathers", "reductions"):
        columns = zip(*(turn[call] for turn in turns["calls"]), strict=True)
        timed[call] = [(column[0][0], min(seconds for _, seconds in column)) for column in columns]
    return timed


def of_steps(ranks: list[list[dict]], among: Callable[[list[float]], float]) -> dict[str, float]:
    """By phase, and "megabytes", the median over steps of what `among` makes of the ranks' numbers."""
    return {name: statistics.median(among([step[name] for step in one]) for one in zip(*ranks)) for name in ranks[0][0]}


# A rank


def run_rank(job: dict) -> None:
    """Time steps or calls, and write what was found: of calls rank 0 alone."""
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    from engine import distributed
    from engine.zero.communication import init

    torch.set_num_threads(1)
    init(timeout_minutes=10)
    found = time_steps(job) if job["what"] == "steps" else time_calls()
    if job["what"] == "steps" or distributed.is_main():
        (Path(job["output"]) / f"rank_{distributed.rank()}.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.shutdown()
    sys.stdout.flush()
    os._exit(0)  # in an orderly exit gloo's threads may abort


def time_steps(job: dict) -> list[dict[str, float]]:
    """Of each step seconds by phase, and 10^6 bytes that this host received."""
    from engine import distributed
    from scripts.benchmark_ours import Setting, make_prompts

    trainer, steps = build(job), []
    prompts = job["prompts"] * distributed.world_size()
    setting = Setting(
        name="trial",
        actor=job["actor"],
        critic=job["critic"],
        prompts=prompts,
        prompt_length=PROMPT,
        response_length=RESPONSE,
    )
    for step in range(WARMUP + STEPS):
        batch = make_prompts(setting, step)
        distributed.barrier()
        began, before = time.perf_counter(), received()
        metrics = trainer.step(batch).metrics
        distributed.barrier()
        found = {"step": time.perf_counter() - began, "megabytes": (received() - before) / 1e6}
        steps.append(found | {phase: metrics[f"time/{phase}"] for phase in PHASES})
    return steps[WARMUP:]


def received() -> int:
    """Bytes that this host's network card has received; proc(5)."""
    lines = [line.split(":") for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]]
    return next((int(numbers.split()[0]) for name, numbers in lines if name.strip() == DEVICE), 0)


def build(job: dict):
    """The trainer of four engines at ZeRO-3, with copies that stay."""
    from engine.algorithms import get_dialect
    from engine.rlhf_engine import EngineSpec, RLHFEngine
    from engine.rollout import SamplingConfig, build_rollouts
    from engine.zero.config import EngineConfig
    from training.ppo_trainer import PPOConfig, PPOTrainer

    models = RLHFEngine.from_pretrained(
        EngineSpec(
            actor_path=job["actor"],
            critic_path=job["critic"],
            dtype=job["dtype"],
            micro_batch_size=MICRO_BATCH,
            actor=EngineConfig("actor", 3),
            critic=EngineConfig("critic", 3),
        )
    )
    rollouts = build_rollouts(
        "auto",
        models.actor,
        models.tokenizer,
        others=models.engines,
        rows_at_once=job["prompts"],
        row_length=PROMPT + RESPONSE,
        decoding="plain",
    )
    dialect = get_dialect("default").override(ppo_epochs=PPO_EPOCHS, actor_lr=1e-6, critic_lr=1e-6)
    exact = job["dtype"] == "fp32"
    sampling = SamplingConfig(
        max_new_tokens=RESPONSE,
        pad_token_id=models.tokenizer.pad_token_id,
        stop_token_ids=(),
        logprob_temperature=dialect.logprob_temperature,
        with_entropy=dialect.takes_sampled_logprobs(exact),
    )
    config = PPOConfig(total_steps=10**6, micro_batch_size=MICRO_BATCH, exact_sampler=exact)
    return PPOTrainer(models=models, rollouts=rollouts, dialect=dialect, config=config, sampling=sampling)


def time_calls() -> dict:
    """Seconds of ZeRO-3's two collective calls on CPUs by their size, and of Adam's step for each number."""
    from engine import distributed

    world = distributed.world_size()

    def gather(size: int) -> None:
        own = torch.zeros(max(1, size // 4 // world))
        distributed.gather_by_broadcasts(own.new_empty(world * len(own)), own)

    def reduce(size: int) -> None:
        if size <= 4_096:  # what ranks agree on and count is summed as it is
            distributed.all_reduce_sum(torch.zeros(max(1, size // 4)))
            return
        parts = torch.zeros(size // 4)
        distributed.scatter_by_all_reduce(parts.new_empty(len(parts) // world), parts)

    def seconds_of(call, size: int) -> float:
        call(size)
        seconds = []
        for _ in range(16 if size <= 65_536 else 4):
            distributed.barrier()
            began = time.perf_counter()
            call(size)
            seconds.append(time.perf_counter() - began)
        return statistics.median(distributed.all_reduce_max(torch.tensor(seconds)).tolist())

    found: dict = {
        name: [(size, seconds_of(call, size)) for size in CALL_SIZES]
        for name, call in (("gathers", gather), ("reductions", reduce))
    }
    numbers, seconds = 1 << 22, []
    weight = torch.nn.Parameter(torch.ones(numbers))
    weight.grad = torch.ones(numbers)
    optimizer = torch.optim.AdamW([weight], fused=True)
    for _ in range(12):  # all ranks at once
        began = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    return found | {"adam": statistics.median(seconds[2:]) / numbers}


# Predicting


def decoders(models: Mapping) -> dict[str, dict]:
    """The shapes of the models, by role, as keywords of Decoder."""
    shapes = {}
    for role, kind in (("actor", LANGUAGE_MODEL), ("critic", CLASSIFIER)):
        model = built(role, models[role], kind, True, dtype=models["dtype"], trust_remote_code=False)
        shapes[role] = asdict(Decoder.of(model))
    return shapes | {"reference": shapes["actor"], "reward": shapes["critic"]}


def predicted(timed: Mapping, shapes: Mapping) -> tuple[dict[str, tuple[float, float]], float]:
    """By phase, seconds that a rank computes and seconds in which ranks exchange; and 10^6 bytes that a host receives
    in the step."""
    roles = frozenset(shapes)
    step = Step(
        decoders={role: Decoder(**shape) for role, shape in shapes.items()},
        rows=PROMPTS // WORLD,
        decoded=PROMPTS // WORLD,
        prompt=PROMPT,
        response=RESPONSE,
        micro_batch=MICRO_BATCH,
        updates=PPO_EPOCHS,
        whole=roles,
        own=roles,
        stays=True,
        scored=False,  # as far as ranks exchange anything
    )
    rates = replace(NO_ARITHMETIC, adam=ADAM / timed["adam"])
    parts = step.parts(rates, MeasuredRanks(WORLD, timed["gathers"], timed["reductions"]))
    alone, rows = dict(timed["alone"]), {}
    rest = max(0.0, alone["step"] - sum(alone[phase] for phase in PHASES))
    # Alone in its world, a rank steps all numbers.
    alone["train"] -= (WORLD - 1) * sum(part.compute for name, part in parts.items() if name.startswith("step "))
    for phase, chosen in PHASES.items():
        rows[phase] = alone[phase], sum(parts[name].exchange for name in chosen)
    own, exchange = (sum(column) for column in zip(*rows.values(), strict=True))
    rows["step"] = own + rest, exchange + parts["metrics"].exchange
    gathered, reduced = (sum(getattr(part, kind) for part in parts.values()) for kind in ("gathered", "reduced"))
    return rows, (gathered * tree_crossings() + reduced * ring_crossings()) / 1e6


def tree_crossings(hosts: int = HOSTS, ranks: int = RANKS_PER_HOST) -> float:
    """How many times as many bytes as are gathered go to a host, where ranks gather by broadcasts.

    gloo broadcasts along a binomial tree of the ranks as numbered from the sender, and so crosses between hosts more
    often than it has to (pytorch/gloo, gloo/broadcast.cc). The host that receives most counts.
    """
    world = hosts * ranks
    arrived = [0] * hosts
    for sender in range(world):
        span = 1
        while span < world:
            for place in range(min(span, world - span)):
                start, end = (place + sender) % world, (place + span + sender) % world
                if start // ranks != end // ranks:
                    arrived[end // ranks] += 1
            span *= 2
    return max(arrived) / world


def ring_crossings(hosts: int = HOSTS, ranks: int = RANKS_PER_HOST) -> float:
    """The same of a sum over all ranks: twice around the ring, which enters each host once (gloo/allreduce.cc)."""
    world = hosts * ranks
    return 2 * (world - 1) / world if hosts > 1 else 0.0


def compared(timed: Mapping, shapes: Mapping) -> tuple[list[str], float]:
    """The table's lines, and how far the step is from its prediction, as a share of what was measured."""
    rows, megabytes = predicted(timed, shapes)
    lines = ["| phase | computed | exchanged | predicted, s | measured, s | ratio |", "| --- " * 6 + "|"]
    for phase, (own, exchange) in rows.items():
        measured = timed["steps"][phase]
        cells = [f"{own:.2f}", f"{exchange:.2f}", f"{own + exchange:.2f}", f"{measured:.2f}"]
        lines.append(f"| {phase} | {' | '.join(cells)} | {(own + exchange) / measured:.2f} |")
    counted = timed["steps"]["megabytes"]
    lines += ["", f"a host receives {megabytes:.1f} MB in a step as predicted, {counted:.1f} MB as counted"]
    for kind in ("gathers", "reductions"):
        curve = ", ".join(f"{size / 1e6:.3g} MB {1e3 * seconds:.1f} ms" for size, seconds in timed[kind])
        lines.append(f"{kind}: {curve}")
    return lines, abs(sum(rows["step"]) / timed["steps"]["step"] - 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        run_rank(json.loads(sys.argv[2]))
    else:
        sys.exit(main())
