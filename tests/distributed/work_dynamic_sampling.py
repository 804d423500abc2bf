"""Run by ranks: four steps with dynamic sampling, the last two once more from a checkpoint, and all of them without
it on the prompts that it should come to."""

import torch

from engine import distributed
from engine.experience import PromptBatch, Rollout
from engine.reward.base import RewardSource
from tests.distributed.tiny_points import load_point, save_point
from tests.distributed.tiny_run import DIALECT, TinyPrompts, build_trainer, engine_spec, prompt_batch, timeless
from tests.engine.zero.inspecting import masters
from training.ppo_trainer import PPOTrainer, StepReport

STEPS, SAVED_AFTER, PER_BATCH, K, MOST = 4, 2, 4, 2, 3
GROUPS = {
    "samples_per_prompt": K,
    "dynamic_sampling": MOST,
    "old_logprobs": "forward",
    "overlong_buffer": 0.5,
    "mask_truncated": True,
    "mini_batches": 2,
}
RLOO = {"advantage_estimator": "rloo", "critic_start": "none", "critic_lr": 0.0}


class ByPrompt(RewardSource):
    """Two parts; their sum differs among the responses to one prompt where the prompt's number says so."""

    def parts(self, rollout: Rollout) -> dict[str, torch.Tensor]:
        """ "even" is of the prompt alone, "odd" of its second response."""
        return {
            "even": (rollout.indices % 2 == 0).float(),
            "odd": torch.tensor([float(differs(index)) for index in rollout.indices.tolist()]) * (rollout.samples % K),
        }


def differs(index: int) -> bool:
    """Two of five prompts, unevenly spread; in the third step there are too few."""
    return index % 5 in (1, 2) and not 24 <= index < 32


class GivenPrompts:
    """This rank's share of the prompts of each step, by their numbers."""

    def __init__(self, steps: list[list[int]]):
        self.steps = steps

    def prompts(self, batch: int) -> PromptBatch:
        """Those of a step."""
        return prompt_batch(self.steps[batch][distributed.rank_share(PER_BATCH)])


def runs(folder: str, output: str, chosen: list[list[int]]) -> dict[str, dict]:
    """Of each kind of run: whole, resumed, plain; chosen: the prompts that are learned from, step by step."""
    found = {}
    for name, stage, fields in (("gae", 0, GROUPS), ("rloo", 3, GROUPS | RLOO)):
        point = f"{output}/{name}"
        whole, resumed, plain = (
            new_trainer(folder, stage, fields | more) for more in ({}, {}, {"dynamic_sampling": 1})
        )
        reports = []
        for report in whole.fit(TinyPrompts(PER_BATCH)):
            reports.append(told(report))
            if report.step == SAVED_AFTER:
                save_point(point, whole.models, whole.state_dict())
        resumed.load_state_dict(load_point(point, resumed.models))
        found[name] = {
            "whole": {"reports": reports, "end": end(whole)},
            "resumed": {
                "reports": [told(report) for report in resumed.fit(TinyPrompts(PER_BATCH))],
                "end": end(resumed),
            },
            "plain": {"reports": [told(report) for report in plain.fit(GivenPrompts(chosen))], "end": end(plain)},
        }
    return found


def new_trainer(folder: str, stage: int, fields: dict) -> PPOTrainer:
    """A trainer with scores by prompt."""
    dialect = DIALECT.override(**fields)
    critic = {} if dialect.has_critic else {"with_critic": False, "critic_path": None}
    spec = engine_spec(folder, stage, config=f"stage{stage}.json", with_reward_model=False, reward=None, **critic)
    return build_trainer(spec, dialect=dialect, reward=ByPrompt(), total_steps=STEPS)


def told(report: StepReport) -> dict:
    """A step: the keys of this rank's rows, what was learned from them, metrics."""
    batch = report.batch
    return {
        "keys": list(zip(batch.rollout.indices.tolist(), batch.rollout.samples.tolist(), strict=True)),
        "batch": [batch.rollout.sequences, batch.logprobs, batch.rewards, batch.advantages, batch.policy_mask],
        "samples": report.samples,
        "metrics": timeless(report.metrics),
    }


def end(trainer: PPOTrainer) -> dict:
    """The master weights of what trains, and the counters."""
    return {
        "weights": {name: masters(model) for name, model in trainer.models.trained.items()},
        "state": trainer.state_dict(),
    }
