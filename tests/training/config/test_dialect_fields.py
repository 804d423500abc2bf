"""Fields of the dialect on the command line: under wrong names, without effect, of several flags."""

import pytest

from engine.algorithms import DIALECTS
from tests.training.config.command_lines import dialect_refusal, refusal, step3, with_rewards
from training.config.step3 import RLHFFlags


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
        (("--overlong_prompts", "truncate"), "--overlong_prompts. It is called --overlong now. truncate: give cut_"),
        (("--overlong_prompts=drop",), "--overlong_prompts. It is called --overlong now."),
        (("--name", "mine"), "--name."),
    ],
)
def test_a_field_of_the_dialect_or_an_old_name_that_is_no_flag(words, message):
    assert refusal(*words, flags_class=RLHFFlags).startswith(f"unknown flag {message}")
    if words[0] == "--kl_controller":
        assert refusal(*words, flags_class=RLHFFlags).endswith("Give --set kl_controller=adaptive.")


def test_a_field_of_the_dialect_that_is_no_key(tmp_path):
    (tmp_path / "run.yaml").write_text("kl_controller: adaptive\n")
    assert refusal("--config", str(tmp_path / "run.yaml"), flags_class=RLHFFlags).endswith(
        "run.yaml: unknown key kl_controller. kl_controller is a field of the dialect. Give --set "
        "kl_controller=adaptive."
    )


def test_the_decay_of_an_average_that_is_not_kept():
    assert dialect_refusal("--critic_model_name_or_path", "c", "--set", "ema_decay=0.5") == (
        "--set ema_decay=0.5 needs --enable_ema or --reference ema. Give that, or leave it out."
    )
    args = with_rewards("--critic_model_name_or_path", "c", "--set", "ema_decay=0.5", "--enable_ema")
    assert args.spec.ema_decay == 0.5


def test_a_dialect_that_a_script_adds_is_known(monkeypatch):
    monkeypatch.setitem(DIALECTS, "mine", DIALECTS["default"].override(name="mine", lam=0.5))
    assert step3(dialect="mine").resolved.dialect.lam == 0.5
    monkeypatch.delitem(DIALECTS, "mine")
    assert "invalid choice: 'mine'" in refusal("--dialect", "mine", flags_class=RLHFFlags)


def test_a_penalty_of_0_on_the_command_line_takes_no_field_from_the_file():
    file = {"set": ["missing_end_value=-2"]}
    assert RLHFFlags.not_overridden(file, {"missing_eos_penalty": 0.0}) == file
    assert RLHFFlags.not_overridden(file, {"missing_eos_penalty": 1.0}) == {}
