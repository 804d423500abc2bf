"""Whether the optimizer steps do their work: finite numbers, moderate updates, a score that rises."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median

from training.reporting.health.curves import (
    ALARM,
    FEWEST_STEPS,
    LOOK,
    NOISE,
    SETTLED_FROM,
    SHARE,
    Finding,
    at_end,
    at_steps,
    column,
    course,
    having,
    mean,
    noise,
    sustained,
)
from training.reporting.health.policy import KL_MOVED, reference_moved

CLIPPED = 0.3
"""Share of tokens. The clip is for outliers, not for a third of all tokens."""
APPROXKL_HIGH = 0.05
"""(log ratio)^2 / 2 of 0.05 is a typical ratio of exp(0.32) = 1.37, well past the usual clip range of 0.2."""
SPIKE, NEIGHBOURS = 10.0, 5
"""Times the median gradient norm of so many steps before and after. Clipping bounds such a step, but its direction is
that of few samples. The whole run's median will not do: a critic's norm falls to a tenth while it learns."""
SKIPPED = 0.05
"""Share of steps without an update. fp16's loss scale is searched by overflowing: some at the start, few after."""
SLOPE = 3.0
"""By which factor a difference of values may be off, up or down: advantages are then mostly the critic's error."""
FELL_BACK = 0.5
"""Share of the highest rise in score that is lost again by the end."""


def not_finite(rows: Sequence[Mapping]) -> Finding | None:
    """NaN, which stands for anything that was not finite, in any metric."""
    steps = [row["step"] for row in rows if not all(map(math.isfinite, row.values()))]
    names = sorted({name for row in rows for name, value in row.items() if not math.isfinite(value)})
    return (
        None
        if not names
        else Finding(
            ALARM,
            f"not finite: {', '.join(names)}, {at_steps(steps)}",
            "Lower the learning rates; in fp16, use bf16 or fp32 if you can.",
        )
    )


def score_unmoved(rows: Sequence[Mapping]) -> Finding | None:
    """Start and end of the score, measured against its noise from step to step."""
    present = having(rows, "objective/scores")
    scores = column(present, "objective/scores")
    if len(scores) < FEWEST_STEPS:
        return None
    window = max(2, int(SHARE * len(scores)))
    error = NOISE * noise(scores) * (2 / window) ** 0.5
    means = [fmean(scores[i : i + window]) for i in range(len(scores) - window + 1)]
    first, highest, last = means[0], max(means), means[-1]
    if last < first - error:
        return Finding(
            ALARM,
            f"the score fell from {first:.3g} to {last:.3g}",
            "Look at the KL penalty (objective/non_score_reward) and at the clip fractions; lower the learning rates.",
        )
    if highest - last > max(FELL_BACK * (highest - first), 2 * error):
        step = present[means.index(highest)]["step"]
        return Finding(
            ALARM,
            f"the score rose from {first:.3g} to {highest:.3g} (step {step}) and fell back to {last:.3g}",
            "Lower --actor_learning_rate or raise --kl_coef; a restart point of before (--save_steps) keeps what was "
            "reached.",
        )
    if last <= first + error:
        return Finding(
            LOOK,
            f"the score did not rise beyond its noise: {first:.3g} at the start, {last:.3g} at the end, a change of "
            f"{last - first:+.3g}, where up to {error:.3g} is within noise",
            _unmoved_by(rows),
        )
    return None


def _unmoved_by(rows: Sequence[Mapping]) -> str:
    """What to try where the score did not rise, by what the KL did."""
    kl, coefficient = course(rows, "objective/kl", SETTLED_FROM), at_end(rows, "objective/kl_coef")
    if reference_moved(rows):
        kl = None  # of which it says nothing
    if kl is not None and kl.after > KL_MOVED and kl.steady and coefficient != 0.0:
        return (
            f"KL to the reference was steady at {kl.after:.3g} nats a response, so that the penalty, not time, holds "
            "the policy there: lower --kl_coef."
        )
    if kl is not None and kl.after <= KL_MOVED:
        return (
            f"KL to the reference was only {kl.after:.2g} nats a response, so that the policy has hardly moved: raise "
            "--actor_learning_rate, train longer (--max_steps), or lower --kl_coef."
        )
    return "Train longer, raise --actor_learning_rate, lower --kl_coef, or make each step larger."


def value_unexplained(rows: Sequence[Mapping]) -> Finding | None:
    """The critic does not help. Returns with a lambda below 1 hold its own values, which explain themselves: outcomes
    are what counts, where a run has them."""
    outcome, late = (mean(rows, f"value/explained_{of}", 0.75, 1.0) for of in ("outcome", "variance"))
    what = "explained variance of the value"
    if outcome is not None:
        late, what = outcome, "explained variance of the value, of what really followed,"
    if late is None or late > 0:
        return None
    return Finding(
        LOOK,
        f"{what} was {late:.2g} over the last quarter: the critic does no better than a constant",
        "Pretrain it (--critic_pretrain_steps 20), give it more passes over the responses (--set critic_epochs=4), "
        "raise --critic_learning_rate, and look whether value/clipfrac is high (--set value_clip_range=none).",
    )


def value_miscalibrated(rows: Sequence[Mapping]) -> Finding | None:
    """A critic that knows which responses are better, but not by how much, or that is off by a constant."""
    explained, slope, bias, variance = (
        mean(rows, name, 0.75, 1.0) for name in ("value/explained_outcome", "value/slope", "value/bias", "returns/var")
    )
    if explained is None or explained <= 0 or slope is None or bias is None or variance is None:
        return None  # one that explains nothing has a finding of its own
    seen = []
    if not 1 / SLOPE <= slope <= SLOPE:
        how = "too far apart" if slope < 1 else "too near to each other"
        seen.append(f"a value higher by 1 stood for {slope:.2g} more (value/slope): values are {how}")
    if abs(bias) > variance**0.5:
        how = "high" if bias > 0 else "low"
        seen.append(f"values were {abs(bias):.2g} too {how} (value/bias), more than returns vary ({variance**0.5:.2g})")
    if not seen:
        return None
    return Finding(
        LOOK,
        f"over the last quarter {'; '.join(seen)}",
        "Give the critic more updates (--set critic_epochs=4), without the clip that holds its values back (--set "
        "value_clip_range=none), and targets without its own values (--set value_lam=1).",
    )


def too_much_clipped(rows: Sequence[Mapping]) -> Finding | None:
    """Updates so large that the clip decides what is learned."""
    return sustained(
        rows,
        "policy/clipfrac",
        CLIPPED,
        lambda value, steps: Finding(
            LOOK,
            f"the policy's clip fraction was {value:.2g} around {steps}: updates are too large",
            "Lower --actor_learning_rate or --ppo_epochs, or have passes left out once a step has gone far enough "
            "(--set early_stop_kl=0.02).",
        ),
    )


def updates_too_far(rows: Sequence[Mapping]) -> Finding | None:
    """Updates that move the policy far from the one that sampled."""
    return sustained(
        rows,
        "policy/approxkl",
        APPROXKL_HIGH,
        lambda value, steps: Finding(
            LOOK,
            f"approximate KL of the updates was {value:.2g} around {steps}: the policy moved far from the one that "
            "had sampled",
            "Lower --actor_learning_rate or --ppo_epochs, or have passes left out once a step has gone far enough "
            "(--set early_stop_kl=0.02).",
        ),
    )


def gradient_spikes(rows: Sequence[Mapping]) -> Finding | None:
    """Single steps whose gradient stands out among its neighbours: a norm that falls or rises slowly does not."""
    found = []
    for name in ("policy/grad_norm", "value/grad_norm"):
        present = having(rows, name)
        norms = column(present, name)
        usual = [median(norms[max(i - NEIGHBOURS, 0) : i + NEIGHBOURS + 1]) for i in range(len(norms))]
        spikes = [i for i, norm in enumerate(norms) if norm > SPIKE * usual[i] > 0.0]
        if spikes:
            worst = max(spikes, key=lambda i: norms[i] / usual[i])
            found.append(
                f"{name} was up to {norms[worst] / usual[worst]:.3g} times its median of {usual[worst]:.2g}, "
                f"{at_steps([present[i]['step'] for i in spikes])}"
            )
    if not found:
        return None
    return Finding(
        LOOK,
        "; ".join(found),
        "Look at these steps' scores and lengths; lower --max_grad_norm or the learning rate, or clip scores "
        "(--score_clip). Where policy/ratio_max jumps with the policy's norm, --set ratio_limit=10 leaves such updates "
        "out.",
    )


def updates_skipped(rows: Sequence[Mapping]) -> Finding | None:
    """Steps none of whose updates were made: a loss, and no gradient norm; but those that `ratio_limit` left out."""
    trained = [row for row in rows if "policy/loss" in row or "value/loss" in row]
    steps = [
        row["step"]
        for row in trained
        if row.get("policy/left_out", 0.0) < 1.0
        and any(f"{name}/loss" in row and f"{name}/grad_norm" not in row for name in ("policy", "value"))
    ]
    if len(steps) <= SKIPPED * len(trained):
        return None
    return Finding(
        ALARM if steps[-1] == trained[-1]["step"] else LOOK,
        f"{len(steps)} of {len(trained)} steps made no update, since gradients overflowed, {at_steps(steps)}",
        "Use bf16 or fp32 if you can; in fp16 look whether the loss scale recovers.",
    )


def updates_left_out(rows: Sequence[Mapping]) -> Finding | None:
    """Optimizer steps of the policy that `ratio_limit` left out."""
    present = having(rows, "policy/left_out")
    shares = column(present, "policy/left_out")
    if not present or fmean(shares) <= SKIPPED:
        return None
    return Finding(
        ALARM if shares[-1] == 1.0 else LOOK,
        f"{100 * fmean(shares):.3g}% of the policy's updates were left out, their mean ratio being over ratio_limit, "
        f"{at_steps([row['step'] for row, share in zip(present, shares, strict=True) if share > 0])}",
        "Lower --actor_learning_rate or --ppo_epochs, or raise ratio_limit.",
    )
