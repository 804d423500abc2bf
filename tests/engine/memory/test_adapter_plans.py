"""What the plan says of models that start from adapters, and of one trunk; against arithmetic by hand.

Nothing but configurations stands in the models' folders: no weights, no tokenizer.
"""

import dataclasses
import json
from pathlib import Path

import pytest

from engine.engine_spec import EngineSpec
from engine.memory import Cluster, plan
from engine.memory.blueprint import blueprints
from engine.models.lora import LoraSpec
from engine.zero.config import EngineConfig
from tests.engine.memory.configurations import (
    LAYERS,
    MIDDLE,
    POLICY,
    SCORER,
    VOCABULARY,
    WIDTH,
    WORKLOAD,
    llama,
    spec_of,
)

LORA = LoraSpec(dim=2, only=True)
FACTORS = LAYERS * 2 * (4 * (WIDTH + WIDTH) + 3 * (WIDTH + MIDDLE))  # of rank 2, in all linear layers: `LORA`
QUERIES = LAYERS * 2 * (WIDTH + WIDTH)  # of rank 2, in q_proj alone


def adapter(folder: Path, base: str, kind: str = "CAUSAL_LM", modules=("q_proj",)) -> str:
    """An adapter's folder with its configuration and nothing else."""
    folder.mkdir()
    config = {"peft_type": "LORA", "task_type": kind, "r": 2, "target_modules": list(modules)}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": base}))
    return str(folder)


@pytest.fixture
def base(tmp_path) -> str:
    (tmp_path / "base").mkdir()
    return llama(tmp_path / "base")


def test_an_adapter_that_is_gone_on_with_is_there_twice(base, tmp_path):
    """Its layers count, not those that a new one would have; the frozen copy is the reference's or reward model's."""
    actor, critic = adapter(tmp_path / "actor", base), adapter(tmp_path / "critic", base, "SEQ_CLS")
    spec = dataclasses.replace(spec_of(actor, 0, actor_lora=LORA, critic_lora=LORA), critic_path=critic)
    rest = plan(spec, WORKLOAD, Cluster()).phases["generate"]
    assert set(rest) == {"actor", "critic"}
    assert rest["actor"]["weights"] == 2 * (POLICY + 2 * QUERIES)
    assert rest["actor"]["optimizer"] == 12 * QUERIES
    assert rest["critic"]["weights"] == 2 * (SCORER + WIDTH + 2 * QUERIES)
    assert rest["critic"]["optimizer"] == 12 * (QUERIES + WIDTH)


def test_an_adapter_without_lora_is_part_of_the_model(base, tmp_path):
    found = blueprints(spec_of(adapter(tmp_path / "actor", base), 0))
    assert {role: model.numbers for role, model in found.items()} == {
        "actor": POLICY,
        "critic": SCORER,
        "reference": POLICY,
        "reward": SCORER,
    }


@pytest.mark.parametrize(("modules", "numbers"), [(("q_proj",), POLICY - VOCABULARY * WIDTH), (("lm_head",), POLICY)])
def test_a_tied_head_with_an_adapter_in_it_is_a_matrix_of_its_own(base, tmp_path, modules, numbers):
    config = Path(base) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    found = blueprints(spec_of(adapter(tmp_path / "actor", base, modules=modules), 0))
    assert (found["actor"].numbers, found["reference"].numbers) == (numbers, numbers)


def shared(actor: str, critic: str | None) -> EngineSpec:
    return EngineSpec(
        actor_path=actor,
        critic_path=critic,
        with_reward_model=critic is not None,
        share_trunk=True,
        actor_lora=LORA,
        critic_lora=LORA,
        dtype="bf16",
        actor=EngineConfig("actor", 0),
    )


def test_one_trunk_serves_all_roles(base):
    planned = plan(shared(base, None), WORKLOAD, Cluster())
    assert planned.phases["generate"].keys() == {"actor"}
    assert planned.phases["generate"]["actor"]["weights"] == 2 * (POLICY + WIDTH + 2 * FACTORS)
    assert planned.phases["generate"]["actor"]["optimizer"] == 12 * (2 * FACTORS + WIDTH)
    assert {moment.name for moment in planned.moments} >= {"critic computes", "critic's backward pass"}
    assert "critic's optimizer step" not in {moment.name for moment in planned.moments}


def test_one_trunk_has_the_adapters_that_its_roles_start_from(base, tmp_path):
    """Actor and reference, critic and reward model: four adapters and two heads; half of them train."""
    spec = shared(adapter(tmp_path / "actor", base), adapter(tmp_path / "judge", base, "SEQ_CLS"))
    actor = plan(spec, WORKLOAD, Cluster()).phases["generate"]["actor"]
    assert actor["weights"] == 2 * (POLICY + 2 * WIDTH + 4 * QUERIES)
    assert actor["optimizer"] == 12 * (2 * QUERIES + WIDTH)
