"""Adapters that peft wrote as starting points of four engines on two ranks, and adapters that these engines save."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, TaskType
from transformers import AutoModelForCausalLM

from engine.experience import position_ids
from engine.models.loading import load_scorer
from engine.models.lora import LoraSpec
from engine.models.saving import merged_weights
from engine.rlhf_engine import RLHFEngine
from engine.zero.gathering import full_shape, set_parameter
from scripts.harness.ranks import run_ranks
from tests.distributed.tiny_run import engine_spec
from tests.engine.models.test_adapter_folders import peft_logprobs, write_adapter
from training.runtime import model_folders

SEQUENCES = torch.arange(4, 20).view(2, 8)


def loaded_and_saved(folder: str, actor: str, reward: str, dim: int, output: str, stages: list[int]) -> dict:
    """By stage, what four engines compute that start from adapters: merged; gone on with; and after a change of the
    factors, which is saved in `output`."""
    return {stage: _at(folder, actor, reward, dim, f"{output}/{stage}", stage) for stage in stages}


def _at(folder: str, actor: str, reward: str, dim: int, output: str, stage: int) -> dict:
    spec = replace(engine_spec(folder, stage, config=f"stage{stage}.json"), actor_path=actor, critic_path=reward)
    found = {"merged": _computed(RLHFEngine.from_pretrained(spec))}
    lora = LoraSpec(dim=dim, only=True)
    spec = replace(spec, actor_lora=lora, critic_lora=lora, reference=None, reward=None)
    models = RLHFEngine.from_pretrained(spec)
    found["gone on with"] = _computed(models)
    for model in models.trained.values():
        for _, b in model.module.adapters.factors().values():
            set_parameter(b, torch.full(full_shape(b), 0.1))
        model.version += 1
    found["changed"] = _computed(models)
    found["merged while training goes on"] = {
        name: weight.clone() for name, weight in merged_weights(models.actor.module)
    }
    for role, model in models.trained.items():
        model_folders.save_forms(model, models.tokenizer, Path(output), role)
    return found


@torch.no_grad()
def _computed(models: RLHFEngine) -> dict[str, torch.Tensor]:
    mask = torch.ones_like(SEQUENCES)
    inputs = (SEQUENCES, mask, position_ids(mask))
    return {
        "actor": models.actor(*inputs, response_length=5)[0],
        "reference": models.reference.model(*inputs, response_length=5)[0],
        "critic": models.critic(*inputs),
        "reward": models.rewards[0].model(*inputs),
    }


CLOSE = {"atol": 1e-5, "rtol": 1e-5}
MASK = torch.ones_like(SEQUENCES)


@pytest.mark.parametrize("stage", [0, 3])
@torch.no_grad()
def test_engines_start_from_adapters_keep_them_as_reference_and_save_theirs(stage, ranks, expected, output):
    for rank in ranks:
        found = rank[stage]
        for when in ("merged", "gone on with"):
            for role, numbers in found[when].items():
                torch.testing.assert_close(numbers, expected[role], **CLOSE)
        for role in ("reference", "reward"):  # bit by bit what they were
            assert torch.equal(found["changed"][role], found["gone on with"][role])
        changed = found["changed"]
        assert (changed["actor"] - expected["actor"]).abs().max() > 0.05
        assert (changed["critic"] - expected["critic"]).abs().max() > 0.05
        saved = output / str(stage)
        theirs = AutoPeftModelForCausalLM.from_pretrained(saved / "actor_adapter")
        torch.testing.assert_close(peft_logprobs(theirs), changed["actor"], **CLOSE)
        whole = AutoModelForCausalLM.from_pretrained(saved / "actor")
        torch.testing.assert_close(peft_logprobs(whole), changed["actor"], **CLOSE)
        for name, weight in whole.named_parameters():  # as saved, on every rank
            torch.testing.assert_close(rank[stage]["merged while training goes on"][name], weight, rtol=0, atol=1e-7)
        assert len(rank[stage]["merged while training goes on"]) == len(dict(whole.named_parameters()))
        for name in ("critic_adapter", "critic"):
            values = load_scorer(str(saved / name), torch.float32)(SEQUENCES, MASK, position_ids(MASK))
            torch.testing.assert_close(values, changed["critic"], **CLOSE)


@pytest.fixture(scope="module")
def adapters(folder, tmp_path_factory) -> dict:
    place = tmp_path_factory.mktemp("adapters")
    layers = ["q_proj", "up_proj", "lm_head"]  # the head of a model in which that is the embedding too
    actor = write_adapter(place / "actor", f"{folder}/tied", target_modules=layers)
    write_adapter(place / "reward", f"{folder}/reward", kind=TaskType.SEQ_CLS, seed=4)
    return {"place": place, "actor": actor}


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def ranks(folder, adapters, output) -> list[dict]:
    paths = {role: str(adapters["place"] / role) for role in ("actor", "reward")}
    return run_ranks(
        "tests.distributed.test_adapter_files:loaded_and_saved",
        folder=folder,
        dim=4,
        output=str(output),
        stages=[0, 3],
        **paths,
    )


@pytest.fixture(scope="module")
@torch.no_grad()
def expected(adapters) -> dict[str, torch.Tensor]:
    logprobs = peft_logprobs(adapters["actor"])
    scorer = load_scorer(str(adapters["place"] / "reward"), torch.float32)  # which is compared with peft in one process
    scores = scorer(SEQUENCES, MASK, position_ids(MASK))
    return {"actor": logprobs, "reference": logprobs, "critic": scores, "reward": scores}
