"""Run by ranks: engines without a critic, and hydra actors of every family."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from engine.experience import PromptBatch, Rollout
from engine.rlhf_engine import RLHFEngine
from engine.zero.engines import TrainedModel
from tests.distributed.tiny_run import engine_spec, prompt_batch, read_checkpoint, write_checkpoint
from tests.distributed.work_hydra import local_bytes
from tests.engine.zero.inspecting import weights
from training.runtime import model_folders

LR = 1e-2
RESPONSE = 4


def without_critic(folder: str, output: str, stages: tuple[int, ...]) -> dict[int, dict]:
    """The same models with and without a critic, by stage: bytes; a step, a checkpoint, one more step, and that once
    more from the checkpoint; the saved actor."""
    return {stage: _without_critic(folder, f"{output}/{stage}", stage) for stage in stages}


def _without_critic(folder: str, output: str, stage: int) -> dict:
    spec = engine_spec(
        folder, stage, config=f"stage{stage}.json", reward_paths=(str(Path(folder) / "reward"),), ema_decay=0.5
    )
    alone = replace(spec, critic_path=None, with_critic=False)
    found = {"gae": local_bytes(RLHFEngine.from_pretrained(spec))}
    engine = RLHFEngine.from_pretrained(alone)
    found |= {
        "compiler": "torch._inductor.compile_fx" in sys.modules,
        "may compile": "TORCHDYNAMO_DISABLE" not in os.environ,
        "rloo": local_bytes(engine),
        "critic": engine.critic,
        "models": len(engine.engines),
        "trained": list(engine.trained),
        "reward": weights(engine.rewards[0].model),
    }
    rollout = whole_rollout(prompt_batch([0, 1, 2, 3]))
    one_step(engine.actor, rollout)
    engine.ema.update()
    point = write_checkpoint(output, engine, {"steps_done": 1})
    found["files"] = sorted(path.name for path in point.iterdir())
    one_step(engine.actor, rollout)
    engine.ema.update()
    found["end"] = weights(engine.actor), [shard.clone() for shard in engine.ema.means]
    found["saved"] = sorted(
        model_folders.save(model, engine.tokenizer, Path(output), role).name for role, model in engine.trained.items()
    )
    resumed = RLHFEngine.from_pretrained(alone)
    read_checkpoint(output, resumed)
    one_step(resumed.actor, rollout)
    resumed.ema.update()
    found["resumed"] = weights(resumed.actor), [shard.clone() for shard in resumed.ema.means]
    return found


def whole_rollout(prompts: PromptBatch) -> Rollout:
    """Prompts with responses of RESPONSE tokens each."""
    generator = torch.Generator().manual_seed(5)
    responses = torch.randint(4, 60, (len(prompts), RESPONSE), generator=generator)
    ones = torch.ones_like(responses)
    return Rollout(
        sequences=torch.cat([prompts.input_ids, responses], 1),
        attention_mask=torch.cat([prompts.attention_mask, ones], 1),
        response_mask=ones.bool(),
        ended=torch.zeros(len(prompts), dtype=torch.bool),
        indices=prompts.indices,
        samples=prompts.samples,
    )


def one_step(actor: TrainedModel, rollout: Rollout) -> None:
    """Make the responses less likely."""
    logprobs, _ = actor(rollout.sequences, rollout.attention_mask, rollout.position_ids, response_length=RESPONSE)
    actor.backward(logprobs.mean(), last=True)
    actor.step(LR)
