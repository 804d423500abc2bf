"""Which changes are proposed, and what searches find, where it is known what fits."""

from types import SimpleNamespace

import pytest

from engine.memory import changes
from engine.memory.changes import Setting, fewest_gpus, largest, what_fits
from engine.memory.workload import Cluster
from engine.models.lora import LoraSpec
from tests.engine.memory.configurations import WORKLOAD, spec_of

FREE = "--replicas_between_steps free"
CHECKPOINTING = "--actor_gradient_checkpointing --critic_gradient_checkpointing"


@pytest.fixture
def found(monkeypatch):
    """What `what_fits` proposes where exactly those settings fit for which a function is true; None for nothing."""

    def propose(fits, gpus=4, **fields):
        monkeypatch.setattr(changes, "plan", lambda *setting: SimpleNamespace(fits=fits(*setting)))
        result = what_fits(Setting(spec_of("a/model", 0, **fields), WORKLOAD, Cluster(gpus=gpus, gpu=10**9)))
        return result and [change.flags for change in result[0]]

    return propose


def test_the_cheapest_change_that_is_enough_is_alone(found):
    assert found(lambda spec, load, cluster: load.between_steps == "free") == [FREE]
    assert found(lambda spec, load, cluster: spec.actor_gradient_checkpointing) == [CHECKPOINTING]


def test_changes_that_are_needed_together_come_together(found):
    assert found(lambda spec, load, cluster: spec.critic_gradient_checkpointing and load.between_steps == "free") == [
        FREE,
        CHECKPOINTING,
    ]


def test_a_higher_stage_goes_before_offload_and_takes_frozen_models_along(found):
    stage3 = found(lambda spec, load, cluster: {config.stage for config in spec.engine_configs} == {3})
    assert stage3 == ["--actor_zero_stage 3 --critic_zero_stage 3"]
    offload = found(lambda spec, load, cluster: spec.actor.offload and spec.actor.stage >= 2)
    assert offload == ["--offload (--actor_zero_stage and --critic_zero_stage 2 or 3)"]


def test_one_gpu_has_no_higher_stage(found):
    assert found(lambda spec, load, cluster: spec.actor.stage == 3 and not spec.actor.offload, gpus=1) is None


def test_weights_in_host_memory_come_last_and_on_one_gpu_too(found):
    """Of all four engines: at stage 3, of which one GPU alone has no use otherwise."""
    offloaded = found(lambda spec, *_: {(c.stage, c.offload) for c in spec.engine_configs} == {(3, True)}, gpus=1)
    assert offloaded is not None and len(offloaded) == 1
    assert offloaded[0].startswith(
        "--offload --actor_zero_stage 3 --critic_zero_stage 3, and --offload_reference_model"
    )


def test_a_shared_trunk_is_not_offloaded(found):
    """Step 3 refuses that."""
    lora = {"share_trunk": True, "actor_lora": LoraSpec(dim=4, only=True)}
    assert found(lambda spec, *_: spec.actor.offload, gpus=1, **lora) is None


def test_the_batch_of_a_step_stays(found):
    seen = []
    assert found(lambda spec, load, cluster: seen.append(load.responses)) is None
    assert set(seen) == {WORKLOAD.responses}


def test_the_fewest_gpus_are_of_as_few_nodes(monkeypatch):
    monkeypatch.setattr(changes, "plan", lambda spec, load, cluster: SimpleNamespace(fits=cluster.world >= 12))
    wanted = fewest_gpus(lambda gpus, nodes: Setting(spec_of("a/model", 3), WORKLOAD, Cluster(gpus=gpus, nodes=nodes)))
    assert (wanted.cluster.gpus, wanted.cluster.nodes) == (8, 2)


@pytest.mark.parametrize("limit, answer", [(0, 0), (1, 1), (7, 7), (13, 13), (512, 512), (9999, 512)])
def test_the_largest_number_that_fits(limit, answer):
    assert largest(lambda size: size <= limit) == answer


def test_among_large_numbers_a_sixteenth_is_near_enough():
    assert 300 - 300 // 16 <= largest(lambda size: size <= 300) <= 300
