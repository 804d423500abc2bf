"""Run by ranks: what copies do between a run's steps, how often they are filled, and that they compute the same."""

import gc
import weakref
from unittest import mock

from engine import distributed
from engine.experience import Rollout
from engine.rlhf_engine import RLHFEngine
from engine.rollout import RolloutBackend, build_rollouts
from engine.rollout.cache import cache_bytes
from engine.rollout.choice import copy_need
from engine.rollout.decode import slots_of_a_row
from tests.distributed.fills import counted_fills
from tests.distributed.tiny_run import DIALECT, SAMPLING, TinyPrompts, engine_spec
from tests.distributed.work_rollouts import _by_key
from tests.engine.zero.inspecting import masters
from training.ppo_trainer import PPOConfig, PPOTrainer

MODES = ("keep", "free", "host", "others freed")


def between_steps(folder: str, stage: int, config: str) -> dict[str, dict]:
    """For each mode of WholeCopies, and where the actor's are kept and others' freed, one after the other with the same
    engines: what happened in two steps and around them."""
    engine = RLHFEngine.from_pretrained(engine_spec(folder, stage, config=config))
    return {mode: _events(engine, mode) for mode in MODES}


def _rollouts(engine: RLHFEngine, mode: str) -> RolloutBackend:
    if mode != "others freed":
        return build_rollouts("replica", engine.actor, engine.tokenizer, others=engine.engines, between_steps=mode)
    free, cache = 10**9, cache_bytes(engine.actor.module.model, slots_of_a_row(0, waiting=True))
    actor, critic = (copy_need(model).size for model in (engine.actor, engine.critic))
    training = int(0.9 * free) - cache - actor - critic // 2
    with mock.patch("engine.zero.accelerator.free_memory", lambda: free):
        return build_rollouts("auto", engine.actor, engine.tokenizer, others=engine.engines, training=training)


def _events(engine: RLHFEngine, mode: str) -> dict:
    rollouts = _rollouts(engine, mode)
    trainer = PPOTrainer(
        models=engine,
        rollouts=rollouts,
        dialect=DIALECT,
        sampling=SAMPLING,
        config=PPOConfig(total_steps=6, micro_batch_size=4),
    )
    feed, fills, answers = TinyPrompts(8), {}, {}
    prompts = feed.prompts(0)
    own = _judged_without_copies(engine, trainer, rollouts.generate(prompts, SAMPLING))

    def counted(event: str, act):
        with counted_fills() as count:
            result = act()
        fills[event] = len(count)
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
    trainer.experience_maker.micro_batch_size = 1  # several passes of each model
    with mock.patch("engine.distributed.any_rank", wraps=distributed.any_rank) as asked:
        counted("judging", lambda: trainer.experience_maker.make_experience(rollout))
    counted("judging again", lambda: trainer.experience_maker.make_experience(rollout))
    return {
        "fills": fills,
        "agreements": asked.call_count,
        "answers": answers,
        "weights": weights,
        "rest with an actor": rests,
        "own": own,
        "rest with all": _rest(rollouts),
    }


def _judged_without_copies(engine: RLHFEngine, trainer: PPOTrainer, rollout: Rollout) -> dict:
    """What copies say of a rollout, and what the engines themselves do, by the names of Experience's fields."""
    lent = trainer.experience_maker.make_experience(rollout)
    copies = [model.copies for model in engine.engines]
    for model in engine.engines:
        model.copies = None
    own = trainer.experience_maker.make_experience(rollout)
    for model, given in zip(engine.engines, copies, strict=True):
        model.copies = given
    return {
        name: (getattr(lent, name), getattr(own, name))
        for name in ("logprobs", "entropy", "ref_logprobs", "values", "scores")
    }


def _rest(rollouts) -> dict:
    """Bytes of the copies before and after a rest, and how many layers the cache has memory for then."""
    modules = [module for copies in (rollouts.copies, *rollouts.others) for module in copies._modules.values()]
    parameters = [weakref.ref(p) for module in modules for p in module.parameters()]
    del modules

    def alive() -> int:
        found = [parameter() for parameter in parameters]
        return sum(p.numel() * p.element_size() for p in found if p is not None)

    before = alive()
    rollouts.release_memory()
    gc.collect()
    return {"before": before, "after": alive(), "cache": len(rollouts.sampler.cache.layers)}
