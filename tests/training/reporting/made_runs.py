"""Metrics of made-up runs: one that is well, and one for each illness, which has it alone.

Their curves follow those of short runs of PPO on a small Llama and film reviews that were made ill: no KL penalty and a
high learning rate (one phrase), rewards for words that no other response has (invented words), for length, for brevity,
for many different words (KL). Noise is that of 64 responses a step and 256 held-out prompts.
"""

import math
import random
from collections.abc import Callable, Mapping

STEPS, RESPONSES, EVAL_EVERY = 60, 64, 15
LIMIT = 128  # tokens of a response

Curve = Callable[[float], float]  # of the share of the way through, 0 to 1


def soon(first: float, last: float, rate: float = 5.0) -> Curve:
    """From one value to another, most of the way early."""
    return lambda t: first + (last - first) * (1 - math.exp(-rate * t)) / (1 - math.exp(-rate))


def late(first: float, last: float, middle: float = 0.5, width: float = 0.1) -> Curve:
    """From one value to another, most of the way around the middle."""

    def passed(t: float) -> float:
        return 1 / (1 + math.exp((middle - t) / width))

    return lambda t: first + (last - first) * (passed(t) - passed(0.0)) / (passed(1.0) - passed(0.0))


HEALTHY: dict[str, Curve] = {
    "score": soon(0.0, 2.0, 9.0),
    "kl": soon(0.0, 7.2, 9.0),
    "entropy": soon(2.26, 1.75),
    "length": soon(40.0, 37.0),
    "ended": soon(0.45, 0.62),
    "clipfrac": lambda t: 0.06 * (1 - t),
    "approxkl": lambda t: 0.0065 * (1 - t),
    "explained": soon(0.2, 0.87),
    "bigrams": soon(2622, 1950),
    "compressed": soon(0.80, 0.66),
    "new_words": soon(0.336, 0.265),
}
"""What other curves of a run follow from, in a run that is well and has settled between score and KL."""

RUNS: dict[str, Mapping[str, Curve]] = {
    "healthy": {},
    "healthy, still on its way": {"score": lambda t: 1.6 * t, "kl": lambda t: 6.0 * t**1.2},
    "collapse into one phrase": {
        "score": soon(0.0, 5.9),
        "kl": late(0.0, 152.0, 0.4, 0.12),
        "entropy": soon(2.26, 0.35, 9.0),
        "length": soon(40.0, 47.0),
        "ended": soon(0.45, 0.01, 9.0),
        "clipfrac": lambda t: 0.16 * (1 - t),
        "approxkl": lambda t: 0.04 * (1 - t),
        "bigrams": soon(2622, 270, 6.0),
        "compressed": soon(0.80, 0.20, 6.0),
        "new_words": soon(0.336, 0.32),
    },
    "invented words": {
        "score": soon(0.0, 1.3, 3.0),
        "kl": soon(0.0, 15.5, 3.0),
        "entropy": soon(2.26, 2.34),
        "length": soon(40.0, 42.0),
        "ended": soon(0.45, 0.40),
        "bigrams": soon(2622, 3050),
        "compressed": soon(0.80, 0.86),
        "new_words": soon(0.336, 0.50, 3.0),
    },
    "length explosion": {
        "score": late(0.0, 2.1),
        "kl": late(0.0, 24.0),
        "entropy": soon(2.26, 2.20),
        "length": late(40.0, 120.0),
        "ended": late(0.92, 0.08),
        "bigrams": late(2622, 4300),
        "compressed": soon(0.80, 0.72),
        "new_words": soon(0.336, 0.31),
    },
    "length collapse": {
        "score": late(0.0, 2.2, 0.4),
        "kl": late(0.0, 9.3, 0.4),
        "entropy": late(2.26, 0.25, 0.4),
        "length": late(40.0, 3.0, 0.4),
        "ended": late(0.45, 1.0, 0.4),
        "bigrams": late(2622, 12, 0.4),
        "compressed": late(0.80, 0.12, 0.4),
        "new_words": late(0.336, 0.01, 0.4),
    },
    "KL run-away": {
        "score": soon(0.0, 2.6, 3.0),
        "kl": lambda t: 68 * (math.exp(3 * t) - 1) / (math.exp(3) - 1),
        "entropy": soon(2.26, 2.15),
        "length": soon(40.0, 43.0),
        "ended": soon(0.45, 0.36),
        "clipfrac": lambda t: 0.12 * (1 - t),
        "approxkl": lambda t: 0.03 * (1 - t),
        "bigrams": soon(2622, 3000),
        "compressed": soon(0.80, 0.77),
        "new_words": soon(0.336, 0.25),
    },
}


def made_run(name: str, seed: int = 0) -> list[dict]:
    """The rows of metrics.jsonl of one of RUNS, as `read_metrics` gives them; `seed` of its noise."""
    draw = random.Random(f"{name} {seed}")
    curves = {**HEALTHY, **RUNS[name]}
    rows = [{"step": 0, "samples": 0, **_evaluation(curves, 0.0, draw)}]
    for step in range(1, STEPS + 1):
        row = {"step": step, "samples": RESPONSES * step, **_step(curves, (step - 1) / (STEPS - 1), draw)}
        if step % EVAL_EVERY == 0:
            row |= _evaluation(curves, step / STEPS, draw)
        rows.append(row)
    return rows


def _step(curves: Mapping[str, Curve], t: float, draw: random.Random) -> dict[str, float]:
    """A step's metrics: a curve's value with the noise of the mean of so many responses, and what follows from it."""
    at = {name: curve(t) for name, curve in curves.items()}

    def near(value: float, share: float) -> float:
        return value * (1 + draw.gauss(0, share))

    score = at["score"] + draw.gauss(0, 1 / RESPONSES**0.5)  # scores have a standard deviation of 1
    kl, length = near(at["kl"], 0.06), min(near(at["length"], 0.05), float(LIMIT))
    ended = sum(draw.random() < at["ended"] for _ in range(RESPONSES)) / RESPONSES
    explained = min(at["explained"] + draw.gauss(0, 0.03), 0.95)
    return {
        "objective/scores": score,
        "objective/kl": kl,
        "objective/kl_per_token": kl / length,
        "objective/kl_coef": 0.1,
        "objective/non_score_reward": -0.1 * kl,
        "objective/rlhf_reward": score - 0.1 * kl,
        "objective/entropy": near(at["entropy"], 0.02),
        "policy/loss": draw.gauss(-0.01, 0.005),
        "policy/clipfrac": near(at["clipfrac"], 0.1),
        "policy/approxkl": near(at["approxkl"], 0.1),
        "policy/ratio_mean": near(1.0, 0.002),
        "policy/grad_norm": near(0.8, 0.08),
        "policy/lr": 3e-4 * (1 - t),
        "value/loss": near(0.11 - 0.04 * t, 0.15),
        "value/explained_variance": explained,
        "value/grad_norm": near(1.0 - 0.3 * t, 0.3),
        "advantages/std": near(0.45, 0.08),
        "rollout/response_length": length,
        "rollout/eos_rate": ended,
        "rollout/degenerate": 0.0,
        "time/generate": near(3.0, 0.05),
        "time/make_experience": near(2.0, 0.05),
        "time/train": near(5.0, 0.05),
        "time/step": 10.2,
    }


def _evaluation(curves: Mapping[str, Curve], t: float, draw: random.Random) -> dict[str, float]:
    """The held-out metrics: the same curves with less noise, since there are more prompts, and always the same."""

    def near(name: str, share: float) -> float:
        return curves[name](t) * (1 + draw.gauss(0, share))

    metrics = {
        "eval/score": curves["score"](t) + draw.gauss(0, 0.02),
        "eval/score_se": 0.06,
        "eval/score_std": 1.0,
        "eval/kl": near("kl", 0.02),
        "eval/kl_se": 0.04 * curves["kl"](t),
        "eval/response_length": near("length", 0.02),
        "eval/response_length_se": 0.03 * curves["length"](t),
        "eval/distinct_responses": 256.0,
        "eval/distinct_bigrams": float(round(near("bigrams", 0.01))),
        "eval/compressed_bytes": near("compressed", 0.01),
        "eval/new_words": near("new_words", 0.02),
        "eval/new_words_se": 0.01,
    }
    return metrics | ({"eval/new_words_change_se": 0.014} if t > 0 else {})
