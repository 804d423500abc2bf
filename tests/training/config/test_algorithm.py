"""What the flags of step 3 make of a dialect, its fields on the command line, and the batch sizes; which models give
the scores.
"""

import pytest

from engine.algorithms import DIALECTS
from engine.errors import UserError
from tests.training.config.command_lines import REQUIRED_FLAGS, dialect_refusal, refusal, step3, with_rewards
from training.config.algorithm import DIALECT_FLAGS, Resolved
from training.config.parsing import parse_flags
from training.config.step3 import RLHFFlags


@pytest.mark.parametrize(
    "generated, batches, samples, micro, accumulation, mini_batches",
    [
        (16, 1, 1, 16, None, 1),  # the defaults: one optimizer step
        (16, 1, 1, 5, None, 1),  # all responses in one optimizer step, however they are cut into passes
        (4, 2, 3, 8, 1, 3),  # 24 responses, 8 a step
        (4, 2, 3, 4, 3, 2),  # 24 responses, 12 a step
        (4, 2, 3, 24, 1, 1),
        (4, 2, 3, 1, 1, 24),
    ],
)
def test_batch_sizes_that_divide(generated, batches, samples, micro, accumulation, mini_batches):
    more = {} if accumulation is None else {"gradient_accumulation_steps": accumulation}
    args = step3(
        per_device_generation_batch_size=generated,
        generation_batches=batches,
        num_samples_per_prompt=samples,
        per_device_training_batch_size=micro,
        **more,
    )
    assert args.rows_per_rank == generated * batches * samples
    assert args.mini_batches == mini_batches


@pytest.mark.parametrize(
    "generated, batches, micro, accumulation, divides",
    [(16, 1, 5, 1, 5), (16, 1, 16, 2, 2), (16, 1, 3, 5, 15), (12, 1, 8, 1, 2), (16, 3, 16, 2, 4)],
)
def test_batch_sizes_that_do_not_divide(generated, batches, micro, accumulation, divides):
    told = refusal(
        "--per_device_generation_batch_size",
        str(generated),
        "--generation_batches",
        str(batches),
        "--per_device_training_batch_size",
        str(micro),
        "--gradient_accumulation_steps",
        str(accumulation),
        flags_class=RLHFFlags,
    )
    assert (
        f"each rank makes {generated * batches} responses" in told
        and f"no multiple of the {micro * accumulation} " in told
    )
    assert f"--per_device_training_batch_size {micro} x --gradient_accumulation_steps {accumulation}" in told
    assert told.endswith(f"--generation_batches {divides} makes them divide.")


def test_flags_that_are_not_given_leave_the_dialect_alone():
    for name, dialect in DIALECTS.items():
        assert step3(dialect=name).resolved == Resolved(dialect, {})


def test_zero_and_false_are_given_values():
    args = step3(kl_coef=0, max_grad_norm=0, num_warmup_steps=0, whiten_advantages="false")
    resolved, changed = args.resolved.dialect, args.resolved.changed
    assert (resolved.kl_coef, resolved.max_grad_norm, resolved.warmup_steps) == (0, 0, 0)
    assert resolved.whiten_advantages is False
    assert set(changed) == {"kl_coef", "max_grad_norm", "warmup_steps", "whiten_advantages"}


OTHER_VALUES = {  # each unlike every dialect's
    "actor_learning_rate": 0.125,
    "critic_learning_rate": 0.125,
    "num_warmup_steps": 7,
    "lr_scheduler_type": "constant",
    "old_logprobs": "sampler",
    "num_samples_per_prompt": 3,
    "kl_coef": 0.625,
    "score_clip": 2.5,
    "likelihood_coef": 0.75,
    "cut_responses": "closed",
    "gamma": 0.875,
    "lam": 0.625,
    "clip_range": 0.125,
    "value_clip_range": 0.625,
    "ppo_epochs": 9,
    "max_grad_norm": 0.125,
    "actor_weight_decay": 0.375,
    "critic_weight_decay": 0.25,
    "temperature": 0.625,
    "ema_decay": 0.5,
}


@pytest.mark.parametrize("name, field", DIALECT_FLAGS.items())
def test_every_dialect_flag_reaches_its_field(name, field):
    other = OTHER_VALUES.get(name, "false")
    args = step3(**{name: other})
    resolved, changed = args.resolved.dialect, args.resolved.changed
    assert changed == {field: (getattr(DIALECTS["default"], field), False if other == "false" else other)}
    assert getattr(resolved, field) == changed[field][1]


def test_any_field_is_set_by_name():
    words = (
        "--critic_model_name_or_path",
        "c",
        "--set",
        "kl_controller=adaptive",
        "kl_target=3",
        "score_clip=none",
        "betas=0.8,0.99",
        "whiten_rewards=true",
        "query_end=.",
        "mini_batches=4",
    )
    args = with_rewards(*words)
    resolved, changed = args.resolved.dialect, args.resolved.changed
    assert (resolved.kl_controller, resolved.kl_target, resolved.score_clip, resolved.betas) == (
        "adaptive",
        3.0,
        None,
        (0.8, 0.99),
    )
    assert resolved.whiten_rewards is True and resolved.query_end == "." and changed["mini_batches"] == (1, 4)
    assert with_rewards(*words).mini_batches == 4


def test_fields_set_in_several_places_add_up(tmp_path):
    (tmp_path / "run.yaml").write_text("set: [kl_controller=adaptive, kl_target=3]\n")
    args = with_rewards(
        "--critic_model_name_or_path",
        "c",
        "--set",
        "lam=0.9",
        "--set",
        "gamma=0.8",
        "--config",
        str(tmp_path / "run.yaml"),
    )
    assert args.resolved.changed == {
        "kl_controller": ("fixed", "adaptive"),
        "kl_target": (6.0, 3.0),
        "lam": (0.95, 0.9),
        "gamma": (1.0, 0.8),
    }
    assert with_rewards("--critic_model_name_or_path", "c").set == []
    (tmp_path / "twice.yaml").write_text("set: [kl_target=3, kl_target=4]\n")
    assert dialect_refusal("--config", str(tmp_path / "twice.yaml")).startswith(
        "'kl_target=4': kl_target is set twice."
    )


@pytest.mark.parametrize(
    "in_file, words, field, value",
    [
        ("set: [lam=0.9, gamma=0.8]", ("--set", "lam=0.5"), "lam", 0.5),
        ("set: lam=0.9", ("--lam", "0.5"), "lam", 0.5),
        ("lam: 0.9", ("--set", "lam=0.5"), "lam", 0.5),
        ("lam: 0.9", ("--lam", "0.5"), "lam", 0.5),
        ("num_samples_per_prompt: 2", ("--set", "samples_per_prompt=4"), "samples_per_prompt", 4),
        ("set: [mini_batches=2]", ("--gradient_accumulation_steps", "1"), "mini_batches", 1),
        ("gradient_accumulation_steps: 1", ("--set", "mini_batches=4"), "mini_batches", 4),
        ("set: [missing_end=replace]", ("--missing_eos_penalty", "2"), "missing_end", "subtract"),
        ("missing_eos_penalty: 2", ("--set", "missing_end=replace"), "missing_end", "replace"),
    ],
)
def test_a_field_on_the_command_line_wins_over_the_file(tmp_path, in_file, words, field, value):
    (tmp_path / "run.yaml").write_text(f"{in_file}\nkl_coef: 0.25\n")
    args = with_rewards("--critic_model_name_or_path", "c", "--config", str(tmp_path / "run.yaml"), *words)
    dialect, changed = args.resolved.dialect, args.resolved.changed
    assert getattr(dialect, field) == value and dialect.kl_coef == 0.25
    assert dialect.gamma == (0.8 if "gamma" in in_file else 1.0), "another field of the same line is lost"
    assert set(changed) <= {field, "kl_coef", "gamma", "missing_end_value"}


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ("--set", "kl_targt=3"),
            "dialect field 'kl_targt' does not exist; did you mean kl_target? Known: name, kl_coef",
        ),
        (("--set", "kl_target"), "'kl_target': dialect fields are set as FIELD=VALUE."),
        (("--set", "kl_target=many"), "'kl_target=many': give a number."),
        (("--set", "ppo_epochs=1.5"), "'ppo_epochs=1.5': give a whole number."),
        (("--set", "whiten_rewards=1"), "'whiten_rewards=1': give true or false."),
        (("--set", "score_clip=x"), "'score_clip=x': give a number, or none."),
        (("--set", "betas=0.9"), "'betas=0.9': give two numbers: 0.9,0.95."),
        (("--set", "lam=0.9", "lam=0.8"), "'lam=0.8': lam is set twice."),
        (("--set", "name=mine"), "'name=mine': a dialect's name is not set."),
        (("--set", "lam=0.9", "--lam", "0.8"), "--set lam=0.9 and --lam 0.8 say the same."),
        (
            ("--set", "mini_batches=2", "--gradient_accumulation_steps", "1"),
            "--set mini_batches=2 and --gradient_accumul",
        ),
        (("--set", "kl_in=nowhere"), "kl_in 'nowhere': known are reward, loss."),
        (("--dialect", "trl_rloo", "--num_samples_per_prompt", "1"), "--num_samples_per_prompt 1: RLOO compares"),
        (
            ("--dialect", "trl_rloo", "--critic_learning_rate", "1e-5"),
            "--critic_learning_rate 1e-05: there is no critic",
        ),
        (
            ("--dialect", "trlx", "--per_device_generation_batch_size", "6"),
            "batch sizes do not divide: each rank makes 6",
        ),
        (("--dialect", "openai", "--stop", "x"), "--stop x: the dialect's sampling is 'fixed'"),
        (("--dialect", "openai", "--max_answer_seq_len", "16"), "truncate_after 16 with --max_answer_seq_len 16: no"),
    ],
)
def test_contradictions_of_the_dialect_are_refused(words, message):
    assert dialect_refusal(*words).startswith(message)


def test_mini_batches_come_from_the_dialect_or_from_accumulation():
    assert with_rewards("--dialect", "trlx").mini_batches == 4
    args = with_rewards(
        "--dialect", "trlx", "--per_device_training_batch_size", "4", "--gradient_accumulation_steps", "2"
    )
    assert args.mini_batches == 2 and args.resolved.changed == {"mini_batches": (4, 2)}


def test_a_run_without_critic_needs_a_reward_model_alone():
    args = with_rewards("--dialect", "trl_rloo")
    assert (args.reward_paths, args.samples_per_prompt, args.rows_per_rank) == (["r"], 2, 32)


def test_the_critic_may_be_left_out_where_a_function_scores():
    flags = [*REQUIRED_FLAGS[RLHFFlags][:-2]]
    with pytest.raises(UserError, match="--critic_model_name_or_path is missing"):
        parse_flags(RLHFFlags, flags, "a program")
    assert parse_flags(RLHFFlags, [*flags, "--reward_function", "m:f"], "a program").reward_paths == []


def test_which_model_gives_the_scores():
    assert step3().reward_paths == ["reward"]
    assert step3(reward_model_name_or_path="other").reward_paths == ["other"]
    assert step3(reward_function="m:f").reward_paths == []
    assert step3(reward_function="m:f", reward_model_name_or_path="other").reward_paths == ["other"]


def test_a_missing_end_is_one_rule():
    assert step3(missing_eos_penalty=1.5).resolved.changed == {
        "missing_end": ("none", "subtract"),
        "missing_end_value": (0.0, 1.5),
    }
    assert step3(missing_eos_penalty=0, dialect="summarize").resolved.changed == {}
    assert step3(missing_eos_penalty=2, dialect="summarize").resolved.dialect.missing_end == "subtract"
    assert dialect_refusal("--missing_eos_penalty", "1", "--set", "missing_end=replace").startswith(
        "--set missing_end=replace and --missing_eos_penalty 1.0 say the same."
    )
    assert dialect_refusal("--missing_eos_penalty", "1", "--dialect", "deepspeed_chat_2023") == (
        "--missing_eos_penalty 1.0: with sampling 'without_eos' every end would be missing. Give a truncate_token, or "
        "set missing_end to 'none'."
    )


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ("--kl_controller", "adaptive"),
            "--kl_controller. kl_controller is a field of the dialect. Give --set",
        ),
        (("--betas=0.8,0.9",), "--betas. betas is a field of the dialect. Give --set betas=0.8,0.9."),
        (
            ("--whiten_rewards", "--lam", "1"),
            "--whiten_rewards. whiten_rewards is a field of the dialect. Give --set",
        ),
        (
            ("--actor_lr", "1e-5"),
            "--actor_lr. actor_lr is a field of the dialect. Give --actor_learning_rate 1e-5, or --set actor_lr=1e-5.",
        ),
        (("--kl_coeff", "1"), "--kl_coeff. Did you mean --kl_coef?"),
        (("--name", "mine"), "--name."),
    ],
)
def test_a_field_of_the_dialect_that_is_no_flag(words, message):
    assert refusal(*words, flags_class=RLHFFlags).startswith(f"unknown flag {message}")
    if words[0] == "--kl_controller":
        assert refusal(*words, flags_class=RLHFFlags).endswith("Give --set kl_controller=adaptive.")


def test_a_dialect_that_a_script_adds_is_known(monkeypatch):
    monkeypatch.setitem(DIALECTS, "mine", DIALECTS["default"].override(name="mine", lam=0.5))
    assert step3(dialect="mine").resolved.dialect.lam == 0.5
    monkeypatch.delitem(DIALECTS, "mine")
    assert "invalid choice: 'mine'" in refusal("--dialect", "mine", flags_class=RLHFFlags)


def test_a_penalty_of_0_on_the_command_line_takes_no_field_from_the_file():
    file = {"set": ["missing_end_value=-2"]}
    assert RLHFFlags.not_overridden(file, {"missing_eos_penalty": 0.0}) == file
    assert RLHFFlags.not_overridden(file, {"missing_eos_penalty": 1.0}) == {}
