"""Run by ranks: the same prompts answered by both backends, in several orders, with several ways to stop."""

from dataclasses import replace
from unittest import mock

import pytest

from engine import distributed
from engine.errors import UserError
from engine.experience import Rollout
from engine.rlhf_engine import RLHFEngine
from engine.rollout import ReplicaRollouts, Zero3Rollouts, build_rollouts
from engine.rollout.base import SamplingConfig
from tests import fake_vllm
from tests.distributed.tiny_run import TinyPrompts, build_trainer, counted_fills, engine_spec, prompt_batch, timeless
from tests.engine.rollout.test_conversations import conversations_of, talks
from tests.engine.zero.inspecting import masters

BACKENDS = {"replica": ReplicaRollouts, "zero3": Zero3Rollouts}
ORDERS = {"in order": [[0, 1, 2, 3, 4, 5, 6, 7]], "shuffled, in two batches": [[6, 1, 4, 3], [0, 7, 2, 5]]}
CASES = {
    (backend, rows_at_once, order): batches
    for backend in BACKENDS
    for rows_at_once in (None, 3)
    for order, batches in ORDERS.items()
    if rows_at_once is None or order == "in order"
}
UNEVEN_STOPS = (tuple(range(64)), (-1,))  # of each rank


def everything(
    folder: str,
    stage: int,
    config: str,
    samplings: dict[str, SamplingConfig],
    moving: SamplingConfig,
    free: dict[str, int],
) -> dict[str, dict]:
    """What the six functions below return, by their names. free: as in `_choices`."""
    engine = RLHFEngine.from_pretrained(engine_spec(folder, stage, config=config))
    return {
        "answers": _answers(engine, samplings),
        "choices": _choices(engine, moving, free),
        "vllm": _by_vllm(engine, moving),
        "conversations": _conversations(engine, moving),
        "gathers": gathers(folder, stage, config, moving),
        "uneven": uneven(folder, stage, config, moving),
    }


def answers(folder: str, stage: int, config: str, samplings: dict[str, SamplingConfig]) -> dict:
    """(backend, rows at once, order, sampling) -> {(index, sample): (tokens, ended)} of this rank's share."""
    return _answers(RLHFEngine.from_pretrained(engine_spec(folder, stage, config=config)), samplings)


def _answers(engine: RLHFEngine, samplings: dict[str, SamplingConfig]) -> dict:
    found = {}
    for (backend, rows_at_once, order), batches in CASES.items():
        rollouts = BACKENDS[backend](engine.actor, engine.tokenizer, rows_at_once)
        for sampling, how in samplings.items():
            parts = [rollouts.generate(prompt_batch(_share(batch)).repeat(2), how) for batch in batches]
            found[backend, rows_at_once, order, sampling] = {
                key: answer for part in parts for key, answer in _by_key(part)
            }
    return found


def _choices(engine: RLHFEngine, sampling: SamplingConfig, free: dict[str, int]) -> dict[str, dict]:
    """What "auto" takes where only rank 1 has this many bytes free, and what it answers; or what it is refused with."""
    found = {}
    for name, least in free.items():
        own = least if distributed.rank() == 1 else 10**12
        try:
            with mock.patch("engine.zero.accelerator.free_memory", lambda: own):
                rollouts = build_rollouts(
                    "auto",
                    engine.actor,
                    engine.tokenizer,
                    others=engine.engines,
                    rows_at_once=3,
                    row_length=30,
                    decoding="auto",
                )
        except UserError as error:
            found[name] = {"refused": str(error)}
            continue
        found[name] = {
            "why": rollouts.why,
            "chosen": (rollouts.copy.group.size, rollouts.copy.between_steps),
            "answers": dict(_by_key(rollouts.generate(prompt_batch(_share(list(range(8)))), sampling))),
        }
    return found


def _by_vllm(engine: RLHFEngine, sampling: SamplingConfig) -> dict[int, dict]:
    """What a stand-in for vLLM answers that has the actor on each rank, or on both together; rank 1's prompts are fewer
    and shorter, and come after rank 0's."""
    found = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        fake_vllm.install(monkeypatch)
        for parts in (1, 2):
            rollouts = build_rollouts(
                "vllm", engine.actor, engine.tokenizer, rows_at_once=2, row_length=40, tensor_parallel=parts
            )
            indices = [[0, 1, 2, 3, 4], [5, 6, 7]][distributed.rank()]
            answered = rollouts.generate(prompt_batch(indices), sampling)
            assert answered.indices.tolist() == indices
            found[parts] = {"answers": dict(_by_key(answered)), "why": rollouts.why}
    return found


def _conversations(engine: RLHFEngine, sampling: SamplingConfig) -> dict[str, dict]:
    """Of each backend, conversations of this rank's prompts, and how many turns this rank has counted. Rank 1's are
    over after fewer turns than rank 0's."""
    found = {}
    prompts = prompt_batch([[3, 5, 9], [4, 6]][distributed.rank()]).repeat(2)
    how = {"row_length": 40, "rows_at_once": 4}
    with pytest.MonkeyPatch.context() as monkeypatch:
        fake_vllm.install(monkeypatch)
        for backend, parts in (("replica", 1), ("replica", 2), ("zero3", None), ("vllm", 2)):
            rollouts = build_rollouts(backend, engine.actor, engine.tokenizer, tensor_parallel=parts, **how)
            rollouts = conversations_of(rollouts)
            conversations = talks(rollouts.generate(prompts, sampling))
            found[backend, parts] = {"conversations": conversations, "turns": rollouts.counts()["turns"]}
    return found


def _share(indices: list[int]) -> list[int]:
    return indices[distributed.rank_share(len(indices))]


def _by_key(rollout: Rollout):
    for row in range(len(rollout)):
        tokens = rollout.responses[row][rollout.response_mask[row]].tolist()
        yield (int(rollout.indices[row]), int(rollout.samples[row])), (tokens, bool(rollout.ended[row]))


def gathers(folder: str, stage: int, config: str, sampling: SamplingConfig) -> dict:
    """How often the replica gathers at each event, and what is answered before and after the actor has moved."""
    trainer = build_trainer(engine_spec(folder, stage, config=config, ema_decay=0.5), sampling=sampling)
    engine, replica = trainer.models, trainer.rollouts
    counts, found = {}, {}
    prompts = prompt_batch(_share(list(range(8))))

    def counted(event: str, act) -> None:
        with counted_fills() as fills:
            act()
        counts[event] = len(fills)

    def generate(backend, event: str) -> None:
        counted(event, lambda: found.update({event: dict(_by_key(backend.generate(prompts, sampling)))}))

    generate(replica, "start")
    generate(replica, "start again")
    counted("step", lambda: trainer.step(TinyPrompts(8).prompts(0)))
    generate(replica, "after the step")
    generate(replica, "after the step again")
    generate(Zero3Rollouts(engine.actor, engine.tokenizer), "after the step, zero3")
    with engine.ema.swapped():
        generate(replica, "averaged")
        averaged = masters(engine.actor)
    generate(replica, "swapped back")
    return {"answers": found, "weights": masters(engine.actor), "averaged weights": averaged, "gathers": counts}


def uneven(folder: str, stage: int, config: str, sampling: SamplingConfig) -> dict:
    """A step in which each response of rank 0 ends at once and none of rank 1 ends before the last slot; before it,
    answers of the untrained actor, 3 rows at once."""
    how = replace(sampling, max_new_tokens=20, stop_token_ids=UNEVEN_STOPS[distributed.rank()])
    found = {}
    for backend in BACKENDS:
        trainer = build_trainer(engine_spec(folder, stage, config=config), backend=backend, sampling=how)
        refilled = BACKENDS[backend](trainer.models.actor, trainer.models.tokenizer, 3)
        rollout = refilled.generate(prompt_batch(_share(list(range(8)))).repeat(2), how)
        report = trainer.step(TinyPrompts(8).prompts(0))
        found[backend] = {
            "answers": dict(_by_key(rollout)),
            "shape": tuple(report.batch.rollout.response_mask.shape),
            "metrics": timeless(report.metrics),
            "finite": all(w.isfinite().all().item() for w in masters(trainer.models.actor).values()),
        }
    return found
