"""Our side of scripts/benchmark_step3.py: what is measured, the four engines, a step of theirs, and their rollouts."""

import argparse
from dataclasses import dataclass, replace
from statistics import median

import torch
from transformers import AutoConfig

from engine import distributed
from engine.algorithms import get_dialect
from engine.experience import PromptBatch
from engine.rlhf_engine import EngineSpec, RLHFEngine
from engine.rollout import RolloutBackend, SamplingConfig, build_rollouts
from engine.zero.config import EngineConfig
from scripts.benchmark_floor import Shape, Work, timed
from scripts.benchmark_report import PHASES
from training.ppo_trainer import PPOConfig, PPOTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One thing to be measured: the models' folders and the sizes of a step, `prompts` over all ranks."""

    name: str
    actor: str
    critic: str
    prompts: int
    prompt_length: int
    response_length: int

    @property
    def rows(self) -> int:
        """Prompts of one rank."""
        return self.prompts // distributed.world_size()

    def work(self) -> Work:
        """The arithmetic of a step over all ranks."""
        return Work(
            *(Shape.of(AutoConfig.from_pretrained(path)) for path in (self.actor, self.critic)),
            rows=self.prompts,
            prompt=self.prompt_length,
            response=self.response_length,
        )


@dataclass(frozen=True, slots=True)
class Ours:
    """The trainer of our engines, and ways to draw responses from its actor."""

    trainer: PPOTrainer
    backends: dict[str, RolloutBackend]


def build_ours(setting: Setting, args: argparse.Namespace) -> Ours:
    """Four engines, all backends that are asked for, and a trainer that uses the first of them."""
    spec = EngineSpec(
        actor_path=setting.actor,
        critic_path=setting.critic,
        dtype=args.dtype,
        actor=EngineConfig("actor", args.zero_stage),
        critic=EngineConfig("critic", args.zero_stage),
        micro_batch_size=args.micro_batch,
    )
    engine = RLHFEngine.from_pretrained(spec)
    built = {
        name: build_rollouts(
            name,
            engine.actor,
            engine.tokenizer,
            others=engine.engines,
            rows_at_once=setting.rows,
            row_length=setting.work().length,
            decoding=args.decoding,
        )
        for name in reversed(args.rollout_backend)
    }  # the first is the last to lend its copy
    backends = {name: built[name] for name in args.rollout_backend}
    dialect = get_dialect("default").override(
        ppo_epochs=1, actor_lr=1e-6, critic_lr=1e-6, old_logprobs=args.old_logprobs
    )
    exact = args.dtype == "fp32"
    trainer = PPOTrainer(
        models=engine,
        rollouts=backends[args.rollout_backend[0]],
        dialect=dialect,
        sampling=replace(
            sampling(setting, engine.tokenizer),
            logprob_temperature=dialect.logprob_temperature,
            with_entropy=dialect.takes_sampled_logprobs(exact),
        ),
        config=PPOConfig(total_steps=10**6, micro_batch_size=args.micro_batch, exact_sampler=exact),
    )
    return Ours(trainer, backends)


def sampling(setting: Setting, tokenizer, tokens: int | None = None) -> SamplingConfig:
    """No token ends a response, so all are as long as may be."""
    return SamplingConfig(
        max_new_tokens=tokens or setting.response_length, pad_token_id=tokenizer.pad_token_id, stop_token_ids=()
    )


def make_prompts(setting: Setting, step: int) -> PromptBatch:
    """This rank's share of a step's prompts: random tokens, no padding, the same whatever the number of ranks."""
    vocabulary = AutoConfig.from_pretrained(setting.actor).get_text_config().vocab_size
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(4, vocabulary, (setting.prompts, setting.prompt_length), generator=generator)
    own = distributed.rank_share(setting.prompts)
    indices = torch.arange(setting.prompts) + step * setting.prompts
    return PromptBatch(tokens[own], torch.ones_like(tokens[own]), indices[own], torch.zeros_like(indices[own])).to(
        distributed.device()
    )


def our_step(ours: Ours, prompts: PromptBatch) -> dict[str, float]:
    """Seconds of each phase of one step of ours."""
    report = ours.trainer.step(prompts)
    mask = report.batch.rollout.response_mask
    assert mask.all() and mask.shape[1] == ours.trainer.sampling.max_new_tokens, "responses are not equally long"
    return {phase: report.metrics[f"time/{phase}"] for phase in PHASES}


def compare_backends(ours: Ours, prompts: PromptBatch, args: argparse.Namespace) -> tuple[dict[str, list[float]], bool]:
    """Seconds of each backend's generations, in turns, each as after an update of the actor; and whether they drew the
    same tokens."""
    seconds, same = {name: [] for name in ours.backends}, True
    for round_ in range(-1, args.steps):
        drawn = []  # of round -1, which warms up, too
        for name in list(ours.backends) if round_ % 2 == 0 else reversed(ours.backends):
            ours.trainer.models.actor.version += 1  # a copy of the weights is stale, as it is in every step
            taken, rollout = timed(lambda: ours.backends[name].generate(prompts, ours.trainer.sampling))
            drawn.append(rollout.sequences)
            if round_ >= 0:
                seconds[name].append(taken)
        same = same and all(torch.equal(drawn[0], other) for other in drawn[1:])
    return seconds, not distributed.any_rank(not same)


def decode_seconds(ours: Ours, setting: Setting, prompts: PromptBatch, rounds: int) -> float:
    """Seconds of all decoding steps: the median difference between a generation of full length and one of one
    token right before it, the weights being there already."""
    full, first = ours.trainer.sampling, sampling(setting, ours.trainer.models.tokenizer, tokens=1)
    differences = []
    for _ in range(rounds + 1):  # the first warms up
        short, long = (timed(lambda: ours.trainer.rollouts.generate(prompts, config))[0] for config in (first, full))
        differences.append(long - short)
    return median(differences[1:])
