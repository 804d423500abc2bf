"""What the plan says of weights, gradients, optimizer states, caches, copies and adapters, of three steps, against
arithmetic by hand.

Nothing but configurations stands in the models' folders: no weights, no tokenizer.
"""

import dataclasses
import json
from pathlib import Path

import pytest

from engine.engine_spec import EngineSpec, OptimizerSpec
from engine.errors import UserError
from engine.memory.blueprint import blueprints
from engine.memory.gpus import reserved
from engine.memory.memory_plan import PHASES, table
from engine.memory.planning import OneModel, plan, plan_one_model
from engine.memory.workload import Cluster
from engine.memory.zero_memory import Bytes, bucket_numbers
from engine.models.lora import LoraSpec
from engine.zero.config import EngineConfig
from engine.zero.gathering import GATHER_BUCKET
from tests.engine.memory.configurations import (
    CACHE_NUMBERS,
    LAYER_MATRICES,
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


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return llama(tmp_path_factory.mktemp("llama"))


def of_role(planned, phase, role):
    return planned.phases[phase].get(role, {})


def test_mixed_precision_adam_takes_16_bytes_a_number_on_one_gpu(path):
    planned = plan(spec_of(path, 0), WORKLOAD, Cluster())
    step = next(moment for moment in planned.moments if moment.name == "critic's optimizer step")
    for role, numbers in (("actor", POLICY), ("critic", SCORER)):
        kinds = step.device.by_role[role]
        assert kinds["weights"] == 2 * numbers
        assert kinds["gradients"] == 2 * numbers
        assert kinds["optimizer"] == 4 * numbers + 8 * numbers  # masters, and two moments
    assert step.device.by_role["critic"]["buffers"] == 4 * SCORER  # its gradients in float32
    assert step.device.by_role["reference"] == {"weights": 2 * POLICY}
    assert step.device.by_role["reward"] == {"weights": 2 * SCORER}


def test_in_float32_the_weights_are_their_own_masters(path):
    planned = plan(spec_of(path, 0, "fp32"), WORKLOAD, Cluster())
    assert of_role(planned, "generate", "actor")["weights"] == 4 * POLICY
    assert of_role(planned, "generate", "actor")["optimizer"] == 8 * POLICY


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_divide_masters_and_moments(path, stage):
    planned = plan(spec_of(path, stage), WORKLOAD, Cluster(gpus=4))
    actor = of_role(planned, "generate", "actor")
    assert actor["weights"] == 2 * POLICY
    assert actor["optimizer"] == pytest.approx(12 * POLICY / 4, rel=0.001)


def test_stage_3_divides_all_of_it(path):
    planned = plan(spec_of(path, 3), dataclasses.replace(WORKLOAD, backend="replica"), Cluster(gpus=8))
    actor = of_role(planned, "generate", "actor")
    assert actor["weights"] == pytest.approx(2 * POLICY / 8, rel=0.001)
    assert actor["optimizer"] == pytest.approx(12 * POLICY / 8, rel=0.001)
    assert actor["gradients"] == pytest.approx(2 * POLICY / 8, rel=0.001)
    assert actor["buffers"] == 2 * POLICY < 2 * 50_000_000  # all gradients; configs/ds/zero3.json would have more
    assert planned.phases["experience"]["copies"]["weights"] == 2 * POLICY  # the actor's alone
    assert of_role(planned, "experience", "reference")["gathered"] == 2 * POLICY  # in whole for all passes


def test_the_copy_that_a_checkpoint_is_written_from_is_the_hosts(path):
    """Of both ranks together the masters and moments, from the first checkpoint on; on CPUs too."""
    load = dataclasses.replace(WORKLOAD, checkpoints=True)
    for stage in range(4):
        planned = plan(spec_of(path, stage, ema_decay=0.9), load, Cluster(gpus=2))
        held = planned.host_phases["train"]
        assert held["actor"]["checkpoint"] == pytest.approx(12 * POLICY, rel=0.001)
        assert held["critic"]["checkpoint"] == pytest.approx(12 * SCORER, rel=0.001)
        assert held["ema"]["checkpoint"] == pytest.approx(4 * POLICY, rel=0.001)
        assert "ema" not in planned.host_phases["load"]
    size = f"{(16 * POLICY + 12 * SCORER) / 2 / 1e9:.4f} GB a rank"
    assert planned.checkpoints == f"written while training goes on, from copies in host memory of {size}"
    assert plan(spec_of(path, 3), WORKLOAD, Cluster(gpus=2)).checkpoints == ""


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("fits", [True, False])
def test_a_copy_that_host_memory_has_no_room_for_is_not_made(path, on_gpu, fits):
    """It may take 0.9 of what is free between two steps."""
    spec, load = spec_of(path, 0), dataclasses.replace(WORKLOAD, checkpoints=True)
    copy = 12 * (POLICY + SCORER)
    held = 0 if on_gpu else (2 + 2 + 12) * (POLICY + SCORER)  # frozen models, weights, masters and moments
    cluster = Cluster(host=round(held + copy / 0.9) + (10 if fits else -10), on_gpu=on_gpu)
    planned = plan(spec, load, cluster)
    assert ("checkpoint" in planned.host_phases["train"].get("actor", {})) == fits
    without = f"training waits while they are written, as host memory has no room for copies of {copy / 1e9:.4f} GB"
    assert planned.checkpoints.startswith("written while training goes on" if fits else without)
    assert f"\ncheckpoints: {planned.checkpoints}\n" in table(planned, "")


@pytest.mark.parametrize("stage", [2, 3])
def test_masters_and_moments_of_16_bits_take_half(path, tmp_path, stage):
    low = {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    (tmp_path / "ds.json").write_text(json.dumps(low))
    spec = dataclasses.replace(spec_of(path, stage), actor=EngineConfig("actor", stage, path=str(tmp_path / "ds.json")))
    planned = plan(spec, WORKLOAD, Cluster(gpus=4))
    assert of_role(planned, "generate", "actor")["optimizer"] == pytest.approx(6 * POLICY / 4, rel=0.001)
    assert of_role(planned, "generate", "critic")["optimizer"] == pytest.approx(12 * SCORER / 4, rel=0.001)


def test_offloaded_states_are_the_hosts(path):
    one_pass = dataclasses.replace(WORKLOAD, micro_batch=16)
    planned = plan(spec_of(path, 2, offload=True), one_pass, Cluster(gpus=2))
    assert "optimizer" not in of_role(planned, "generate", "actor")
    # Of both ranks: masters, moments and their gradients in float32, and weights on their way.
    host = planned.host_phases["generate"]["actor"]
    assert host["optimizer"] == pytest.approx(12 * POLICY, rel=0.001)
    assert host["gradients"] == pytest.approx(4 * POLICY, rel=0.001)
    # Sums over passes, in 16 bits, of weights that lie in a partition, whole or in part; these stay between steps. The
    # matrices are shared out within the second layer's gate: before it are embedding, a layer and four projections.
    several = plan(spec_of(path, 2, offload=True), WORKLOAD, Cluster(gpus=2)).host_phases["generate"]["actor"]
    second = 2 * VOCABULARY * WIDTH + LAYERS * LAYER_MATRICES - (VOCABULARY * WIDTH + LAYER_MATRICES + 4 * WIDTH**2)
    norms = 4 * WIDTH  # of seven
    assert several["gradients"] == pytest.approx(4 * POLICY + 2 * 2 * (second + norms), rel=0.001)


def test_through_partitions_nothing_is_fetched_ahead_in_generation(path):
    spec = spec_of(path, 3, ema_decay=0.99)
    planned = plan(spec, dataclasses.replace(WORKLOAD, backend="zero3"), Cluster(gpus=2))
    moments = {(one.phase, one.name): one for one in planned.moments}
    drawn = moments["generate", "responses are drawn"].device.by_role["actor"]
    assert drawn["gathered"] == 2 * 2 * VOCABULARY * WIDTH  # the embedding, larger than a layer, and what it came in
    # All gradients fit into one bucket, which is reduced when the pass is over: its copy, and no gathered weights.
    one_pass = plan(spec, dataclasses.replace(WORKLOAD, backend="zero3", micro_batch=16), Cluster(gpus=2))
    reduced = {one.name: one for one in one_pass.moments}["actor's gradients are reduced"].device.by_role["actor"]
    assert "gathered" not in reduced and reduced["buffers"] == 2 * 2 * POLICY
    # While weights are read the largest is whole, and read as one piece; there is no optimizer yet.
    read = moments["load", "actor is read"]
    assert read.device.by_role == {"actor": {"weights": pytest.approx(POLICY, rel=0.001)}}
    assert read.host.total == 2 * (2 * VOCABULARY * WIDTH)
    assert moments["load", "the average is made"].device.by_role["ema"]["average"] == pytest.approx(
        2 * POLICY, rel=0.01
    )


@pytest.mark.parametrize("gpus, whole, summed", [(1, 0, 0), (2, 1, 1)])
def test_over_several_passes_weights_and_gradients_are_whole(path, gpus, whole, summed):
    planned = plan(spec_of(path, 3), dataclasses.replace(WORKLOAD, backend="zero3"), Cluster(gpus=gpus))
    moments = {one.name: one.device.by_role["actor"] for one in planned.moments if one.phase == "train"}
    backward, reduced = moments["actor's backward pass"], moments["actor's gradients are reduced"]
    share = 2 * POLICY / gpus
    assert backward.get("gathered", 0) == reduced.get("gathered", 0) == whole * 2 * POLICY
    assert backward["gradients"] == pytest.approx(share + summed * 2 * POLICY, rel=0.001)
    assert reduced["gradients"] == pytest.approx(share, rel=0.001)


def test_nothing_is_kept_whole_where_memory_does_not_allow_it(path):
    """The GPU has what would be needed, less weights and gradients."""
    load = dataclasses.replace(WORKLOAD, backend="zero3")
    peak = plan(spec_of(path, 3), load, Cluster(gpus=2)).peak.device.total
    planned = plan(spec_of(path, 3), load, Cluster(gpus=2, gpu=reserved(2) + peak - 2 * 2 * POLICY))
    moments = {one.name: one.device.by_role["actor"] for one in planned.moments if one.phase == "train"}
    assert moments["actor's backward pass"]["gradients"] == pytest.approx(POLICY, rel=0.001)
    assert "gathered" not in moments["actor's gradients are reduced"] and "actor's first pass" not in moments


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_are_reduced_in_one_bucket_or_in_several(path, tmp_path, stage):
    """On one GPU, whose partition is all there is, with room in the bucket for all gradients, and for a quarter."""
    found = {}
    for name, numbers in (("one", POLICY), ("several", POLICY // 4)):
        zero = {"reduce_bucket_size": numbers, "overlap_comm": False, "contiguous_gradients": True}
        (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": stage} | zero}))
        config = EngineConfig("actor", stage, path=str(tmp_path / "ds.json"))
        planned = plan(dataclasses.replace(spec_of(path, stage), actor=config), WORKLOAD, Cluster())
        moments = {moment.name: moment.device.by_role["actor"] for moment in planned.moments}
        kinds = moments["actor's gradients are reduced"]
        found[name] = kinds["buffers"] + kinds["gradients"]
        found[f"{name}, before"] = {
            kind: moments["actor's backward pass"].get(kind, 0) for kind in ("buffers", "gradients")
        }
    # Stage 1: what is in the bucket is nowhere else. Stage 2: sums of the passes before are beside it.
    earlier = 2 * POLICY * (stage == 2)
    assert found["one"] == 2 * POLICY + 2 * POLICY + earlier  # the bucket, and where gradients come to lie
    assert found["one, before"] == {"buffers": 2 * POLICY, "gradients": 2 * POLICY}
    if stage == 1:  # with three quarters that are not in it yet
        assert found["several"] == pytest.approx(2 * (0.25 + 0.75 + 1) * POLICY, rel=0.001)
    else:  # with a copy of the bucket, which is reduced while there are activations
        assert found["several"] == pytest.approx(2 * (0.25 + 0.25 + 1) * POLICY + earlier, rel=0.001)
        assert found["several, before"]["gradients"] == 2 * POLICY + earlier


def test_keys_and_values_and_the_average(path):
    planned = plan(spec_of(path, 0, ema_decay=0.99), WORKLOAD, Cluster())
    for phase in PHASES[1:]:  # the cache stays, as copies are kept between steps
        assert of_role(planned, phase, "actor")["keys and values"] == 2 * CACHE_NUMBERS
        assert of_role(planned, phase, "ema") == {"average": 4 * POLICY}
    # Of 40 held-out prompts a rank has 20, of which 4 wait for the first rows: 64 slots more to go on in.
    evaluated = plan(spec_of(path, 0), dataclasses.replace(WORKLOAD, evaluated=40), Cluster(gpus=2))
    assert of_role(evaluated, "generate", "actor")["keys and values"] == 2 * CACHE_NUMBERS * (32 + 64) // 32
    fewer = plan(spec_of(path, 0), dataclasses.replace(WORKLOAD, evaluated=32), Cluster(gpus=2))
    assert of_role(fewer, "generate", "actor")["keys and values"] == 2 * CACHE_NUMBERS
    freed = plan(spec_of(path, 0), dataclasses.replace(WORKLOAD, between_steps="free"), Cluster())
    assert "keys and values" not in of_role(freed, "train", "actor")


def test_the_actors_copy_is_given_back_where_it_takes_most_of_what_is_free(path):
    """Beside engines with moments, and gradients of both trained models, of which two ranks have half each."""
    copy, cache, gradients = 2 * POLICY, 2 * CACHE_NUMBERS, POLICY + SCORER
    usual = plan(spec_of(path, 3), dataclasses.replace(WORKLOAD, backend="zero3"), Cluster(gpus=2))
    drawn = next(one for one in usual.moments if one.name == "responses are drawn")
    rest = sum(
        sum(kinds[kind] for kind in ("weights", "optimizer", "gradients", "buffers") if kind in kinds)
        for kinds in drawn.device.by_role.values()
    )
    for share, kept in ((0.61, 0), (0.59, copy)):
        free = rest + gradients + (copy + cache) / share
        planned = plan(spec_of(path, 3), WORKLOAD, Cluster(gpus=2, gpu=reserved(2) + int(free)))
        copies = {phase: of_role(planned, phase, "copies").get("weights", 0) for phase in PHASES[1:]}
        assert copies == {"generate": copy, "experience": copy, "train": kept, "save": kept}, share
    for share, placed in ((0.74, True), (0.76, False)):  # of a copy that no ranks may hold together
        gpu = reserved(2) + int(rest + gradients + (copy + cache) / share)
        planned = plan(spec_of(path, 3), dataclasses.replace(WORKLOAD, group=1), Cluster(gpus=2, gpu=gpu))
        assert planned.placed == placed and planned.copies.endswith("may take 75% of that") == (not placed)
        assert not dataclasses.replace(planned, cluster=Cluster(gpus=2, gpu=10**12), placed=False).fits


FACTORS = LAYERS * 2 * (4 * (WIDTH + WIDTH) + 3 * (WIDTH + MIDDLE))  # of rank 2: projections, MLP


def test_adapters_leave_two_trunks_and_states_of_the_factors(path):
    lora = LoraSpec(dim=2, only=True)
    planned = plan(spec_of(path, 0, actor_lora=lora, critic_lora=lora), WORKLOAD, Cluster())
    rest = planned.phases["generate"]
    assert set(rest) == {"actor", "critic"}  # reference and reward model compute within these
    assert rest["actor"]["weights"] == 2 * (POLICY + FACTORS)
    assert rest["actor"]["optimizer"] == 12 * FACTORS
    # The critic's head trains too, and the reward model's is kept beside it.
    assert rest["critic"]["weights"] == 2 * (SCORER + WIDTH + FACTORS)
    assert rest["critic"]["optimizer"] == 12 * (FACTORS + WIDTH)
    names = [moment.name for moment in planned.moments if moment.phase == "experience"]
    assert names == [f"{role} computes" for role in ("actor", "reference", "critic", "reward")]


def test_a_model_that_is_not_there_is_named(path, tmp_path):
    with pytest.raises(UserError, match="config.json"):
        plan(spec_of(str(tmp_path), 0), WORKLOAD, Cluster())


def test_vllm_holds_a_part_of_the_actor_while_responses_and_experience_are_made(path):
    load = dataclasses.replace(WORKLOAD, backend="vllm", parts=4)
    on_gpu = plan(spec_of(path, 3), load, Cluster(gpus=8))
    # 16 rows of 24 tokens, a key and a value each, of 2 bytes.
    held = {"weights": 2 * POLICY // 4, "keys and values": 2 * 16 * 24 * 2 * LAYERS * WIDTH}
    assert of_role(on_gpu, "generate", "vLLM") == of_role(on_gpu, "experience", "vLLM") == held
    assert of_role(on_gpu, "train", "vLLM") == {} == of_role(on_gpu, "generate", "copies").get("weights", {})
    on_cpu = plan(spec_of(path, 3), load, Cluster(gpus=8, on_gpu=False))
    assert of_role(on_cpu, "train", "vLLM") == held  # where vLLM cannot sleep


@pytest.mark.parametrize("stage", [0, 2])
def test_a_reference_that_moves_is_a_shard_in_place_of_a_model(path, stage):
    """Beside the actor's masters, of which two ranks have half each; and one more of these while it computes."""
    usual = plan(spec_of(path, stage), WORKLOAD, Cluster(gpus=2))
    spec = spec_of(path, stage, reference_refresh_steps=5)
    moving = plan(spec, WORKLOAD, Cluster(gpus=2))
    assert of_role(usual, "train", "reference") == {"weights": 2 * POLICY}
    shard = 4 * POLICY // (2 if stage else 1)
    assert of_role(moving, "train", "reference") == {"weights": pytest.approx(shard, rel=0.001)}
    (exchange,) = [one.device.by_role for one in moving.moments if one.name == "the reference takes the actor's place"]
    most = 4 * VOCABULARY * WIDTH if stage == 0 else shard  # a master is a weight there, and all of a group here
    assert exchange["reference"]["buffers"] == pytest.approx(most, rel=0.02)
    assert "reference computes" in {one.name for one in moving.moments}
    average = plan(spec_of(path, stage, ema_decay=0.9, reference_is_ema=True), WORKLOAD, Cluster(gpus=2))
    assert of_role(average, "train", "ema") == {"average": pytest.approx(shard, rel=0.001)}
    assert "reference" not in average.phases["train"]


LORA = LoraSpec(dim=2, only=True)
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


WHOLE = {False: 2 * POLICY, True: 2 * SCORER}  # bytes in 16 bits


def training(path: str, scorer: bool, passes: int, gpu: int | None = None) -> dict[str, Bytes]:
    """The device's bytes at the moments of training, on two GPUs."""
    one = OneModel(
        path=path,
        scorer=scorer,
        engine=EngineConfig("model", 3),
        optimizer=OptimizerSpec(lr=1e-5),
        dtype="bf16",
        rows=2,
        length=24,
        passes=passes,
    )
    planned = plan_one_model(one, Cluster(gpus=2, gpu=gpu))
    return {moment.name: moment.device for moment in planned.moments if moment.phase == "train"}


@pytest.mark.parametrize("scorer", [False, True])
def test_one_model_over_several_passes_has_whole_weights_and_gradients(path, scorer):
    once, several = training(path, scorer, 1), training(path, scorer, 4)
    share, whole = WHOLE[scorer] / 2, WHOLE[scorer]
    assert several["the backward pass"].of_kind("gathered") == several["gradients are reduced"].of_kind("gathered")
    assert several["the backward pass"].of_kind("gathered") == whole
    assert several["the backward pass"].of_kind("gradients") == pytest.approx(share + whole, rel=0.001)
    assert several["gradients are reduced"].of_kind("gradients") == pytest.approx(share, rel=0.001)
    assert several["the first pass"].by_role == once["the backward pass"].by_role
    assert once["gradients are reduced"].of_kind("gathered") == 0 and "the first pass" not in once


def test_nothing_of_one_model_is_kept_whole_where_memory_does_not_allow_it(path):
    """The GPU has what would be needed, less weights and gradients."""
    needed = max(device.total for device in training(path, False, 4).values())
    assert training(path, False, 4, reserved(2) + needed - 2 * WHOLE[False]).keys() == training(path, False, 1).keys()


def test_what_is_received_and_sent():
    assert bucket_numbers(80, 10, world=4) == 80 + 20


def test_at_most_a_bucket_and_a_weight_that_no_longer_fits_into_it():
    assert bucket_numbers(10**10, 6, world=2) == 1.5 * (GATHER_BUCKET + 6)
