"""Settings of a run on so many GPUs: by the planner, and what a step of the first one that fits takes."""

import itertools
import json
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from engine.engine_spec import EngineSpec
from engine.memory import Cluster, MemoryPlan, Workload, plan
from engine.speed.decoding import Decoder
from engine.speed.planned_step import step_of
from engine.speed.shapes import configuration, decoder
from engine.speed.step import Step
from engine.zero.config import EngineConfig

ROLES = ("actor", "critic", "reference", "reward")
"""The engines, in the order in which the planner numbers them."""
OFFLOADS = ((), ("reference", "reward"), ROLES)
"""Which engines have weights, and those that train their states, in host memory; the first that fits is taken."""
MOST_DECODED = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is to be trained, on what: models in `engine.speed.shapes`, tokens of prompt and response, responses of a
    rank in a step, optimizer steps that each of them is in (epochs) and by which they are divided (mini_batches)."""

    actor: str
    scorer: str
    prompt: int
    response: int
    rows: int
    mini_batches: int = 1
    epochs: int = 1


@dataclass(frozen=True, slots=True)
class Setting:
    """A way to run a task: what is planned of it, and its step."""

    step: Step
    planned: MemoryPlan

    @property
    def words(self) -> str:
        """What it comes to: rows of a pass, copies, what stands in host memory."""
        step, out = self.step, []
        if step.whole:
            out.append("copies" if len(step.whole) == len(step.decoders) else f"copies: {_listed(step.whole)}")
        if step.divided:
            whose = "" if len(step.divided) == len(step.decoders) else f" of {_listed(step.divided)}"
            out.append(f"copies{whose} by {step.group}")
        if not out:
            out.append("partitions")
        offloaded = {0: "", 2: ", frozen on host", 4: ", all on host"}[len(step.offloaded)]
        return f"{step.decoded}/{step.micro_batch} rows, {' and '.join(out)}{offloaded}"


def fitting(task: Task, cluster: Cluster) -> Setting | None:
    """The first setting that fits: with a copy of the actor if any has one, then with as little in host memory, as many
    rows decoded side by side and as many of a pass as possible. None where none fits."""
    without: Setting | None = None
    most = min(task.rows, MOST_DECODED)
    decoded = [most >> halvings for halvings in range(most.bit_length()) if most >> halvings >= min(8, most)]
    passes = sorted({min(size, task.rows // task.mini_batches) for size in (8, 4, 2, 1)}, reverse=True)
    for offloaded in OFFLOADS:
        if not plan(*_asked(task, decoded[-1], passes[-1], offloaded), cluster).fits:
            continue  # nor does anything larger
        for at_once, micro_batch in itertools.product(decoded, passes):
            spec, load = _asked(task, at_once, micro_batch, offloaded)
            planned = plan(spec, load, cluster)
            if not planned.fits:
                continue
            setting = Setting(step_of(planned, spec, load, _decoders(task)), planned)
            if setting.step.whole or setting.step.divided:
                return setting
            without = without or setting
    return without


def _asked(task: Task, decoded: int, micro_batch: int, offloaded: tuple[str, ...]) -> tuple[EngineSpec, Workload]:
    """What is to be planned."""
    configs = {role: EngineConfig(role, 3, role in offloaded) for role in ROLES}
    spec = EngineSpec(
        actor_path=_folder(task.actor),
        critic_path=_folder(task.scorer),
        dtype="bf16",
        micro_batch_size=micro_batch,
        actor_gradient_checkpointing=True,
        critic_gradient_checkpointing=True,
        actor=configs["actor"],
        critic=configs["critic"],
        reference=configs["reference"],
        reward=configs["reward"],
    )
    load = Workload(
        prompt=task.prompt,
        response=task.response,
        generated=decoded,
        responses=task.rows,
        micro_batch=micro_batch,
        mini_batches=task.mini_batches,
        ppo_epochs=task.epochs,
    )
    return spec, load


def _decoders(task: Task) -> dict[str, Decoder]:
    actor, scorer = decoder(task.actor), decoder(task.scorer, scorer=True)
    return {"actor": actor, "critic": scorer, "reference": actor, "reward": scorer}


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


def _listed(roles: frozenset[str]) -> str:
    return ", ".join(role for role in ROLES if role in roles)
