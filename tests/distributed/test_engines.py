"""Engines of several models on two ranks, the actor's copy that generates, and whole weights for experience."""

import gc
import weakref
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from engine.experience import Rollout
from engine.rlhf_engine import RLHFEngine
from engine.rollout import build_rollouts
from engine.zero.gather_once import InferenceGather
from engine.zero.gathering import is_available
from scripts.harness.ranks import run_ranks
from tests.distributed import plain
from tests.distributed.tiny_run import DIALECT, SAMPLING, TinyPrompts, counted_fills, engine_spec, prompt_tokens
from tests.distributed.work_rollouts import _by_key
from tests.engine.zero.inspecting import counted_gathers, masters
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


MODES = ("keep", "free")
FIELDS = ("logprobs", "entropy", "ref_logprobs", "values", "scores")


def between_steps(folder: str, stage: int, config: str) -> dict[str, dict]:
    """For each mode of ActorCopy, one after the other with the same engines: what happened in two steps and around
    them."""
    engine = RLHFEngine.from_pretrained(engine_spec(folder, stage, config=config))
    return {mode: _events(engine, mode) for mode in MODES}


def _events(engine: RLHFEngine, mode: str) -> dict:
    rollouts = build_rollouts("replica", engine.actor, engine.tokenizer, others=engine.engines, between_steps=mode)
    trainer = PPOTrainer(
        models=engine,
        rollouts=rollouts,
        dialect=DIALECT,
        sampling=SAMPLING,
        config=PPOConfig(total_steps=6, micro_batch_size=4),
    )
    feed, fills, answers = TinyPrompts(8), {}, {}
    prompts = feed.prompts(0)

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
    rest = _rest(rollouts)
    answers["after a rest"] = dict(_by_key(counted("after a rest", generate)))
    weights = masters(engine.actor)
    counted("a step with what is held", lambda: trainer.step(prompts))
    counted("the next step", lambda: trainer.step(feed.prompts(1)))
    rollout = counted("generation", generate)
    trainer.experience_maker.micro_batch_size = 1  # several passes of each model
    return {
        "fills": fills,
        "answers": answers,
        "weights": weights,
        "rest": rest,
        "whole": _judged(engine, trainer, rollout, fits=True),
        "partitioned": _judged(engine, trainer, rollout, fits=False),
    }


def _judged(engine: RLHFEngine, trainer: PPOTrainer, rollout: Rollout, fits: bool) -> dict:
    """What the models say of a rollout, by the names of Experience's fields; whose weights were gathered whole for
    that, and how often ZeRO gathered a layer's. fits: whether there is memory for whole weights, the copy's too."""
    copy, whole, gathered = engine.actor.copy, [], InferenceGather._gathered
    roles = {id(model.inference_gather): model.role for model in engine.engines}

    def watched(inference: InferenceGather) -> dict:
        whole.append(roles[id(inference)])
        return gathered(inference)

    engine.actor.copy = copy if fits else None
    with (
        mock.patch.object(InferenceGather, "_fits", lambda inference: fits),
        mock.patch.object(InferenceGather, "_gathered", watched),
        counted_gathers() as gathers,
    ):
        experience = trainer.experience_maker.make_experience(rollout)
    engine.actor.copy = copy
    left = sum(is_available(p) for model in engine.engines for p in model.module.parameters())
    found = {name: getattr(experience, name) for name in FIELDS}
    return found | {"gathered whole": whole, "gathers of layers": len(gathers), "left whole": left}


def _rest(rollouts) -> dict:
    """Bytes of the copy before and after a rest, and how many layers the cache has memory for then."""
    parameters = [weakref.ref(p) for p in rollouts.copy.module().parameters()]

    def alive() -> int:
        found = [parameter() for parameter in parameters]
        return sum(p.numel() * p.element_size() for p in found if p is not None)

    before = alive()
    rollouts.release_memory()
    gc.collect()
    return {"before": before, "after": alive(), "cache": len(rollouts.sampler.cache.layers)}


# A copy is filled where the weights have changed since it was filled, or where it was freed in a rest.
FILLS = {
    "a step": 1,
    "evaluation": 1,
    "evaluation again": 0,
    "after a rest": 0,
    "a step with what is held": 0,
    "the next step": 1,
    "generation": 1,
}


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict]:
    return run_ranks(
        "tests.distributed.test_engines:between_steps", world=2, folder=folder, stage=3, config="stage3.json"
    )


@pytest.mark.parametrize("mode", MODES)
def test_the_copy_is_filled_how_often(ranks, mode):
    for rank in ranks:
        assert rank[mode]["fills"] == FILLS | {"after a rest": int(mode == "free")}


@pytest.mark.parametrize("mode", MODES)
def test_what_stays_after_a_rest(ranks, folder, mode):
    size = sum(4 * p.numel() for p in plain.policy(folder).parameters())
    for rank in ranks:
        assert rank[mode]["rest"] == {
            "before": size,
            "after": 0 if mode == "free" else size,
            "cache": 2 if mode == "keep" else 0,
        }


@pytest.mark.parametrize("mode", MODES)
def test_answers_are_the_same_after_a_rest(ranks, folder, mode):
    model = plain.policy(folder)
    model.load_state_dict({name: tensor.double() for name, tensor in ranks[0][mode]["weights"].items()})
    for rank in ranks:
        first, again, rested = rank[mode]["answers"].values()
        assert first == again == rested
        assert first == {key: plain_answer(model, prompt_tokens(key[0]), *key, SAMPLING) for key in first}


@pytest.mark.parametrize("mode", MODES)
def test_whole_weights_are_gathered_once_for_all_passes_and_say_what_partitions_say(ranks, mode):
    """The actor's are those of its copy."""
    for rank in ranks:
        whole, partitioned = rank[mode]["whole"], rank[mode]["partitioned"]
        assert whole["gathered whole"] == ["reference", "critic", "reward"]
        assert partitioned["gathered whole"] == [] and whole["gathers of layers"] == 0
        assert partitioned["gathers of layers"] >= 4 * 4 * 2  # models, passes of one row each, layers
        assert whole["left whole"] == partitioned["left whole"] == 0
        for name in FIELDS:
            torch.testing.assert_close(whole[name], partitioned[name], rtol=0, atol=1e-5, msg=name)


def test_actor_and_critic_have_moved(ranks):
    """Or it would not show whose weights are whole."""
    judged = ranks[0]["free"]["whole"]
    assert (judged["logprobs"] - judged["ref_logprobs"]).abs().max() > 1e-3
    before, after = ranks[0]["keep"]["whole"], ranks[0]["free"]["whole"]
    assert (before["values"].sum() - after["values"].sum()).abs() > 1e-3
