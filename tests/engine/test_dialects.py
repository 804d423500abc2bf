"""The named dialects, field by field, and how a user changes one."""
import dataclasses

import pytest

from engine.dialects import DIALECTS, Dialect, get_dialect
from engine.errors import UserError

# DeepSpeedExamples 83757d9c, applications/DeepSpeed-Chat, as read from its source.
DEEPSPEED_CHAT = {
    "name": "deepspeed_chat",
    "kl_coef": 0.1, "kl_estimator": "k1",
    "length_rule": "before_pad", "reward_slots": "one_past", "score_slot": "after_last", "min_response_tokens": 2,
    "score_clip": 5.0,
    "gamma": 1.0, "lam": 0.95, "whiten_advantages": False,
    "clip_range": 0.2, "value_clip_range": 0.2, "loss_scope": "micro_batch",
    "ppo_epochs": 1, "actor_lr": 9.65e-6, "critic_lr": 5e-6, "lr_schedule": "cosine", "warmup_steps": 100,
    "warmup_from_zero": True,
    "betas": (0.9, 0.95), "eps": 1e-8, "actor_weight_decay": 0.0, "critic_weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "temperature": 1.0, "temperature_in_logprobs": False, "old_logprobs": "forward",
    "ema_decay": 0.992,
}


def test_deepspeed_chat_is_the_reference_in_every_field():
    assert dataclasses.asdict(get_dialect("deepspeed_chat")) == DEEPSPEED_CHAT  # a new field needs a value here too


def test_default_scores_the_last_sampled_token_and_learns_all_of_them():
    default = get_dialect("default")
    assert default == Dialect()
    chosen = {name: getattr(default, name) for name in (
        "length_rule", "reward_slots", "score_slot", "kl_estimator", "whiten_advantages", "loss_scope",
        "temperature_in_logprobs", "gamma", "lam", "clip_range", "value_clip_range", "min_response_tokens")}
    assert chosen == {"length_rule": "sampled", "reward_slots": "response", "score_slot": "last", "kl_estimator": "k1",
                      "whiten_advantages": True, "loss_scope": "optimizer_step", "temperature_in_logprobs": True,
                      "gamma": 1.0, "lam": 0.95, "clip_range": 0.2, "value_clip_range": 0.2, "min_response_tokens": 1}


def test_names_in_the_table_are_the_dialects_own():
    assert all(name == dialect.name for name, dialect in DIALECTS.items())
    with pytest.raises(UserError, match="--dialect 'deepspeed': known are default, deepspeed_chat"):
        get_dialect("deepspeed")


def test_override_replaces_what_is_given_and_leaves_none():
    changed = get_dialect("deepspeed_chat").override(kl_coef=0.02, ppo_epochs=None, score_clip=None, gamma=0.0)
    assert dataclasses.asdict(changed) == {**DEEPSPEED_CHAT, "kl_coef": 0.02, "gamma": 0.0}
    assert get_dialect("deepspeed_chat").kl_coef == 0.1


def test_an_unknown_field_is_refused_with_the_nearest():
    with pytest.raises(UserError, match="'kl_coeff' does not exist; did you mean kl_coef?") as caught:
        get_dialect("default").override(kl_coeff=0.1)
    assert "value_clip_range" in str(caught.value)  # and all that are known
    with pytest.raises(UserError, match=r"'zzz' does not exist\. Known: name, kl_coef"):
        get_dialect("default").override(zzz=None)


def test_dialects_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        get_dialect("default").kl_coef = 1.0


def test_differences_name_both_values():
    default, chat = get_dialect("default"), get_dialect("deepspeed_chat")
    assert default.differences(default) == {}
    assert default.differences(default.override(name="mine", lam=1.0)) == {"lam": (0.95, 1.0)}
    differences = default.differences(chat)
    assert differences["score_slot"] == ("last", "after_last") and differences["ppo_epochs"] == (4, 1)
    assert "name" not in differences and "gamma" not in differences
    assert chat.differences(default) == {name: pair[::-1] for name, pair in differences.items()}


def test_log_probs_are_taken_at_the_sampling_temperature_or_at_1():
    assert get_dialect("default").override(temperature=0.7).logprob_temperature == 0.7
    assert get_dialect("deepspeed_chat").override(temperature=0.7).logprob_temperature == 1.0
