"""What a dialect refuses, alone and together, what follows from its fields, what of a run leaves them without effect,
and how dialects are printed side by side.
"""

import dataclasses
import subprocess
import sys

import pytest
import torch

from engine.algorithms import (
    DIALECTS,
    Algorithm,
    Dialect,
    check_conversations,
    check_effect,
    check_sizes,
    get_dialect,
    parse_settings,
)
from engine.algorithms.__main__ import main
from engine.algorithms.losses import Losses
from engine.algorithms.table import GROUP_DIALECTS
from engine.errors import UserError
from engine.rollout import SamplingConfig
from tests.engine.algorithms.system_fields import DEEPSPEED_CHAT


# What each system's source says, in every field; a new field needs a value here too.
def test_override_replaces_what_is_given_and_leaves_none():
    changed = get_dialect("deepspeed_chat").override(kl_coef=0.02, ppo_epochs=None, score_clip=None, gamma=0.0)
    assert dataclasses.asdict(changed) == {**DEEPSPEED_CHAT, "kl_coef": 0.02, "gamma": 0.0}
    assert get_dialect("deepspeed_chat").kl_coef == 0.1
    assert get_dialect("openai").override(truncate_token="", truncate_after=0).truncate_token == ""


def test_an_unknown_field_is_refused_with_the_nearest():
    with pytest.raises(UserError, match="'kl_coeff' does not exist; did you mean kl_coef?") as caught:
        get_dialect("default").override(kl_coeff=0.1)
    assert "value_clip_range" in str(caught.value)  # and all that are known
    with pytest.raises(UserError, match=r"'zzz' does not exist\. Known: name, kl_coef"):
        get_dialect("default").override(zzz=None)


@pytest.mark.parametrize(
    "name, changed, message",
    [
        ("default", {"whiten_over": "world"}, "whiten_over 'world': known are all_ranks, rank."),
        ("default", {"lam": 1.5}, "lam 1.5: must be at most 1."),
        ("default", {"lr_schedule": "exponential"}, "lr_schedule 'exponential': known are linear, cosine, constant"),
        ("default", {"betas": (0.9, 1.0)}, "betas (0.9, 1.0): each must be less than 1."),
        ("default", {"kl_coef": float("inf")}, "kl_coef inf: must be finite."),
        ("default", {"temperature_offset": -1.0}, "temperature_offset -1.0: logits would be divided by 0.0"),
        ("trl_rloo", {"samples_per_prompt": 1}, "samples_per_prompt 1: RLOO compares"),
        (
            "default",
            {"old_logprobs": "sampler", "kl_positions": "one_past"},
            "old_logprobs 'sampler': the sampler knows",
        ),
        ("openai", {"sampling": "until_eos"}, "old_logprobs 'sampler': the sampler knows"),
        ("trl_rloo", {"critic_start": "zero_head"}, "critic_start 'zero_head': RLOO has no critic"),
        ("trl_rloo", {"critic_lr": 1e-5}, "critic_lr 1e-05: there is no critic"),
        ("trl_rloo", {"critic_weight_decay": 0.1}, "critic_weight_decay 0.1: there is no critic"),
        ("trl_rloo", {"advantages_at": "mini_batch"}, "advantages_at 'mini_batch': RLOO needs all responses"),
        ("trl_rloo", {"whiten_rewards": True}, "whiten_rewards True: RLOO has one reward"),
        ("default", {"critic_start": "none"}, "critic_start 'none': GAE needs a critic"),
        ("default", {"ratio": "response"}, "ratio 'response': GAE has one advantage a token"),
        (
            "default",
            {"correction": "token"},
            "correction 'token': known are none, token_truncate, token_mask, sequence_",
        ),
        ("default", {"correction_min": 1.5}, "correction_min 1.5: must be at most 1."),
        ("default", {"correction_max": 0.5}, "correction_max 0.5: as the upper bound of a ratio it must be at least 1"),
        ("default", {"correction": "token_tv"}, "correction_max 2.0: with correction 'token_tv' it is the largest"),
        (
            "gspo",
            {"correction": "sequence_binary_kl", "correction_max": 0.01},
            "correction 'sequence_binary_kl': with one ratio a response",
        ),
        ("rloo", {"surrogate": "sapo"}, "surrogate 'sapo': it has one ratio a token. Set ratio to 'token'"),
        (
            "default",
            {"correction": "token_mask", "old_logprobs": "sampler"},
            "correction 'token_mask': it makes up for the difference between old log-probs and the sampler's",
        ),
        (
            "trl_rloo",
            {"correction": "token_truncate", "old_logprobs": "forward"},
            "correction 'token_truncate': with one ratio a response",
        ),
        ("openai", {"actor_weight_decay": 0.1}, "optimizer 'tf_adam': it has no weight decay"),
        ("openai", {"kl_coef": 0.0}, "kl_coef 0.0: an adaptive coefficient is multiplied"),
        ("default", {"truncate_after": 3}, "truncate_after 3: it says from where on"),
        ("deepspeed_chat_2023", {"truncate_token": "eos"}, "truncate_token 'eos': sampling 'without_eos'"),
        ("deepspeed_chat_2023", {"missing_end": "replace"}, "missing_end 'replace': with sampling 'without_eos'"),
        ("grpo", {"samples_per_prompt": 1}, "samples_per_prompt 1: GRPO compares the responses to one prompt"),
        ("reinforce_pp_baseline", {"samples_per_prompt": 1}, "samples_per_prompt 1: REINFORCE_BASELINE compares"),
        ("grpo", {"advantages_at": "mini_batch"}, "advantages_at 'mini_batch': GRPO needs all responses"),
        ("default", {"advantage_scale": "group"}, "advantage_scale 'group': GAE has no difference of rewards within"),
        (
            "reinforce_pp_baseline",
            {"advantage_scale": "batch"},
            "advantage_scale 'batch': REINFORCE_BASELINE has no difference of rewards within a group that could be",
        ),
        ("reinforce_pp", {"ratio": "response_mean"}, "ratio 'response_mean': REINFORCE has one advantage a token"),
        ("gspo", {"loss_scope": "response"}, "loss_scope 'response': one ratio a response gives one loss a response"),
        ("rloo", {"loss_scope": "fixed_length"}, "loss_scope 'fixed_length': one ratio a response gives one loss"),
        ("gspo", {"correction": "token_mask"}, "correction 'token_mask': with one ratio a response there is one loss"),
        ("dapo", {"dual_clip": 1.28}, "dual_clip 1.28: it is for ratios that clipping leaves alone, over 1.28. Give"),
        ("default", {"dual_clip": 1.1}, "dual_clip 1.1: it is for ratios that clipping leaves alone, over 1.2."),
        ("openai", {"cut_responses": "closed"}, "cut_responses 'closed': responses end with '.' (truncate_token) here"),
        ("rloo", {"kl_times_ratio": True}, "kl_times_ratio True: it is for a penalty in the loss. Set kl_in to"),
    ],
)
def test_what_cannot_go_together_is_refused_with_the_reason(name, changed, message):
    with pytest.raises(UserError) as caught:
        get_dialect(name).override(**changed)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "name, given, message",
    [
        (
            "trl_rloo",
            ["kl_coef", "critic_epochs"],
            "critic_epochs None: the dialect trl_rloo has no critic. Leave it out",
        ),
        ("trl_rloo", ["value_clip_range"], "value_clip_range 0.2: the dialect trl_rloo has no critic."),
        ("trl_rloo", ["gamma"], "gamma 1.0: the dialect trl_rloo has no critic, nor a discount."),
        ("trl_rloo", ["value_lam"], "value_lam None: the dialect trl_rloo has no critic."),
        (
            "trlx",
            ["kl_target"],
            "kl_target 6.0: it has no effect where kl_controller is 'fixed'. Change",
        ),
        ("deepspeed_chat_2023", ["missing_end_value"], "missing_end_value 0.0: it has no effect where missing_end is"),
        ("default", ["score_order"], "score_order 'scale_clip': scores are not both scaled and clipped."),
        (
            "deepspeed_chat",
            ["whiten_over"],
            "whiten_over 'all_ranks': it has no effect where whiten_advantages is False and whiten_rewards is False.",
        ),
        ("default", ["decay"], "decay 'matrices': it has no effect where actor_weight_decay is 0.0 and critic_weight"),
        ("openai", ["warmup_from_zero"], "warmup_from_zero False: it has no effect where warmup_steps is 0."),
        ("default", ["temperature_in_logprobs"], "temperature_in_logprobs True: the temperature is 1, which changes"),
    ],
)
def test_a_field_without_effect_is_refused_where_it_is_given(name, given, message):
    with pytest.raises(UserError) as caught:
        check_effect(get_dialect(name), given)
    assert str(caught.value).startswith(message)
    check_effect(get_dialect(name), [])


@pytest.mark.parametrize(
    "name, given",
    [
        ("trl_rloo", ["actor_lr"]),
        ("openai", ["kl_target", "lam", "missing_end_value", "whiten_over", "temperature_in_logprobs"]),
        ("summarize", ["decay"]),
        ("default", ["critic_lr"]),
        ("trl_rloo", ["critic_lr"]),  # 0, as an estimator without a critic needs it in a dialect with one
    ],
)
def test_a_field_with_effect_is_let_through(name, given):
    check_effect(get_dialect(name), given)


@pytest.mark.parametrize(
    "name, run, message",
    [
        ("default", {"rows_per_rank": 1}, "whiten_advantages over a batch of one response (advantages_at 'rollout'"),
        ("summarize", {"rows_per_rank": 1, "ranks": 8}, "whiten_advantages over a batch of one"),
        ("openai", {"rows_per_rank": 8, "mini_batches": 8, "ranks": 2}, "whiten_advantages over a batch of one"),
        ("trlx", {"rows_per_rank": 8, "micro_batch_size": 1}, "whiten_advantages over a batch of one"),
        ("trlx", {"rows_per_rank": 5, "micro_batch_size": 4}, "whiten_advantages over a batch of one"),
    ],
)
def test_a_runs_sizes_are_checked(name, run, message):
    with pytest.raises(UserError) as caught:
        check_sizes(get_dialect(name), **run)
    assert str(caught.value).startswith(message)


def test_a_limit_that_no_epoch_follows_is_refused():
    one_pass = get_dialect("deepspeed_chat").override(early_stop_kl=0.1)
    with pytest.raises(UserError, match="early_stop_kl 0.1: ppo_epochs is 1, and no later epoch"):
        check_effect(one_pass, ["early_stop_kl"])
    check_effect(one_pass.override(ppo_epochs=2), ["early_stop_kl"])
    check_effect(get_dialect("deepspeed_chat"), ["early_stop_kl"])  # set to none


def test_a_lambda_that_nobody_reads_is_refused():
    both = get_dialect("default").override(value_lam=1.0, length_adaptive_alpha=0.05)
    with pytest.raises(UserError, match="lam 0.95: value_lam and length_adaptive_alpha say both lambdas."):
        check_effect(both, ["lam"])
    check_effect(both.replaced(value_lam=None), ["lam"])


def test_scores_of_one_response_have_no_deviation():
    scaled = get_dialect("deepspeed_chat").override(score_scaling="running")
    with pytest.raises(UserError, match="score_scaling 'running' with 1 response a step"):
        check_sizes(scaled, rows_per_rank=1)
    check_sizes(scaled, rows_per_rank=1, ranks=2)
    with pytest.raises(UserError, match="likelihood_coef 0.5 with 1 response a step"):
        check_sizes(Dialect(likelihood_coef=0.5), rows_per_rank=1)


@pytest.mark.parametrize(
    "name, run",
    [
        ("default", {"rows_per_rank": 1, "ranks": 2}),
        ("default", {"rows_per_rank": 2, "mini_batches": 2}),
        ("deepspeed_chat", {"rows_per_rank": 1}),
        ("openai", {"rows_per_rank": 8, "mini_batches": 4}),
        ("trlx", {"rows_per_rank": 8, "micro_batch_size": 1, "ranks": 2}),
        ("trl_rloo", {"rows_per_rank": 2}),
        ("trlx", {"rows_per_rank": 6, "micro_batch_size": 4}),
    ],
)
def test_what_can_work_is_let_through(name, run):
    check_sizes(get_dialect(name), **run)


def test_differences_name_both_values():
    default, chat = get_dialect("default"), get_dialect("deepspeed_chat")
    assert default.differences(default) == {}
    assert default.differences(default.override(name="mine", lam=1.0)) == {"lam": (0.95, 1.0)}
    differences = default.differences(chat)
    assert differences["score_position"] == ("last", "after_last") and differences["ppo_epochs"] == (4, 1)
    assert "name" not in differences and "gamma" not in differences
    assert chat.differences(default) == {name: pair[::-1] for name, pair in differences.items()}


def test_temperatures_of_sampling_and_of_log_probs():
    assert get_dialect("default").override(temperature=0.7).logprob_temperature == 0.7
    chat = get_dialect("deepspeed_chat").override(temperature=0.7)
    assert (chat.sampling_temperature, chat.logprob_temperature) == (0.7, 1.0)
    trl = get_dialect("trl_ppo")
    assert trl.sampling_temperature == trl.logprob_temperature == 0.7 + 1e-7


@pytest.mark.parametrize(
    "name, changed, dtypes",
    [
        ("default", {}, ["fp32"]),
        ("default", {"old_logprobs": "sampler"}, ["fp32", "fp16", "bf16"]),
        ("default", {"old_logprobs": "forward"}, []),
        ("deepspeed_chat", {}, []),
        ("trlx", {}, []),
        ("openai", {}, ["fp32", "fp16", "bf16"]),
        ("openai", {"old_logprobs": "auto"}, ["fp32"]),
        ("default", {"correction": "token_truncate"}, []),
        # nothing was drawn past the end, nor of the prompt
        ("default", {"kl_positions": "one_past"}, []),
        ("default", {"length_rule": "row"}, []),
        ("default", {"sampling": "fixed", "kl_positions": "one_past"}, ["fp32"]),
        ("default", {"sampling": "fixed", "kl_positions": "one_past", "truncate_token": "eos"}, []),
        ("default", {"kl_controller": "adaptive", "kl_measure": "exp_delta"}, []),
    ],
)
def test_where_old_log_probs_are_the_samplers(name, changed, dtypes):
    dialect = get_dialect(name).override(**changed)
    taken = [dtype for dtype in ("fp32", "fp16", "bf16") if dialect.takes_sampled_logprobs(exact=dtype == "fp32")]
    assert taken == dtypes
    # The sampler notes log-probs whatever is made of them, and entropy where no forward pass gives it.
    sampling = [
        SamplingConfig.of(dialect, (2,), dtype, max_new_tokens=4, pad_token_id=0) for dtype in ("fp32", "fp16", "bf16")
    ]
    assert [one.logprob_temperature for one in sampling] == [dialect.logprob_temperature] * 3
    assert [one.with_entropy for one in sampling] == [dtype in dtypes for dtype in ("fp32", "fp16", "bf16")]


@pytest.mark.parametrize(
    "name, positions",
    [
        ("default", 0),
        ("deepspeed_chat", 1),
        ("deepspeed_chat_2023", None),
        ("openai", 0),
        ("summarize", 1),
        ("trlx", 2),
        ("trl_ppo", 1),
        ("trl_rloo", 0),
    ],
)
def test_positions_past_the_response_that_carry_a_number(name, positions):
    assert get_dialect(name).positions_past_response == positions


def test_variance_by_the_number_of_ranks():
    def unbiased(name):
        return [get_dialect(name).unbiased_variance(ranks) for ranks in (1, 2)]

    assert unbiased("openai") == unbiased("summarize") == [False, False]
    assert unbiased("trl_ppo") == [True, True] and unbiased("trlx") == [True, False]


ONE_UPDATE = "there is one optimizer step a rollout, in which every ratio is 1"


@pytest.mark.parametrize(
    "name, changed, given, message",
    [
        ("grpo_trl", {"clip_range_high": 0.3}, "clip_range_high", f"clip_range_high 0.3: {ONE_UPDATE}"),
        ("grpo_trl", {"dual_clip": 3.0}, "dual_clip", f"dual_clip 3.0: {ONE_UPDATE}"),
        ("grpo_trl", {"surrogate": "cispo"}, "surrogate", f"surrogate 'cispo': {ONE_UPDATE}"),
        ("cispo", {"dual_clip": 7.0}, "dual_clip", "dual_clip 7.0: it has no effect where surrogate is 'cispo'."),
        ("sapo", {"clip_range": 0.1}, "clip_range", "clip_range 0.1: it has no effect where surrogate is 'sapo'."),
        (
            "default",
            {"correction": "sequence_tv", "correction_max": 0.1},
            "correction_min",
            "correction_min 0.0: it has no effect where correction is 'sequence_tv'.",
        ),
        ("dapo", {"clip_range_high": 0.2}, "clip_range_high", "clip_range_high 0.2: clip_range is the same"),
        (
            "dr_grpo",
            {"scale_eps": 1e-3},
            "scale_eps",
            "scale_eps 0.001: it has no effect where advantage_scale",
        ),
        (
            "default",
            {"scale_variance": "biased"},
            "scale_variance",
            "scale_variance 'biased': it has no effect",
        ),
        ("grpo", {"gamma": 0.9}, "gamma", "gamma 0.9: the dialect grpo has no critic, nor a discount."),
        (
            "grpo",
            {"correction_max": 5.0},
            "correction_max",
            "correction_max 5.0: it has no effect where corr",
        ),
        (
            "rloo",
            {"whiten_positions": "row", "whiten_advantages": True},
            "whiten_positions",
            "whiten_positions 'row': the dialect rloo has one advantage a response",
        ),
        ("reinforce_pp", {"lam": 0.9}, "lam", "lam 0.9: the dialect reinforce_pp has no critic."),
    ],
)
def test_what_has_no_effect_is_refused_where_it_is_given(name, changed, given, message):
    with pytest.raises(UserError) as caught:
        check_effect(get_dialect(name).override(**changed), [given])
    assert str(caught.value).startswith(message)


def test_none_takes_a_clip_away():
    dialect = get_dialect("dapo").replaced(clip_range_high=None, mini_batches=1)
    check_effect(dialect, ["clip_range_high", "mini_batches"])


@pytest.mark.parametrize("name", [dialect.name for dialect in GROUP_DIALECTS])
def test_no_layout_changes_what_is_learned_without_a_critic(name):
    dialect = get_dialect(name)
    assert not dialect.micro_batches_matter
    assert get_dialect("grpo_trl").override(loss_scope="micro_batch").micro_batches_matter


def test_what_a_sum_is_divided_by():
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])

    def count(name, **changed):
        dialect = get_dialect(name).override(**changed)
        return Algorithm(dialect, pad_token_id=0, max_response_length=10).losses.policy_count(mask).item()

    assert count("default") == count("grpo_trl") == count("dapo") == 4
    assert count("grpo") == 2 and count("grpo", min_response_tokens=0) == 3
    assert count("dr_grpo") == 30 and count("dr_grpo", min_response_tokens=1) == 20
    assert count("gspo") == count("rloo") == 3


def test_a_fixed_length_has_to_be_known():
    with pytest.raises(AssertionError, match="'fixed_length' without a length"):
        Losses(get_dialect("dr_grpo"))


# What each system's source says, in every field; a new field needs a value here too.
def test_the_table_has_all_fields_of_all_dialects():
    table, meanings = main([], width=1000).split("\n\n")
    head, rule, *rows = table.splitlines()
    assert [line.split(maxsplit=1)[0] for line in meanings.splitlines()] == [row.split()[0] for row in rows]
    assert "\nlam                     lambda of GAE\n" in meanings
    assert head.split() == list(DIALECTS) and set(rule) == {"-", " "}
    assert [row.split()[0] for row in rows] == [field.name for field in dataclasses.fields(Dialect)][1:]
    by_name = {row.split()[0]: row.split()[1:] for row in rows}
    assert by_name["kl_coef"] == (
        ["0.1", "0.1", "0.02", "0.15", "0.05", "0.001", "0.05", "0.05", "0.04", *["0"] * 6, "0.01", "1e-05", "0.05"]
    )
    assert by_name["score_clip"] == ["5", "5", "5", "-", "-", "10", *["-"] * 9, "10", "-", "-"]
    assert by_name["whiten_rewards"] == ["no", "no", "no", "yes", *["no"] * 14]


def test_two_dialects_only_where_they_differ():
    head, _, *rows = main(["summarize", "trl_ppo"]).split("\n\n")[0].splitlines()
    assert head.split() == ["summarize", "trl_ppo"]
    assert {tuple(row.split()) for row in rows} == {
        ("truncate_token", "eos", "-"),
        ("missing_end", "replace", "none"),
        ("missing_end_value", "-1", "0"),
        ("whiten_variance", "biased", "unbiased"),
        ("eps", "1e-05", "1e-08"),
        ("actor_weight_decay", "0.01", "0"),
        ("critic_weight_decay", "0.01", "0"),
    }


def test_a_narrow_terminal_gets_several_tables():
    for width, printed in ((90, main([], width=90)), (160, main([]))):
        *tables, _ = printed.split("\n\n")
        assert [name for table in tables for name in table.splitlines()[0].split()] == list(DIALECTS)
        assert max(len(line) for table in tables for line in table.splitlines()) <= width


@pytest.mark.slow
def test_the_command_prints_and_refuses():
    def run(*words):
        return subprocess.run([sys.executable, "-m", "engine.algorithms", *words], capture_output=True, text=True)

    assert run("trlx").stdout.splitlines()[0].split() == ["trlx"]
    refused = run("openai", "opeanai")
    assert refused.returncode == 2 and refused.stdout == "" and len(refused.stderr.splitlines()) == 1
    assert "'opeanai': known are default, deepspeed_chat," in refused.stderr


NO_CONVERSATIONS = {  # what a user has to set before the dialect takes them
    "deepspeed_chat": "score_before_pad=false length_rule=sampled kl_positions=response score_position=last "
    "value_positions=response",
    "deepspeed_chat_2023": "sampling=until_eos score_before_pad=false length_rule=sampled kl_positions=response "
    "value_positions=response",
    "openai": "sampling=until_eos truncate_token= truncate_after=0 length_rule=sampled",
    "summarize": "sampling=until_eos truncate_token= score_before_pad=false length_rule=sampled score_position=last "
    "value_positions=response value_loss_positions=response",
    "trlx": "length_rule=sampled kl_positions=response score_position=last value_positions=response "
    "whiten_positions=response",
    "trl_ppo": "sampling=until_eos score_before_pad=false length_rule=sampled score_position=last "
    "value_positions=response value_loss_positions=response",
    "trl_rloo": "sampling=until_eos score_before_pad=false length_rule=sampled",
}


@pytest.mark.parametrize("name", DIALECTS)
def test_dialects_take_conversations_or_say_what_to_set(name):
    dialect = get_dialect(name)
    if name not in NO_CONVERSATIONS:
        assert {"sampling": "until_eos", "length_rule": "sampled"}.items() <= dataclasses.asdict(dialect).items()
        check_conversations(dialect)
        return
    with pytest.raises(UserError) as caught:
        check_conversations(dialect)
    settings = NO_CONVERSATIONS[name]
    assert f"the dialect {name} has " in str(caught.value)
    assert f"Give --set {settings}, or another --dialect" in str(caught.value)
    given = parse_settings(settings.split())
    check_effect(dialect.replaced(**given), list(given))
    check_conversations(dialect.replaced(**given))


def test_what_a_dialect_has_is_named():
    with pytest.raises(
        UserError, match="the dialect openai has sampling 'fixed', truncate_token '\\.', truncate_after 16"
    ):
        check_conversations(get_dialect("openai"))
