"""Which changes are proposed, and what searches find, where it is known what fits."""

from functools import partial
from types import SimpleNamespace

import pytest

from tests.training.tools.memory.configurations import flags_of, llama
from training.tools.memory import changes
from training.tools.memory.changes import change_lines, fewest_gpus, largest_batch, what_fits
from training.tools.memory.cluster import Cluster


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def found(path, monkeypatch):
    """What `what_fits` proposes where exactly those flags fit for which a function is true; None for nothing."""

    def propose(fits, gpus=4, stage=1, more=""):
        monkeypatch.setattr(changes, "plan", lambda args, cluster: SimpleNamespace(fits=fits(args)))
        result = what_fits(flags_of(path, stage, f"--num_gpus {gpus} {more}"), Cluster(gpus=gpus, gpu=10**9))
        return result and result[0]

    return propose


CHECKPOINTING = {"actor_gradient_checkpointing": True, "critic_gradient_checkpointing": True}


def test_the_cheapest_changes_that_are_enough_come_alone(found):
    assert found(lambda args: args.replicas_between_steps == "free") == {"replicas_between_steps": "free"}
    assert found(lambda args: args.actor_gradient_checkpointing) == CHECKPOINTING
    both = found(lambda args: args.critic_gradient_checkpointing and args.replicas_between_steps == "free")
    assert both == {"replicas_between_steps": "free", **CHECKPOINTING}


def test_a_higher_stage_goes_before_offload_and_weights_in_host_memory_come_last(found):
    assert found(lambda args: args.spec.actor.stage == 3) == {"actor_zero_stage": 3, "critic_zero_stage": 3}
    offload = found(lambda args: args.spec.actor.offload)
    assert offload == {"offload": True, "actor_zero_stage": 2, "critic_zero_stage": 2}
    last = found(lambda args: {(c.stage, c.offload) for c in args.spec.engine_configs} == {(3, True)}, gpus=1)
    frozen = {"offload_reference_model": True, "offload_reward_model": True}
    assert last == {"offload": True, "actor_zero_stage": 3, "critic_zero_stage": 3, **frozen}


def test_ranks_of_a_node_split_sequences(found):
    assert found(lambda args: args.sequence_parallel_size == 4) == {"sequence_parallel_size": 4}


def test_what_step_3_refuses_is_not_proposed(found):
    """A shared trunk is not offloaded; a node of two ranks has no group of four; four heads are not for eight ranks."""
    assert found(lambda args: args.sequence_parallel_size == 4, gpus=2) is None
    assert found(lambda args: args.sequence_parallel_size == 8, gpus=8) is None
    lora = "--share_trunk --only_optimize_lora --actor_lora_dim 4 --critic_lora_dim 4"
    assert found(lambda args: args.spec.actor.offload, gpus=1, more=lora) is None


def test_the_batch_of_a_step_and_of_an_update_stays(found):
    seen = set()
    assert found(lambda args: seen.add((args.rows_per_rank, args.mini_batches))) is None
    assert seen == {(16, 1)}


def test_what_nothing_makes_fit_is_told_what_it_has_not_tried(path, monkeypatch):
    monkeypatch.setattr(changes, "what_fits", lambda args, cluster: None)
    (line,) = change_lines(flags_of(path, 0), Cluster(gpu=10**9))
    assert "more GPUs" in line and "LoRA" in line


def fits_on(least: int, args, cluster: Cluster) -> SimpleNamespace:
    return SimpleNamespace(fits=cluster.world >= least)


def test_the_fewest_gpus_hold_the_actor_together_and_are_of_as_few_nodes(path, monkeypatch):
    for least, flags, expected in (
        (12, "", (8, 2)),
        (1, "--rollout_backend vllm --vllm_tensor_parallel_size 4", (4, 1)),
        (2000, "", None),
    ):
        monkeypatch.setattr(changes, "plan", partial(fits_on, least))
        wanted = fewest_gpus(flags_of(path, 3, flags))
        assert (wanted and (wanted.num_gpus, wanted.num_nodes)) == expected


@pytest.mark.parametrize("limit, answer", [(0, None), (1, 1), (7, 4), (9999, 512)])
def test_the_largest_power_of_two_that_fits(path, limit, answer, monkeypatch):
    def fits(args, cluster):
        return SimpleNamespace(fits=args.per_device_training_batch_size <= limit)

    monkeypatch.setattr(changes, "plan", fits)
    found = largest_batch(flags_of(path, 0))
    assert (found and (found.per_device_training_batch_size, found.per_device_generation_batch_size)) == (
        answer and (answer, answer)
    )
