"""The named dialects, field by field; how a user changes one; what cannot go together; the printed table."""

import dataclasses

import pytest

from engine.algorithms import DIALECTS, Dialect, get_dialect
from engine.errors import UserError
from tests.engine.algorithms.group_fields import GROUPS
from tests.engine.algorithms.system_fields import DEEPSPEED_CHAT, OTHERS


# What each system's source says, in every field; a new field needs a value here too.
@pytest.mark.parametrize("name", ["deepspeed_chat", *OTHERS, *GROUPS])
def test_each_system_in_every_field(name):
    departures = (OTHERS | GROUPS).get(name, {})
    assert dataclasses.asdict(get_dialect(name)) == {**DEEPSPEED_CHAT, **departures, "name": name}


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
    assert list(DIALECTS) == ["default", "deepspeed_chat", *OTHERS, *GROUPS]
    assert all(name == dialect.name for name, dialect in DIALECTS.items())
    with pytest.raises(
        UserError,
        match="'deepspeed': known are default, deepspeed_chat, deepspeed_chat_2023, openai, "
        "summarize, trlx, trl_ppo, trl_rloo, grpo, grpo_trl, dr_grpo, dapo, gspo, reinforce_pp, "
        "reinforce_pp_baseline, rloo.",
    ):
        get_dialect("deepspeed")
