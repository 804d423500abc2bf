"""What a PPO run's curves say, in words: what was seen, with its numbers, and what to try.

    for finding in health(read_metrics(output_dir / "metrics.jsonl")):  # of training.reporting.metrics_file
        print(finding.severity, finding.text)

Each check is a function from a run's records to a Finding, or to None where it sees nothing, or the run lacks its
metrics. Thresholds are rules of thumb, each with its reason: a finding is a reason to look, not a verdict.
"""

from collections.abc import Mapping, Sequence

from training.reporting.health.curves import ALARM, FEWEST_STEPS, FINE, LOOK, Finding, having
from training.reporting.health.optimization import (
    gradient_spikes,
    not_finite,
    score_unmoved,
    too_much_clipped,
    updates_skipped,
    updates_too_far,
    value_unexplained,
)
from training.reporting.health.policy import entropy_collapsed, kl_far, kl_growing, kl_negative
from training.reporting.health.responses import answers_alike, degenerate, few_ended, length_drifted

__all__ = ["ALARM", "FINE", "LOOK", "Finding", "health"]

ANY_LENGTH = (not_finite, kl_far, kl_negative, degenerate, updates_skipped)
TRENDS = (
    score_unmoved,
    kl_growing,
    entropy_collapsed,
    value_unexplained,
    too_much_clipped,
    updates_too_far,
    length_drifted,
    few_ended,
    gradient_spikes,
    answers_alike,
)


def health(records: Sequence[Mapping]) -> list[Finding]:
    """The findings of a run's metrics (`read_metrics`), alarms first; one that is FINE where nothing stood out."""
    steps = len(having(records, "objective/kl"))
    if steps == 0:
        return [Finding(FINE, "no step of PPO to judge")]
    checks = ANY_LENGTH + TRENDS if steps >= FEWEST_STEPS else ANY_LENGTH
    found = [finding for finding in (check(records) for check in checks) if finding is not None]
    if found:
        return sorted(found, key=lambda finding: finding.severity != ALARM)
    few = ", which are too few to show a trend" if steps < FEWEST_STEPS else ""
    return [Finding(FINE, f"nothing stood out in {steps} steps{few}")]
