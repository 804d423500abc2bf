"""TRL's PPO configuration: conversions by hand, from PPOTrainer's own sizes, and what is refused."""

import json

import pytest
import yaml

from engine.algorithms import get_dialect
from engine.errors import UserError
from training.convert.__main__ import convert, main
from training.convert.trl_table import TABLE
from training.flags.parsing import parse_flags
from training.flags.rlhf_arguments import RLHFFlags

SMALL = {"dataset_name": "org/prompts", "sft_model_path": "sft", "reward_model_path": "reward", "bf16": False}


def write(tmp_path, fields: dict, name: str = "ppo.yaml") -> str:
    path = tmp_path / name
    path.write_text(json.dumps(fields) if name.endswith("json") else yaml.safe_dump(fields))
    return str(path)


def converted(tmp_path, ranks: int | None = None, **fields) -> dict:
    """The YAML's settings."""
    return yaml.safe_load(convert("trl", write(tmp_path, {**SMALL, **fields}), ranks)[0])


def parsed(tmp_path, ranks: int | None = None, **fields) -> RLHFFlags:
    """The flags that step 3 makes of them."""
    path = tmp_path / "run.yaml"
    path.write_text(convert("trl", write(tmp_path, {**SMALL, **fields}), ranks)[0])
    return parse_flags(RLHFFlags, ["--config", str(path)], "a program")


def test_an_example_of_trls_script(tmp_path):
    """1 x 16 prompts of a rank; 10000 episodes over 8 ranks are 10000 / 128 = 78.1 steps."""
    found = converted(
        tmp_path,
        8,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=16,
        total_episodes=10000,
        local_rollout_forward_batch_size=4,
        missing_eos_penalty=1.0,
        num_ppo_epochs=1,
        learning_rate="3e-6",
    )
    assert found["per_device_generation_batch_size"] * found["generation_batches"] == 16
    assert found["per_device_generation_batch_size"] == 4
    assert found["per_device_training_batch_size"] == 1 and found["gradient_accumulation_steps"] == 16
    assert found["max_steps"] == 79 and found["print_answers_interval"] == 7  # 79 // 10
    assert found["actor_learning_rate"] == found["critic_learning_rate"] == pytest.approx(3e-6)
    assert found["critic_model_name_or_path"] == "reward" and found["data_path"] == "org/prompts"
    assert found["max_answer_seq_len"] == 53 and found["seed"] == 42 and found["dtype"] == "fp32"
    assert found["missing_eos_penalty"] == 1.0 and found["ppo_epochs"] == 1


@pytest.mark.parametrize(
    "size, passes, parts, micro, steps",
    [(8, 4, 1, 8, 1), (8, 4, 2, 8, 1), (8, 4, 4, 8, 1), (8, 1, 4, 2, 4), (8, 2, 4, 4, 2)],
)
def test_optimizer_steps_are_accelerates(size, passes, parts, micro, steps, tmp_path):
    """TRL makes one after each gradient_accumulation_steps micro-batches. By hand, 8 x 2 rows in 4 parts: micro-batches
    of 4 rows, 4 in a pass, 2 of them a step: 2 steps."""
    args = parsed(
        tmp_path,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=passes,
        num_mini_batches=parts,
    )
    assert args.rows_per_rank == size * passes
    assert args.per_device_training_batch_size == micro and args.mini_batches == steps


def test_the_dialect_that_results_is_trl_ppo_with_the_given_fields(tmp_path):
    args = parsed(
        tmp_path, kl_estimator="k3", whiten_rewards=True, vf_coef=0.5, stop_token="eos", adam_beta2=0.95, cliprange=0.1
    )
    resolved, changed = args.resolved_dialect()
    assert {name: new for name, (_, new) in changed.items()} == {
        "kl_estimator": "k3",
        "whiten_rewards": True,
        "value_factor": 0.5,
        "truncate_token": "eos",
        "betas": (0.9, 0.95),
        "clip_range": 0.1,
    }
    assert resolved.replaced(**{name: old for name, (old, _) in changed.items()}) == get_dialect("trl_ppo")


def test_warm_up_is_counted_in_steps(tmp_path):
    sizes = {"per_device_train_batch_size": 4, "total_episodes": 400}  # 400 / (4 x 2 ranks) = 50
    found = converted(tmp_path, 2, warmup_ratio=0.1, **sizes)
    assert found["num_warmup_steps"] == 5 and "warmup_from_zero=true" in found["set"]
    assert converted(tmp_path, 2, warmup_steps=7, **sizes)["num_warmup_steps"] == 7
    assert converted(tmp_path, 2, warmup_steps=0.1, **sizes)["num_warmup_steps"] == 5
    assert "num_warmup_steps" not in converted(tmp_path, warmup_steps=0.1)  # of how many is not known


def test_adapters_are_the_policys_alone(tmp_path):
    found = converted(tmp_path, use_peft=True, lora_r=8, lora_target_modules=["q_proj", "v_proj"], learning_rate=1e-4)
    assert found["actor_lora_dim"] == 8 and "critic_lora_dim" not in found and found["only_optimize_lora"] is True
    assert found["lora_alpha"] == 32 and found["lora_target_modules"] == ["q_proj", "v_proj"]
    assert found["actor_lora_learning_rate"] == 1e-4


def test_what_has_no_counterpart_is_told_and_stands_in_the_file(tmp_path, capsys):
    path = write(tmp_path, {**SMALL, "load_in_4bit": True, "use_dora": False, "logging_steps": 5}, "ppo.json")
    assert main(["trl", path, "--output", str(tmp_path / "run.yaml")]) == 0
    told, text = capsys.readouterr().err, (tmp_path / "run.yaml").read_text()
    assert "load_in_4bit true: weights here are of 16 or 32 bits" in told
    assert "#   load_in_4bit true" in text and "use_dora" not in text and "#   logging_steps 5" in text
    assert main(["trl", path, "--output", str(tmp_path / "run.yaml")]) == 2
    assert "is there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"kl_coeff": 0.1}, "unknown field kl_coeff of TRL (did you mean kl_coef?)"),
        ({"total_episodes": 100}, "total_episodes needs --ranks N"),
        ({"num_mini_batches": 3}, "num_mini_batches 3 does not divide per_device_train_batch_size 8"),
        (
            {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2, "num_mini_batches": 3},
            "are no multiple",
        ),
        ({"bf16": True, "fp16": True}, "bf16 and fp16 are both on"),
        ({"per_device_train_batch_size": 1.5}, "needed is a whole number"),
        ({"learning_rate": "fast"}, "learning_rate 'fast': found no number"),
    ],
)
def test_what_is_refused(fields, message, tmp_path):
    with pytest.raises(UserError) as caught:
        converted(tmp_path, **fields)
    assert message in str(caught.value)


def test_a_model_is_uploaded_where_its_owner_is_named(tmp_path):
    args = parsed(tmp_path, push_to_hub=True, hub_model_id="me/ppo", hub_private_repo=False)
    assert (args.push_to_hub, args.hub_model_id, args.hub_private) == (True, "me/ppo", False)
    for place in ({}, {"hub_model_id": "ppo"}):
        assert not parsed(tmp_path, push_to_hub=True, **place).push_to_hub
    assert parsed(tmp_path, hub_model_id="me/ppo").hub_model_id is None


SCRIPT = """accelerate launch --config_file examples/deepspeed_zero2.yaml \\
    examples/scripts/ppo/ppo_tldr.py \\
    --dataset_name org/prompts --sft_model_path sft --reward_model_path reward --missing_eos_penalty 1.0 \\
    --whiten_rewards True --gradient_checkpointing False --ds3_gather_for_generation False --stop_token eos
"""


def test_a_script_and_its_flags_alone_are_read_too(tmp_path):
    fields = {"missing_eos_penalty": 1.0, "whiten_rewards": True, "gradient_checkpointing": False}
    wanted = converted(tmp_path, ds3_gather_for_generation=False, stop_token="eos", **fields)
    for text in (SCRIPT, SCRIPT.split("ppo_tldr.py \\")[1]):
        (tmp_path / "ppo.sh").write_text(text)
        assert yaml.safe_load(convert("trl", str(tmp_path / "ppo.sh"))[0]) == wanted | {"dtype": "bf16"}


def test_a_script_that_calls_none_is_refused_in_trls_words(tmp_path):
    (tmp_path / "ppo.sh").write_text("accelerate config\n")
    with pytest.raises(UserError, match=r"found no command that calls a script of TRL's \(\*.py\), and no flags"):
        convert("trl", str(tmp_path / "ppo.sh"))


@pytest.mark.parametrize("skip", [False, True])
def test_the_configuration_of_before_0_12_is_that_of_another_program(skip, tmp_path):
    older = {"model_name": "gpt2", "steps": 20000, "batch_size": 128, "mini_batch_size": 16, "adap_kl_ctrl": True}
    with pytest.raises(UserError) as caught:
        convert("trl", write(tmp_path, older), skip_unknown=skip)
    assert "model_name, steps, adap_kl_ctrl: fields of the PPOConfig that TRL had before 0.12" in str(caught.value)
    with pytest.raises(UserError, match="unknown field steps of TRL"):
        convert("trl", write(tmp_path, {**SMALL, "steps": 3}))  # one alone is a slip


def test_an_unknown_field_is_passed_over_on_request(tmp_path):
    path = write(tmp_path, {**SMALL, "new_thing": 1})
    text, missing = convert("trl", path, None, skip_unknown=True)
    assert "new_thing: unknown, and passed over (--skip_unknown)" in missing and "new_thing" not in yaml.safe_load(text)


def test_every_flag_of_the_table_is_one_of_step_3_and_every_setting_a_field():
    flags, fields = RLHFFlags.__dataclass_fields__, get_dialect("trl_ppo").__dataclass_fields__
    assert {flag for entry in TABLE.values() for flag in entry.flags} <= flags.keys()
    assert {name for entry in TABLE.values() for name in entry.settings} <= fields.keys()
