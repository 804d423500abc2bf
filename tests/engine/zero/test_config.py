"""DeepSpeed's configurations: what is shipped is accepted, what the user gives is checked before anything is loaded,
and what may not be asked for here is refused by name; settings of ZeRO-3 that go by the size of a layer.
"""

import json

import pytest
import torch
from deepspeed.runtime.precision_config import DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from torch import nn
from transformers import LlamaConfig, LlamaModel

from engine.errors import UserError
from engine.zero.config import (
    CONFIG_DIR,
    EngineConfig,
    build_ds_config,
    read_ds_file,
    stage_of_file,
    with_fitting_sizes,
)

SHIPPED = sorted(CONFIG_DIR.glob("*.json"))


def build(choice, dtype="fp32", **options):
    return build_ds_config(choice, dtype=dtype, micro_batch_size=4, **options)


@pytest.fixture
def given(tmp_path):
    """Writes a user's file (an object, or text as it is); returns the choice of an engine at this stage with it."""

    def write(content, stage=2, role="actor"):
        path = tmp_path / "ds.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return EngineConfig(role, stage, path=str(path))

    return write


@pytest.mark.parametrize("path", SHIPPED, ids=[path.stem for path in SHIPPED])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_every_shipped_file_is_accepted_for_its_stage(path, dtype):
    stage = int(path.stem[len("zero")])
    config = build(EngineConfig("actor", stage, path=str(path)), dtype, gradient_clipping=0.5)
    written = json.loads(path.read_text())
    assert config["zero_optimization"] == written["zero_optimization"]
    DeepSpeedZeroConfig(**config["zero_optimization"])
    DeepSpeedFP16Config(**config["fp16"])
    assert [config[name]["enabled"] for name in ("fp16", "bf16")] == [dtype == "fp16", dtype == "bf16"]
    if dtype == "fp16":
        assert config["fp16"] == {**written["fp16"], "enabled": True}
    assert config["train_micro_batch_size_per_gpu"] == 4 and config["gradient_accumulation_steps"] == 1
    assert config["gradient_clipping"] == 0.5
    assert "comment" not in config  # DeepSpeed knows no such key


def test_the_shipped_files_are_those_that_stages_and_the_flag_choose():
    names = [f"zero{stage}{offload}" for stage in range(4) for offload in ("", "_offload") if stage or not offload]
    assert [path.stem for path in SHIPPED] == names
    for path in SHIPPED:
        assert json.loads(path.read_text())["zero_optimization"]["stage"] == int(path.stem[len("zero")])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_offload_flag_chooses_the_file(stage):
    for offload in (False, True):
        zero = build(EngineConfig("actor", stage, offload))["zero_optimization"]
        assert zero["stage"] == stage
        assert ("offload_optimizer" in zero) == (offload and stage > 0)
        assert ("offload_param" in zero) == (offload and stage == 3)


def test_stage_1_does_not_overlap_its_communication():
    for offload in (False, True):  # several backwards before a step would otherwise give wrong gradients
        assert build(EngineConfig("actor", 1, offload))["zero_optimization"]["overlap_comm"] is False


@pytest.mark.parametrize("stage", [0, 3])
def test_a_frozen_model_offloads_no_optimizer(stage):
    zero = build(EngineConfig("reference", stage, offload=True), trained=False)["zero_optimization"]
    assert "offload_optimizer" not in zero and ("offload_param" in zero) == (stage == 3)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_frozen_model_has_nothing_for_stages_1_and_2(stage):
    with pytest.raises(UserError, match=f"reference: stage {stage} .*Use stage 0 or 3"):
        build(EngineConfig("reference", stage), trained=False)


def test_an_explicit_path_wins_over_the_shipped_file(given):
    config = build(given({"zero_optimization": {"reduce_bucket_size": 7}, "wall_clock_breakdown": True}))
    assert config["zero_optimization"] == {"reduce_bucket_size": 7, "stage": 2}
    assert config["wall_clock_breakdown"] is True


@pytest.mark.parametrize(
    "content, message",
    [
        ({"zero_optimisation": {"stage": 2}}, r"zero_optimisation is no key .*Did you mean zero_optimization\?"),
        ({"eigenvalue": {"enabled": True}}, r"eigenvalue is no key .*Known are zero_optimization, fp16"),
        ({"zero_optimization": {"overlap_com": True}}, r"overlap_com is True: Extra inputs are not permitted"),
        ({"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}}, r"offload_optimizer\.devise is 'cpu'"),
        ({"zero_optimization": {"reduce_bucket_size": "many"}}, r"reduce_bucket_size is 'many'"),
        ({"zero_optimization": {"mics_shard_size": 2}}, "DeepSpeed does not take it: MiCS .* has been removed"),
        ({"communication_data_type": "int7"}, "DeepSpeed does not take it: Invalid communication_data_type"),
        ({"zero_optimization": 2}, r"zero_optimization is 2, but should be a JSON object"),
        ({"bf16": True}, r"bf16 is True, but should be a JSON object"),
    ],
)
def test_unknown_keys_and_impossible_values_are_named(given, content, message):
    with pytest.raises(UserError, match=rf"ds\.json: {message}"):
        build(given(content))


@pytest.mark.parametrize(
    "role, flag", [("actor", "--actor_zero_stage"), ("critic", "--critic_zero_stage"), ("model", "--zero_stage")]
)
def test_a_stage_that_contradicts_the_flag_is_refused(given, role, flag):
    with pytest.raises(UserError, match=rf"ds\.json: zero_optimization\.stage is 3, but {flag} is 2\..*same"):
        build(given({"zero_optimization": {"stage": 3}}, role=role))


def test_a_file_may_not_settle_what_the_program_settles(given):
    for name, value in (
        ("train_batch_size", 64),
        ("train_micro_batch_size_per_gpu", 8),
        ("gradient_clipping", 2.0),
        ("gradient_accumulation_steps", 4),
        ("zero_force_ds_cpu_optimizer", True),
    ):
        with pytest.raises(UserError, match=rf"ds\.json: {name} is {value}, but the program sets it.*Leave it out"):
            build(given({name: value}), gradient_clipping=1.0)
    for section, dtype in (("fp16", "bf16"), ("bf16", "fp32")):
        with pytest.raises(UserError, match=rf"{section}\.enabled is True, but --dtype is {dtype}\..*Leave it out"):
            build(given({section: {"enabled": True}}), dtype)
    with pytest.raises(UserError, match=r"bf16\.enabled is False, but --dtype is bf16"):
        build(given({"bf16": {"enabled": False}}), "bf16")


def test_a_file_may_leave_it_to_the_program_or_say_the_same(given):
    owned = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "gradient_accumulation_steps": "auto",
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
    }
    same = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1,
        "gradient_accumulation_steps": 1,
        "fp16": {"enabled": False},
        "bf16": {"enabled": True},
    }
    for content in (owned, same, {}):
        config = build(given(content), "bf16", gradient_clipping=1.0)
        assert "train_batch_size" not in config  # DeepSpeed works it out from the others
        assert config["train_micro_batch_size_per_gpu"] == 4 and config["gradient_accumulation_steps"] == 1
        assert config["gradient_clipping"] == 1.0
        assert config["fp16"] == {"enabled": False} and config["bf16"]["enabled"] is True


def test_files_that_cannot_be_read(given, tmp_path):
    with pytest.raises(UserError, match=r"of the actor: .*ds\.json is not valid JSON .*line 2"):
        build(given('{"zero_optimization":\n'))
    for path, reason in ((tmp_path / "missing.json", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(UserError, match=rf"of the critic: cannot read .*{path.name} \({reason}"):
            build(EngineConfig("critic", 2, path=str(path)))


def test_the_stage_that_a_file_asks_for(given, tmp_path):
    assert stage_of_file(given({"zero_optimization": {"stage": 3}}).path, "actor") == 3
    assert stage_of_file(given({"zero_optimization": {}}).path, "actor") is None
    for unreadable in ("{", [], {"zero_optimization": 3}):
        assert stage_of_file(given(unreadable).path, "actor") is None  # what is wrong is said when it is built
    assert stage_of_file(str(tmp_path / "missing.json"), "actor") is None
    with pytest.raises(UserError, match=r"ds\.json: zero_optimization\.stage is 4 for the critic"):
        stage_of_file(given({"zero_optimization": {"stage": 4}}).path, "critic")


BOTH = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


def built(
    tmp_path, content: dict, stage: int = 3, dtype: str = "fp32", role: str = "actor", trained: bool = True
) -> dict:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    choice = EngineConfig(role, stage, path=str(path))
    return build_ds_config(choice, dtype=dtype, micro_batch_size=4, trained=trained)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_16_bit_masters_are_accepted_where_deepspeed_has_them(tmp_path, stage):
    assert built(tmp_path, {"bf16": BOTH}, stage, "bf16")["bf16"] == {**BOTH, "enabled": True}
    frozen = built(tmp_path, {"bf16": BOTH}, 0, "bf16", role="reference", trained=False)
    assert frozen["bf16"] == {"enabled": True}  # it has no masters


@pytest.mark.parametrize(
    "content, stage, dtype",
    [
        ({"bf16": BOTH}, 3, "fp32"),
        ({"bf16": BOTH}, 0, "bf16"),
        ({"bf16": {"bf16_master_weights_and_grads": True}}, 2, "bf16"),
        ({"bf16": {"bf16_optimizer_states": True}}, 2, "bf16"),
        ({"bf16": BOTH, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, 2, "bf16"),
    ],
)
def test_16_bit_masters_are_refused_elsewhere(tmp_path, content, stage, dtype):
    with pytest.raises(UserError, match=r"ds\.json: .* go together, with --dtype bf16 at stages 1 to 3 and without"):
        built(tmp_path, content, stage, dtype)


def test_each_engine_swaps_its_parameters_in_a_folder_of_its_own(tmp_path):
    content = {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/ssd"}}}
    paths = [
        built(tmp_path, content, role=role, trained=False)["zero_optimization"]["offload_param"]["nvme_path"]
        for role in ("reference", "reward")
    ]
    assert paths == ["/ssd/reference", "/ssd/reward"]


@pytest.mark.parametrize(
    "ranks, size, refused", [(4, 2, False), (4, 4, False), (2, 8, False), (4, 3, True), (6, 4, True)]
)
def test_hpz_groups_divide_the_ranks(tmp_path, monkeypatch, ranks, size, refused):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    content = {"zero_optimization": {"zero_hpz_partition_size": size}}
    if not refused:
        assert built(tmp_path, content)["zero_optimization"]["zero_hpz_partition_size"] == size
        return
    with pytest.raises(
        UserError, match=rf"ds\.json: .*hpz_partition_size is {size}, but {ranks} ranks cannot be divided"
    ):
        built(tmp_path, content)


DOES_NOTHING = "which does nothing at stage"


@pytest.mark.parametrize(
    "zero, stage, message",
    [
        ({"zero_hpz_partition_size": 2}, 2, f"zero_hpz_partition_size is 2, {DOES_NOTHING} 2"),
        ({"offload_param": {"device": "cpu"}}, 1, rf"offload_param is \{{'device': 'cpu'\}}, {DOES_NOTHING} 1"),
        ({"offload_optimizer": {"device": "cpu"}}, 0, f"offload_optimizer is .*, {DOES_NOTHING} 0"),
        ({"zero_quantized_weights": True}, 3, "zero_quantized_weights is True, but it rounds numbers"),
        ({"zenflow": {"topk_ratio": 0.1}}, 2, "zenflow is {'topk_ratio': 0.1}, but no checkpoint can be written"),
        ({"cpu_offload": True}, 2, "cpu_offload is True, but this is an old name of offload_optimizer"),
        ({"offload_optimizer": {"device": "nvme"}}, 3, "offload_optimizer.device is 'nvme', but no checkpoint"),
        ({"offload_param": {"device": "nvme"}}, 3, "offload_param.device is 'nvme', but no checkpoint"),
        ({"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, 3, "ratio is 0.5, but no checkpoint"),
        (
            {"offload_optimizer": {"device": "cpu", "super_offload": True}},
            3,
            "super_offload is True, but no checkpoint",
        ),
    ],
)
def test_settings_of_zero_that_would_do_nothing_or_harm_are_refused(tmp_path, zero, stage, message):
    with pytest.raises(UserError, match=rf"ds\.json: zero_optimization\..*{message}"):
        built(tmp_path, {"zero_optimization": zero}, stage)


@pytest.mark.parametrize(
    "content, message",
    [
        ({"optimizer": {"type": "AdamW"}}, "optimizer has no effect here.*use --actor_learning_rate"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel has no effect here.*use --actor_zero_stage 3"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size has no effect here.*use --sequence_parallel_size"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast has no effect here.*use --dtype"),
        ({"data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype is 'bf16', but all models compute"),
        ({"fp16": {"fp16_master_weights_and_grads": True}}, "fp16.fp16_master_.* is True, but in fp16 updates below"),
    ],
)
@pytest.mark.parametrize("trained", [True, False])
def test_what_flags_say_and_what_would_change_numbers_is_refused(tmp_path, content, message, trained):
    with pytest.raises(UserError, match=rf"ds\.json: {message}"):
        built(tmp_path, content, trained=trained)


def test_sums_in_another_dtype_are_refused_at_stage_1(tmp_path):
    content = {"data_types": {"grad_accum_dtype": "fp32"}}
    assert built(tmp_path, content, 2, "bf16")["data_types"] == {"grad_accum_dtype": "fp32"}
    with pytest.raises(UserError, match=r"ds\.json: data_types\.grad_accum_dtype at stage 1 .*Use stage 2"):
        built(tmp_path, content, 1, "bf16")


def test_what_is_off_is_taken_out(tmp_path):
    off = {
        "tensorboard": {"enabled": False, "job_name": "x"},
        "elasticity": {"enabled": False},
        "dump_state": False,
        "sparse_gradients": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "zero_quantized_weights": False,
            "offload_optimizer": {"device": "none"},
            "offload_param": None,
        },
    }
    config = built(tmp_path, off, stage=2)
    assert config["zero_optimization"] == {"stage": 2, "zero_quantized_weights": False}
    assert not config.keys() & (off.keys() - {"zero_optimization", "zero_allow_untested_optimizer"})


NAMES = ("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance")


def sizes(hidden: int, inner: int, **zero) -> list[int]:
    """The three settings for a Llama of two layers, whose file says `zero`."""
    config = LlamaConfig(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=2, num_attention_heads=32)
    module = nn.Module()
    with torch.device("meta"):
        module.model = LlamaModel(config)
    fitted = with_fitting_sizes(module, {"zero_optimization": {"stage": 3, **zero}})["zero_optimization"]
    return [fitted.get(f"stage3_{name}", fitted.get(name)) for name in NAMES]


def test_there_is_room_for_the_layer_that_computes_and_the_next():
    """A layer of Llama-7B has 4 * 4096^2 + 3 * 4096 * 11008 + 2 * 4096 = 202383360 numbers."""
    assert sizes(4096, 11008) == [202383360, 3 * 202383360, 2 * 202383360]


def test_small_layers_are_fetched_several_at_a_time():
    assert sizes(64, 128) == [30_000_000, 100_000_000, 100_000_000]


@pytest.mark.parametrize("prefix", ("stage3_", ""))
def test_what_a_file_names_is_left(prefix):
    given = {f"{prefix}{name}": number for number, name in enumerate(NAMES)}
    assert sizes(4096, 11008, **given) == [0, 1, 2]


@pytest.mark.parametrize("offload", (False, True))
def test_the_shipped_files_name_none(offload):
    zero = read_ds_file(EngineConfig("actor", 3, offload))["zero_optimization"]
    assert not {f"stage3_{name}" for name in NAMES} & zero.keys()


def test_other_stages_have_none():
    config = {"zero_optimization": {"stage": 2}}
    assert with_fitting_sizes(nn.Module(), config) == config
