"""What DeepSpeed's configurations may not ask for here is refused by name, with what to do."""

import json

import pytest

from engine.errors import UserError
from engine.zero.config import EngineConfig, build_ds_config
from engine.zero.limits import refuse_together

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
        ({"tensor_parallel": {"autotp_size": 2}}, r"tensor_parallel\.autotp_size is 2, .*leave tensor_parallel out"),
        ({"torch_autocast": {"enabled": True}}, r"torch_autocast\.enabled is true, .*Give --dtype bf16 or fp16"),
        ({"tensor_parallel": 2}, r"tensor_parallel is 2, but should be a JSON object"),
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


def test_hpz_groups_are_made_once_in_a_process():
    def configs(**sizes) -> dict:
        return {
            role: {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": size}} for role, size in sizes.items()
        }

    paths = {"actor": "a.json", "critic": None}
    refuse_together(configs(actor=1, critic=1), paths)
    refuse_together(configs(actor=4) | {"reward": {"zero_optimization": {"stage": 0}}}, paths)
    for critic in (1, 4):
        with pytest.raises(UserError, match=r"a\.json: .*zero_hpz_partition_size is 4 for the actor, .*critic"):
            refuse_together(configs(actor=4, critic=critic), paths)
