"""Metrics of a short run that goes well, and of ones that differ from it in the curves that a test names."""

import math

from training.reporting.health import health

STEPS = 40


def run(steps: int = STEPS, **curves) -> list[dict]:
    """The records of a good run of `steps` steps; `curves`: metric -> function of the share of the way through, or None
    to leave it out; names with _ for /."""
    good = {
        "objective_kl": lambda t: 8 * t**0.5,
        "objective_kl_per_token": lambda t: 0.2 * t**0.5,
        "objective_scores": lambda t: 2 * t**0.5,
        "objective_entropy": lambda t: 2 - 0.6 * t,
        "policy_loss": lambda t: -0.02,
        "policy_clipfrac": lambda t: 0.05 * (1 - t),
        "policy_approxkl": lambda t: 0.01 * (1 - t),
        "policy_grad_norm": lambda t: 0.8 + 0.1 * t,
        "value_loss": lambda t: 0.3 - 0.2 * t,
        "value_grad_norm": lambda t: 2 - t,
        "value_explained_variance": lambda t: min(-0.5 + 3 * t, 0.7),
        "rollout_response_length": lambda t: 40 - 8 * t,
        "rollout_eos_rate": lambda t: 0.5 + 0.4 * t,
        "rollout_degenerate": lambda t: 0.0,
    }
    rows = [
        {
            "step": 0,
            "samples": 0,
            "eval/score": 0.0,
            "eval/kl": 0.0,
            "eval/response_length": 40.0,
            "eval/distinct_bigrams": 2000.0,
        }
    ]
    for step in range(1, steps + 1):
        share = (step - 1) / max(steps - 1, 1)
        noise = 0.05 * math.sin(2.5 * step)  # the score's, from step to step
        row = {name.replace("_", "/", 1): curve(share) for name, curve in {**good, **curves}.items() if curve}
        row = {name: value for name, value in row.items() if value is not None}
        if "objective/scores" in row:
            row["objective/scores"] += noise
        rows.append({"step": step, "samples": 64 * step, **row})
    rows[-1] |= {"eval/score": 2.0, "eval/kl": 8.0, "eval/response_length": 32.0, "eval/distinct_bigrams": 1400.0}
    return rows


def the_finding(records: list[dict]):
    """The only finding of the health report."""
    (finding,) = health(records)
    return finding
