"""Flags: how a command line becomes a dataclass, which values are refused, what a run of step 3 amounts to."""

from dataclasses import dataclass, fields
from operator import attrgetter

import pytest

from engine.algorithms import DIALECTS
from engine.errors import UserError
from training.flags import deepspeed_chat
from training.flags.arguments import REQUIRED, RunFlags, flag, parse_flags
from training.flags.dialect_flags import DIALECT_FLAGS
from training.flags.rlhf_arguments import RLHFFlags
from training.flags.supervised_arguments import RewardFlags, SFTFlags

SUPERVISED = ["--data_path", "d.jsonl", "--output_dir", "out", "--model_name_or_path", "m"]
REQUIRED_FLAGS = {
    SFTFlags: SUPERVISED,
    RewardFlags: SUPERVISED,
    RLHFFlags: [
        "--data_path",
        "d.jsonl",
        "--output_dir",
        "out",
        "--actor_model_name_or_path",
        "sft",
        "--critic_model_name_or_path",
        "reward",
    ],
}


@dataclass(kw_only=True)
class Flags(RunFlags):
    """One flag of each kind."""

    size: int = flag(REQUIRED, "a number that must be given")
    rate: float | None = flag(None, "a number that may be left out")
    color: str = flag("red", "one of two", choices=("red", "blue"))
    quick: bool = flag(False, "off unless given")
    checked: bool = flag(True, "on unless said otherwise")
    center: bool | None = flag(None, "neither, unless said")
    stop: list[str] = flag([], "texts")


def parse(*words: str, flags_class: type = Flags):
    given = REQUIRED_FLAGS.get(flags_class, ["--output_dir", "out", "--size", "3"])
    if "--ema_decay" in words:
        given = [*given, "--enable_ema"]
    return parse_flags(flags_class, [*given, *words], "a program")


def step3(**values) -> RLHFFlags:
    return parse(*(word for name, value in values.items() for word in (f"--{name}", str(value))), flags_class=RLHFFlags)


def refusal(*words: str, flags_class: type = Flags) -> str:
    with pytest.raises(UserError) as caught:
        parse(*words, flags_class=flags_class)
    return str(caught.value)


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


AT_LEAST = {  # flag: (the highest value that is refused, the lowest that is taken, what the message says)
    RLHFFlags: {
        **dict.fromkeys(
            (
                "max_prompt_seq_len",
                "max_answer_seq_len",
                "per_device_generation_batch_size",
                "generation_batches",
                "num_samples_per_prompt",
                "per_device_training_batch_size",
                "gradient_accumulation_steps",
                "num_train_epochs",
                "max_steps",
                "ppo_epochs",
            ),
            (0, 1),
        ),
        **dict.fromkeys(
            (
                "seed",
                "num_eval_prompts",
                "critic_warmup_steps",
                "num_warmup_steps",
                "eval_steps",
                "save_steps",
                "print_answers_interval",
            ),
            (-1, 0),
        ),
        **dict.fromkeys(
            (
                "kl_coef",
                "max_grad_norm",
                "actor_weight_decay",
                "critic_weight_decay",
                "actor_learning_rate",
                "critic_learning_rate",
                "gamma",
                "lam",
                "ema_decay",
                "unsup_coef",
            ),
            (-1e-6, 0.0),
        ),
        **dict.fromkeys(("temperature", "clip_range", "value_clip_range", "score_clip"), (0.0, 1e-6)),
    },
    SFTFlags: {
        **dict.fromkeys(
            (
                "per_device_train_batch_size",
                "per_device_eval_batch_size",
                "gradient_accumulation_steps",
                "num_train_epochs",
            ),
            (0, 1),
        ),
        "max_seq_len": (1, 2),
        "seed": (-1, 0),
        "num_warmup_steps": (-1, 0),
        **dict.fromkeys(("learning_rate", "weight_decay", "max_grad_norm"), (-1e-6, 0.0)),
        "held_out": (0.0, 1e-6),
    },
    RewardFlags: {
        "max_prompt_seq_len": (0, 1),
        "max_answer_seq_len": (0, 1),
        "normalization_samples": (-1, 0),
        "temperature": (0.0, 1e-6),
        "per_device_train_batch_size": (0, 1),
        "learning_rate": (-1e-6, 0.0),
    },
}


@pytest.mark.parametrize(
    "flags_class, name, refused, taken",
    [(flags_class, name, *bounds) for flags_class, flags in AT_LEAST.items() for name, bounds in flags.items()],
)
def test_lower_bounds(flags_class, name, refused, taken):
    message = refusal(f"--{name}", str(refused), flags_class=flags_class)
    assert message.startswith(f"--{name} {refused}: must be ")
    assert getattr(parse(f"--{name}", str(taken), flags_class=flags_class), name) == taken


@pytest.mark.parametrize("name", ("gamma", "lam", "ema_decay"))
def test_upper_bounds(name):
    assert refusal(f"--{name}", "1.001", flags_class=RLHFFlags) == f"--{name} 1.001: must be at most 1."
    assert getattr(step3(**{name: 1}), name) == 1.0


@pytest.mark.parametrize("name", ("kl_coef", "temperature", "gamma"))
def test_nan_is_no_value(name):
    assert refusal(f"--{name}", "nan", flags_class=RLHFFlags).startswith(f"--{name} nan: must be")


@pytest.mark.parametrize(
    "flags_class, name",
    [
        (RLHFFlags, "actor_zero_stage"),
        (RLHFFlags, "critic_zero_stage"),
        (SFTFlags, "zero_stage"),
        (RewardFlags, "zero_stage"),
    ],
)
def test_zero_stages(flags_class, name):
    for stage in ("4", "-1"):
        told = refusal(f"--{name}", stage, flags_class=flags_class)
        assert told == f"--{name} {stage}: ZeRO has the stages 0, 1, 2 and 3."
    for stage in range(4):
        assert getattr(parse(f"--{name}", str(stage), flags_class=flags_class), name) == stage


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


@pytest.mark.parametrize("generated, micro, accumulation", [(16, 5, 1), (16, 16, 2), (16, 3, 5), (12, 8, 1)])
def test_batch_sizes_that_do_not_divide(generated, micro, accumulation):
    told = refusal(
        "--per_device_generation_batch_size",
        str(generated),
        "--per_device_training_batch_size",
        str(micro),
        "--gradient_accumulation_steps",
        str(accumulation),
        flags_class=RLHFFlags,
    )
    assert f"each rank makes {generated} responses" in told and f"no multiple of the {micro * accumulation} " in told
    assert f"--per_device_training_batch_size {micro} x --gradient_accumulation_steps {accumulation}" in told


def test_offload_needs_something_to_offload():
    assert refusal("--offload", flags_class=SFTFlags).startswith("--offload with --zero_stage 0")
    told = refusal("--offload", "--ds_config", "x.json", flags_class=SFTFlags)
    assert told.startswith("--offload and --ds_config x.json contradict each other")
    default = DIALECTS["default"]  # which engines step 3 has is its dialect's affair
    for given, told in (
        (["--actor_zero_stage", "2"], "--offload with --critic_zero_stage 0"),
        (["--actor_ds_config", "x.json"], "--offload and --actor_ds_config x.json contradict"),
    ):
        with pytest.raises(UserError, match=told):
            parse("--offload", *given, flags_class=RLHFFlags).engine_spec(default)
    args = parse("--offload", "--actor_zero_stage", "2", "--critic_zero_stage", "3", flags_class=RLHFFlags)
    assert args.engine_spec(default).critic.offload


def test_flags_that_are_not_given_leave_the_dialect_alone():
    for name, dialect in DIALECTS.items():
        resolved, changed = step3(dialect=name).resolved_dialect()
        assert resolved == dialect and changed == {}


def test_given_flags_override_the_dialect_and_are_listed():
    resolved, changed = step3(
        dialect="deepspeed_chat",
        kl_coef=0.2,
        ppo_epochs=3,
        whiten_advantages="true",
        actor_learning_rate=2e-5,
        lr_scheduler_type="linear",
    ).resolved_dialect()
    assert changed == {
        "kl_coef": (0.1, 0.2),
        "ppo_epochs": (1, 3),
        "whiten_advantages": (False, True),
        "actor_lr": (9.65e-6, 2e-5),
        "lr_schedule": ("cosine", "linear"),
    }
    assert resolved.name == "deepspeed_chat" and resolved.reward_slots == "one_past"
    assert (resolved.kl_coef, resolved.ppo_epochs, resolved.actor_lr, resolved.critic_lr) == (0.2, 3, 2e-5, 5e-6)


def test_zero_and_false_are_given_values():
    args = step3(kl_coef=0, max_grad_norm=0, num_warmup_steps=0, whiten_advantages="false")
    resolved, changed = args.resolved_dialect()
    assert (resolved.kl_coef, resolved.max_grad_norm, resolved.warmup_steps) == (0, 0, 0)
    assert resolved.whiten_advantages is False
    assert set(changed) == {"kl_coef", "max_grad_norm", "warmup_steps", "whiten_advantages"}


def test_a_flag_that_repeats_the_dialect_is_no_departure():
    usual = DIALECTS["default"]
    assert step3(kl_coef=usual.kl_coef, ppo_epochs=usual.ppo_epochs).resolved_dialect()[1] == {}


OTHER_VALUES = {  # each unlike every dialect's
    "actor_learning_rate": 0.125,
    "critic_learning_rate": 0.125,
    "num_warmup_steps": 7,
    "lr_scheduler_type": "constant",
    "old_logprobs": "sampler",
    "num_samples_per_prompt": 3,
    "kl_coef": 0.625,
    "score_clip": 2.5,
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
    resolved, changed = step3(**{name: other}).resolved_dialect()
    assert changed == {field: (getattr(DIALECTS["default"], field), False if other == "false" else other)}
    assert getattr(resolved, field) == changed[field][1]


def with_rewards(*words: str):
    """Flags of a run with a reward model and no critic's path."""
    return parse_flags(
        RLHFFlags,
        [
            "--data_path",
            "d",
            "--output_dir",
            "o",
            "--actor_model_name_or_path",
            "a",
            "--reward_model_name_or_path",
            "r",
            *words,
        ],
        "a program",
    )


def told(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        with_rewards(*words).resolved_dialect()
    return str(caught.value)


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
    resolved, changed = with_rewards(*words).resolved_dialect()
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
    assert args.resolved_dialect()[1] == {
        "kl_controller": ("fixed", "adaptive"),
        "kl_target": (6.0, 3.0),
        "lam": (0.95, 0.9),
        "gamma": (1.0, 0.8),
    }
    assert with_rewards("--critic_model_name_or_path", "c").set == []
    assert told("--set", "kl_target=4", "--config", str(tmp_path / "run.yaml")).startswith(
        "'kl_target=4': kl_target is set twice."
    )


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
        (("--dialect", "trl_rloo", "--num_samples_per_prompt", "1"), "samples_per_prompt 1: RLOO compares"),
        (("--dialect", "trl_rloo", "--critic_learning_rate", "1e-5"), "critic_lr 1e-05: there is no critic"),
        (
            ("--dialect", "trlx", "--per_device_generation_batch_size", "6"),
            "batch sizes do not divide: each rank makes 6",
        ),
        (("--dialect", "openai", "--stop", "x"), "--stop x: the dialect's sampling is 'fixed'"),
        (("--dialect", "openai", "--max_answer_seq_len", "16"), "truncate_after 16 with --max_answer_seq_len 16: no"),
        ((), "--critic_model_name_or_path is missing"),
    ],
)
def test_contradictions_of_the_dialect_are_refused(words, message):
    assert told(*words).startswith(message)


def test_mini_batches_come_from_the_dialect_or_from_accumulation():
    assert with_rewards("--dialect", "trlx").mini_batches == 4
    args = with_rewards(
        "--dialect", "trlx", "--per_device_training_batch_size", "4", "--gradient_accumulation_steps", "2"
    )
    assert args.mini_batches == 2 and args.resolved_dialect()[1] == {"mini_batches": (4, 2)}


def test_a_run_without_critic_needs_a_reward_model_alone():
    args = with_rewards("--dialect", "trl_rloo")
    assert (args.reward_path, args.samples_per_prompt, args.rows_per_rank) == ("r", 2, 32)


@pytest.mark.parametrize(
    "words, message",
    [
        (("--ema_decay", "0.5"), "--ema_decay 0.5 needs --enable_ema."),
        (("--stop", ""), "--stop '': an empty string"),
        (("--actor_dropout", "0.1"), "--actor_dropout 0.1: PPO compares"),
        (("--data_weights", "1", "2"), "--data_weights 1 2: 2 weights for 1 data sets"),
        (("--data_weights", "0"), "--data_weights 0: a weight says how often"),
        (("--enable_test_mode",), "--enable_test_mode and --test_stop_step N (1 or more) go together"),
        (("--test_stop_step", "3"), "--enable_test_mode and --test_stop_step N (1 or more) go together"),
        (("--unsupervised_dataset_config_name", "x"), "--unsupervised_dataset_config_name x needs"),
        (("--reward_function_weight", "2"), "--reward_function_weight 2.0 needs --reward_function."),
        (
            ("--reward_function", "m:f", "--reward_model_weight", "2"),
            "--reward_model_weight 2.0: there is no reward model",
        ),
        (
            ("--reward_function", "m:f", "--offload_reward_model"),
            "--offload_reward_model is given, but there is no reward",
        ),
        (("--missing_eos_penalty", "nan"), "--missing_eos_penalty nan: must be finite."),
        (("--wandb_project", "p", "--enable_tensorboard", "false"), "--wandb_project needs --enable_tensorboard true"),
        (("--tensorboard_path", " "), "--tensorboard_path ' ': no name of a file or folder."),
        (("--actor_learning_rate", "inf"), "--actor_learning_rate inf: must be finite."),
        (("--seed", str(2**31)), f"--seed {2**31}: must be at most {2**31 - 1}."),
        (
            ("--offload_reward_model", "--reward_ds_config", "x.json"),
            "--offload_reward_model and --reward_ds_config x.json",
        ),
    ],
)
def test_flags_that_would_do_nothing_or_harm_are_refused(words, message):
    with pytest.raises(UserError) as caught:
        parse_flags(RLHFFlags, [*REQUIRED_FLAGS[RLHFFlags], *words], "a program")
    assert str(caught.value).startswith(message)


def test_the_critic_may_be_left_out_where_a_function_scores():
    flags = [*REQUIRED_FLAGS[RLHFFlags][:-2]]
    with pytest.raises(UserError, match="--critic_model_name_or_path is missing"):
        parse_flags(RLHFFlags, flags, "a program")
    assert parse_flags(RLHFFlags, [*flags, "--reward_function", "m:f"], "a program").reward_path is None


def test_which_model_gives_the_scores():
    assert step3().reward_path == "reward"
    assert step3(reward_model_name_or_path="other").reward_path == "other"
    assert step3(reward_function="m:f").reward_path is None
    assert step3(reward_function="m:f", reward_model_name_or_path="other").reward_path == "other"


@pytest.fixture
def config(tmp_path):
    def write(text: str) -> str:
        (tmp_path / "run.yaml").write_text(text)
        return str(tmp_path / "run.yaml")

    return write


def test_a_yaml_file_says_what_flags_say(config):
    path = config(
        "size: 7\nrate: 1e-3\nquick: true\nchecked: false\ncolor: blue\nstop: [a b, END]\ncenter:\n"
        "output_dir: elsewhere\n"
    )
    args = parse_flags(Flags, ["--config", path], "a program")
    assert args == Flags(
        config=path,
        output_dir="elsewhere",
        size=7,
        rate=1e-3,
        quick=True,
        checked=False,
        color="blue",
        stop=["a b", "END"],
    )


def test_the_command_line_wins_over_the_file(config):
    path = config("size: 7\nquick: true\nstop: [a]\n")
    args = parse("--config", path, "--quick", "false", "--stop", "b", "c")
    assert (args.size, args.quick, args.stop) == (3, False, ["b", "c"])


@pytest.mark.parametrize(
    "text, told",
    [
        ("sise: 3", "run.yaml: unknown key sise. Did you mean size?"),
        ("zzzzzz: 3", "run.yaml: unknown key zzzzzz. --help lists the flags."),
        ("3: 3", "run.yaml: unknown key 3."),
        ("config: x", "run.yaml: unknown key config."),
        ("local_rank: 3", "run.yaml: unknown key local_rank."),
        ("size: many", "run.yaml, key size: argument --size: invalid int value: 'many'"),
        ("size: [3, 4]", "run.yaml, key size: [3, 4] is more than one value."),
        ("size: {a: 1}", "run.yaml, key size: {'a': 1} is no text, number, truth value or list of these."),
        ("stop: [a, null]", "run.yaml, key stop: ['a', None] is no text"),
        ("stop: [a, --quick]", "run.yaml, key stop: a value that begins with -- cannot stand in a list."),
        ("color: green", "run.yaml, key color: argument --color: invalid choice: 'green'"),
        ("size: 3\nsize: 4", "run.yaml, line 2: no valid YAML (the key size stands there twice)."),
        ("size: [3", "run.yaml, line 1: no valid YAML"),
        ("just words", "run.yaml: found 'just words'; needed lines like"),
        ("", "run.yaml: found nothing; needed lines like"),
    ],
)
def test_mistakes_in_the_file(config, text, told):
    assert told in refusal("--config", config(text))


def test_a_file_that_cannot_be_read(tmp_path):
    assert refusal("--config", str(tmp_path / "none.yaml")).endswith("cannot be read (No such file or directory).")
    (tmp_path / "bad.yaml").write_bytes(b"size: \xff")
    assert "bad.yaml: cannot be read" in refusal("--config", str(tmp_path / "bad.yaml"))


@pytest.mark.parametrize("flags_class, old", [(SFTFlags, deepspeed_chat.SUPERVISED), (RLHFFlags, deepspeed_chat.STEP3)])
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
    for words in (["--actor_lora_dim", "0"], ["--inference_tp_size", "1"]):
        told = []
        args = parse_flags(RLHFFlags, [*REQUIRED_FLAGS[RLHFFlags], *words], "a program", told.append)
        assert args == parse(flags_class=RLHFFlags) and told == []
    assert parse("--only_optimize_lora", "false", flags_class=RLHFFlags) == parse(flags_class=RLHFFlags)


def test_steps_of_a_supervised_run():
    words = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2", "--num_train_epochs", "3"]
    args = parse(*words, flags_class=SFTFlags)
    assert (args.steps_per_epoch(17), args.total_steps(17)) == (2, 6)  # 17 examples: two times 8, one left over
    assert parse(*words, "--max_steps", "5", flags_class=SFTFlags).total_steps(17) == 5
    with pytest.raises(UserError, match="7 examples are too few for one optimizer step"):
        args.total_steps(7)
