"""Engines of several models on two ranks, and the whole copies that they generate with."""

import gc
import weakref
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from engine import distributed
from engine.experience import Rollout
from engine.rlhf_engine import RLHFEngine
from engine.rollout import RolloutBackend, build_rollouts
from engine.rollout.cache import cache_bytes
from engine.rollout.choice import copy_need
from engine.rollout.decode import slots_of_a_row
from scripts.harness.models import make_causal_lm
from scripts.harness.ranks import run_ranks
from tests.distributed import plain
from tests.distributed.tiny_run import DIALECT, SAMPLING, TinyPrompts, counted_fills, engine_spec, prompt_tokens
from tests.distributed.work_rollouts import _by_key
from tests.engine.zero.inspecting import masters
from tests.plain_sampling import plain_answer
from training.ppo_trainer import PPOConfig, PPOTrainer

STAGES = (0, 3)
TIED = ("opt", "gpt2", "bloom")
FAMILIES = ("llama", "mistral", "qwen2", "gpt2", "gpt_neox", "opt", "bloom")


@pytest.fixture(scope="module")
def alone(folder, output) -> list[dict]:
    return run_ranks("tests.distributed.work_engines:without_critic", folder=folder, output=output, stages=STAGES)


@pytest.mark.parametrize("stage", STAGES)
def test_without_a_critic_there_are_the_bytes_of_exactly_one_model_fewer(alone, folder, stage):
    stored = load_file(f"{folder}/reward/model.safetensors")
    whole = sum(tensor.numel() * 4 for tensor in stored.values())
    for rank in alone:
        gae, rloo = rank[stage]["gae"], rank[stage]["rloo"]
        assert rank[stage]["critic"] is None
        assert gae.keys() - rloo.keys() == {"critic"} and rank[stage]["trained"] == ["actor"]
        assert rank[stage]["models"] == len(rloo) == 3
        assert sum(gae.values()) - sum(rloo.values()) == whole / (2 if stage == 3 else 1)  # two ranks hold half each
        assert all(torch.equal(rank[stage]["reward"][name], tensor) for name, tensor in stored.items())


@pytest.mark.parametrize("stage", STAGES)
def test_no_compiler_is_imported_for_an_engine_and_one_may_be_later(alone, stage):
    assert all(not rank[stage]["compiler"] and rank[stage]["may compile"] for rank in alone)


@pytest.mark.parametrize("stage", STAGES)
def test_without_a_critic_a_run_goes_on_from_a_restart_point(alone, output, stage):
    for rank in alone:
        found = rank[stage]
        assert "actor" in found["files"] and "critic" not in found["files"]
        assert found["saved"] == ["actor"]
        (weights, shards), (again, average) = found["end"], found["resumed"]
        assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())
        assert all(torch.equal(one, other) for one, other in zip(average, shards, strict=True))
    saved = load_file(f"{output}/{stage}/actor/model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in alone[0][stage]["end"][0].items())


@pytest.fixture(scope="module")
def hydras(folder, tmp_path_factory) -> list[dict]:
    root = tmp_path_factory.mktemp("hydras")
    folders = {family: make_causal_lm(root / family, family, tied=family in TIED) for family in FAMILIES}
    return run_ranks("tests.distributed.work_engines:families", folders=folders, config=f"{folder}/stage3.json")


@pytest.mark.parametrize("family", FAMILIES)
def test_partitioned_hydras_train_their_top_and_refer_to_the_untouched_model(hydras, family):
    for rank in hydras:
        found = rank[family]
        assert torch.equal(found["reference"], found["untouched"])
        assert (found["actor"] - found["untouched"]).abs().max() > 0.05
        layer, norm, *head = found["parts"]
        assert layer.endswith(".1") and norm.endswith(("norm", "ln_f")) and len(head) == (family not in TIED)
        for name, before in found["before"].items():
            moves = name.startswith(tuple(f"{part}." for part in found["parts"]))
            # Keys' biases move no attention weight; all that is left of their gradient is rounding.
            assert torch.equal(found["after"][name], before) != moves or ("bias" in name and moves), name


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


# Actor and reference take turns in one module, critic and reward model in another. So a whole step fills four times,
# and once less where the actor's weights are still held from a generation before it.
FILLS = {
    "a step": 4,
    "evaluation": 1,
    "evaluation again": 0,
    "after a rest": 0,
    "a step with what is held": 3,
    "the next step": 4,
    "generation": 1,
    "judging": 3,
    "judging again": 4,
}


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict]:
    return run_ranks(
        "tests.distributed.test_engines:between_steps", world=2, folder=folder, stage=3, config="stage3.json"
    )


@pytest.fixture(scope="module")
def sizes(folder) -> tuple[int, int]:
    """Bytes of the actor and of the reward model in float32."""
    models = plain.policy(folder), plain.critic(folder)
    return tuple(sum(4 * p.numel() for p in model.parameters()) for model in models)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_filled_how_often(ranks, mode):
    for rank in ranks:
        assert rank[mode]["fills"] == FILLS | {"after a rest": int(mode == "free")}


def test_ranks_agree_on_memory_once_a_fill_and_once_a_model(ranks):
    """The actor's copy, which has just generated, makes its passes; reference, critic and reward model are gathered
    first."""
    assert [rank["keep"]["agreements"] for rank in ranks] == [1 + 3 * 2] * 2


@pytest.mark.parametrize("mode", MODES)
def test_what_stays_after_a_rest(ranks, sizes, mode):
    """A step ends with a rest: where copies are given back, the one that an evaluation made is all there is then."""
    after = {"free": 0, "others freed": sizes[0]}.get(mode, sum(sizes))
    for rank in ranks:
        alone, all_copies = rank[mode]["rest with an actor"], rank[mode]["rest with all"]
        assert alone["before"] == max(after, sizes[0])
        assert all_copies["before"] == sum(sizes)
        for rest in (alone, all_copies):
            assert rest["after"] == after
            assert rest["cache"] == (2 if mode in ("keep", "others freed") else 0)


@pytest.mark.parametrize("mode", MODES)
def test_answers_are_the_same_after_a_rest(ranks, folder, mode):
    model = plain.policy(folder)
    model.load_state_dict({name: tensor.double() for name, tensor in ranks[0][mode]["weights"].items()})
    for rank in ranks:
        first, again, rested = rank[mode]["answers"].values()
        assert first == again == rested
        assert first == {key: plain_answer(model, prompt_tokens(key[0]), *key, SAMPLING) for key in first}


@pytest.mark.parametrize("mode", MODES)
def test_copies_say_what_the_engines_say(ranks, mode):
    for rank in ranks:
        for name, (lent, own) in rank[mode]["own"].items():
            torch.testing.assert_close(lent, own, rtol=0, atol=1e-5, msg=name)


def test_the_four_models_have_moved_apart(ranks):
    """Or it would not show whose weights a copy holds."""
    judged = ranks[0]["free"]["own"]
    assert (judged["logprobs"][0] - judged["ref_logprobs"][0]).abs().max() > 1e-3
    before, after = ranks[0]["keep"]["own"], ranks[0]["host"]["own"]
    assert (before["values"][0].sum() - after["values"][0].sum()).abs() > 1e-3
