"""What DeepSpeed's configurations may not ask for here is refused by name, with what to do."""

import json

import pytest

from engine.errors import UserError
from engine.zero.config import REASONS, EngineConfig, build_ds_config

BOTH = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


def build(
    tmp_path, content: dict, stage: int = 3, dtype: str = "fp32", role: str = "actor", trained: bool = True
) -> dict:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    choice = EngineConfig(role, stage, path=str(path))
    return build_ds_config(choice, dtype=dtype, micro_batch_size=4, trained=trained)


@pytest.mark.parametrize(
    "content, message",
    [
        (
            {"tensor_parallel": {"autotp_size": 2}},
            r"tensor_parallel is {'autotp_size': 2}, but all ranks .* Leave it out",
        ),
        (
            {"torch_autocast": {"enabled": True}},
            r"torch_autocast is {'enabled': True}, but .* give --dtype bf16 or fp16",
        ),
        ({"tensor_parallel": 2}, r"tensor_parallel is 2, but all ranks are given rows of their own"),
    ],
)
@pytest.mark.parametrize("trained", [True, False])
def test_what_all_engines_of_a_process_would_have_is_refused(tmp_path, content, message, trained):
    with pytest.raises(UserError, match=rf"ds\.json: {message}"):
        build(tmp_path, content, trained=trained)


def test_what_turns_it_off_is_accepted(tmp_path):
    config = build(tmp_path, {"tensor_parallel": {"autotp_size": 1}, "torch_autocast": {"enabled": False}})
    assert "tensor_parallel" not in config and "torch_autocast" not in config


def test_moments_in_another_process_are_out_of_reach(tmp_path):
    zero = {"offload_optimizer": {"device": "cpu", "super_offload": True}}
    with pytest.raises(UserError, match=r"offload_optimizer\.super_offload is True, under which no restart point can"):
        build(tmp_path, {"zero_optimization": zero})


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_16_bit_masters_are_accepted_where_deepspeed_has_them(tmp_path, stage):
    assert build(tmp_path, {"bf16": BOTH}, stage, "bf16")["bf16"] == {**BOTH, "enabled": True}
    frozen = build(tmp_path, {"bf16": BOTH}, 0, "bf16", role="reference", trained=False)
    assert frozen["bf16"] == {"enabled": True}  # it has no masters


@pytest.mark.parametrize(
    "content, stage, dtype, reason",
    [
        ({"bf16": BOTH}, 3, "fp32", "--dtype is fp32"),
        ({"bf16": BOTH}, 0, "bf16", "the stage is 0"),
        ({"bf16": {"bf16_master_weights_and_grads": True}}, 2, "bf16", "bf16_optimizer_states is not true"),
        ({"bf16": {"bf16_optimizer_states": True}}, 2, "bf16", "bf16_master_weights_and_grads is not true"),
        (
            {"bf16": BOTH, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            2,
            "bf16",
            "the optimizer is offloaded",
        ),
        ({"fp16": {"fp16_master_weights_and_grads": True}}, 2, "fp16", "in fp16 updates below 6e-8 are none"),
    ],
)
def test_16_bit_masters_are_refused_elsewhere(tmp_path, content, stage, dtype, reason):
    with pytest.raises(UserError, match=rf"ds\.json: .*{reason}.*out of the file"):
        build(tmp_path, content, stage, dtype)


def test_each_engine_swaps_its_parameters_in_a_folder_of_its_own(tmp_path):
    content = {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/ssd"}}}
    paths = [
        build(tmp_path, content, role=role, trained=False)["zero_optimization"]["offload_param"]["nvme_path"]
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
        assert build(tmp_path, content)["zero_optimization"]["zero_hpz_partition_size"] == size
        return
    with pytest.raises(
        UserError, match=rf"ds\.json: .*hpz_partition_size is {size}, but {ranks} ranks cannot be divided"
    ):
        build(tmp_path, content)


@pytest.mark.parametrize(
    "zero, stage, message",
    [
        (
            {"zero_hpz_partition_size": 2},
            2,
            r"zero_hpz_partition_size is 2, but the stage is 2: .*Change the stage, or",
        ),
        ({"offload_param": {"device": "cpu"}}, 1, r"offload_param is \{'device': 'cpu'\}, but the stage is 1"),
        (
            {"offload_optimizer": {"device": "cpu"}},
            0,
            r"offload_optimizer is .*, but the stage is 0.*Use stage 1, 2 or 3",
        ),
        (
            {"zero_quantized_weights": True},
            3,
            r"zero_quantized_weights is True, but .*zero_hpz_partition_size sends less",
        ),
        ({"zero_quantized_gradients": True}, 3, r"zero_quantized_gradients is True, but its numbers are rounded"),
        ({"mics_shard_size": 2}, 3, r"mics_shard_size is 2, but DeepSpeed itself has it no longer"),
        ({"zenflow": {"topk_ratio": 0.1}}, 2, r"zenflow is {'topk_ratio': 0.1}, but no restart point can be written"),
        ({"cpu_offload": True}, 2, r'cpu_offload is True, but .*write "offload_optimizer": \{"device": "cpu"\}'),
        ({"elastic_checkpoint": True}, 1, r"elastic_checkpoint is True, but .*restart points are the program's own"),
        (
            {"stage3_module_granularity_threshold": 9},
            3,
            r"stage3_module_granularity_threshold is 9, but decoder layers",
        ),
        (
            {"zero_hpz_partition_size": 2, "offload_param": {"device": "nvme", "nvme_path": "/ssd"}},
            3,
            r"zero_hpz_partition_size is 2 with offload_param\.device 'nvme'",
        ),
    ],
)
@pytest.mark.parametrize("trained", [True, False])
def test_settings_of_zero_that_would_do_nothing_or_harm_are_refused(tmp_path, zero, stage, message, trained):
    if not trained and (stage in (1, 2) or "offload_optimizer" in zero):
        return  # frozen engines have no such stage, and nothing to offload at stage 0
    if trained and zero.get("offload_param", {}).get("device") == "nvme":
        message = "zero_hpz_partition_size"
    with pytest.raises(UserError, match=rf"ds\.json: zero_optimization\.{message}"):
        build(tmp_path, {"zero_optimization": zero}, stage, trained=trained)


@pytest.mark.parametrize("name", sorted(name for name in REASONS if "." not in name))
def test_sections_that_would_do_nothing_or_harm_are_refused(tmp_path, name):
    with pytest.raises(
        UserError, match=rf"ds\.json: {name} is {{'enabled': True}}, but .*\. Leave it out of the file\."
    ):
        build(tmp_path, {name: {"enabled": True}})


@pytest.mark.parametrize(
    "content, told",
    [
        ({"eigenvalue": {"enabled": True}}, r"eigenvalue\. Known: aio, bf16, "),
        ({"sparse_gradients": True}, r"sparse_gradients\. Did you mean prescale_gradients\?"),
        ({"zero_optimization": {"save_muon_momentum_buffer_in_memory": True}}, r"zero_optimization\.save_muon"),
        (
            {"zero_optimization": {"overlap_com": False}},
            r"zero_optimization\.overlap_com\. Did you mean .*overlap_comm\?",
        ),
    ],
)
def test_what_is_not_listed_is_refused(tmp_path, content, told):
    """Also where DeepSpeed has it, and what may be a slip, whatever its value."""
    with pytest.raises(UserError, match=rf"ds\.json: unknown key {told}"):
        build(tmp_path, content)


def test_what_is_off_is_taken_out(tmp_path):
    off = {
        "tensorboard": {"enabled": False, "job_name": "x"},
        "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None},
        "elasticity": {"enabled": False},
        "dump_state": False,
        "sequence_parallel_size": 1,
        "zero_allow_untested_optimizer": True,
        "tensor_parallel": {"autotp_size": 0},
        "sparse_gradients": False,
        "checkpoint": {"load_universal": False},
        "zero_optimization": {
            "zero_quantized_weights": False,
            "offload_optimizer": {"device": "none"},
            "offload_param": None,
            "legacy_stage1": False,
        },
    }
    config = build(tmp_path, off, stage=2)
    assert config["zero_optimization"] == {"stage": 2}
    assert not config.keys() & (off.keys() - {"zero_optimization", "zero_allow_untested_optimizer"})


@pytest.mark.parametrize("name", ["param_dtype", "buffer_dtype", "keep_in_fp32_modules"])
def test_weights_and_buffers_have_one_dtype(tmp_path, name):
    with pytest.raises(UserError, match=rf"ds\.json: data_types\.{name} is 'bf16', but weights and buffers"):
        build(tmp_path, {"data_types": {name: "bf16"}}, dtype="bf16")


@pytest.mark.parametrize("name, value", [("prescale_gradients", True), ("gradient_predivide_factor", 2.0)])
def test_gradients_are_scaled_before_their_reduction_where_deepspeed_does_so(tmp_path, name, value):
    assert build(tmp_path, {name: value}, stage=0)[name] == value
    assert build(tmp_path, {name: value, "zero_optimization": {"reduce_scatter": False}}, stage=2)[name] == value
    for stage in (1, 2, 3):
        with pytest.raises(UserError, match=rf"ds\.json: {name} is {value}, .*reduce_scatter false alone\. Say so, or"):
            build(tmp_path, {name: value}, stage)


def test_dtypes_that_deepspeed_does_not_know(tmp_path):
    with pytest.raises(
        UserError, match=r"ds\.json: communication_data_type is 'int7'; DeepSpeed knows fp32, fp16, bf16"
    ):
        build(tmp_path, {"communication_data_type": "int7"})
    with pytest.raises(UserError, match=r"ds\.json: data_types\.grad_accum_dtype is 8; DeepSpeed knows fp32"):
        build(tmp_path, {"data_types": {"grad_accum_dtype": 8}})
