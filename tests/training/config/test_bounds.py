"""Which values of flags are refused, alone and together."""

import pytest

from engine.errors import UserError
from tests.training.config.command_lines import REQUIRED_FLAGS, parse, refusal, step3
from training.config.parsing import parse_flags
from training.config.step3 import RLHFFlags
from training.config.supervised import RewardFlags, SFTFlags

AT_LEAST = {  # flag: (a value that is refused, the lowest that is taken)
    RLHFFlags: {
        "max_answer_seq_len": (0, 1),
        "num_samples_per_prompt": (0, 1),  # a field of the dialect
        "seed": (-1, 0),
        "kl_coef": (-1e-6, 0.0),
        "temperature": (0.0, 1e-6),
    },
    SFTFlags: {"max_seq_len": (1, 2), "learning_rate": (-1e-6, 0.0), "held_out": (0.0, 1e-6)},
    RewardFlags: {"normalization_samples": (-1, 0)},
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
    for stage, limit in (("4", "at most 3"), ("-1", "at least 0")):
        told = refusal(f"--{name}", stage, flags_class=flags_class)
        assert told == f"--{name} {stage}: must be {limit}."
    for stage in range(4):
        assert getattr(parse(f"--{name}", str(stage), flags_class=flags_class), name) == stage


def test_offload_needs_something_to_offload():
    for given, told in (
        ([], "--offload with --zero_stage 0"),
        (["--ds_config", "x.json"], "--offload and --ds_config x.json contradict each other"),
    ):
        with pytest.raises(UserError, match=told):
            parse("--offload", *given, flags_class=SFTFlags).ds_settings()
    for given, told in (
        (["--actor_zero_stage", "2"], "--offload with --critic_zero_stage 0"),
        (["--actor_ds_config", "x.json"], "--offload and --actor_ds_config x.json contradict"),
    ):
        with pytest.raises(UserError, match=told):
            _ = parse("--offload", *given, flags_class=RLHFFlags).spec
    args = parse("--offload", "--actor_zero_stage", "2", "--critic_zero_stage", "3", flags_class=RLHFFlags)
    assert args.spec.critic.offload


@pytest.mark.parametrize(
    "words, message",
    [
        (("--ema_decay", "0.5"), "--ema_decay 0.5 needs --enable_ema or --reference ema. Give that, or"),
        (("--stop", ""), "--stop '': an empty string"),
        (("--data_weights", "1", "2"), "--data_weights 1 2: 2 weights for 1 data sets"),
        (("--data_weights", "0"), "--data_weights 0.0: must be greater than 0"),
        (("--data_weights", "1e300"), "--data_weights 1e+300: must be at most 1000."),
        (("--unsup_coef", "-1e-6", "--unsupervised_dataset_name", "x"), "--unsup_coef -1e-06: must be at least 0"),
        (("--unsup_coef", "3"), "--unsup_coef 3.0 needs --unsupervised_dataset_name. Give that, or leave it out."),
        (("--inference_tp_size", "2"), "--inference_tp_size 2 with the actor at ZeRO stage 0: each rank has the whole"),
        (("--enable_test_mode",), "--enable_test_mode needs --test_stop_step."),
        (("--test_stop_step", "3"), "--test_stop_step 3 needs --enable_test_mode."),
        (("--unsupervised_dataset_config_name", "x"), "--unsupervised_dataset_config_name x needs"),
        (("--reward_weights", "2"), "--reward_weights 2.0 needs --reward_function or --reward_url or --environment."),
        (
            ("--reward_function", "m:f", "m:g", "--reward_weights", "2"),
            "--reward_weights 2.0: 1 weights. They belong to m:f, m:g, in this order: give 2 or none. The reward "
            "models' weights are --reward_model_weight. To mix the reward model in by half, give "
            "--reward_model_name_or_path reward --reward_model_weight 0.5 --reward_weights 0.25 0.25.",
        ),
        (("--reward_function", "m:f", "--reward_weights", "nan"), "--reward_weights nan: must be finite."),
        (("--reward_function", "m:f", "m:f"), "--reward_function m:f m:f: m:f is given twice."),
        (("--answer_column", "solution"), "--answer_column solution needs --reward_function math_verify."),
        (
            ("--reward_function", "format", "--response_format", "(a"),
            "--response_format (a: is not a regular expression",
        ),
        (("--overlap_rewards",), "--overlap_rewards needs --reward_function or --reward_url"),
        (
            ("--reward_function", "m:f", "--reward_weights", "0", "--reward_model_weight", "0"),
            "--reward_model_weight 0.0 and --reward_weights 0.0: every score would be 0. Give one that is not.",
        ),
        (("--reward_model_weight", "0"), "--reward_model_weight 0.0: every score would be 0. Give one that is not."),
        (
            ("--reward_function", "m:f", "--reward_model_weight", "2"),
            "--reward_model_weight 2.0: there is no reward model",
        ),
        (
            ("--reward_model_name_or_path", "a", "b", "--reward_model_weight", "2"),
            "--reward_model_weight 2.0: 1 weight for 2 reward models, a, b. Give one for each, in this order, or none.",
        ),
        (
            ("--reward_model_name_or_path", "a", "b", "a"),
            "--reward_model_name_or_path a b a: a is given twice. Give it once.",
        ),
        (
            ("--reward_function", "m:f", "--offload_reward_model"),
            "--offload_reward_model: there is no reward model beside --reward_function.",
        ),
        (("--missing_eos_penalty", "nan"), "--missing_eos_penalty nan: must be finite."),
        (("--tensorboard_path", " "), "--tensorboard_path ' ': this is blank."),
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


def test_steps_of_a_supervised_run():
    words = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2", "--num_train_epochs", "3"]
    args = parse(*words, flags_class=SFTFlags)
    assert (args.steps_per_epoch(17), args.total_steps(17)) == (2, 6)  # 17 examples: two times 8, one left over
    assert parse(*words, "--max_steps", "5", flags_class=SFTFlags).total_steps(17) == 5
    with pytest.raises(UserError, match="7 examples are too few for one optimizer step"):
        args.total_steps(7)
