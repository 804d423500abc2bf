"""How a command line and a YAML file become a dataclass, and which words are refused."""

import re
from dataclasses import fields
from operator import attrgetter

import pytest

from engine.errors import UserError
from tests.training.config.command_lines import REQUIRED_FLAGS, Flags, parse, refusal
from training.config import other_systems, parsing
from training.config.parsing import parse_flags
from training.config.step3 import RLHFFlags
from training.config.supervised import RewardFlags, SFTFlags


def test_defaults_and_values():
    assert parse() == Flags(output_dir="out", size=3)
    args = parse("--size", "4", "--rate=0.5", "--color", "blue", "--quick", "--overwrite_output_dir")
    assert args == Flags(output_dir="out", size=4, rate=0.5, color="blue", quick=True, overwrite_output_dir=True)


def test_the_launchers_own_flag_is_accepted_and_not_kept():
    assert parse("--local_rank=1") == parse("--local_rank", "0") == parse()


def test_truth_values():
    assert parse("--checked", "false").checked is False and parse("--checked", "True").checked is True
    assert parse().center is None
    assert parse("--center", "true").center is True and parse("--center", "FALSE").center is False
    assert "'yes' is neither true nor false" in refusal("--center", "yes") and "--center" in refusal("--center", "yes")
    assert parse("--quick").quick is True and parse("--quick", "--quick", "false").quick is False
    assert "'maybe' is neither true nor false" in refusal("--quick", "maybe")


def test_lists():
    assert parse("--stop", "END", "a b", "--quick").stop == ["END", "a b"]
    assert "--stop" in refusal("--stop")
    first = parse()
    first.stop.append("changed")
    assert parse().stop == [], "two runs share a default list"


@pytest.mark.parametrize("words", [["--rate", "-1e-5"], ["--rate=-1e-5"], ["--rate", "-.00001"], ["--rate", "-1E-05"]])
def test_negative_numbers_are_values(words):
    assert parse(*words).rate == -1e-5


@pytest.mark.parametrize(
    "words, told",
    [
        (["--colour", "blue"], "unknown flag --colour. Did you mean --color?"),
        (["--rates=3"], "unknown flag --rates. Did you mean --rate?"),
        (["--rat", "3"], "unknown flag --rat. Did you mean --rate?"),  # and not taken for an abbreviation
        (["--zzzzzz", "3"], "unknown flag --zzzzzz. --help lists the flags."),
        (["--hel"], "unknown flag --hel. --help lists the flags."),
        (["--locl_rank", "3"], "unknown flag --locl_rank. --help lists the flags."),  # the launcher's
        (["--rat", "3", "--hel"], "unknown flag --rat. Did you mean --rate?\nunknown flag --hel. --help lists"),
        (["stray"], "'stray' belongs to no flag. --help lists the flags."),
        (["--size", "3", "4"], "'4' belongs to no flag. --help lists the flags."),
        (["-s", "3"], "'-s' belongs to no flag. --help lists the flags."),
        (["--size", "many"], "argument --size: invalid int value: 'many'. --help lists the flags."),
        (["--size", "3.5"], "argument --size: invalid int value: '3.5'. --help lists the flags."),
        (["--rate", "high"], "argument --rate: invalid float value: 'high'. --help lists the flags."),
        (["--rate"], "argument --rate: expected one argument. --help lists the flags."),
        (["--color", "green"], "argument --color: invalid choice: 'green'"),
        (["--seed", "-1"], "--seed -1: must be at least 0."),
    ],
)
def test_refusals(words, told):
    assert refusal(*words).startswith(told)


@pytest.mark.parametrize(
    "flags_class, word, told",
    [
        (
            RLHFFlags,
            "--held_out",
            "It is a flag of steps 1 and 2; here --num_eval_prompts says how many prompts are held",
        ),
        (SFTFlags, "--num_eval_prompts", "It is a flag of step 3; here --held_out says how many rows are held out."),
        (RewardFlags, "--num_eval_prompts", "It is a flag of step 3; here --held_out says how many rows are held out."),
        (SFTFlags, "--max_answer_seq_len", "It is a flag of steps 2 and 3."),
        (RewardFlags, "--kl_coef", "It is a flag of step 3."),
        (
            RLHFFlags,
            "--per_device_batch_size",  # not --per_device_train_batch_size, which is refused as renamed
            "Did you mean --per_device_training_batch_size or --per_device_generation_batch_size?",
        ),
        (
            RewardFlags,
            "--per_device_batch_size",
            "Did you mean --per_device_eval_batch_size or --per_device_train_batch",
        ),
    ],
)
def test_flags_of_other_steps_are_named(flags_class, word, told):
    assert refusal(word, "100", flags_class=flags_class).startswith(f"unknown flag {word}. {told}")


@pytest.mark.parametrize("flags_class", REQUIRED_FLAGS)
def test_what_is_named_in_place_of_another_steps_flag_is_there(flags_class):
    counterparts = parsing.IN_STEP_3 if flags_class is RLHFFlags else parsing.IN_STEPS_1_AND_2
    named = {name for told in counterparts.values() for name in re.findall(r"--(\w+)", told)}
    assert named and named <= set(flags_class.__dataclass_fields__)


def test_a_missing_flag_is_named():
    with pytest.raises(UserError, match="required: --size. --help lists the flags"):
        parse_flags(Flags, ["--output_dir", "out"], "a program")


@pytest.mark.parametrize("flags_class", REQUIRED_FLAGS)
def test_help_lists_every_flag(flags_class, capsys):
    with pytest.raises(SystemExit) as end:
        parse("--help", flags_class=flags_class)
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert all(
        f"--{name} " in shown or f"--{name}\n" in shown
        for name in [*map(attrgetter("name"), fields(flags_class)), *flags_class.old_flags]
    )


def test_required_flags_are_enough():
    for flags_class in REQUIRED_FLAGS:
        parse(flags_class=flags_class)


@pytest.mark.parametrize("flags_class, old", [(SFTFlags, other_systems.SUPERVISED), (RLHFFlags, other_systems.STEP3)])
def test_old_flags_are_accepted_with_one_line_or_refused(flags_class, old):
    for name, flag_ in old.items():
        value = {bool: [], int: ["64"], float: ["0.5"], str: ["x"]}[flag_.kind]
        words, told = [*REQUIRED_FLAGS[flags_class], f"--{name}", *value], []
        if flag_.allowed is None:
            assert parse_flags(flags_class, words, "a program", told.append) == parse(flags_class=flags_class)
            assert told == [" ".join([f"--{name}", *value]) + f": {flag_.instead}"]
        else:
            with pytest.raises(UserError) as caught:
                parse_flags(flags_class, words, "a program")
            assert str(caught.value) == " ".join([f"--{name}", *value]) + f": {flag_.instead}"


def test_old_flags_whose_value_asks_for_nothing():
    told = []
    words = [*REQUIRED_FLAGS[RLHFFlags], "--enable_mixed_precision_lora", "false"]
    assert parse_flags(RLHFFlags, words, "a program", told.append) == parse(flags_class=RLHFFlags) and told == []
