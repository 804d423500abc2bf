"""What the critic-free dialects' fields refuse, alone and together; what of a run leaves them without effect."""

import pytest
import torch

from engine.algorithms import Algorithm, check_effect, get_dialect
from engine.algorithms.losses import Losses
from engine.algorithms.table import GROUP_DIALECTS
from engine.errors import UserError


@pytest.mark.parametrize(
    "name, changed, message",
    [
        ("dapo", {"clip_range_high": 0.0}, "clip_range_high 0.0: must be greater than 0."),
        ("grpo", {"scale_eps": 0.0}, "scale_eps 0.0: must be greater than 0."),
        ("grpo", {"advantage_scale": "world"}, "advantage_scale 'world': known are none, group, batch."),
        ("grpo", {"scale_variance": "n"}, "scale_variance 'n': known are unbiased, biased."),
        ("grpo", {"samples_per_prompt": 1}, "samples_per_prompt 1: GRPO compares the responses to one prompt"),
        ("reinforce_pp_baseline", {"samples_per_prompt": 1}, "samples_per_prompt 1: REINFORCE_BASELINE compares"),
        ("grpo", {"critic_start": "zero_head"}, "critic_start 'zero_head': GRPO has no critic"),
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
        ("rloo", {"kl_times_ratio": True}, "kl_times_ratio True: it is for a penalty in the loss. Set kl_in to"),
        ("default", {"critic_start": "none"}, "critic_start 'none': GAE needs a critic. Set advantage_estimator to"),
    ],
)
def test_what_cannot_go_together_is_refused_with_the_reason(name, changed, message):
    with pytest.raises(UserError) as caught:
        get_dialect(name).override(**changed)
    assert str(caught.value).startswith(message)


ONE_UPDATE = "there is one optimizer step a rollout, in which every ratio is 1"


@pytest.mark.parametrize(
    "name, changed, given, message",
    [
        ("grpo_trl", {"clip_range_high": 0.3}, "clip_range_high", f"clip_range_high 0.3: {ONE_UPDATE}"),
        ("grpo_trl", {"dual_clip": 3.0}, "dual_clip", f"dual_clip 3.0: {ONE_UPDATE}"),
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
        ("reinforce_pp_baseline", {"gamma": 0.9}, "gamma", "gamma 0.9: the dialect reinforce_pp_baseline has"),
        (
            "grpo",
            {"correction_max": 5.0},
            "correction_max",
            "correction_max 5.0: it has no effect where corr",
        ),
        (
            "rloo",
            {"whiten_slots": "row", "whiten_advantages": True},
            "whiten_slots",
            "whiten_slots 'row': the dialect rloo has one advantage a response",
        ),
        ("reinforce_pp", {"lam": 0.9}, "lam", "lam 0.9: it has no effect where critic_start is 'none'."),
    ],
)
def test_what_has_no_effect_is_refused_where_it_is_given(name, changed, given, message):
    with pytest.raises(UserError) as caught:
        check_effect(get_dialect(name).override(**changed), [given])
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "name, changed",
    [
        ("grpo_trl", {"clip_range_high": 0.3, "ppo_epochs": 2}),
        ("grpo_trl", {"clip_range_high": 0.3, "old_logprobs": "sampler"}),
        ("dapo", {"dual_clip": 10.0}),
        ("grpo", {"scale_eps": 1e-3, "scale_variance": "biased", "advantage_scale": "batch"}),
        ("reinforce_pp", {"gamma": 0.99}),
        ("rloo", {"advantage_scale": "group"}),
    ],
)
def test_what_has_an_effect_is_let_through(name, changed):
    check_effect(get_dialect(name).override(**changed), list(changed))


def test_none_takes_a_clip_away():
    dialect = get_dialect("dapo").replaced(clip_range_high=None, mini_batches=1)
    check_effect(dialect, ["clip_range_high", "mini_batches"])


@pytest.mark.parametrize("name", [dialect.name for dialect in GROUP_DIALECTS])
def test_no_layout_changes_what_is_learned_without_a_critic(name):
    dialect = get_dialect(name)
    assert not dialect.ranks_matter and not dialect.micro_batches_matter
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
