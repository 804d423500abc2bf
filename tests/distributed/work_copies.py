"""Run by ranks: what copies do between a run's steps, how often they are filled, and that they compute the same."""

import gc
import weakref

from engine.experience import Rollout
from engine.rlhf_engine import RLHFEngine
from engine.rollout import build_rollouts
from engine.whole_copies import Replicas
from tests.distributed.tiny_run import DIALECT, SAMPLING, TinyPrompts, engine_spec, masters
from tests.distributed.work_rollouts import _by_key
from training.ppo_trainer import PPOConfig, PPOTrainer

MODES = ("keep", "free", "host")


def between_steps(folder: str, stage: int, config: str) -> dict[str, dict]:
    """For each mode of Replicas, one after the other with the same engines: what happened in two steps and around
    them."""
    engine = RLHFEngine.from_pretrained(engine_spec(folder, stage, config=config))
    return {mode: _events(engine, mode) for mode in MODES}


def _events(engine: RLHFEngine, mode: str) -> dict:
    rollouts = build_rollouts("replica", engine.actor, engine.tokenizer, others=engine.models, between_steps=mode)
    trainer = PPOTrainer(
        engine=engine,
        rollouts=rollouts,
        dialect=DIALECT,
        sampling=SAMPLING,
        config=PPOConfig(total_steps=6, micro_batch_size=4),
    )
    feed, fills, answers = TinyPrompts(8), {}, {}
    prompts = feed.prompts(0)
    own = _judged_without_copies(engine, trainer, rollouts.generate(prompts, SAMPLING), rollouts.replicas)

    def counted(event: str, act):
        before = rollouts.replicas.fills
        result = act()
        fills[event] = rollouts.replicas.fills - before
        return result

    def generate() -> Rollout:
        return rollouts.generate(prompts, SAMPLING)

    counted("a step", lambda: trainer.step(prompts))
    for event in ("evaluation", "evaluation again"):
        answers[event] = dict(_by_key(counted(event, generate)))
    rests = _rest(rollouts)
    answers["after a rest"] = dict(_by_key(counted("after a rest", generate)))
    weights = masters(engine.actor)
    counted("a step with what is held", lambda: trainer.step(prompts))
    counted("the next step", lambda: trainer.step(feed.prompts(1)))
    rollout = counted("generation", generate)
    counted("judging", lambda: trainer.maker.judge(rollout))
    counted("judging again", lambda: trainer.maker.judge(rollout))
    return {
        "fills": fills,
        "answers": answers,
        "weights": weights,
        "rest with an actor": rests,
        "own": own,
        "rest with all": _rest(rollouts),
    }


def _judged_without_copies(engine: RLHFEngine, trainer: PPOTrainer, rollout: Rollout, replicas: Replicas) -> dict:
    """What copies say of a rollout, and what the engines themselves do, by the names of Judged's fields."""
    lent = trainer.maker.judge(rollout)
    for model in engine.models:
        model.lender = None
    own = trainer.maker.judge(rollout)
    for model in engine.models:
        model.lender = replicas
    return {
        name: (getattr(lent, name), getattr(own, name))
        for name in ("logprobs", "entropy", "ref_logprobs", "values", "scores")
    }


def _rest(rollouts) -> dict:
    """Bytes of the copies before and after a rest, and how many layers the cache has memory for then."""
    parameters = [weakref.ref(p) for module in rollouts.replicas._modules.values() for p in module.parameters()]

    def alive() -> int:
        found = [parameter() for parameter in parameters]
        return sum(p.numel() * p.element_size() for p in found if p is not None)

    before = alive()
    rollouts.release_memory()
    gc.collect()
    return {"before": before, "after": alive(), "cache": len(rollouts.sampler.cache.layers)}
