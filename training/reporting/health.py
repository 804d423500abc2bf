"""What a PPO run's curves say, in words: what was seen, with its numbers, and what to try.

    for finding in health(read_metrics(output_dir / "metrics.jsonl")):
        print(finding.severity, finding.text)

Each check is a function from a run's records to a Finding, or to None where it sees nothing, or the run lacks its
metrics. Thresholds are rules of thumb, each with its reason: a finding is a reason to look, not a verdict.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

ALARM, LOOK, FINE = "alarm", "look", "fine"
"""The run is probably spoilt; it may be well, but look; nothing stood out."""

FEWEST_STEPS, SHARE = 8, 0.1
"""Fewer steps make no trend. Start and end of a run are its first and last tenth."""

KL_FAR = 30.0
"""Nats a response: what the policy answers is e^30 = 10^13 times likelier than the reference made it."""
KL_FAR_A_TOKEN = 0.5
"""Nats a token: at every token the policy is, on average, 1.6 times surer of its choice than the reference was."""
KL_GROWTH, KL_SMALL = 1.5, 5.0
"""Growth over the last quarter, where the KL should settle; below so many nats it is the learning itself."""
KL_NEGATIVE = -0.5
"""The estimate's mean is a KL, which is not negative; rounding and noise leave a little, not half a nat."""
ENTROPY_KEPT = 0.4
"""Share of the entropy at the start. Sharpening to half is ordinary, and to a third leaves little to explore."""
ENTROPY_GREW = 1.5
"""A policy that gets so much less sure is losing the language rather than exploring."""
CLIPPED = 0.3
"""Share of tokens. The clip is for outliers, not for a third of all tokens."""
APPROXKL_HIGH = 0.05
"""(log ratio)^2 / 2 of 0.05 is a typical ratio of exp(0.32) = 1.37, well past the usual clip range of 0.2."""
LONGER, SHORTER = 1.5, 0.67
"""Response length, end over start. Reward models like length (or its absence) for its own sake."""
FEW_ENDED = 0.1
"""Share of responses that end by themselves; below it nearly all are cut off at the limit, and scored unfinished."""
DEGENERATE = 0.01
"""Share of responses masked out for being too short: a few are accidents, one in a hundred is a habit."""
SPIKE = 10.0
"""Times the median gradient norm. Clipping bounds such a step, but its direction is that of few samples."""
SKIPPED = 0.05
"""Share of steps without an update. fp16's loss scale is searched by overflowing: some at the start, few after."""
NOISE = 2.0
"""Standard errors by which the score must differ between start and end to count as changed."""
FELL_BACK = 0.5
"""Share of the highest rise in score that is lost again by the end."""
ALIKE = 0.5
"""Distinct bigrams a token of the held-out responses, end over start: below it, they have become one response."""


@dataclass(frozen=True)
class Finding:
    """What stood out: `severity` is ALARM, LOOK or FINE, `text` says what was seen and what to try."""

    severity: str
    text: str


def health(records: Sequence[Mapping]) -> list[Finding]:
    """The findings of a run's metrics (report.read_metrics), alarms first; one that is FINE where nothing stood out."""
    steps = len(_having(records, "objective/kl"))
    if steps == 0:
        return [Finding(FINE, "no step of PPO to judge")]
    checks = ANY_LENGTH + TRENDS if steps >= FEWEST_STEPS else ANY_LENGTH
    found = [finding for finding in (check(records) for check in checks) if finding is not None]
    if found:
        return sorted(found, key=lambda finding: finding.severity != ALARM)
    few = ", which are too few to show a trend" if steps < FEWEST_STEPS else ""
    return [Finding(FINE, f"nothing stood out in {steps} steps{few}")]


def not_finite(rows: Sequence[Mapping]) -> Finding | None:
    """NaN, which stands for anything that was not finite, in any metric."""
    steps = [row["step"] for row in rows if not all(map(math.isfinite, row.values()))]
    names = sorted({name for row in rows for name, value in row.items() if not math.isfinite(value)})
    return (
        None
        if not names
        else Finding(
            ALARM,
            f"not finite: {', '.join(names)}, {_at(steps)}. Lower the learning "
            "rates; in fp16, use bf16 or fp32 if you can.",
        )
    )


def kl_far(rows: Sequence[Mapping]) -> Finding | None:
    """The policy has left the neighbourhood in which the reward model was trained."""
    kl, a_token = _end(rows, "objective/kl"), _end(rows, "objective/kl_per_token")
    if kl is None or (kl <= KL_FAR and (a_token is None or a_token <= KL_FAR_A_TOKEN)):
        return None
    return Finding(
        ALARM,
        f"KL to the reference ended at {kl:.3g} nats a response, {a_token or 0:.2g} a token. So far "
        "away the reward model's scores mean little: read samples/, then raise --kl_coef, lower "
        "--actor_learning_rate, or take an earlier restart point.",
    )


def kl_negative(rows: Sequence[Mapping]) -> Finding | None:
    """The sampler and the log-probs do not belong to the same distribution."""
    kl = _end(rows, "objective/kl")
    if kl is None or kl >= KL_NEGATIVE:
        return None
    return Finding(
        ALARM,
        f"KL to the reference ended at {kl:.3g} nats a response: a KL is not negative, so responses "
        "are sampled from something else than their log-probs say. Look at --temperature and the "
        "dialect's temperature_in_logprobs.",
    )


def kl_growing(rows: Sequence[Mapping]) -> Finding | None:
    """No balance between score and KL penalty by the end."""
    before, after = _mean(rows, "objective/kl", 0.7, 0.8), _end(rows, "objective/kl")
    if before is None or after <= KL_SMALL or after <= KL_GROWTH * max(before, 0.0):
        return None
    return Finding(
        LOOK,
        f"KL to the reference was still growing fast: {before:.3g} nats a response three quarters "
        f"through, {after:.3g} at the end. Raise --kl_coef or lower --actor_learning_rate; look "
        "whether the held-out score grew with it.",
    )


def entropy_collapsed(rows: Sequence[Mapping]) -> Finding | None:
    """The policy has become sure of everything, or of nothing."""
    first, last = _start(rows, "objective/entropy"), _end(rows, "objective/entropy")
    if first is None or first <= 0:
        return None
    if last < ENTROPY_KEPT * first:
        return Finding(
            LOOK,
            f"entropy fell from {first:.3g} to {last:.3g} nats a token ({last / first:.0%} of its "
            "start): responses become alike, and nothing new is tried. Raise --kl_coef, lower "
            "--actor_learning_rate or --ppo_epochs.",
        )
    if last > ENTROPY_GREW * first:
        return Finding(
            LOOK,
            f"entropy rose from {first:.3g} to {last:.3g} nats a token ({last / first:.3g} times its "
            "start): the policy may be losing its language. Read samples/; raise --kl_coef or lower "
            "--actor_learning_rate.",
        )
    return None


def value_unexplained(rows: Sequence[Mapping]) -> Finding | None:
    """The critic does not help."""
    late = _mean(rows, "value/explained_variance", 0.75, 1.0)
    if late is None or late > 0:
        return None
    return Finding(
        LOOK,
        f"explained variance of the value was {late:.2g} over the last quarter: the critic does no "
        "better than a constant. Raise --critic_learning_rate or --critic_warmup_steps, and look "
        "whether value/clipfrac is high.",
    )


def too_much_clipped(rows: Sequence[Mapping]) -> Finding | None:
    """Updates so large that the clip decides what is learned."""
    return _sustained(
        rows,
        "policy/clipfrac",
        CLIPPED,
        lambda value, steps: Finding(
            LOOK,
            f"the policy's clip fraction was {value:.2g} around {steps}: updates are too large. Lower "
            "--actor_learning_rate or --ppo_epochs.",
        ),
    )


def updates_too_far(rows: Sequence[Mapping]) -> Finding | None:
    """Updates that move the policy far from the one that sampled."""
    return _sustained(
        rows,
        "policy/approxkl",
        APPROXKL_HIGH,
        lambda value, steps: Finding(
            LOOK,
            f"approximate KL of the updates was {value:.2g} around {steps}: the policy moved far from the one that "
            "had sampled. Lower --actor_learning_rate or --ppo_epochs.",
        ),
    )


def length_drifted(rows: Sequence[Mapping]) -> Finding | None:
    """Length, as the reward model's back door."""
    # The held-out prompts are the same each time, and their first answers come from before any training.
    name = "eval/response_length" if len(_having(rows, "eval/response_length")) > 1 else "rollout/response_length"
    first, last = _start(rows, name), _end(rows, name)
    if first is None or SHORTER * first <= last <= LONGER * first:
        return None
    direction = "grew" if last > first else "shrank"
    return Finding(
        LOOK,
        f"responses {direction} from {first:.3g} to {last:.3g} tokens: see in samples/ whether the "
        "reward model pays for length alone. If so, balance lengths among its training pairs, or "
        "raise --kl_coef.",
    )


def few_ended(rows: Sequence[Mapping]) -> Finding | None:
    """Responses that the limit cuts off."""
    first, last = _start(rows, "rollout/eos_rate"), _end(rows, "rollout/eos_rate")
    if last is None or last >= FEW_ENDED:
        return None
    remedy = (
        "They did not from the start: raise --max_answer_seq_len, and see that the SFT data ends with EOS."
        if first < FEW_ENDED
        else f"At the start {first:.0%} did: see in samples/ whether the reward model pays "
        "for going on; raise --max_answer_seq_len."
    )
    return Finding(LOOK, f"{last:.0%} of responses ended by themselves at the end, the others hit the limit. {remedy}")


def score_unmoved(rows: Sequence[Mapping]) -> Finding | None:
    """Start and end of the score, measured against its noise from step to step."""
    present = _having(rows, "objective/scores")
    scores = _column(present, "objective/scores")
    if len(scores) < FEWEST_STEPS:
        return None
    window = max(2, int(SHARE * len(scores)))
    noise = (fmean((b - a) ** 2 for a, b in itertools.pairwise(scores)) / 2) ** 0.5
    error = NOISE * noise * (2 / window) ** 0.5
    means = [fmean(scores[i : i + window]) for i in range(len(scores) - window + 1)]
    first, highest, last = means[0], max(means), means[-1]
    if last < first - error:
        return Finding(
            ALARM,
            f"the score fell from {first:.3g} to {last:.3g}. Look at the KL penalty "
            "(objective/non_score_reward) and at the clip fractions; lower the learning rates.",
        )
    if highest - last > max(FELL_BACK * (highest - first), 2 * error):
        step = present[means.index(highest)]["step"]
        return Finding(
            ALARM,
            f"the score rose from {first:.3g} to {highest:.3g} (step {step}) and fell back to "
            f"{last:.3g}. Take an earlier restart point; lower --actor_learning_rate or raise "
            "--kl_coef.",
        )
    if last <= first + error:
        return Finding(
            LOOK,
            f"the score did not rise: {first:.3g} at the start, {last:.3g} at the end, with a noise "
            f"of {noise:.2g} a step. Train longer, raise --actor_learning_rate, lower --kl_coef, or "
            "make each step larger.",
        )
    return None


def degenerate(rows: Sequence[Mapping]) -> Finding | None:
    """Responses that were masked out."""
    count, seen = sum(_column(rows, "rollout/degenerate")), rows[-1]["samples"]
    if count == 0 or count < DEGENERATE * seen:
        return None
    return Finding(
        LOOK,
        f"{count:.0f} responses ({count / seen:.1%}) were degenerate, too short to learn from. See in "
        "samples/ whether the reward model pays for silence; with pad equal to EOS, look at the "
        "dialect's length_rule.",
    )


def gradient_spikes(rows: Sequence[Mapping]) -> Finding | None:
    """Single steps whose gradient stands out."""
    told = []
    for name in ("policy/grad_norm", "value/grad_norm"):
        norms = _column(rows, name)
        usual = median(norms) if norms else 0.0
        steps = [row["step"] for row in rows if row.get(name, 0.0) > SPIKE * usual]
        if usual and steps:
            told.append(f"{name} was up to {max(norms) / usual:.3g} times its median of {usual:.2g}, {_at(steps)}")
    if not told:
        return None
    return Finding(
        LOOK,
        f"{'; '.join(told)}. Look at these steps' scores and lengths; lower --max_grad_norm or the "
        "learning rate, or clip scores (--score_clip).",
    )


def updates_skipped(rows: Sequence[Mapping]) -> Finding | None:
    """Steps none of whose updates were made: a loss, and no gradient norm."""
    trained = [row for row in rows if "policy/loss" in row or "value/loss" in row]
    steps = [
        row["step"]
        for row in trained
        if any(f"{name}/loss" in row and f"{name}/grad_norm" not in row for name in ("policy", "value"))
    ]
    if len(steps) <= SKIPPED * len(trained):
        return None
    return Finding(
        ALARM if steps[-1] == trained[-1]["step"] else LOOK,
        f"{len(steps)} of {len(trained)} steps made no update, since gradients overflowed, {_at(steps)}. "
        "Use bf16 or fp32 if you can; in fp16 look whether the loss scale recovers.",
    )


def answers_alike(rows: Sequence[Mapping]) -> Finding | None:
    """Held-out responses, first and last: how many different pairs of words they hold, for their length."""
    evaluations = [row for row in _having(rows, "eval/distinct_bigrams") if row.get("eval/response_length", 0.0) > 0]
    if len(evaluations) < 2:
        return None
    first, last = (evaluations[place]["eval/distinct_bigrams"] for place in (0, -1))
    kept = last / max(first, 1.0) * evaluations[0]["eval/response_length"] / evaluations[-1]["eval/response_length"]
    if kept >= ALIKE:
        return None
    return Finding(
        LOOK,
        f"held-out responses became alike: {first:.0f} distinct bigrams before, {last:.0f} after, "
        f"{kept:.0%} for their length. Read samples/; raise --kl_coef or stop earlier.",
    )


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


def _having(rows: Sequence[Mapping], name: str) -> list[Mapping]:
    """The rows in which a metric is finite."""
    return [row for row in rows if math.isfinite(row.get(name, math.nan))]


def _column(rows: Sequence[Mapping], name: str) -> list[float]:
    """The finite values of a metric, in order."""
    return [row[name] for row in _having(rows, name)]


def _mean(rows: Sequence[Mapping], name: str, begin: float, end: float) -> float | None:
    """The mean of a metric's values between two shares of the way through; at least of one value."""
    values = _column(rows, name)
    first = min(int(begin * len(values)), len(values) - 1)
    return fmean(values[first : max(int(end * len(values)), first + 1)]) if values else None


def _start(rows: Sequence[Mapping], name: str) -> float | None:
    return _mean(rows, name, 0.0, SHARE)


def _end(rows: Sequence[Mapping], name: str) -> float | None:
    return _mean(rows, name, 1.0 - SHARE, 1.0)


def _sustained(
    rows: Sequence[Mapping], name: str, threshold: float, finding: Callable[[float, str], Finding]
) -> Finding | None:
    """`finding` of the highest mean over a tenth of the run (3 steps at least), where that is above the threshold."""
    present = _having(rows, name)
    width = max(3, int(SHARE * len(present)))
    windows = [present[i : i + width] for i in range(len(present) - width + 1)]
    if not windows:
        return None
    window = max(windows, key=lambda window: fmean(_column(window, name)))
    value = fmean(_column(window, name))
    return finding(value, f"steps {window[0]['step']}-{window[-1]['step']}") if value > threshold else None


def _at(steps: Sequence[int]) -> str:
    """Where something was seen: the first few steps by number."""
    shown = ", ".join(map(str, steps[:3]))
    return f"at step{'s' if len(steps) > 1 else ''} {shown}" + (f" and {len(steps) - 3} more" if len(steps) > 3 else "")
