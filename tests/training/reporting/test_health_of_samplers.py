"""Health in words: a sampler that is not the actor, and corrections for it."""

import pytest

from tests.training.reporting.good_run import run, the_finding
from training.reporting.health import ALARM, FINE, LOOK


@pytest.mark.parametrize("steps", [1, 20])
def test_a_sampler_that_is_not_the_actor_is_told(steps):
    near = {"rollout_logprob_gap": lambda t: 0.01, "rollout_ratio_far": lambda t: 0.0}
    assert the_finding(run(steps, **near)).severity == FINE
    apart = near | {
        "rollout_logprob_gap": lambda t: 0.06,
        "rollout_sampler_kl": lambda t: 0.004,
        "rollout_ratio_min": lambda t: 0.25,
        "rollout_ratio_max": lambda t: 7.5,
    }
    finding = the_finding(run(steps, **apart))
    assert finding.severity == LOOK
    assert finding.seen == (
        "the sampler's log-probs ended 0.06 nats a token from the actor's (KL 0.004), with ratios from 0.25 to 7.5, "
        "0.0% of them outside 0.5 to 2"
    )
    another = the_finding(run(steps, **apart | {"rollout_ratio_far": lambda t: 0.2}))
    assert another.severity == ALARM and "20.0% of them" in another.seen
    # A KL that is negative is one of its signs.
    both = the_finding(run(steps, **apart | {"objective_kl": lambda t: -2.0}))
    assert both.severity == ALARM and "With it: KL to the reference ended at -2 nats" in both.seen


def test_a_correction_that_cuts_much_is_told():
    assert the_finding(run(policy_correction_cut=lambda t: 0.05)).severity == FINE
    finding = the_finding(run(policy_correction_cut=lambda t: 0.2))
    assert finding.severity == LOOK
    assert finding.seen.startswith("20% of the tokens that were learned from had a ratio to the sampler that was cut")
