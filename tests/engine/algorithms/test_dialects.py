"""The named dialects, field by field; how a user changes one; what cannot go together; the printed table."""

import dataclasses
import subprocess
import sys

import pytest

from engine.algorithms import DIALECTS, Dialect, check, get_dialect
from engine.algorithms.__main__ import main
from engine.errors import UserError

# What each system's source says, in every field; a new field needs a value here too.
DEEPSPEED_CHAT = {  # microsoft/DeepSpeedExamples 83757d9c, applications/DeepSpeed-Chat
    "name": "deepspeed_chat",
    "kl_coef": 0.1,
    "kl_estimator": "k1",
    "kl_in": "reward",
    "kl_controller": "fixed",
    "kl_target": 6.0,
    "kl_horizon": 10000.0,
    "kl_measure": "k1",
    "kl_update": "step",
    "sampling": "until_eos",
    "temperature": 1.0,
    "temperature_offset": 0.0,
    "temperature_in_logprobs": False,
    "old_logprobs": "forward",
    "samples_per_prompt": 1,
    "query_start": "",
    "query_end": "",
    "truncate_token": "",
    "truncate_after": 0,
    "score_before_pad": True,
    "pad_token": "eos_unless_llama",
    "length_rule": "not_pad",
    "reward_slots": "one_past",
    "score_slot": "after_last",
    "value_slots": "one_past",
    "value_loss_slots": "response",
    "min_response_tokens": 2,
    "score_clip": 5.0,
    "score_scaling": "none",
    "score_order": "scale_clip",
    "missing_end": "none",
    "missing_end_value": 0.0,
    "advantage_estimator": "gae",
    "gamma": 1.0,
    "lam": 0.95,
    "advantages_at": "rollout",
    "whiten_rewards": False,
    "whiten_advantages": False,
    "whiten_slots": "response",
    "whiten_over": "all_ranks",
    "whiten_variance": "biased",
    "ratio": "token",
    "clip_range": 0.2,
    "value_clip_range": 0.2,
    "value_factor": 1.0,
    "loss_scope": "micro_batch",
    "early_stop_kl": None,
    "ratio_limit": None,
    "ppo_epochs": 1,
    "mini_batches": 1,
    "actor_lr": 9.65e-6,
    "critic_lr": 5e-6,
    "lr_schedule": "cosine",
    "lr_per": "optimizer_step",
    "warmup_steps": 100,
    "warmup_from_zero": True,
    "optimizer": "adamw",
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "actor_weight_decay": 0.0,
    "critic_weight_decay": 0.0,
    "decay": "deepspeed_chat",
    "max_grad_norm": 1.0,
    "critic_start": "reward_model",
    "hydra_layers": 0,
    "ema_decay": 0.992,
}
# The other systems' departures from it, so that each value stands here a second time and not by way of the table.
OTHERS = {
    "deepspeed_chat_2023": {
        "kl_coef": 0.02,
        "sampling": "without_eos",
        "reward_slots": "all",
        "value_slots": "all",
        "score_slot": "last",
    },
    "openai": {
        "kl_coef": 0.15,
        "kl_controller": "adaptive",
        "sampling": "fixed",
        "temperature": 0.7,
        "temperature_in_logprobs": True,
        "old_logprobs": "sampler",
        "query_start": ".",
        "query_end": ".",
        "truncate_token": ".",
        "truncate_after": 16,
        "score_before_pad": False,
        "pad_token": "tokenizer",
        "length_rule": "row",
        "reward_slots": "response",
        "value_slots": "response",
        "score_slot": "last",
        "min_response_tokens": 1,
        "score_clip": None,
        "missing_end": "replace",
        "missing_end_value": -1.0,
        "advantages_at": "mini_batch",
        "whiten_rewards": True,
        "whiten_advantages": True,
        "whiten_over": "rank",
        "value_factor": 0.1,
        "loss_scope": "optimizer_step",
        "ppo_epochs": 4,
        "actor_lr": 1e-5,
        "critic_lr": 1e-5,
        "lr_schedule": "linear",
        "lr_per": "step",
        "warmup_steps": 0,
        "warmup_from_zero": False,
        "optimizer": "tf_adam",
        "betas": (0.9, 0.999),
        "eps": 1e-5,
        "decay": "matrices",
        "max_grad_norm": 0.0,
        "critic_start": "zero_head",
    },
    "summarize": {
        "kl_coef": 0.05,
        "sampling": "fixed",
        "temperature": 0.7,
        "temperature_offset": 1e-7,
        "temperature_in_logprobs": True,
        "old_logprobs": "sampler",
        "truncate_token": "eos",
        "pad_token": "never_eos",
        "length_rule": "before_pad",
        "reward_slots": "response",
        "value_loss_slots": "one_past",
        "min_response_tokens": 0,
        "score_clip": None,
        "missing_end": "replace",
        "missing_end_value": -1.0,
        "whiten_advantages": True,
        "whiten_over": "rank",
        "value_factor": 0.1,
        "ppo_epochs": 4,
        "actor_lr": 3e-6,
        "critic_lr": 3e-6,
        "lr_schedule": "linear",
        "lr_per": "step",
        "warmup_steps": 0,
        "warmup_from_zero": False,
        "betas": (0.9, 0.999),
        "eps": 1e-5,
        "actor_weight_decay": 0.01,
        "critic_weight_decay": 0.01,
        "decay": "all",
        "max_grad_norm": 0.0,
    },
    "trlx": {
        "kl_coef": 0.001,
        "kl_measure": "exp_delta",
        "kl_update": "epoch",
        "pad_token": "padding",
        "score_before_pad": False,
        "reward_slots": "after_tokens",
        "value_slots": "two_past",
        "score_slot": "two_after",
        "min_response_tokens": 0,
        "score_clip": 10.0,
        "score_order": "clip_scale",
        "advantages_at": "micro_batch",
        "whiten_advantages": True,
        "whiten_slots": "row",
        "whiten_variance": "unbiased_alone",
        "loss_scope": "micro_batch_sum",
        "ppo_epochs": 4,
        "mini_batches": 4,
        "actor_lr": 3e-5,
        "critic_lr": 3e-5,
        "lr_schedule": "constant",
        "warmup_steps": 0,
        "warmup_from_zero": False,
        "actor_weight_decay": 1e-6,
        "critic_weight_decay": 1e-6,
        "decay": "all",
        "max_grad_norm": 0.0,
        "critic_start": "zero_head",
        "hydra_layers": 2,
    },
    "trl_ppo": {
        "kl_coef": 0.05,
        "sampling": "fixed",
        "temperature": 0.7,
        "temperature_offset": 1e-7,
        "temperature_in_logprobs": True,
        "old_logprobs": "sampler",
        "pad_token": "never_eos",
        "length_rule": "before_pad",
        "reward_slots": "response",
        "value_loss_slots": "one_past",
        "min_response_tokens": 0,
        "score_clip": None,
        "whiten_advantages": True,
        "whiten_over": "rank",
        "whiten_variance": "unbiased",
        "value_factor": 0.1,
        "ppo_epochs": 4,
        "actor_lr": 3e-6,
        "critic_lr": 3e-6,
        "lr_schedule": "linear",
        "lr_per": "step",
        "warmup_steps": 0,
        "warmup_from_zero": False,
        "betas": (0.9, 0.999),
        "decay": "all",
        "max_grad_norm": 0.0,
    },
    "trl_rloo": {
        "kl_coef": 0.05,
        "sampling": "fixed",
        "temperature": 0.7,
        "temperature_offset": 1e-7,
        "temperature_in_logprobs": True,
        "old_logprobs": "sampler",
        "samples_per_prompt": 2,
        "pad_token": "never_eos",
        "length_rule": "before_pad",
        "reward_slots": "response",
        "value_slots": "response",
        "score_slot": "last",
        "min_response_tokens": 0,
        "score_clip": None,
        "advantage_estimator": "rloo",
        "ratio": "response",
        "whiten_over": "rank",
        "whiten_variance": "unbiased",
        "ppo_epochs": 4,
        "actor_lr": 5e-5,
        "critic_lr": 0.0,
        "lr_schedule": "linear",
        "lr_per": "step",
        "warmup_steps": 0,
        "warmup_from_zero": False,
        "betas": (0.9, 0.999),
        "decay": "all",
        "max_grad_norm": 0.0,
        "critic_start": "none",
    },
}


@pytest.mark.parametrize("name", ["deepspeed_chat", *OTHERS])
def test_each_system_in_every_field(name):
    assert dataclasses.asdict(get_dialect(name)) == {**DEEPSPEED_CHAT, **OTHERS.get(name, {}), "name": name}


def test_default_scores_the_last_sampled_token_and_learns_all_of_them():
    default = get_dialect("default")
    assert default == Dialect()
    chosen = {
        name: getattr(default, name)
        for name in (
            "length_rule",
            "reward_slots",
            "score_slot",
            "value_slots",
            "value_loss_slots",
            "kl_estimator",
            "kl_in",
            "whiten_advantages",
            "whiten_over",
            "loss_scope",
            "temperature_in_logprobs",
            "gamma",
            "lam",
            "clip_range",
            "value_clip_range",
            "min_response_tokens",
            "old_logprobs",
            "advantages_at",
            "sampling",
        )
    }
    assert chosen == {
        "length_rule": "sampled",
        "reward_slots": "response",
        "score_slot": "last",
        "value_slots": "response",
        "value_loss_slots": "response",
        "kl_estimator": "k1",
        "kl_in": "reward",
        "whiten_advantages": True,
        "whiten_over": "all_ranks",
        "loss_scope": "optimizer_step",
        "temperature_in_logprobs": True,
        "gamma": 1.0,
        "lam": 0.95,
        "clip_range": 0.2,
        "value_clip_range": 0.2,
        "min_response_tokens": 1,
        "old_logprobs": "auto",
        "advantages_at": "rollout",
        "sampling": "until_eos",
    }


def test_names_in_the_table_are_the_dialects_own():
    assert list(DIALECTS) == ["default", "deepspeed_chat", *OTHERS]
    assert all(name == dialect.name for name, dialect in DIALECTS.items())
    with pytest.raises(
        UserError,
        match="'deepspeed': known are default, deepspeed_chat, deepspeed_chat_2023, openai, "
        "summarize, trlx, trl_ppo, trl_rloo",
    ):
        get_dialect("deepspeed")


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


def test_dialects_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        get_dialect("default").kl_coef = 1.0


@pytest.mark.parametrize(
    "name, changed, message",
    [
        ("default", {"kl_estimator": "k4"}, "kl_estimator 'k4': known are k1, k2, k3."),
        ("default", {"whiten_over": "world"}, "whiten_over 'world': known are all_ranks, rank."),
        ("default", {"clip_range": 0.0}, "clip_range 0.0: must be greater than 0."),
        ("default", {"score_clip": -1.0}, "score_clip -1.0: must be greater than 0."),
        ("default", {"kl_coef": -0.1}, "kl_coef -0.1: must be at least 0."),
        ("default", {"lam": 1.5}, "lam 1.5: must be at most 1."),
        ("default", {"lam": float("nan")}, "lam nan: must be at least 0."),
        ("default", {"lr_schedule": "exponential"}, "lr_schedule 'exponential': known are linear, cosine, constant"),
        ("default", {"betas": (0.9, 1.0)}, "betas (0.9, 1.0): each must be at least 0 and less than 1."),
        ("default", {"betas": (-0.1, 0.9)}, "betas (-0.1, 0.9): each must be"),
        ("default", {"kl_coef": float("inf")}, "kl_coef inf: must be finite."),
        ("summarize", {"missing_end_value": float("nan")}, "missing_end_value nan: must be finite."),
        ("default", {"temperature_offset": -1.0}, "temperature_offset -1.0: logits would be divided by 0.0"),
        ("trl_rloo", {"samples_per_prompt": 1}, "samples_per_prompt 1: RLOO compares"),
        (
            "default",
            {"old_logprobs": "sampler", "reward_slots": "one_past"},
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
        ("openai", {"actor_weight_decay": 0.1}, "optimizer 'tf_adam': it has no weight decay"),
        ("openai", {"kl_coef": 0.0}, "kl_coef 0.0: an adaptive coefficient is multiplied"),
        ("default", {"truncate_after": 3}, "truncate_after 3: it says from where on"),
        ("deepspeed_chat_2023", {"truncate_token": "eos"}, "truncate_token 'eos': sampling 'without_eos'"),
        ("deepspeed_chat_2023", {"missing_end": "replace"}, "missing_end 'replace': with sampling 'without_eos'"),
    ],
)
def test_what_cannot_go_together_is_refused_with_the_reason(name, changed, message):
    with pytest.raises(UserError) as caught:
        get_dialect(name).override(**changed)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "name, run, message",
    [
        ("trl_rloo", {"samples_per_prompt": 1}, "1 response a prompt with RLOO"),
        ("trl_rloo", {"given": ["kl_coef", "critic_lr"]}, "critic_lr is given, but the dialect trl_rloo has no critic"),
        ("trl_rloo", {"given": ["value_clip_range"]}, "value_clip_range is given"),
        ("trl_rloo", {"given": ["gamma"]}, "gamma is given, but the dialect trl_rloo has no critic"),
        ("trlx", {"given": ["kl_target"]}, "kl_target is given, but kl_controller is 'fixed'"),
        (
            "deepspeed_chat_2023",
            {"given": ["missing_end_value"]},
            "missing_end_value is given, but missing_end is 'none', and no score would change. Set missing_end to",
        ),
        ("default", {"given": ["score_order"]}, "score_order is given, but scores are not both scaled and clipped."),
        ("deepspeed_chat", {"given": ["whiten_over"]}, "whiten_over is given, but nothing is whitened. Set"),
        ("default", {"given": ["decay"]}, "decay is given, but there is no weight decay. Give"),
        ("openai", {"given": ["warmup_from_zero"]}, "warmup_from_zero is given, but warmup_steps is 0."),
        ("default", {"given": ["temperature_in_logprobs"]}, "temperature_in_logprobs is given, but the temperature is"),
        ("trlx", {"layers": 1}, "hydra_layers 2: the actor has 1 layers"),
        ("default", {"rows_per_rank": 1}, "whiten_advantages over a batch of one response (advantages_at 'rollout'"),
        ("summarize", {"rows_per_rank": 1, "ranks": 8}, "whiten_advantages over a batch of one"),
        ("openai", {"rows_per_rank": 8, "mini_batches": 8, "ranks": 2}, "whiten_advantages over a batch of one"),
        ("trlx", {"rows_per_rank": 8, "micro_batch_size": 1}, "whiten_advantages over a batch of one"),
        ("trlx", {"rows_per_rank": 5, "micro_batch_size": 4}, "whiten_advantages over a batch of one"),
    ],
)
def test_a_runs_sizes_and_models_are_checked(name, run, message):
    with pytest.raises(UserError) as caught:
        check(get_dialect(name), **run)
    assert str(caught.value).startswith(message)


def test_a_limit_that_no_epoch_follows_is_refused():
    one_pass = get_dialect("deepspeed_chat").override(early_stop_kl=0.1)
    with pytest.raises(UserError, match="early_stop_kl is given, but ppo_epochs is 1, and no later epoch"):
        check(one_pass, given=["early_stop_kl"])
    check(one_pass.override(ppo_epochs=2), given=["early_stop_kl"])
    check(get_dialect("deepspeed_chat"), given=["early_stop_kl"])  # set to none


def test_scores_of_one_response_have_no_deviation():
    scaled = get_dialect("deepspeed_chat").override(score_scaling="running")
    with pytest.raises(UserError, match="score_scaling 'running' with 1 response a step"):
        check(scaled, rows_per_rank=1)
    check(scaled, rows_per_rank=1, ranks=2)


@pytest.mark.parametrize(
    "name, run",
    [
        ("default", {"rows_per_rank": 1, "ranks": 2}),
        ("default", {"rows_per_rank": 2, "mini_batches": 2}),
        ("deepspeed_chat", {"rows_per_rank": 1}),
        ("openai", {"rows_per_rank": 8, "mini_batches": 4}),
        ("trlx", {"rows_per_rank": 8, "micro_batch_size": 1, "ranks": 2, "layers": 2}),
        ("trl_rloo", {"rows_per_rank": 2, "samples_per_prompt": 2, "given": ["actor_lr"]}),
        ("trlx", {"rows_per_rank": 6, "micro_batch_size": 4}),
        ("openai", {"given": ["kl_target", "lam", "missing_end_value", "whiten_over", "temperature_in_logprobs"]}),
        ("summarize", {"given": ["decay"]}),
        ("default", {"given": ["critic_lr"], "layers": 0}),
        ("default", {}),
    ],
)
def test_what_can_work_is_let_through(name, run):
    check(get_dialect(name), **run)


def test_differences_name_both_values():
    default, chat = get_dialect("default"), get_dialect("deepspeed_chat")
    assert default.differences(default) == {}
    assert default.differences(default.override(name="mine", lam=1.0)) == {"lam": (0.95, 1.0)}
    differences = default.differences(chat)
    assert differences["score_slot"] == ("last", "after_last") and differences["ppo_epochs"] == (4, 1)
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
        # nothing was drawn past the end, nor of the prompt
        ("default", {"reward_slots": "one_past"}, []),
        ("default", {"length_rule": "row"}, []),
        ("default", {"sampling": "fixed", "reward_slots": "one_past"}, ["fp32"]),
        ("default", {"sampling": "fixed", "reward_slots": "one_past", "truncate_token": "eos"}, []),
        ("default", {"kl_controller": "adaptive", "kl_measure": "exp_delta"}, []),
    ],
)
def test_where_the_sampler_notes_log_probs(name, changed, dtypes):
    dialect = get_dialect(name).override(**changed)
    assert [dtype for dtype in ("fp32", "fp16", "bf16") if dialect.samples_logprobs(dtype)] == dtypes
    assert dialect.takes_sampled_logprobs == bool(dtypes)


@pytest.mark.parametrize(
    "name, slots",
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
def test_slots_past_the_response_that_carry_a_number(name, slots):
    assert get_dialect(name).slots_past_response == slots


def test_variance_by_the_number_of_ranks():
    def unbiased(name):
        return [get_dialect(name).unbiased_variance(ranks) for ranks in (1, 2)]

    assert unbiased("openai") == unbiased("summarize") == [False, False]
    assert unbiased("trl_ppo") == [True, True] and unbiased("trlx") == [True, False]


def test_the_table_has_all_fields_of_all_dialects():
    head, rule, *rows = main([]).splitlines()
    assert head.split() == list(DIALECTS) and set(rule) == {"-", " "}
    assert [row.split()[0] for row in rows] == [field.name for field in dataclasses.fields(Dialect)][1:]
    by_name = {row.split()[0]: row.split()[1:] for row in rows}
    assert by_name["kl_coef"] == ["0.1", "0.1", "0.02", "0.15", "0.05", "0.001", "0.05", "0.05"]
    assert by_name["score_clip"] == ["5", "5", "5", "-", "-", "10", "-", "-"]
    assert by_name["whiten_rewards"] == ["no", "no", "no", "yes", "no", "no", "no", "no"]
    assert max(map(len, rows)) <= 160


def test_two_dialects_only_where_they_differ():
    head, _, *rows = main(["summarize", "trl_ppo"]).splitlines()
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
    tables = main([], width=90).split("\n\n")
    assert [name for table in tables for name in table.splitlines()[0].split()] == list(DIALECTS)
    assert max(len(line) for table in tables for line in table.splitlines()) <= 90


def test_the_command_prints_and_refuses():
    def run(*words):
        return subprocess.run([sys.executable, "-m", "engine.algorithms", *words], capture_output=True, text=True)

    assert run("trlx").stdout.splitlines()[0].split() == ["trlx"]
    refused = run("openai", "opeanai")
    assert refused.returncode == 2 and refused.stdout == "" and len(refused.stderr.splitlines()) == 1
    assert "'opeanai': known are default, deepspeed_chat," in refused.stderr
