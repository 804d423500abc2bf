"""Seconds that other systems have published, beside those of this model in their setting.

Nothing is fitted to them: the rates are those that `engine.speed.rates.assumed` gives to every GPU.
"""

from dataclasses import dataclass

from engine.memory import Cluster
from engine.memory.data_sheets import Link, data_sheet
from engine.memory.gpus import gpu_bytes
from engine.speed.decoding import Decoder
from engine.speed.machines import INFINIBAND_8X200G, Machines
from engine.speed.part import Part
from engine.speed.rates import LINKS, Rates, assumed
from engine.speed.settings import Task, fitting
from engine.speed.shapes import decoder
from engine.speed.step import Step

NETWORK = Link(LINKS * INFINIBAND_8X200G.bandwidth, INFINIBAND_8X200G.latency)
ROWS_OF_DEEPSPEED_CHAT = 264_292
"""Prompts of the epoch: "total training samples" in applications/DeepSpeed-Chat/training/step3_rlhf_finetuning/
BenckmarkSetting.md of microsoft/DeepSpeedExamples, 0f09e4b200f3113c98ee216e517ab75ced36428f, which with 512 tokens each
are the 135M tokens that it states. The blog's 131.9k (blogs/deepspeed-chat/README.md of microsoft/DeepSpeed,
040679e549ce420c886b7abf790a5979bf73c0f7) are half of what its own 67.5M prompt tokens of 256 each come to."""
DEEPSPEED_CHAT = (("opt-13b", 8, 9.0), ("opt-13b", 64, 1.25), ("opt-66b", 64, 7.5))
"""Actor, GPUs, hours of an epoch: the blog's tables 1 and 2, at most 1,024 rows a step, reward model OPT-350M."""
MOST_ROWS_A_GPU = 64


@dataclass(frozen=True, slots=True)
class Placement:
    """How OpenRLHF places models: GPUs of each. Source: benchmark/README.md of OpenRLHF/OpenRLHF,
    0baf3dd44d01f5744c2580bdd99db83ba59e1e04, which has half as many of each on half the GPUs."""

    reference: int
    reward: int
    actor: int
    critic: int
    vllm: int


OPENRLHF = (
    ("llama-2-7b", Placement(2, 2, 4, 4, 4), 1, 471.11),
    ("llama-2-70b", Placement(4, 4, 8, 8, 8), 8, 4488.53),
)
"""Actor, GPUs, GPUs that hold one actor in vLLM, seconds of 1,024 prompts (arXiv:2405.11143, 2024). Lengths, 1,024 and
1,024 tokens, batches of 128 and models of the actor's size are those of its benchmark/README.md."""


def published_table() -> str:
    """Markdown: what was published, what their system and ours would take by this model, and the ratios."""
    lines = [
        "| system | actor | GPUs | published | modelled, their placement | ratio | modelled, this engine | ratio |",
        "| --- " * 8 + "|",
    ]
    for actor, gpus, hours in DEEPSPEED_CHAT:
        ours = deepspeed_chat_hours(actor, gpus)
        half = f"{ours / 2:.2f} to " if ours else ""
        told = "does not fit" if ours is None else f"{half}{ours:.2f} h"
        ratio = "" if ours is None else f"{ours / 2 / hours:.2f} to {ours / hours:.2f}"
        where = f"{gpus} A100-80G"
        lines.append(f"| DeepSpeed-Chat | {actor} | {where} | {hours:g} h | the same as ours | | {told} | {ratio} |")
    for actor, placement, together, seconds in OPENRLHF:
        theirs, gpus = placed_seconds(actor, placement, together), 16 if actor.endswith("-7b") else 32
        ours = colocated_seconds(actor, gpus)
        cells = ["OpenRLHF 2024", actor, f"{gpus} A800-80G", f"{seconds:,.0f} s", f"{theirs:,.0f} s"]
        cells += [f"{theirs / seconds:.2f}", "does not fit" if ours is None else f"{ours:,.0f} s"]
        lines.append(f"| {' | '.join(cells)} | {'' if ours is None else f'{ours / seconds:.2f}'} |")
    return "\n".join(lines)


def deepspeed_chat_hours(actor: str, gpus: int) -> float | None:
    """Hours of an epoch of all rows; None where it does not fit."""
    rows = min(MOST_ROWS_A_GPU, 1024 // gpus)
    task = Task(actor=actor, scorer="opt-350m", prompt=256, response=256, rows=rows)
    seconds = _fitting_seconds(task, gpus, _rates("NVIDIA A100-SXM4-80GB"))
    return None if seconds is None else seconds * ROWS_OF_DEEPSPEED_CHAT / (rows * gpus) / 3600


def colocated_seconds(actor: str, gpus: int) -> float | None:
    """Seconds of this engine in OpenRLHF's setting, all models on all GPUs; None where it does not fit."""
    task = Task(actor=actor, scorer=actor, prompt=1024, response=1024, rows=1024 // gpus, mini_batches=8)
    return _fitting_seconds(task, gpus, _rates("NVIDIA A800-SXM4-80GB"))


def _fitting_seconds(task: Task, gpus: int, rates: Rates) -> float | None:
    setting = fitting(task, Cluster(gpus=8, nodes=gpus // 8, gpu=gpu_bytes("a100-80g"), host=10**12))
    if setting is None:
        return None
    parts = setting.step.parts(rates, rates.machines(8, gpus // 8, NETWORK))
    return sum(part.seconds for part in parts.values())


def placed_seconds(actor: str, placement: Placement, together: int, rows: int = 1024) -> float:
    """Seconds of OpenRLHF's own: vLLM draws, then reference, reward model, actor and critic pass over all rows, then
    actor and critic train, each on its own GPUs, side by side; Adam's states are in host memory. What stands on other
    GPUs waits.

    together: GPUs that hold one actor in vLLM, which decodes as many rows side by side as 90 % of its memory hold.
    """
    rates, shape = _rates("NVIDIA A800-SXM4-80GB"), decoder(actor)
    engines = placement.vllm // together
    free = 0.9 * gpu_bytes("a100-80g") * together - shape.size
    at_once = max(1, min(rows // engines, int(free / shape.cached(2048))))
    drawn = _parts(shape, rows // engines // together, max(1, at_once // together), rates, together, placement.vllm)
    generate = drawn["prompts"].seconds + drawn["tokens"].seconds
    experience, train = 0.0, 0.0
    for role in ("reference", "reward", "actor", "critic"):
        gpus = getattr(placement, role)
        parts = _parts(shape, rows // gpus, 4, rates, 1, gpus)
        experience = max(experience, parts["reference"].seconds)
        if role in ("actor", "critic"):
            train = max(train, parts["train actor"].seconds + parts["step actor"].seconds)
    return generate + experience + train


def _parts(shape: Decoder, rows: int, decoded: int, rates: Rates, group: int, gpus: int) -> dict[str, Part]:
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
    return step.parts(rates, Machines(rates.sheet, gpus=min(gpus, 8), nodes=max(1, gpus // 8), network=NETWORK))


def _rates(name: str) -> Rates:
    sheet = data_sheet(name)
    assert sheet is not None
    return assumed(sheet)
