"""Run by ranks: models divided among a group of ranks, beside the same models whole."""

from types import SimpleNamespace
from unittest import mock

import torch

from engine import distributed
from engine.experience import Rollout
from engine.memory.live_bytes import LiveBytes
from engine.models.loading import load_policy, load_scorer
from engine.models.tensor_parallel import bare_model
from engine.rlhf_engine import RLHFEngine
from engine.rollout import ReplicaRollouts
from engine.rollout.base import SamplingConfig
from engine.tensor_parallel_copies import TensorParallelCopies
from engine.zero.gathering import full_numel
from tests.distributed.tiny_run import engine_spec, prompt_batch
from tests.distributed.work_rollouts import _by_key
from tests.tiny_models import make_tokenizer


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
    the most bytes that the copy has taken while it was made and filled, or filled."""
    actor = RLHFEngine.from_pretrained(engine_spec(folder, 3, config=config, actor="deep")).actor
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
            mock.patch("engine.tensor_parallel_copies.bare_model", lambda module: bare),
            mock.patch("engine.zero.gathering.GATHER_BUCKET", 1),
            LiveBytes() as live,
        ):
            copies.of(actor)
        peaks.append(live.peak.total())
        answers.append([dict(_by_key(backend.generate(prompts, sampling))) for backend in backends])
    return {"answers": answers, "peaks": peaks, "whole": 4 * sum(map(full_numel, actor.module.parameters()))}


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
