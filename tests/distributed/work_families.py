"""One whole step of PPO, and what came of it, for tests that ask the same of one process and of several."""

import gc

import torch

from engine import distributed
from engine.algorithms import Dialect
from engine.experience import PromptBatch, Rollout
from engine.rlhf_engine import EngineSpec, RLHFEngine
from engine.rollout import SamplingConfig, build_rollouts
from engine.zero.config import EngineConfig
from scripts.harness.models import EOS, PAD
from scripts.harness.weights import full_state
from training.ppo_trainer import PPOConfig, PPOTrainer

PROMPTS = ([5, 9, 33], [17], [40, 41, 42, 43, 44], [6, 60])
INDICES = (12, 7, 3, 30)
LEARNING_RATE = 1e-3
SEED = 11


def own_prompts() -> PromptBatch:
    """This rank's share of PROMPTS, left-padded."""
    rows = range(len(PROMPTS))[distributed.rank_share(len(PROMPTS))]
    width = max(len(PROMPTS[row]) for row in rows)
    ids = torch.tensor([[PAD] * (width - len(PROMPTS[row])) + PROMPTS[row] for row in rows])
    return PromptBatch(
        ids,
        (ids != PAD).long(),
        torch.tensor([INDICES[row] for row in rows]),
        torch.zeros(len(rows), dtype=torch.int64),
    )


def one_step(actor: str, critic: str, stage: int) -> dict:
    """generate, make_experience, one update of actor and critic; this rank's rows and, on rank 0, the new weights."""
    choices = {role: EngineConfig(role, stage) for role in ("actor", "critic")}
    engine = RLHFEngine.from_pretrained(EngineSpec(actor_path=actor, critic_path=critic, **choices))
    trainer = PPOTrainer(
        models=engine,
        rollouts=build_rollouts("replica", engine.actor, engine.tokenizer),
        dialect=Dialect(ppo_epochs=1, warmup_steps=0, actor_lr=LEARNING_RATE, critic_lr=LEARNING_RATE),
        config=PPOConfig(total_steps=1, micro_batch_size=1),
        sampling=SamplingConfig(max_new_tokens=6, pad_token_id=PAD, stop_token_ids=(EOS,), seed=SEED),
    )
    report = trainer.step(own_prompts())
    experience = report.batch
    names = ("logprobs", "ref_logprobs", "values", "scores", "advantages", "returns")
    columns = {name: getattr(experience, name) for name in names}
    return {
        "rows": rows_of(experience.rollout, columns),
        "metrics": report.metrics,
        "actor": full_state(engine.actor.module.model),
        "critic": full_state(engine.critic.module.model),
        "reference": full_state(engine.reference.model.module.model),
        "reward": full_state(engine.rewards[0].model.module.model),
    }


def rows_of(rollout: Rollout, columns: dict[str, torch.Tensor]) -> list[dict]:
    """Each row without its padding: prompt and response as lists, the columns cut to the response."""
    rows = []
    for row, mask in enumerate(rollout.response_mask):
        prompt = rollout.prompts[row][rollout.attention_mask[row, : rollout.prompt_length].bool()]
        cut = {name: column[row][mask] if column.dim() > 1 else column[row] for name, column in columns.items()}
        rows.append({"prompt": prompt.tolist(), "response": rollout.responses[row][mask].tolist(), **cut})
    return rows


def all_families(folders: dict[str, tuple[str, str]], stage: int) -> dict[str, dict]:
    """`one_step` of each family: {family: (actor, critic)} -> {family: what came of it}."""
    gc.freeze()  # engines collect garbage as they are made: not each time through all that was imported
    return {family: one_step(actor, critic, stage) for family, (actor, critic) in folders.items()}
