"""Run by ranks: the same prompts answered by both backends, in several orders, with several ways to stop."""
from dataclasses import replace

from engine import distributed
from engine.experience import Rollout
from engine.rlhf_engine import RLHFEngine
from engine.rollout import ReplicaRollouts, Zero3Rollouts
from engine.rollout.base import SamplingConfig
from tests.distributed.tiny_run import TinyPrompts, build_trainer, engine_spec, masters, prompt_batch, timeless

ORDERS = {"in order": [[0, 1, 2, 3, 4, 5, 6, 7]], "shuffled, in two batches": [[6, 1, 4, 3], [0, 7, 2, 5]]}


def everything(folder: str, stage: int, config: str, samplings: dict[str, SamplingConfig],
               moving: SamplingConfig) -> dict[str, dict]:
    """What the three functions below return, by their names."""
    return {"answers": answers(folder, stage, config, samplings), "gathers": gathers(folder, stage, config, moving),
            "uneven": uneven(folder, stage, config, moving)}


def answers(folder: str, stage: int, config: str, samplings: dict[str, SamplingConfig]) -> dict:
    """(backend, order, sampling) -> {(index, sample): (tokens, ended)} of this rank's share of each batch."""
    engine = RLHFEngine.from_pretrained(engine_spec(folder, stage, config=config))
    backends = {"replica": ReplicaRollouts(engine.actor, engine.tokenizer),
                "zero3": Zero3Rollouts(engine.actor, engine.tokenizer)}
    found = {}
    for backend, rollouts in backends.items():
        for order, batches in ORDERS.items():
            for sampling, how in samplings.items():
                parts = [rollouts.generate(prompt_batch(_share(batch)).repeat(2), how) for batch in batches]
                found[backend, order, sampling] = {key: answer for part in parts for key, answer in _by_key(part)}
    return found


def _share(indices: list[int]) -> list[int]:
    own = len(indices) // distributed.world_size()
    return indices[distributed.rank() * own:(distributed.rank() + 1) * own]


def _by_key(rollout: Rollout):
    for row in range(len(rollout)):
        tokens = rollout.responses[row][rollout.response_mask[row]].tolist()
        yield (int(rollout.indices[row]), int(rollout.samples[row])), (tokens, bool(rollout.ended[row]))


def gathers(folder: str, stage: int, config: str, sampling: SamplingConfig) -> dict:
    """How often the replica gathers at each event, and what is answered before and after the actor has moved."""
    trainer = build_trainer(engine_spec(folder, stage, config=config, ema_decay=0.5), sampling=sampling)
    engine, replica = trainer.engine, trainer.rollouts
    counts, found = {}, {}
    prompts = prompt_batch(_share(list(range(8))))

    def counted(event: str, act) -> None:
        before = replica.replicas.fills
        act()
        counts[event] = replica.replicas.fills - before

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
    return {"answers": found, "weights": masters(engine.actor), "averaged weights": averaged,
            "gathers": counts}


def uneven(folder: str, stage: int, config: str, sampling: SamplingConfig) -> dict:
    """A step in which each response of rank 0 ends at once and none of rank 1 ends before the last slot."""
    stops = tuple(range(64)) if distributed.rank() == 0 else (-1,)
    found = {}
    for backend in ("zero3", "replica"):
        trainer = build_trainer(engine_spec(folder, stage, config=config), backend=backend,
                                sampling=replace(sampling, max_new_tokens=20, stop_token_ids=stops))
        report = trainer.step(TinyPrompts(8).prompts(0))
        found[backend] = {"shape": tuple(report.experience.rollout.response_mask.shape),
                          "metrics": timeless(report.metrics),
                          "finite": all(w.isfinite().all().item() for w in masters(trainer.engine.actor).values())}
    return found
