"""Tiny engines, prompts and trainers for the ranks of a test; their weights and checkpoints; how often copies are
filled."""

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch

from engine import distributed
from engine.actor_copy import ActorCopy
from engine.algorithms import Dialect
from engine.experience import PromptBatch
from engine.reward.base import RewardSource
from engine.rlhf_engine import EngineSpec, RLHFEngine
from engine.rollout import SamplingConfig, build_rollouts
from engine.zero.config import EngineConfig
from scripts.harness.models import PAD, VOCABULARY
from scripts.harness.ranks import run_ranks
from tests.engine.zero.inspecting import pretend_cpus_have_fp16
from training.checkpoints.conditions import Conditions
from training.checkpoints.files import Schedule, config_files
from training.checkpoints.resuming import Checkpoint, restore
from training.checkpoints.saving import CheckpointWriter
from training.data.examples import collate_prompts
from training.learner import TextFeed
from training.ppo_trainer import PPOConfig, PPOTrainer

DIALECT = Dialect(name="tiny", actor_lr=1e-3, critic_lr=1e-3, warmup_steps=2, ppo_epochs=1, ema_decay=0.9)
SAMPLING = SamplingConfig(max_new_tokens=12, pad_token_id=PAD, stop_token_ids=(2, 7, 11, 19, 23), seed=3)


def engine_spec(
    folder: str, stage: int, *, dtype: str = "fp32", actor: str = "actor", config: str | None = None, **fields
) -> EngineSpec:
    """Trained engines at this stage, frozen ones at 3 where it is 3, else at 0.

    `actor`, `config`: names in `folder` of a model and of a DeepSpeed JSON, the latter for all engines of this stage.
    """
    path = config and str(Path(folder) / config)
    choices = {role: EngineConfig(role, stage, path=path) for role in ("actor", "critic")}
    if stage == 3:
        choices |= {role: EngineConfig(role, stage, path=path) for role in ("reference", "reward")}
    choices |= {"critic_path": str(Path(folder) / "reward")} | fields
    return EngineSpec(actor_path=str(Path(folder) / actor), dtype=dtype, **choices)


def build_trainer(
    spec: EngineSpec,
    *,
    dialect: Dialect = DIALECT,
    sampling: SamplingConfig = SAMPLING,
    backend: str = "replica",
    reward: RewardSource | None = None,
    unsupervised: TextFeed | None = None,
    **config,
) -> PPOTrainer:
    """New engines, and a trainer of `total_steps` 3 and `micro_batch_size` 4 unless `config` says otherwise."""
    engine = RLHFEngine.from_pretrained(spec)
    config = {"total_steps": 3, "micro_batch_size": 4} | config
    return PPOTrainer(
        models=engine,
        rollouts=build_rollouts(backend, engine.actor, engine.tokenizer),
        dialect=dialect,
        config=PPOConfig(**config),
        sampling=sampling,
        reward=reward,
        unsupervised=unsupervised,
    )


def of_each(function: str, runs: dict[str, dict], world: int = 2, **common) -> list[dict]:
    """What a function ("module:name") returns for each set of arguments, by the same names, on each rank of one launch.

    common: arguments of all; each run has a folder of its own in `output`.
    """
    given = {"function": function, "runs": runs, "common": common}
    return run_ranks("tests.distributed.tiny_run:_each", world=world, **given)


def _each(function: str, runs: dict[str, dict], common: dict) -> dict:
    pretend_cpus_have_fp16()
    module, _, name = function.partition(":")
    call, found = getattr(importlib.import_module(module), name), {}
    for run, arguments in runs.items():
        own = {"output": f"{common['output']}/{run}"} if "output" in common else {}
        found[run] = call(**(common | own | arguments))
    return found


class TinyPrompts:
    """This rank's share of `per_step` prompts of 2 to 9 tokens a step."""

    def __init__(self, per_step: int):
        self.per_step = per_step

    def prompts(self, step: int) -> PromptBatch:
        """The prompts of a step, counted from 0."""
        indices = range(step * self.per_step, (step + 1) * self.per_step)
        return prompt_batch(list(indices[distributed.rank_share(self.per_step)]))


def prompt_tokens(index: int) -> list[int]:
    """2 to 9 tokens, the same wherever and whenever this prompt is asked for."""
    generator = torch.Generator().manual_seed(index)
    length = int(torch.randint(2, 10, (), generator=generator))
    return torch.randint(4, VOCABULARY, (length,), generator=generator).tolist()


def prompt_batch(indices: list[int]) -> PromptBatch:
    """These prompts, left-padded."""
    return collate_prompts(
        [prompt_tokens(index) for index in indices],
        torch.tensor(indices),
        torch.zeros(len(indices), dtype=torch.int64),
        PAD,
    )


def timeless(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that do not depend on the machine."""
    return {
        name: value
        for name, value in metrics.items()
        if not name.startswith(("time/", "memory/", "speed/")) and name != "rollout/tokens_per_second"
    }


def write_checkpoint(output: str | Path, models: RLHFEngine, state: dict) -> Path:
    """Write the checkpoint of these models; returns its folder."""
    checkpoints = CheckpointWriter(
        Path(output),
        Schedule(),
        models=models.trained,
        ema=models.ema,
        reference=models.kept_reference,
        state=lambda: state,
        conditions=Conditions(),
        config_files=config_files(models.trained, models.tokenizer) if distributed.is_main() else {},
    )
    checkpoint = checkpoints.save(state["steps_done"], wait=True)
    assert checkpoint is not None
    return checkpoint


def read_checkpoint(output: str | Path, models: RLHFEngine) -> dict:
    """Put the models to the newest checkpoint; returns its state."""
    checkpoint = Checkpoint.find(str(output), str(output), with_ema=models.ema is not None)
    restore(checkpoint, models.trained, models.ema, models.kept_reference)
    return checkpoint.state


@contextlib.contextmanager
def counted_fills() -> Iterator[list]:
    """Within this context the list, which is given, grows by an entry each time that a copy is filled."""
    fills: list = []
    fill = ActorCopy._fill

    def counted(copy) -> None:
        fills.append(None)
        fill(copy)

    with mock.patch("engine.actor_copy.ActorCopy._fill", counted):
        yield fills
