"""What the plan says of weights, gradients, optimizer states, caches, copies and adapters, against arithmetic by hand.

Nothing but configurations stands in the models' folders: no weights, no tokenizer.
"""

import dataclasses
import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from engine.errors import UserError
from tests.training.tools.memory.configurations import (
    CACHE_NUMBERS,
    LAYER,
    LAYERS,
    MIDDLE,
    POLICY,
    SCORER,
    VOCABULARY,
    WIDTH,
    flags_of,
    llama,
)
from training.config.parsing import parse_flags
from training.config.supervised import RewardFlags, SFTFlags
from training.tools.memory.cluster import Cluster
from training.tools.memory.meta_model import meta_models
from training.tools.memory.plan import PHASES, MemoryPlan, plan, plan_one_model, table


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return llama(tmp_path_factory.mktemp("llama"))


def of(planned: MemoryPlan, name: str, role: str, host: bool = False) -> dict[str, int]:
    """{kind: bytes} of a role at the peak of a phase, or at a moment."""
    moment = planned.peak_of(name) if name in PHASES else next(one for one in planned.moments if one.name == name)
    return {kind: size for (whose, kind), size in (moment.host if host else moment.device).items() if whose == role}


def test_mixed_precision_adam_takes_16_bytes_a_number_on_one_gpu(path):
    planned = plan(flags_of(path, 0), Cluster())
    for role, numbers in (("actor", POLICY), ("critic", SCORER)):
        kinds = of(planned, "critic's optimizer step", role)
        assert kinds["weights"] == 2 * numbers
        assert kinds["gradients"] == 2 * numbers
        assert kinds["optimizer"] == 4 * numbers + 8 * numbers  # masters, and two moments
    assert of(planned, "critic's optimizer step", "critic")["buffers"] == 4 * SCORER  # its gradients in float32
    assert of(planned, "train", "reference") == {"weights": 2 * POLICY}
    assert of(planned, "train", "reward") == {"weights": 2 * SCORER}
    assert planned.host == 2 * POLICY  # while it is loaded


def test_each_reward_model_is_counted_with_its_own_weights_stage_and_length(path, tmp_path):
    LlamaConfig.from_pretrained(path, num_hidden_layers=1).save_pretrained(tmp_path)
    activations = {}
    for limit in (24, 48):
        flags = flags_of(path, 3, f"--reward_model_name_or_path {path} {tmp_path} --max_reward_seq_len {limit}")
        flags.__dict__["text_reward_paths"] = [str(tmp_path)]  # these folders have no tokenizers, which would tell
        planned = plan(flags, Cluster(gpus=2))
        assert of(planned, "generate", "reward") == {"weights": SCORER}  # half of two bytes each
        assert of(planned, "generate", "reward_2") == {"weights": SCORER - (LAYERS - 1) * LAYER}
        activations[limit] = of(planned, "reward_2 computes", "reward_2")["activations"]
    assert activations[48] == pytest.approx(2 * activations[24], rel=0.05)
    assert "reward_2" in table(planned, "")


def test_in_float32_the_weights_are_their_own_masters(path):
    actor = of(plan(flags_of(path, 0, dtype="fp32"), Cluster()), "generate", "actor")
    assert (actor["weights"], actor["optimizer"]) == (4 * POLICY, 8 * POLICY)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stages_divide_masters_and_moments_and_3_all(path, stage):
    planned = plan(flags_of(path, stage, "--rollout_backend replica"), Cluster(gpus=4))
    actor = of(planned, "generate", "actor")
    assert actor["optimizer"] == pytest.approx(12 * POLICY / 4, rel=0.001)
    assert actor["weights"] == pytest.approx(2 * POLICY / (4 if stage == 3 else 1), rel=0.001)
    if stage == 3:
        assert actor["gradients"] == pytest.approx(2 * POLICY / 4, rel=0.001)
        assert of(planned, "experience", "copy") == {"weights": 2 * POLICY}  # the actor's alone
        assert of(planned, "reference computes", "reference")["gathered"] == 2 * POLICY  # in whole for all passes


def test_masters_and_moments_of_16_bits_take_half(path, tmp_path):
    low = {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}} | low))
    planned = plan(flags_of(path, 2, f"--actor_ds_config {tmp_path}/ds.json"), Cluster(gpus=4))
    assert of(planned, "generate", "actor")["optimizer"] == pytest.approx(6 * POLICY / 4, rel=0.001)
    assert of(planned, "generate", "critic")["optimizer"] == pytest.approx(12 * SCORER / 4, rel=0.001)


def test_offloaded_states_are_the_hosts(path):
    planned = plan(flags_of(path, 2, "--offload"), Cluster(gpus=2))
    assert "optimizer" not in of(planned, "generate", "actor")
    host = of(planned, "generate", "actor", host=True)
    assert host["optimizer"] == pytest.approx(12 * POLICY / 2, rel=0.001)
    assert host["gradients"] == pytest.approx(4 * POLICY / 2, rel=0.001)  # in float32
    weights = of(plan(flags_of(path, 3, "--offload"), Cluster(gpus=2)), "generate", "actor", host=True)["weights"]
    assert weights == pytest.approx(2 * POLICY / 2, rel=0.001)


def test_the_copy_that_a_checkpoint_is_written_from_is_the_hosts_if_there_is_room(path):
    """Of both ranks together the masters and moments. It may take 0.9 of what is free between two steps."""
    flags = flags_of(path, 0, "--save_steps 1 --enable_ema")
    copy = round((12 * POLICY + 12 * SCORER + 4 * POLICY) / 2)
    assert plan(flags, Cluster(gpus=2)).checkpoint == pytest.approx(copy, rel=0.001)
    assert plan(flags_of(path, 0), Cluster(gpus=2)).checkpoint == 0
    for spare, expected in ((10, copy), (-10, 0)):
        planned = plan(flags, Cluster(gpus=2, host=2 * round(copy / 0.9) + spare))
        assert planned.checkpoint == pytest.approx(expected, rel=0.001)


@pytest.mark.parametrize("passes, whole", [(4, 1), (1, 0)])
def test_several_passes_at_stage_3_keep_whole_weights_and_gradients(path, passes, whole):
    sizes = f"--per_device_training_batch_size {16 // passes} --gradient_accumulation_steps {passes}"
    flags = flags_of(path, 3, f"--rollout_backend zero3 {sizes}")
    actor = of(plan(flags, Cluster(gpus=2)), "actor's backward pass", "actor")
    assert actor["gathered"] == (1 if whole else 2) * 2 * POLICY  # fetched layers are there twice, if they are small
    assert actor["gradients"] == pytest.approx(POLICY + whole * 2 * POLICY, rel=0.001)


def test_a_pass_of_a_group_may_have_the_rows_of_all_its_ranks(path):
    """16 rows on one rank are as many tokens for a rank as 32 rows on two."""

    def activations(ranks: int) -> int:
        flags = flags_of(path, 0, f"--packing packed --sequence_parallel_size {ranks}")
        sizes = {"per_device_training_batch_size": 16 * ranks, "gradient_accumulation_steps": None}
        planned = plan(dataclasses.replace(flags, **sizes), Cluster(gpus=2))
        return of(planned, "actor's backward pass", "actor")["activations"]

    assert activations(2) == pytest.approx(activations(1), rel=0.1)


def test_nothing_is_kept_whole_where_memory_does_not_allow_it(path):
    """The GPU has what would be needed, less weights and gradients."""
    flags, cluster = flags_of(path, 3, "--rollout_backend zero3"), Cluster(gpus=2)
    peak = plan(flags, cluster).peak.device.total()
    planned = plan(flags, Cluster(gpus=2, gpu=cluster.reserved + peak - 2 * 2 * POLICY))
    assert of(planned, "actor's backward pass", "actor")["gradients"] == pytest.approx(POLICY, rel=0.001)


def test_a_single_update_reads_the_weights_of_the_copy(path):
    once = "--rollout_backend replica --ppo_epochs 1"
    assert "gathered" not in of(plan(flags_of(path, 3, once), Cluster(gpus=2)), "actor's backward pass", "actor")
    again = plan(flags_of(path, 3, "--rollout_backend replica"), Cluster(gpus=2))
    assert of(again, "actor's backward pass", "actor")["gathered"] == 2 * POLICY


def test_keys_and_values_and_the_average(path):
    planned = plan(flags_of(path, 0, "--enable_ema"), Cluster())
    for phase in PHASES:  # the cache stays, as copies are kept between steps
        assert of(planned, phase, "actor")["keys and values"] == 2 * CACHE_NUMBERS
        assert of(planned, phase, "ema") == {"weights": 4 * POLICY}
    # Of 40 held-out prompts a rank has 20, of which 4 wait for the first rows: 64 slots more to go on in.
    evaluated = plan(flags_of(path, 0, "--num_eval_prompts 40"), Cluster(gpus=2))
    assert of(evaluated, "generate", "actor")["keys and values"] == 2 * CACHE_NUMBERS * (32 + 64) // 32
    freed = plan(flags_of(path, 0, "--replicas_between_steps free"), Cluster())
    assert "keys and values" not in of(freed, "train", "actor")


def test_a_copy_without_room_is_given_back_or_refused_as_a_run_does(path):
    """engine/rollout/placement.py, of what is free beside engines and gradients: of 32 + 64 slots a row here."""
    copy, cache, gradients = 2 * POLICY, 2 * CACHE_NUMBERS * (32 + 64) // 32, POLICY + SCORER
    usual = plan(flags_of(path, 3, "--rollout_backend zero3"), Cluster(gpus=2))
    drawn = next(one for one in usual.moments if one.name == "responses are drawn").device
    kinds = ("weights", "optimizer", "gradients", "buffers")
    rest = sum(size for (_, kind), size in drawn.items() if kind in kinds)
    for share, kept, placed in ((0.59, copy, True), (0.61, 0, True), (0.76, 0, False)):
        gpu = Cluster(gpus=2).reserved + int(rest + gradients + (copy + cache) / share)
        planned = plan(flags_of(path, 3, "--inference_tp_size 1"), Cluster(gpus=2, gpu=gpu))
        assert of(planned, "train", "copy").get("weights", 0) == kept, share
        assert planned.placed == placed


def test_vllm_holds_a_part_of_the_actor_while_responses_and_experience_are_made(path):
    flags = flags_of(path, 3, "--rollout_backend vllm --vllm_tensor_parallel_size 4")
    on_gpu = plan(flags, Cluster(gpus=8))
    # 16 rows of 24 tokens, a key and a value each, of 2 bytes.
    held = {"weights": 2 * POLICY // 4, "keys and values": 2 * 16 * 24 * 2 * LAYERS * WIDTH}
    assert of(on_gpu, "generate", "vLLM") == of(on_gpu, "experience", "vLLM") == held
    assert of(on_gpu, "train", "vLLM") == {} == of(on_gpu, "generate", "copy")
    assert of(plan(flags, Cluster(gpus=8, on_gpu=False)), "train", "vLLM") == held  # where vLLM cannot sleep


@pytest.mark.parametrize("stage", [0, 2])
def test_a_reference_that_moves_is_a_shard_in_place_of_a_model(path, stage):
    """In float32, beside the actor's masters, of which two ranks have half each at stage 2."""
    planned = plan(flags_of(path, stage, "--reference_refresh_steps 5"), Cluster(gpus=2))
    shard = 4 * POLICY // (2 if stage else 1)
    assert of(planned, "train", "reference") == {"weights": pytest.approx(shard, rel=0.001)}
    assert "reference computes" in {one.name for one in planned.moments}


FACTORS = LAYERS * 2 * (4 * (WIDTH + WIDTH) + 3 * (WIDTH + MIDDLE))  # of rank 2: projections, MLP
QUERIES = LAYERS * 2 * (WIDTH + WIDTH)  # of rank 2, in q_proj alone
LORA = "--actor_lora_dim 2 --critic_lora_dim 2 --only_optimize_lora"


def test_adapters_leave_two_trunks_and_states_of_the_factors(path):
    planned = plan(flags_of(path, 0, LORA), Cluster())
    assert {role for role, _ in planned.peak_of("generate").device} == {"actor", "critic"}
    actor, critic = (of(planned, "generate", role) for role in ("actor", "critic"))
    assert (actor["weights"], actor["optimizer"]) == (2 * (POLICY + FACTORS), 12 * FACTORS)
    # The critic's head trains too, and the reward model's is kept beside it.
    assert (critic["weights"], critic["optimizer"]) == (2 * (SCORER + WIDTH + FACTORS), 12 * (FACTORS + WIDTH))
    names = [moment.name for moment in planned.moments if moment.phase == "experience"]
    assert names == [f"{role} computes" for role in ("actor", "reference", "critic", "reward")]


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
    planned = plan(flags_of(actor, 0, LORA, critic), Cluster())
    actor, critic = (of(planned, "generate", role) for role in ("actor", "critic"))
    assert (actor["weights"], actor["optimizer"]) == (2 * (POLICY + 2 * QUERIES), 12 * QUERIES)
    assert (critic["weights"], critic["optimizer"]) == (2 * (SCORER + WIDTH + 2 * QUERIES), 12 * (QUERIES + WIDTH))


@pytest.mark.parametrize(("modules", "numbers"), [(("q_proj",), POLICY - VOCABULARY * WIDTH), (("lm_head",), POLICY)])
def test_a_tied_head_with_an_adapter_in_it_is_a_matrix_of_its_own(base, tmp_path, modules, numbers):
    config = Path(base) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    found = meta_models(flags_of(adapter(tmp_path / "actor", base, modules=modules), 0, critic=base).spec)
    assert (found["actor"].numbers, found["reference"].numbers) == (numbers, numbers)


def test_one_trunk_has_the_adapters_that_its_roles_start_from(base, tmp_path):
    """Actor and reference, critic and reward model: four adapters and two heads; half of them train."""
    actor, judge = adapter(tmp_path / "actor", base), adapter(tmp_path / "judge", base, "SEQ_CLS")
    planned = plan(flags_of(actor, 0, f"{LORA} --share_trunk", judge), Cluster())
    kinds = of(planned, "generate", "actor")
    assert kinds["weights"] == 2 * (POLICY + 2 * WIDTH + 4 * QUERIES)
    assert kinds["optimizer"] == 12 * (2 * QUERIES + WIDTH)
    assert {moment.name for moment in planned.moments} >= {"critic computes", "critic's backward pass"}
    assert "critic's optimizer step" not in {moment.name for moment in planned.moments}


def test_a_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match="config.json"):
        plan(flags_of(str(tmp_path), 0), Cluster())


@pytest.mark.parametrize("program, numbers", [(SFTFlags, POLICY), (RewardFlags, SCORER)])
def test_one_model_over_several_passes_has_whole_weights_and_gradients(path, tmp_path, program, numbers):
    words = f"--model_name_or_path {path} --data_path x --output_dir {tmp_path} --dtype bf16 --zero_stage 3"
    words += " --max_seq_len 24 --per_device_train_batch_size 2 --gradient_accumulation_steps "
    for passes in (1, 4):
        planned = plan_one_model(parse_flags(program, [*words.split(), str(passes)], ""), Cluster(gpus=2))
        kinds = of(planned, "the backward pass", "model")
        assert kinds["gathered"] == (1 if passes > 1 else 2) * 2 * numbers
        assert kinds["gradients"] == pytest.approx(numbers + (passes > 1) * 2 * numbers, rel=0.001)
