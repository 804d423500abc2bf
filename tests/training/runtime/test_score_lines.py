"""What a run says first of its score: a formula, and a warning of a reward model that it leaves out."""

import pytest

from tests.training.config.command_lines import parse
from training.config.step3 import RLHFFlags
from training.runtime.first_lines import score_lines

REWARD = ("--reward_model_name_or_path", "reward")
SCALED = ("score_scaling=running", "score_order=clip_scale", "missing_end=replace", "missing_end_value=-1")


def lines(*words: str) -> list[str]:
    args = parse(*words, flags_class=RLHFFlags)
    return score_lines(args, args.resolved.dialect)


@pytest.mark.parametrize(
    "words, formula",
    [
        ((), "reward model, clipped at 5"),
        (("--reward_model_weight", "2", "--dialect", "grpo"), "2 reward model"),
        (
            (*REWARD, "--reward_model_weight", "0.5", "--reward_function", "rules.py:has_number")
            + ("--reward_weights", "0.5", "--length_penalty", "0.01"),
            "0.5 reward model + 0.5 has_number - 0.01 a token, clipped at 5",
        ),
        (
            (*REWARD, "--reward_function", "a.py:f", "b.py:f", "--reward_weights", "1", "-0.2"),
            "1 reward model + 1 f - 0.2 f_2 (b.py:f), clipped at 5",
        ),
        (
            (*REWARD, "--reward_url", "http://judge:80/a?key=secret", "http://b/?key=c")
            + ("--missing_eos_penalty", "1"),
            "1 reward model + 1 reward server judge:80 and b, less 1 where a response has no end, clipped at 5",
        ),
        (
            ("--set", *SCALED, "overlong_buffer=0.25", "--max_answer_seq_len", "64"),
            "reward model, clipped at 5, divided by the standard deviation of all scores so far, replaced by -1 "
            "where a response has no end, less up to 1 in the last 25% of 64 tokens",
        ),
    ],
)
def test_the_score_is_told_as_a_formula(words, formula):
    assert lines(*words) == [f"score = {formula}"]


def test_a_reward_model_that_only_the_critic_starts_from_is_told():
    formula, warning = lines("--reward_function", "rules.py:right", "--reward_weights", "2")
    assert formula == "score = 2 right, clipped at 5"
    assert warning.startswith("WARNING: the score does not use the reward model reward, from which the critic starts.")
    assert warning.endswith("--reward_model_name_or_path reward --reward_model_weight 0.5 --reward_weights 0.5")


def test_a_pretrained_critic_could_not_score(tmp_path):
    (tmp_path / "critic_pretraining.json").write_text("{}")
    given = ("--critic_model_name_or_path", str(tmp_path), "--reward_function", "rules.py:right")
    assert lines(*given) == ["score = right, clipped at 5"]


def test_the_flags_that_are_told_mix_half_and_half():
    words = ("--reward_function", "rules.py:right", "format")
    told = lines(*words)[-1].partition("give ")[2].split()
    assert lines(*words, *told) == ["score = 0.5 reward model + 0.25 right + 0.25 format, clipped at 5"]
    assert parse(*words, *told, flags_class=RLHFFlags).spec.reward_path == "reward"
