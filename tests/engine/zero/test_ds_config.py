"""DeepSpeed configurations: what is shipped is accepted, what the user gives is checked before anything is loaded."""

import json

import pytest
from deepspeed.runtime.precision_config import DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from engine.errors import UserError
from engine.zero.config import CONFIG_DIR, EngineConfig, build_ds_config, stage_of_file

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
        ({"zero_optimisation": {"stage": 2}}, r"unknown key zero_optimisation\. Did you mean zero_optimization\?"),
        ({"gradient_cliping": 1.0}, r"unknown key gradient_cliping\. Did you mean gradient_clipping\?"),
        ({"xyz": 1}, r"unknown key xyz\. Known: .*zero_optimization"),
        (
            {"zero_optimization": {"overlap_com": True}},
            r"unknown key zero_optimization\.overlap_com\. Did you mean zero_optimization\.overlap_comm\?",
        ),
        ({"fp16": {"initial_scale_pwoer": 8}}, r"unknown key fp16\..*Did you mean fp16\.initial_scale_power\?"),
        (
            {"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}},
            r"zero_optimization\.offload_optimizer\.devise",
        ),
        ({"zero_optimization": {"reduce_bucket_size": "many"}}, r"zero_optimization\.reduce_bucket_size is 'many'"),
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
    with pytest.raises(UserError, match=f"{flag} 4: ZeRO has the stages 0, 1, 2 and 3"):
        build(EngineConfig(role, 4))


def test_a_file_may_not_settle_what_the_program_settles(given):
    for name, value in (
        ("train_batch_size", 64),
        ("train_micro_batch_size_per_gpu", 8),
        ("gradient_clipping", 2.0),
        ("gradient_accumulation_steps", 4),
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
    with pytest.raises(UserError, match=r"of the actor: .*ds\.json holds no JSON object"):
        build(given([{"stage": 2}]))
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


@pytest.mark.parametrize(
    "zero, named",
    [
        ({"offload_optimizer": {"device": "nvme", "nvme_path": "/ssd"}}, "offload_optimizer.device is 'nvme'"),
        ({"offload_param": {"device": "nvme", "nvme_path": "/ssd"}}, "offload_param.device is 'nvme'"),
        ({"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, "offload_optimizer.ratio is 0.5"),
        ({"zero_quantized_nontrainable_weights": True}, "zero_quantized_nontrainable_weights is True"),
        ({"offload_optimizer": {"device": "cpu", "ratio": 1.0}, "offload_param": {"device": "none"}}, None),
        ({"offload_optimizer": None, "stage3_param_persistence_threshold": 0}, None),
    ],
)
def test_what_no_restart_point_could_hold_is_refused_of_engines_that_train(given, zero, named):
    choice = given({"zero_optimization": zero}, stage=3)
    build(choice, trained=False)
    if named is None:
        build(choice)
        return
    with pytest.raises(UserError) as refusal:
        build(choice)
    assert f"{choice.path}: zero_optimization.{named}, under which no restart point can be" in str(refusal.value)


@pytest.mark.parametrize(
    "stage, size, refused", [(1, 1, True), (2, 50000001, True), (2, 50000000, False), (3, 1, False)]
)
def test_odd_buckets_are_refused_where_deepspeed_asserts_even_ones(given, stage, size, refused):
    choice = given({"zero_optimization": {"allgather_bucket_size": size}}, stage=stage)
    if not refused:
        build(choice)
        return
    with pytest.raises(UserError, match=f"ds.json: zero_optimization.allgather_bucket_size is {size}, but at stages 1"):
        build(choice)
