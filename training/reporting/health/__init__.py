"""What a PPO run's curves say, in words: what was seen, with its numbers, and what to try.

    for finding in health(read_metrics(output_dir / "metrics.jsonl")):  # of training.reporting.metrics_file
        print(finding.severity, finding.text)

Each check is a function from a run's records to a Finding, or to None where it sees nothing, or the run lacks its
metrics. An illness shows in several metrics: what EXPLAINS says to be a sign of another finding is told with that one.
Thresholds are rules of thumb, each with its reason: a finding is a reason to look, not a verdict.
"""

from collections.abc import Mapping, Sequence

from training.reporting.health.curves import ALARM, FEWEST_STEPS, FINE, LOOK, Finding, having
from training.reporting.health.optimization import (
    gradient_spikes,
    not_finite,
    score_unmoved,
    too_much_clipped,
    updates_left_out,
    updates_skipped,
    updates_too_far,
    value_miscalibrated,
    value_unexplained,
)
from training.reporting.health.outlook import outlook
from training.reporting.health.policy import entropy_fell, entropy_rose, kl_far, kl_growing, kl_negative
from training.reporting.health.responses import (
    answers_alike,
    degenerate,
    few_ended,
    few_ever_ended,
    groups_alike,
    length_grew,
    length_shrank,
    scores_clipped,
    words_invented,
)
from training.reporting.health.sampler import much_cut, sampler_apart
from training.reporting.reward_change import of_one_reward

__all__ = ["ALARM", "FINE", "LOOK", "Finding", "health"]

ANY_LENGTH = (
    not_finite,
    sampler_apart,
    much_cut,
    kl_far,
    kl_negative,
    degenerate,
    scores_clipped,
    few_ever_ended,
    updates_skipped,
    updates_left_out,
)
TRENDS = (
    score_unmoved,
    kl_growing,
    entropy_fell,
    entropy_rose,
    value_unexplained,
    value_miscalibrated,
    too_much_clipped,
    updates_too_far,
    length_grew,
    length_shrank,
    few_ended,
    groups_alike,
    gradient_spikes,
    answers_alike,
    words_invented,
)
EXPLAINS = {
    sampler_apart: (much_cut, kl_negative),
    answers_alike: (entropy_fell, length_grew, length_shrank, few_ended, few_ever_ended, kl_far, kl_growing),
    length_shrank: (entropy_fell, kl_far, kl_growing),
    words_invented: (entropy_rose, kl_far, kl_growing),
    length_grew: (few_ended, kl_far, kl_growing),
    kl_far: (kl_growing,),
}
"""Illness -> its signs, which are no illnesses of their own where it is found. The first that is found has them."""


def health(records: Sequence[Mapping]) -> list[Finding]:
    """The findings of a run's metrics (`read_metrics`), alarms first; one that is FINE where nothing stood out."""
    records = of_one_reward(records)
    steps = len(having(records, "objective/kl"))
    if steps == 0:
        return [Finding(FINE, "no step of PPO to judge")]
    checks = ANY_LENGTH + TRENDS if steps >= FEWEST_STEPS else ANY_LENGTH
    found = {check: finding for check in checks if (finding := check(records)) is not None}
    for illness, signs in EXPLAINS.items():
        if illness in found:
            found[illness] = found[illness].with_signs([found.pop(sign) for sign in signs if sign in found])
    if found:
        return sorted(found.values(), key=lambda finding: finding.severity != ALARM)
    if steps < FEWEST_STEPS:
        return [Finding(FINE, f"nothing stood out in {steps} steps, which are too few to show a trend")]
    return [Finding(FINE, f"nothing stood out in {steps} steps", outlook(records) or "")]
