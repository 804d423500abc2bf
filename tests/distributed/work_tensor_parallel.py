"""Run by ranks: models divided among a group of ranks, beside the same models whole."""

import warnings
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import torch

from engine import distributed
from engine.copies import TensorParallelCopies
from engine.experience import Rollout
from engine.memory.passes import LiveBytes
from engine.models.loading import empty_like, load_policy, load_scorer
from engine.models.tensor_parallel import bare_model
from engine.rlhf_engine import RLHFEngine
from engine.rollout import ReplicaRollouts, build_rollouts
from engine.rollout.base import SamplingConfig
from engine.zero.gathering import full_numel, whole_weights
from scripts.harness.models import make_tokenizer
from tests.distributed.tiny_run import DIALECT, engine_spec, prompt_batch
from tests.distributed.work_rollouts import _by_key
from training.ppo_trainer import PPOConfig, PPOTrainer


def engine(module, stage: int) -> SimpleNamespace:
    """What copies ask of an engine; its weights stand whole, which gathering leaves as they are."""
    return SimpleNamespace(module=module.requires_grad_(False).eval(), stage=stage, version=0)


def everything(
    folders: dict[str, tuple[str, str]], folder: str, config: str, ranks: int, sampling: SamplingConfig
) -> dict[str, dict]:
    """What both functions below return, by their names."""
    return {
        "families": families(folders, ranks, sampling),
        "partitions": partitions(folder, config, ranks, sampling),
    }


def partitions(folder: str, config: str, ranks: int, sampling: SamplingConfig) -> dict:
    """A deep actor at stage 3 and its tensor-parallel copy: what both answer before and after an optimizer step, and
    the most bytes that the copy has taken while it was made and filled, or filled; and those of a walk through all
    weights at once."""
    models = RLHFEngine.from_pretrained(engine_spec(folder, 3, config=config, actor="deep"))
    actor = models.actor
    copies = TensorParallelCopies(ranks)
    backends = ReplicaRollouts(actor, make_tokenizer(), copies=copies), ReplicaRollouts(actor, make_tokenizer())
    bare = bare_model(actor.module)  # on the meta device, where bytes are none
    prompts, answers, peaks = prompt_batch([distributed.rank(), 5 + distributed.rank()]), [], []
    for step in range(2):
        if step:
            rollout = backends[1].generate(prompts, sampling)
            inputs = rollout.sequences, rollout.attention_mask, rollout.position_ids
            logprobs, _ = actor(*inputs, response_length=rollout.response_length)
            actor.backward(-(logprobs * rollout.response_mask).sum() / 100, last=True)
            actor.step(0.05)
        with (
            mock.patch("engine.copies.bare_model", lambda module: bare),
            mock.patch("engine.zero.gathering.GATHER_BUCKET", 1),
            LiveBytes() as live,
        ):
            copies.of(actor)
        peaks.append(live.peak.total())
        answers.append([dict(_by_key(backend.generate(prompts, sampling))) for backend in backends])
    with LiveBytes() as live:
        for _, weight in whole_weights(actor.module):  # of one bucket
            del weight
    peaks.append(live.peak.total())
    found = {"experience": _judged(models, ranks, sampling), "no memory": _without_memory(models, sampling)}
    return found | {"answers": answers, "peaks": peaks, "whole": 4 * sum(map(full_numel, actor.module.parameters()))}


def _judged(models: RLHFEngine, ranks: int, sampling: SamplingConfig) -> dict:
    """What copies that ranks hold together say of a rollout, and what the engines themselves do, by the names of
    Experience's fields."""
    rollouts = build_rollouts(
        "replica", models.actor, models.tokenizer, others=models.engines, tensor_parallel=ranks, decoding="auto"
    )
    assert all(isinstance(model.copies, TensorParallelCopies) for model in models.engines), rollouts.why
    trainer = PPOTrainer(
        models=models, rollouts=rollouts, dialect=DIALECT, sampling=sampling, config=PPOConfig(total_steps=1)
    )
    indices = [2 * distributed.rank() + number for number in range(2)]
    rollout = rollouts.generate(prompt_batch(indices), replace(sampling, logprob_temperature=None))
    shared = trainer.experience_maker.make_experience(rollout)
    for model in models.engines:
        model.copies = None
    own = trainer.experience_maker.make_experience(rollout)
    names = ("logprobs", "entropy", "ref_logprobs", "values", "scores")
    return {name: (getattr(shared, name), getattr(own, name)) for name in names}


def _without_memory(models: RLHFEngine, sampling: SamplingConfig) -> dict:
    """What is answered, and warned of, where rank 1 has no memory for the actor's copy; and by the copy."""

    def empty(module, device):
        if distributed.rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return empty_like(module, device)

    prompts = prompt_batch([3 + distributed.rank()])
    backends = [build_rollouts("replica", models.actor, models.tokenizer) for _ in range(2)]
    expected = dict(_by_key(backends[0].generate(prompts, sampling)))
    with mock.patch("engine.copies.empty_like", empty), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = [dict(_by_key(backends[1].generate(prompts, sampling))) for _ in range(2)]
    return {
        "answers": (expected, *found),
        "told": [str(one.message) for one in told if "does not fit" in str(one.message)],
        "copies": models.actor.copies,
    }


def families(folders: dict[str, tuple[str, str]], ranks: int, sampling: SamplingConfig) -> dict[str, dict]:
    """{family: (policy, scorer)} -> {family: what the group of `ranks` computes, and what each rank does alone}."""
    indices = list(range(2 * distributed.world_size() + 1))[distributed.rank_share(2 * distributed.world_size() + 1)]
    return {name: _family(*paths, ranks, sampling, indices) for name, paths in folders.items()}


@torch.no_grad()
def _family(policy: str, scorer: str, ranks: int, sampling: SamplingConfig, indices: list[int]) -> dict:
    model, judge = load_policy(policy, torch.float32), load_scorer(scorer, torch.float32)
    together, alone = TensorParallelCopies(ranks), ReplicaRollouts(engine(model, 0), make_tokenizer())
    rollouts = ReplicaRollouts(engine(model, 3), make_tokenizer(), 2, together)
    prompts = prompt_batch(indices).repeat(2)
    rollout, expected = rollouts.generate(prompts, sampling), alone.generate(prompts, sampling)
    part = together.of(rollouts.actor)
    numbers = [sum(p.numel() for p in module.model.parameters()) for module in (part, model)]
    found = {
        "answers": [dict(_by_key(each)) for each in (rollout, expected)],
        "sampled logprobs": [each.logprobs for each in (rollout, expected)],
        "numbers": numbers,
        "logprobs": [_policy(module, expected) for module in (part, model)],
    }
    inputs = expected.sequences, expected.attention_mask, expected.position_ids
    return {**found, "scores": [module(*inputs) for module in (together.of(engine(judge, 3)), judge)]}


def _policy(module, rollout: Rollout) -> torch.Tensor:
    return torch.stack(
        module(
            rollout.sequences,
            rollout.attention_mask,
            rollout.position_ids,
            response_length=rollout.response_length,
            temperature=0.7,
            with_entropy=True,
        )
    )
