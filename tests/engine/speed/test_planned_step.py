"""What ranks exchange in the step that the planner plans: bytes by hand from the models' configurations."""

import json
from dataclasses import replace

import pytest

from engine.memory import Cluster, plan
from engine.memory.blueprint import blueprints
from engine.models.lora import LoraSpec
from engine.speed.decoding import Decoder
from engine.speed.measured import NO_ARITHMETIC, MeasuredRanks
from engine.speed.planned_step import step_of
from engine.zero.config import EngineConfig
from tests.engine.memory.configurations import (
    LAYER_MATRICES,
    LAYERS,
    MIDDLE,
    POLICY,
    SCORER,
    WIDTH,
    WORKLOAD,
    llama,
    spec_of,
)

# 16 rows of a rank in passes of 4; an update has four, before which weights and after which gradients are kept.
LOAD = replace(WORKLOAD, backend="replica")
NODES = Cluster(gpus=2, nodes=2)
NOTHING = [(0, 0), (1, 0)]
RANKS = MeasuredRanks(4, [(0, 1.0), (1, 1.0)], [(0, 1.0), (1, 1.0)], within=MeasuredRanks(2, NOTHING, NOTHING))
FACTORS = LAYERS * 2 * (4 * (WIDTH + WIDTH) + 3 * (WIDTH + MIDDLE))  # of LoRA's rank 2, in all linear layers


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return llama(tmp_path_factory.mktemp("llama"))


def exchanged(spec, load=LOAD) -> dict[str, tuple[float, float]]:
    """(numbers gathered, numbers summed up) by part, of those that have any."""
    shapes = {role: Decoder.of(model) for role, model in blueprints(spec).items()}
    parts = step_of(plan(spec, load, NODES), spec, load, shapes).parts(NO_ARITHMETIC, RANKS)
    sizes = {name: (part.gathered / 2, part.reduced / 2) for name, part in parts.items()}
    return {name: pair for name, pair in sizes.items() if any(pair)}


def test_copies_that_models_take_turns_in_are_filled_each_time(path):
    assert exchanged(spec_of(path, 3)) == {
        "gather actor": (POLICY, 0),
        "gather reference": (POLICY, 0),
        "gather critic": (SCORER, 0),
        "gather reward": (SCORER, 0),
        "train critic": (SCORER, SCORER),
        "train actor": (POLICY, POLICY),
    }


def test_a_reference_that_moves_takes_its_turn_in_the_actors_copy(path):
    moving = exchanged(spec_of(path, 3, reference_refresh_steps=5))
    assert moving["gather actor"] == moving["gather reference"] == (POLICY, 0)
    assert "gather reference" not in exchanged(spec_of(path, 0, reference_refresh_steps=5))


def test_below_stage_3_gradients_are_summed_and_new_weights_gathered(path):
    assert exchanged(spec_of(path, 0)) == {"train critic": (0, SCORER), "train actor": (0, POLICY)}
    assert exchanged(spec_of(path, 1)) == {"train critic": (SCORER, SCORER), "train actor": (POLICY, POLICY)}
    assert exchanged(spec_of(path, 2), replace(LOAD, ppo_epochs=3)) == {
        "train critic": (3 * SCORER, 3 * 4 * SCORER),
        "train actor": (3 * POLICY, 3 * 4 * POLICY),
    }


def test_of_lora_factors_are_gathered_and_summed(path):
    lora = LoraSpec(dim=2, only=True)
    factors, head = FACTORS, FACTORS + WIDTH  # the critic's head trains, and the reward model's stays beside it
    assert exchanged(spec_of(path, 3, actor_lora=lora, critic_lora=lora)) == {
        "gather actor": (factors, 0),
        "gather actor unmerged": (factors + LAYERS * LAYER_MATRICES, 0),
        "gather critic": (head, 0),
        "train critic": (0, head),  # copies of their own lend their weights
        "train actor": (0, factors),
    }


def test_vllm_takes_all_weights_and_everything_else_goes_through_partitions(path):
    found = exchanged(spec_of(path, 3), replace(LOAD, backend="vllm", parts=2))
    assert found["gather actor"] == (POLICY, 0) and "tokens" not in found and "prompts" not in found
    assert found["actor"] == found["reference"] == (4 * POLICY, 0)


def test_with_hpz_only_what_has_changed_crosses_between_nodes(path, tmp_path):
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "zero_hpz_partition_size": 2}
    (tmp_path / "hpz.json").write_text(json.dumps({"zero_optimization": zero}))
    of_hpz = {role: EngineConfig(role, 3, path=str(tmp_path / "hpz.json")) for role in ("actor", "critic")}
    spec = replace(spec_of(path, 3), **of_hpz)
    load = replace(LOAD, backend="zero3")
    shapes = {role: Decoder.of(model) for role, model in blueprints(spec).items()}
    parts = step_of(plan(spec, load, NODES), spec, load, shapes).parts(NO_ARITHMETIC, RANKS)
    # Each call between nodes takes a second: one gathers a small model. The frozen ones have no groups.
    seconds = {name: part.exchange for name, part in parts.items() if part.gathered or part.reduced}
    assert seconds == {
        "prompts": 1,
        "tokens": 0,
        "actor": 0,
        "reference": 4,
        "critic": 1,
        "reward": 4,
        "train critic": 1,  # sums alone
        "train actor": 1,
    }


def test_the_shape_is_the_models(path):
    shape = Decoder.of(blueprints(spec_of(path, 3))["actor"])
    assert shape == Decoder(parameters=POLICY, layers=LAYERS, width=WIDTH, kept=2 * WIDTH, vocabulary=1000, number=2)
