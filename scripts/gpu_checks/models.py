"""Models with random weights, prompts of random words, and a trainer of them: what most checks compute with."""

import shutil
from pathlib import Path

import torch

from engine.algorithms import get_dialect
from engine.experience import PromptBatch
from engine.rlhf_engine import EngineSpec, RLHFEngine
from engine.rollout import SamplingConfig, build_rollouts
from engine.zero.config import EngineConfig
from scripts.benchmark_models import SIZES, make_models
from scripts.gpu_checks.trial import Trial
from training.data.prompts import collate_prompts
from training.ppo_trainer import PPOConfig, PPOTrainer

TINY = "260k"  # what every size becomes in a dry run
DIALECT = get_dialect("default").override(ppo_epochs=1, warmup_steps=0, actor_lr=1e-5, critic_lr=1e-5)


def random_models(trial: Trial, size: str, critic_size: str | None = None) -> tuple[str, str]:
    """The folders of an actor and a reward model, in float32 up to 136m and in bf16 beyond; made where they are not
    there, on the GPU if there is one."""
    size, critic_size = (TINY, TINY) if trial.dry else (size, critic_size or size)
    folder = trial.models / f"{size}_{critic_size}"
    if not folder.exists():
        large = SIZES[size]["hidden_size"] >= 1024
        part = Path(f"{folder}.part")  # whole or not there, whenever the check is ended
        shutil.rmtree(part, ignore_errors=True)
        with torch.device("cpu" if trial.dry else "cuda"):
            make_models(part, size, critic_size, torch.bfloat16 if large else torch.float32)
        part.rename(folder)
    return str(folder / "actor"), str(folder / "critic")


def prompts(rows: int, length: int, vocabulary: int, first: int = 0) -> PromptBatch:
    """Left-padded prompts of `length` / 2 to `length` tokens, the same whenever these are asked for."""
    generator = torch.Generator().manual_seed(first)
    lengths = torch.randint(max(1, length // 2), length + 1, (rows,), generator=generator).tolist()
    lengths[0] = length
    tokens = [torch.randint(4, vocabulary, (count,), generator=generator).tolist() for count in lengths]
    return collate_prompts(tokens, torch.arange(first, first + rows), torch.zeros(rows, dtype=torch.int64), 0)


def sampling(tokens: int, recorded: bool = False) -> SamplingConfig:
    """Responses of exactly so many tokens; with their log-probs if `recorded`."""
    return SamplingConfig(
        max_new_tokens=tokens, pad_token_id=0, stop_token_ids=(), logprob_temperature=1.0 if recorded else None
    )


def new_trainer(
    trial: Trial,
    *,
    size: str = "136m",
    stage: int,
    dtype: str,
    tokens: int = 64,
    offload: bool = False,
    backend: str = "auto",
    between_steps: str = "keep",
    **spec,
) -> PPOTrainer:
    """Four engines at this stage, and a trainer whose responses have `tokens` tokens, in a dry run 8.

    spec: fields of EngineSpec.
    """
    tokens = 8 if trial.dry else tokens
    actor, critic = random_models(trial, size)
    spec = {"actor_path": actor, "critic_path": critic} | spec
    engine = RLHFEngine.from_pretrained(
        EngineSpec(
            dtype=dtype,
            actor=EngineConfig("actor", stage, offload),
            critic=EngineConfig("critic", stage, offload),
            **spec,
        )
    )
    rollouts = build_rollouts(
        backend,
        engine.actor,
        engine.tokenizer,
        others=engine.engines,
        rows_at_once=rows(trial),
        row_length=2 * tokens,
        between_steps=between_steps,
        decoding="auto",
    )
    return PPOTrainer(
        models=engine,
        rollouts=rollouts,
        dialect=DIALECT,
        config=PPOConfig(total_steps=1000, micro_batch_size=8, first_kl_bound=None),
        sampling=sampling(tokens),
    )


def rows(trial: Trial) -> int:
    """How many responses a step has."""
    return 4 if trial.dry else 16
