"""A step of PPO on 8 to 1,024 GPUs: seconds by phase, what fits, where it stops scaling and why.

    python -m scripts.simulation.scaling                            # the tables of docs/scaling.md; some minutes
    python -m scripts.simulation.scaling --models llama-2-7b --gpu h100-80g --network 12.5e9 --rows 512

For each number of GPUs the memory planner finds a setting that fits, and `step.py` adds up its operations, bytes and
calls. At the end stand seconds that other systems have published beside those of this model in their settings.
"""

import argparse
import itertools
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from engine.engine_spec import EngineSpec
from engine.errors import UserError
from engine.memory import Cluster, Workload
from engine.memory.blueprint import blueprints
from engine.memory.gpus import DataSheet, Link, data_sheet, gpu_bytes
from engine.memory.planning import Planner
from engine.zero.config import EngineConfig
from scripts.simulation.step import INFINIBAND_8X200G, LINKS, Decoder, Machines, Part, Rates, Step, assumed

GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
A_NODE = 8
HOST = 1_000_000_000_000
"""Bytes of a node's host memory."""
ROLES = ("actor", "critic", "reference", "reward")
"""The engines, in the order in which the planner numbers them."""
OFFLOADS = ((), ("reference", "reward"), ROLES)
"""Which engines have weights, and those that train their states, in host memory; the first that fits is taken."""
MOST_DECODED = 128
PHASES = {
    "gather": ("gather ",),
    "prompts": ("prompts",),
    "tokens": ("tokens",),
    "experience": ROLES,
    "train": ("train ",),
    "optimizer": ("step ",),
}
"""Columns of the table, and how the parts of a step that they add up begin. Calls in which ranks agree on a number, and
that add metrics up, take milliseconds and have none: they count in the step alone."""
WORTH = 0.75
"""Of twice the speed, what twice the GPUs must give for the step to count as scaling."""
NOTED = 0.97
"""From when on nothing is said of what is lost."""

LLAMA = {  # meta-llama/Llama-2-*: width, feed-forward width, layers, heads, heads of keys and values
    "llama-2-7b": (4096, 11008, 32, 32, 32),
    "llama-2-13b": (5120, 13824, 40, 40, 40),
    "llama-2-70b": (8192, 28672, 80, 64, 8),
}
OPT = {  # facebook/opt-*: width, feed-forward width, layers, heads
    "opt-350m": (1024, 4096, 24, 16),
    "opt-1.3b": (2048, 8192, 24, 32),
    "opt-6.7b": (4096, 16384, 32, 32),
    "opt-13b": (5120, 20480, 40, 40),
    "opt-30b": (7168, 28672, 48, 56),
    "opt-66b": (9216, 36864, 64, 72),
}
MODELS = (*LLAMA, *OPT)


def configuration(name: str) -> dict:
    """config.json of a published model in MODELS, as far as shapes follow from it."""
    if name in LLAMA:
        width, middle, layers, heads, kept = LLAMA[name]
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": width,
            "intermediate_size": middle,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kept,
            "vocab_size": 32000,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
        }
    width, middle, layers, heads = OPT[name]
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": width,
        "ffn_dim": middle,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": 512 if name == "opt-350m" else width,
        "do_layer_norm_before": name != "opt-350m",
    }


@cache
def _models() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory()


@cache
def _folder(name: str) -> str:
    """A folder with the model's config.json, for as long as the process lasts."""
    folder = Path(_models().name) / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(configuration(name)))
    return str(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is to be trained, on what: models in MODELS, tokens of prompt and response, responses of a rank in a step,
    and how many optimizer steps a pass over them has."""

    actor: str
    scorer: str
    prompt: int
    response: int
    rows: int
    mini_batches: int = 1

    def asked(self, decoded: int, micro_batch: int, offloaded: tuple[str, ...]) -> tuple[EngineSpec, Workload]:
        """What is to be planned."""
        spec = EngineSpec(
            actor_path=_folder(self.actor),
            critic_path=_folder(self.scorer),
            dtype="bf16",
            micro_batch_size=micro_batch,
            actor_gradient_checkpointing=True,
            critic_gradient_checkpointing=True,
            **{role: EngineConfig(role, 3, role in offloaded) for role in ROLES},
        )
        load = Workload(
            prompt=self.prompt,
            response=self.response,
            generated=decoded,
            responses=self.rows,
            micro_batch=micro_batch,
            mini_batches=self.mini_batches,
            ppo_epochs=1,
        )
        return spec, load


def fitting(task: Task, cluster: Cluster) -> Step | None:
    """The step of the first setting that fits: with a copy of the actor if any has one, then with as little in host
    memory, as many rows decoded side by side and as many of a pass as possible. None where none fits."""
    without: Step | None = None
    most = min(task.rows, MOST_DECODED)
    decoded = [most >> halvings for halvings in range(most.bit_length()) if most >> halvings >= min(8, most)]
    passes = sorted({min(size, task.rows // task.mini_batches) for size in (8, 4, 2, 1)}, reverse=True)
    for offloaded in OFFLOADS:
        if not Planner(*task.asked(decoded[-1], passes[-1], offloaded), cluster).plan().fits:
            continue  # nor does anything larger
        for at_once, micro_batch in itertools.product(decoded, passes):
            spec, load = task.asked(at_once, micro_batch, offloaded)
            planner = Planner(spec, load, cluster)
            if not planner.plan().fits:
                continue
            placed, needs = planner.copies, planner.needs
            kinds = [needs[place].kind for place in (*placed.models, *placed.divided)]
            shared = {need.role for need in needs if placed.shared and kinds.count(need.kind) > 1}
            step = Step(
                decoders={role: Decoder.of(model) for role, model in blueprints(spec).items()},
                rows=task.rows,
                decoded=min(at_once, task.rows),
                prompt=task.prompt,
                response=task.response,
                micro_batch=micro_batch,
                mini_batches=task.mini_batches,
                updates=task.mini_batches,
                kept=planner.kept,
                whole=frozenset(ROLES[place] for place in placed.models),
                divided=frozenset(ROLES[place] for place in placed.divided),
                group=placed.ranks,
                own=frozenset(planner.engines.keys() - shared - {ROLES[place] for place in placed.freed}),
                stays=placed.between_steps == "keep",
                checkpointed=True,
                offloaded=frozenset(offloaded),
            )
            if step.whole or step.divided:
                return step
            without = without or step
    return without


def setting(step: Step) -> str:
    """In words: rows decoded at once and of a pass, copies, what stands in host memory."""

    def of(roles: frozenset[str], before: str) -> str:
        return "" if len(roles) == len(step.decoders) else before + ", ".join(role for role in ROLES if role in roles)

    copies = [f"copies{of(step.whole, ': ')}"] if step.whole else []
    copies += [f"copies{of(step.divided, ' of ')} by {step.group}"] if step.divided else []
    offloaded = {0: "", 2: ", frozen on host", 4: ", all on host"}[len(step.offloaded)]
    return f"{step.decoded}/{step.micro_batch} rows, {' and '.join(copies) or 'partitions'}{offloaded}"


@dataclass(frozen=True)
class Point:
    """A step on so many GPUs."""

    gpus: int
    rows: int
    setting: str
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


def point(task: Task, gpus: int, rates: Rates, network: Link, gpu: str) -> Point | None:
    """The step on so many GPUs of this name; None where no setting fits."""
    nodes, a_node = max(1, gpus // A_NODE), min(gpus, A_NODE)
    step = fitting(task, Cluster(gpus=a_node, nodes=nodes, gpu=gpu_bytes(gpu), host=HOST))
    if step is None:
        return None
    machines = Machines(rates.sheet, gpus=a_node, nodes=nodes, network=network if nodes > 1 else None)
    return Point(gpus, task.rows, setting(step), step.parts(rates, machines))


def why(before: Point, after: Point) -> str:
    """What keeps the second point from twice the first one's speed: the phase that lost most, and what it waits for:
    weights that are read for each token, passes of few rows, rings of many steps, or bytes that each rank receives."""
    fewer = after.rows / before.rows  # rows of a rank
    worst = max(PHASES, key=lambda name: after.phase(name).seconds - fewer * before.phase(name).seconds)
    now, then = after.phase(worst), before.phase(worst)
    grown = {kind: getattr(now, kind) - fewer * getattr(then, kind) for kind in ("compute", "latency", "transfer")}
    reasons = {
        "compute": "reading weights" if worst == "tokens" else "few rows",
        "latency": "latency",
        "transfer": "bytes",
    }
    return f"{worst} ({reasons[max(grown, key=lambda kind: grown[kind])]})"


def table(points: Sequence[tuple[int, Point | None]]) -> str:
    """Markdown: a row for each number of GPUs."""
    head = ["GPUs", "rows a GPU", "setting", *PHASES, "step, s", "rows/s", "of ideal"]
    head.append("lost to the row before")
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    first = previous = None
    stopped = False
    for gpus, now in points:
        if now is None:
            lines.append(f"| {gpus} | | does not fit |" + " |" * (len(head) - 3))
            continue
        first = first or now
        ideal = first.rows_a_second * gpus / first.gpus
        cells = [str(gpus), str(now.rows), now.setting, *(_seconds(now.phase(name).seconds) for name in PHASES)]
        cells += [_seconds(now.seconds), f"{now.rows_a_second:.0f}", f"{now.rows_a_second / ideal:.2f}", ""]
        gain = 1.0 if previous is None else now.rows_a_second / previous.rows_a_second * previous.gpus / now.gpus
        stops = gain < WORTH and not stopped
        stopped = stopped or stops
        if previous is not None and gain < NOTED:
            slower = "; slower than half as many" if now.rows_a_second < previous.rows_a_second else ""
            cells[-1] = f"{1 - gain:.0%}, {why(previous, now)}{'; **stops here**' if stops else ''}{slower}"
        lines.append(f"| {' | '.join(cells)} |")
        previous = now
    return "\n".join(lines)


def _seconds(value: float) -> str:
    return f"{value:.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


ROWS_OF_DEEPSPEED_CHAT = 264_292
"""Prompts of the epoch: "total training samples" in applications/DeepSpeed-Chat/training/step3_rlhf_finetuning/
BenckmarkSetting.md of microsoft/DeepSpeedExamples, 0f09e4b200f3113c98ee216e517ab75ced36428f, which with 512 tokens each
are the 135M tokens that it states. The blog's 131.9k (blogs/deepspeed-chat/README.md of microsoft/DeepSpeed,
040679e549ce420c886b7abf790a5979bf73c0f7) are half of what its own 67.5M prompt tokens of 256 each come to."""
DEEPSPEED_CHAT = (("opt-13b", 8, 9.0), ("opt-13b", 64, 1.25), ("opt-66b", 64, 7.5))
"""Actor, GPUs, hours of an epoch: the blog's tables 1 and 2, at most 1,024 rows a step, reward model OPT-350M."""
OPENRLHF = (
    ("llama-2-7b", {"reference": 2, "reward": 2, "actor": 4, "critic": 4, "vllm": 4}, 1, 471.11),
    ("llama-2-70b", {"reference": 4, "reward": 4, "actor": 8, "critic": 8, "vllm": 8}, 8, 4488.53),
)
"""Actor, GPUs of each model, GPUs that hold one actor in vLLM, seconds of 1,024 prompts (arXiv:2405.11143, 2024).
Lengths, 1,024 and 1,024 tokens, batches of 128 and models of the actor's size are those of benchmark/README.md of
OpenRLHF/OpenRLHF, 0baf3dd44d01f5744c2580bdd99db83ba59e1e04, which has half as many of each on half the GPUs."""
NETWORK = Link(LINKS * INFINIBAND_8X200G.bandwidth, INFINIBAND_8X200G.latency)


def published_table() -> str:
    """Markdown: what was published, what their system and ours would take by this model, and the ratios."""
    lines = [
        "| system | actor | GPUs | published | modelled, their placement | ratio | modelled, this engine | ratio |",
        "| --- " * 8 + "|",
    ]
    a100, a800 = (assumed(sheet_of(name)) for name in ("a100-80g", "a800-80g"))
    for actor, gpus, hours in DEEPSPEED_CHAT:
        rows = min(64, 1024 // gpus)
        task = Task(actor=actor, scorer="opt-350m", prompt=256, response=256, rows=rows)
        step = point(task, gpus, a100, NETWORK, "a100-80g")
        ours = "does not fit", ""
        if step:
            most = step.seconds * ROWS_OF_DEEPSPEED_CHAT / (rows * gpus) / 3600
            ours = f"{most / 2:.2f} to {most:.2f} h", f"{most / 2 / hours:.2f} to {most / hours:.2f}"
        cells = ["DeepSpeed-Chat", actor, f"{gpus} A100-80G", f"{hours:g} h", "the same as ours", "", *ours]
        lines.append(f"| {' | '.join(cells)} |")
    for actor, placed, together, seconds in OPENRLHF:
        gpus = sum(placed.values())
        theirs = placed_seconds(actor, placed, together, a800)
        task = Task(actor=actor, scorer=actor, prompt=1024, response=1024, rows=1024 // gpus, mini_batches=8)
        step = point(task, gpus, a800, NETWORK, "a100-80g")
        ours = (f"{step.seconds:,.0f} s", f"{step.seconds / seconds:.2f}") if step else ("does not fit", "")
        cells = ["OpenRLHF 2024", actor, f"{gpus} A800-80G", f"{seconds:,.0f} s", f"{theirs:,.0f} s"]
        lines.append(f"| {' | '.join([*cells, f'{theirs / seconds:.2f}', *ours])} |")
    return "\n".join(lines)


def placed_seconds(actor: str, placed: Mapping[str, int], together: int, rates: Rates, rows: int = 1024) -> float:
    """Seconds of OpenRLHF's own: vLLM draws, then reference, reward model, actor and critic pass over all rows, then
    actor and critic train, each on its own GPUs, side by side; Adam's states are in host memory. What stands on other
    GPUs waits.

    together: GPUs that hold one actor in vLLM, which decodes as many rows side by side as 90 % of its memory hold.
    """
    spec, _ = Task(actor=actor, scorer=actor, prompt=1024, response=1024, rows=rows).asked(1, 1, ())
    shape = Decoder.of(blueprints(spec)["actor"])

    def parts(gpus: int, rows: int, decoded: int, group: int) -> dict[str, Part]:
        step = Step(
            decoders={"actor": shape, "reference": shape},
            rows=rows,
            decoded=decoded,
            prompt=1024,
            response=1024,
            micro_batch=4,
            mini_batches=8,
            updates=8,
            divided=frozenset({"actor"}),
            group=group,
            checkpointed=True,
            offloaded=frozenset({"actor"}),
        )
        return step.parts(rates, Machines(rates.sheet, min(gpus, 8), max(1, gpus // 8), NETWORK))

    engines = placed["vllm"] // together
    at_once = int((0.9 * gpu_bytes("a100-80g") * together - shape.size) / shape.cached(2048))
    at_once = max(1, min(rows // engines, at_once))
    drawn = parts(placed["vllm"], rows // engines // together, max(1, at_once // together), together)
    own = {role: parts(gpus, rows // gpus, 4, 1) for role, gpus in placed.items() if role != "vllm"}
    experience = max(found["reference"].seconds for found in own.values())
    train = max(own[role]["train actor"].seconds + own[role]["step actor"].seconds for role in ("actor", "critic"))
    return drawn["prompts"].seconds + drawn["tokens"].seconds + experience + train


def sheet_of(gpu: str) -> DataSheet:
    """The data sheet of a GPU that the planner calls so. Raises: UserError where there is none."""
    sheet = data_sheet(re.sub(r"(\d+)g$", r"\1GB", gpu))
    if sheet is None:
        raise UserError(f"--gpu {gpu}: no data sheet of it is known (engine/memory/gpus.py).")
    return sheet


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser("python -m scripts.simulation.scaling", description=str(__doc__).splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=tuple(LLAMA), help="actors (Llama-2's)")
    parser.add_argument("--scorer", choices=MODELS, default="llama-2-7b", help="critic and reward model (llama-2-7b)")
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
                sizes = {"prompt": args.prompt, "response": args.response, "rows": rows_of(gpus)}
                task = Task(actor=model, scorer=args.scorer, **sizes)
                points.append((gpus, point(task, gpus, rates, link, args.gpu) if task.rows else None))
            print(f"\n### {model}, {title}\n\n{table(points)}", flush=True)
    print(f"\n### Beside what others have published\n\n{published_table()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
