"""Finds signs of problems in a PPO run's metrics. A `Finding` says what the metrics show, and what to try.

    for finding in health(read_metrics(output_dir / "metrics.jsonl")):  # of training.reporting.run_record
        print(finding.severity, finding.text)

A rule takes a run's records and returns a Finding, or None if it finds nothing or the run lacks the metrics that it
reads. Thresholds are rules of thumb; the reason stands with each of them. A finding is a reason to look at the run, not
a verdict.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from engine.errors import in_words
from training.reporting.standard_errors import NOISE, of_one_reward

ALARM = "alarm"
LOOK = "look"
FINE = "fine"
"""ALARM: the run is probably spoilt. LOOK: the run may be healthy, but look at it. FINE: nothing stood out."""
FEWEST_STEPS, SHARE = 8, 0.1
"""FEWEST_STEPS: a run with fewer steps is too short to show a trend. SHARE: the start and the end of a run are its
first and its last tenth."""


@dataclass(frozen=True)
class Finding:
    """A finding. severity: ALARM, LOOK or FINE. seen: what the metrics show, with numbers. advice: what to try. alone:
    whether it is never a sign of another problem."""

    severity: str
    seen: str
    advice: str = ""
    alone: bool = False

    @property
    def text(self) -> str:
        """The finding as a text: what the metrics show, and the advice."""
        return f"{self.seen}. {self.advice}" if self.advice else self.seen

    def with_signs(self, signs: "Sequence[Finding]") -> "Finding":
        """This finding together with further findings of the same problem; its severity becomes the highest of all."""
        if not signs:
            return self
        severity = ALARM if ALARM in (self.severity, *(sign.severity for sign in signs)) else self.severity
        return Finding(severity, f"{self.seen}. With it: {'; '.join(sign.seen for sign in signs)}", self.advice)


Rule = Callable[[Sequence[Mapping]], Finding | None]


# Means and noise of a metric over a run.


def having(rows: Sequence[Mapping], name: str) -> list[Mapping]:
    """The rows in which a metric is finite."""
    return [row for row in rows if math.isfinite(row.get(name, math.nan))]


def column(rows: Sequence[Mapping], name: str) -> list[float]:
    """The finite values of a metric, in the order of the rows."""
    return [row[name] for row in having(rows, name)]


def mean(rows: Sequence[Mapping], name: str, begin: float, end: float) -> float | None:
    """The mean of a metric over a part of the run, over at least one value. begin, end: where the part begins and ends,
    as shares of the run (0 to 1)."""
    values = column(rows, name)
    first = min(int(begin * len(values)), len(values) - 1)
    return fmean(values[first : max(int(end * len(values)), first + 1)]) if values else None


def at_start(rows: Sequence[Mapping], name: str) -> float | None:
    """The mean of a metric over the first tenth of the run."""
    return mean(rows, name, 0.0, SHARE)


def at_end(rows: Sequence[Mapping], name: str) -> float | None:
    """The mean of a metric over the last tenth of the run."""
    return mean(rows, name, 1.0 - SHARE, 1.0)


def noise(values: Sequence[float]) -> float:
    """The standard deviation of a curve around its trend, estimated from the differences of neighbouring values; 0 if
    there is one value."""
    return (fmean([(b - a) ** 2 for a, b in itertools.pairwise(values)] or [0.0]) / 2) ** 0.5


def smoothed(rows: Sequence[Mapping], name: str) -> tuple[list[float], float]:
    """(the means of a metric over all stretches of a tenth of the run, of 2 values if there are as many; NOISE standard
    errors of the difference of two such means). The rows all have the metric."""
    values = column(rows, name)
    window = min(max(2, int(SHARE * len(values))), len(values))
    means = [fmean(values[i : i + window]) for i in range(len(values) - window + 1)]
    return means, NOISE * noise(values) * (2 / window) ** 0.5


def by_ends(
    *metrics: str,
    ill: Callable[[float, float], bool],
    seen: str,
    advice: str,
    alarm: Callable[[float], bool] = lambda last: False,
) -> Rule:
    """Make a rule that compares a metric's mean over the first tenth of a run (`first`) with its mean over the last
    tenth (`last`).

    metrics: names of metrics. The rule reads the first metric that has several values; if none has, it reads the last
    metric.
    ill: (first, last) -> whether there is a finding. alarm: last -> whether the finding is an ALARM. seen: what the
    finding says, with the fields {first}, {last} and {times}, which is last / first.
    """

    def rule(rows: Sequence[Mapping]) -> Finding | None:
        metric = next((name for name in metrics if len(having(rows, name)) > 1), metrics[-1])
        first, last = at_start(rows, metric), at_end(rows, metric)
        if first is None or last is None or not ill(first, last):
            return None
        times = last / first if first else math.inf
        return Finding(ALARM if alarm(last) else LOOK, seen.format(first=first, last=last, times=times), advice)

    return rule


# The distance of the policy from the reference, and its entropy.

KL_FAR, KL_FAR_A_TOKEN = 30.0, 0.5
"""Nats per response and per token. At 30 nats, a response of the policy is e^30 = 10^13 times likelier than under the
reference. At 0.5 nats, a token that the policy chooses is on average 1.6 times likelier."""
KL_MOVED = 0.5
"""Nats per response. Below it the policy has hardly changed: a response is at most 1.6 times likelier than before."""
KL_NEGATIVE = -0.5
"""Nats per response. A KL is not negative. Rounding and noise can make its estimate slightly negative, but not by half
a nat."""
ENTROPY_KEPT, ENTROPY_GREW = 0.4, 1.5
"""Entropy at the end / entropy at the start. A fall to half is usual; after a fall to a third little is explored. A
policy whose entropy grows by half is losing its language rather than exploring."""


def reference_moved(rows: Sequence[Mapping]) -> bool:
    """Whether the reference changed during the run. If so, the KL to the reference is not the KL to the model from
    which training started: each refresh of the reference lowers it."""
    return (at_end(rows, "objective/reference_moves") or 0.0) > 0.0


def kl_far(rows: Sequence[Mapping]) -> Finding | None:
    """The KL is so large that the responses are unlike those on which the reward model was trained."""
    kl, a_token = at_end(rows, "objective/kl"), at_end(rows, "objective/kl_per_token")
    if kl is None or (kl <= KL_FAR and (a_token is None or a_token <= KL_FAR_A_TOKEN)):
        return None
    moved = ", which has moved: the model that training started from is further away" if reference_moved(rows) else ""
    return Finding(
        ALARM,
        f"KL to the reference ended at {kl:.3g} nats a response, {a_token or 0:.2g} a token{moved}",
        "So far away the reward model's scores mean little: read samples/, then raise --kl_coef, lower "
        "--actor_learning_rate, or have the coefficient steered to a KL of your choice (--set kl_controller=adaptive "
        "kl_target=6); a checkpoint of before (--save_steps) keeps what was reached, and --max_kl ends a run that "
        "goes so far.",
    )


kl_negative = by_ends(
    "objective/kl",
    ill=lambda first, last: last < KL_NEGATIVE,
    alarm=lambda last: True,
    seen="KL to the reference ended at {last:.3g} nats a response: a KL is not negative, so responses are sampled from "
    "something else than their log-probs say",
    advice="Look at --temperature and the dialect's temperature_in_logprobs.",
)
entropy_fell = by_ends(
    "objective/entropy",
    ill=lambda first, last: first > 0 and last < ENTROPY_KEPT * first,
    seen="entropy fell from {first:.3g} to {last:.3g} nats a token ({times:.0%} of its start): responses become alike, "
    "and nothing new is tried",
    advice="Raise --kl_coef, lower --actor_learning_rate or --ppo_epochs.",
)
entropy_rose = by_ends(
    "objective/entropy",
    ill=lambda first, last: first > 0 and last > ENTROPY_GREW * first,
    seen="entropy rose from {first:.3g} to {last:.3g} nats a token ({times:.3g} times its start): the policy may be "
    "losing its language",
    advice="Read samples/; raise --kl_coef or lower --actor_learning_rate.",
)


# The optimizer steps: whether updates are made and moderate, and the score rises.

CLIPPED = 0.3
"""Share of tokens whose policy loss is clipped. Clipping is meant for outliers, not for a third of all tokens."""
SKIPPED = 0.05
"""Share of steps without an update. In fp16 overflows at the start are usual, since they lower the loss scale to a
fitting size; later they are rare."""
FELL_BACK = 0.5
"""Limit of the share of the score's highest rise that is lost again by the end of the run."""


def score_unmoved(rows: Sequence[Mapping]) -> Finding | None:
    """The score fell, or fell back after a rise, or did not rise beyond its step-to-step noise."""
    present = having(rows, "objective/scores")
    scores = column(present, "objective/scores")
    if len(scores) < FEWEST_STEPS:
        return None
    means, error = smoothed(present, "objective/scores")
    first = means[0]
    highest = max(means)
    last = means[-1]
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
            "Lower --actor_learning_rate or raise --kl_coef; a checkpoint of before (--save_steps) keeps what was "
            "reached.",
        )
    if last > first + error:
        return None
    kl = at_end(rows, "objective/kl")
    advice = "Train longer (--max_steps), raise --actor_learning_rate, lower --kl_coef, or make each step larger."
    if kl is not None and not reference_moved(rows):
        moved = "the penalty may hold the policy there" if kl > KL_MOVED else "the policy has hardly moved"
        advice = f"KL to the reference is {kl:.2g} nats a response: {moved}. {advice}"
    return Finding(
        LOOK,
        f"the score did not rise beyond its noise: {first:.3g} at the start, {last:.3g} at the end, a change of "
        f"{last - first:+.3g}, where up to {error:.3g} is within noise",
        advice,
    )


def value_unexplained(rows: Sequence[Mapping]) -> Finding | None:
    """The critic predicts the returns no better than a constant. With a lambda below 1, returns contain the critic's
    own values; therefore the outcomes (returns with lambda 1) are used if the run has their metric."""
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


def too_much_clipped(rows: Sequence[Mapping]) -> Finding | None:
    """Over some tenth of the run (at least 3 steps), the loss of many tokens was clipped."""
    present = having(rows, "policy/clipfrac")
    width = max(3, int(SHARE * len(present)))
    stretches = [present[i : i + width] for i in range(len(present) - width + 1)]
    means = [fmean(column(stretch, "policy/clipfrac")) for stretch in stretches]
    if max(means, default=0.0) <= CLIPPED:
        return None
    highest = stretches[means.index(max(means))]
    return Finding(
        LOOK,
        f"the policy's clip fraction was {max(means):.2g} around steps {highest[0]['step']}-{highest[-1]['step']}: "
        "updates are too large",
        "Lower --actor_learning_rate or --ppo_epochs, or have passes left out once a step has gone far enough "
        "(--set early_stop_kl=0.02).",
    )


def updates_skipped(rows: Sequence[Mapping]) -> Finding | None:
    """Steps made no update: their records have a loss but no gradient norm."""
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
        f"{len(steps)} of {len(trained)} steps made no update, since gradients overflowed, the last one step "
        f"{steps[-1]}",
        "Use bf16 or fp32 if you can; in fp16 look whether the loss scale recovers.",
    )


# The difference between the sampler, which draws the responses, and the actor, which learns from them.

GAP = 0.05
"""Mean difference of log-probs, in nats per token. In bf16, models of a few layers stay below 0.01, and models of many
layers far below 0.05."""
FAR, ANOTHER = 0.01, 0.1
"""Share of tokens whose ratio actor / sampler is outside of 0.5 to 2. At 0.01, the loss of one token in 100 would be
clipped before anything is learned. Above 0.1, rounding cannot be the cause: the sampler computes another policy."""


def sampler_apart(rows: Sequence[Mapping]) -> Finding | None:
    """The sampler's probabilities differ from the actor's."""
    gap, far = at_end(rows, "rollout/logprob_gap"), at_end(rows, "rollout/ratio_far")
    if gap is None or far is None or (gap <= GAP and far <= FAR):
        return None
    advice = (
        "Rounding explains hundredths of a nat: see that the sampler has the actor's weights, and try --dtype fp32 or "
        "another --rollout_backend. Have old log-probs come from a forward pass (--old_logprobs forward), and weigh "
        "what was drawn by the ratios (--set correction=token_truncate)."
    )
    hidden = at_end(rows, "rollout/hidden_tokens")
    if hidden:
        advice = (
            "The dialect hides the pad token from the actor, also where it is BOS or EOS in a prompt "
            f"({hidden:.1%} of the tokens that the sampler read). If the tokenizer has a pad token of its own, give "
            "--set pad_token=tokenizer; else --set length_rule=sampled."
        )
    seen = (
        f"the sampler's log-probs ended {gap:.3g} nats a token from the actor's, and {far:.1%} of the tokens had a "
        "ratio outside 0.5 to 2"
    )
    return Finding(ALARM if far > ANOTHER else LOOK, seen, advice)


# The responses: their length, whether they end, their variety, their scores.

LONGER, SHORTER = 1.5, 0.67
"""Response length at the end / at the start of the run. A reward model may prefer long (or short) responses as such."""
FEW_ENDED, HALVED = 0.1, 0.5
"""FEW_ENDED: share of responses that end by themselves. Below it, nearly all responses are cut off at the length limit,
and are scored unfinished. HALVED: limit of that share at the end / before. The score of an unfinished response is close
to noise."""
FAILED, MANY_FAILED = 0.01, 0.2
"""Share of conversations that an error of the environment ended. A few time-outs teach little that is wrong; a fifth
of the conversations does."""
MANY_CLIPPED, ALL_CLIPPED = 0.1, 0.9
"""Share of scores that are clipped, after the first step or at the end of the run. Clipping is meant for outliers; if
nearly all scores are clipped, they hardly differ any more."""
NO_DIFFERENCE = 0.5
"""Share of groups of equal scores at the end of the run. Above it, most of the drawn responses teach nothing."""
ALIKE = 0.5
"""Distinct bigrams per token, and compressed bytes per token, of the held-out responses: last value / first value. If
both are below the limit, the responses have become alike. The bytes of a healthy policy stay at 0.8 of their first
value; those of a collapsed policy fall to 0.1 to 0.25."""
TOO_SHORT = 0.33
"""Response length at the end / at the start. Below it, responses are too short to differ: the length is the problem."""
INVENTED = 0.05
"""Limit of the rise in the share of new words. Measured with a small model: before training 34 % of the words were new
and 20 % were non-words; after good training 27 % and 16 %; after training that rewards invented words 46 % and 31 %,
later 57 % and 40 %. The share of new words thus rises about as much as the share of non-words. In a policy that only
learned to say other things, the share of new words rose by at most 1 %."""
_LENGTH = "eval/response_length", "rollout/response_length"
"""The length is measured on held-out prompts if there are any: these are the same each time, and are answered before
any training."""

length_grew = by_ends(
    *_LENGTH,
    ill=lambda first, last: last > LONGER * first,
    seen="responses grew from {first:.3g} to {last:.3g} tokens",
    advice="See in samples/ whether the reward model pays for length alone. If so, balance lengths among its training "
    "pairs, try --length_penalty, or raise --kl_coef.",
)
length_shrank = by_ends(
    *_LENGTH,
    ill=lambda first, last: last < SHORTER * first,
    seen="responses shrank from {first:.3g} to {last:.3g} tokens",
    advice="See in samples/ whether the reward model pays for brevity alone. If so, balance lengths among its training "
    "pairs, or raise --kl_coef.",
)


def few_ended(rows: Sequence[Mapping]) -> Finding | None:
    """Hardly any response ends by itself: one step is enough to see this. Or the share of those that do has halved."""
    shares = having(rows, ENDS)
    if not shares:
        return None
    means, error = smoothed(shares, ENDS)
    first, last = means[0], means[-1]
    halved = len(shares) >= FEWEST_STEPS and last < min(HALVED * first, first - 2 * error)
    if last >= FEW_ENDED and not halved:
        return None
    if having(rows, "rollout/after_eos"):
        return Finding(
            LOOK,
            f"{last:.0%} of responses contained EOS at the end",
            "The dialect draws on after EOS, and scores and learns what follows, so that nothing rewards an end: --set "
            "truncate_token=eos ends the response there.",
        )
    if having(rows, "rollout/turns"):
        if (at_end(rows, "rollout/environment_errors") or 0.0) > 1 - FEW_ENDED:
            return None  # `environment_failed` tells it
        return Finding(
            LOOK,
            f"{last:.0%} of conversations ended by themselves at the end",
            "See whether rollout/turn_limit or rollout/token_limit ended them, and raise --max_turns or "
            "--max_answer_seq_len; or see in samples/ why turns go on.",
        )
    penalty = f"--missing_eos_penalty {next(iter(column(rows, 'eval/score_std')), 0.0) or 1.0:.2g}"
    if having(rows, "objective/missing_eos_penalty"):
        penalty = "a larger --missing_eos_penalty"
    advice = (
        f"At the start {first:.0%} did, and the score of a cut response is close to noise. Try {penalty} first, about "
        "a standard deviation of the scores; then raise --max_answer_seq_len. See in samples/ whether the reward model "
        "pays for going on: --length_penalty, or pairs of balanced lengths."
    )
    if first < FEW_ENDED:
        advice = "They did not from the start: raise --max_answer_seq_len, and see that the SFT data ends with EOS."
    return Finding(LOOK, f"{last:.0%} of responses ended by themselves at the end, the others hit the limit", advice)


environment_failed = by_ends(
    "rollout/environment_errors",
    ill=lambda first, last: last > FAILED,
    alarm=lambda last: last > MANY_FAILED,
    seen="the environment failed in {last:.1%} of the conversations at the end, which ended there",
    advice="The run's output shows the first errors, in lines that begin with --environment. For time-outs raise "
    "--environment_timeout or --environment_threads.",
)
groups_alike = by_ends(  # many groups of responses to one prompt have equal scores, from which nothing is learned
    "rollout/groups_alike",
    ill=lambda first, last: last > NO_DIFFERENCE,
    seen="in {last:.0%} of the groups at the end all responses scored the same, and comparing them taught nothing",
    advice="By objective/scores see whether the prompts are solved or too hard; take other prompts, more responses to "
    "each (--num_samples_per_prompt), or draw for further prompts in their place (--set dynamic_sampling=10).",
)


def answers_alike(rows: Sequence[Mapping]) -> Finding | None:
    """Held-out responses became alike: they have fewer pairs of words for their length, and compress better."""
    evaluations = [row for row in having(rows, "eval/distinct_bigrams") if row.get("eval/response_length", 0.0) > 0]
    if len(evaluations) < 2:
        return None
    first, last = evaluations[0], evaluations[-1]
    length = last["eval/response_length"] / first["eval/response_length"]
    bigrams = last["eval/distinct_bigrams"] / max(first["eval/distinct_bigrams"], 1.0) / length
    before, after = (row.get("eval/compressed_bytes", 0.0) for row in (first, last))
    compressed = after / before if before > 0.0 else 0.0
    # Neither sign suffices alone: longer texts have fewer new pairs of words for their length, and plainer words
    # compress better. Responses that became alike show both signs.
    if max(bigrams, compressed) >= ALIKE or length < TOO_SHORT:
        return None
    return Finding(
        LOOK,
        f"held-out responses became alike: {first['eval/distinct_bigrams']:.0f} distinct bigrams before, "
        f"{last['eval/distinct_bigrams']:.0f} after, {bigrams:.0%} for their length"
        + (f"; compressed together they take {compressed:.0%} of the bytes a token" if compressed else ""),
        "Read samples/; raise --kl_coef, lower --actor_learning_rate, or stop earlier.",
    )


def words_invented(rows: Sequence[Mapping]) -> Finding | None:
    """Held-out responses contain a larger share of new words: words that were in no prompt and in no other response
    before training."""
    evaluations = having(rows, "eval/new_words")
    if len(evaluations) < 2:
        return None
    first, last = (evaluations[place]["eval/new_words"] for place in (0, -1))
    error = evaluations[-1].get("eval/new_words_change_se", 0.0)
    if last - first <= max(INVENTED, NOISE * error):
        return None
    return Finding(
        LOOK,
        f"words are being invented, or new to the policy: {last:.0%} of a held-out response's words stood in no other "
        f"response before training, and in no prompt; before it was {first:.0%}",
        "Read samples/: if they are no words, the score pays for noise that the reward model has never seen; raise "
        "--kl_coef, lower --actor_learning_rate, or mix language in (--unsupervised_dataset_name).",
    )


scores_clipped = by_ends(  # the scores' scale does not fit the clip
    "objective/clipped",
    ill=lambda first, last: last > MANY_CLIPPED,
    alarm=lambda last: last > ALL_CLIPPED,
    seen="{last:.0%} of the latest scores were beyond score_clip and counted as that, so that they do not differ",
    advice="Have the reward function, server or model give smaller numbers (--reward_model_weight), or give --set "
    "score_scaling=running or --set score_clip=none.",
)


# Over-optimisation: the score rises, and what it stands for falls.

ENDS, LIKELIHOOD = "rollout/eos_rate", "likelihood"
UNLIKELIER, ENOUGH_KL = 0.25, 3.0
"""UNLIKELIER: nats a token by which the reference's log-prob of the responses falls. In most runs that went well it
rose, since responses became typical. Where a task with short answers was learned it fell by 0.35, at a KL of 1.
ENOUGH_KL: nats a response. Below it hardly any reward model was seen to be over-optimised."""


@dataclass(frozen=True)
class TurningPoint:
    """Where something that should rise with the score began to fall. step: the last step at which it was as good as
    ever, within noise. kl: the KL to the reference there. name: its metric. best, last: its mean there and at the end.
    scores: those of the score."""

    step: int
    kl: float
    name: str
    best: float
    last: float
    scores: tuple[float, float]

    @property
    def bound(self) -> str:
        """The flag with which merging goes back to the KL of that step, or to ENOUGH_KL if that was smaller."""
        return f"--max_kl {max(self.kl, ENOUGH_KL):.2g}"


def turning_point(rows: Sequence[Mapping], name: str) -> TurningPoint | None:
    """Where the metric turned; None if it did not fall by more than noise, or the score did not rise meanwhile."""
    present = having(having(having(rows, name), "objective/scores"), "objective/kl")
    if len(present) < FEWEST_STEPS:
        return None
    means, error = smoothed(present, name)
    scores, score_error = smoothed(present, "objective/scores")
    best = max(place for place, value in enumerate(means) if value >= max(means) - error)
    if max(means) - means[-1] <= 2 * error or scores[-1] - scores[best] <= score_error:
        return None
    kls, _ = smoothed(present, "objective/kl")
    step = present[best + len(present) - len(means)]["step"]  # the last one of the stretch
    return TurningPoint(step, kls[best], name, means[best], means[-1], (scores[best], scores[-1]))


def over_optimised_since(rows: Sequence[Mapping]) -> TurningPoint | None:
    """Where the run became over-optimised; None if nothing shows that it did.

    Rewards of weight 0 tell it alone, if there are any: PPO does not see them. Else it shows in the share of responses
    that end, if that halves, and in the reference's log-prob of a token, which is - (entropy + KL) in the mean.
    """
    rows = of_one_reward(rows)
    names = {name for row in rows for name in row if name.startswith("reward/") and row[name]}  # not always 0
    weighted = {name: column(rows, name.replace("reward/", "objective/scores_")) for name in names}
    if judges := [name for name in sorted(names) if weighted[name] and not any(weighted[name])]:
        turns = [turning_point(rows, name) for name in judges]
    else:
        both = "objective/entropy", "objective/kl_per_token"
        likely = [row | {LIKELIHOOD: -sum(row[name] for name in both)} for row in rows if {*both} <= row.keys()]
        fell = None if reference_moved(rows) else turning_point(likely, LIKELIHOOD)
        ended = turning_point(rows, ENDS)
        turns = [ended if ended is not None and ended.last < HALVED * ended.best else None]
        if fell is not None and fell.best - fell.last > UNLIKELIER and at_end(rows, "objective/kl") > ENOUGH_KL:
            turns.append(fell)
    return min((one for one in turns if one is not None), key=lambda one: one.step, default=None)


def over_optimised(rows: Sequence[Mapping]) -> Finding | None:
    """The score rose while responses ended more rarely, or became unlikely, which another problem may explain; or while
    a reward of weight 0 fell, which no other problem explains. Whether such a reward says how good a response is, and
    whether the score is a proxy at all, only the user knows."""
    since = over_optimised_since(rows)
    if since is None:
        return None
    what, provided = f"{since.name} (weight 0)", f"if {since.name} says how good a response is"
    back, judged = f"--choose_by eval/{since.name.replace('/', '_')}", since.name not in (ENDS, LIKELIHOOD)
    if not judged:
        what = "the share of responses that end" if since.name == ENDS else "the reference's log-prob of a token"
        provided, back = "if a reward model gives the score", since.bound
    return Finding(
        LOOK,
        f"over-optimised since step {since.step}, {provided}: from there the score rose from {since.scores[0]:.3g} to "
        f"{since.scores[1]:.3g}, and {what} fell from {since.best:.3g} to {since.last:.3g}; merging with {back} "
        "goes back",
        "Read samples/. A checkpoint of that step or before (--save_steps, --keep_best_by) goes back, too.",
        alone=judged,
    )


# All rules together.

ANY_LENGTH = (sampler_apart, kl_far, kl_negative, scores_clipped, few_ended, environment_failed, updates_skipped)
TRENDS = (
    *(score_unmoved, entropy_fell, entropy_rose, value_unexplained, too_much_clipped),
    *(length_grew, length_shrank, groups_alike, answers_alike, words_invented, over_optimised),
)
EXPLAINS = {
    sampler_apart: (kl_negative,),
    answers_alike: (entropy_fell, length_grew, length_shrank, few_ended, kl_far, over_optimised),
    length_shrank: (entropy_fell, kl_far, over_optimised),
    words_invented: (entropy_rose, kl_far, over_optimised),
    few_ended: (length_grew, kl_far, over_optimised),
    length_grew: (kl_far, over_optimised),
    kl_far: (over_optimised,),
    entropy_rose: (over_optimised,),
}
"""{rule of a problem: rules that find signs of this problem}. If the problem is found, its signs are reported together
with it, and not as findings of their own. A sign of several problems is reported with the first that is found."""


def health(records: Sequence[Mapping]) -> list[Finding]:
    """Apply all rules to a run's metrics (`read_metrics`). Returns the findings, alarms first; a single finding FINE if
    the rules find nothing."""
    records = of_one_reward(records)
    steps = len(having(records, "objective/kl"))
    if steps == 0:
        return [Finding(FINE, "no step of PPO to judge")]
    rules = ANY_LENGTH + TRENDS if steps >= FEWEST_STEPS else ANY_LENGTH
    found = {rule: finding for rule in rules if (finding := rule(records)) is not None}
    for illness, signs in EXPLAINS.items():
        if illness in found:
            found[illness] = found[illness].with_signs(
                [found.pop(sign) for sign in signs if sign in found and not found[sign].alone]
            )
    if found:
        return sorted(found.values(), key=lambda finding: finding.severity != ALARM)
    if steps < FEWEST_STEPS:
        return [Finding(FINE, f"nothing stood out in {in_words(steps, 'step')}, too few to show a trend")]
    return [Finding(FINE, f"nothing stood out in {steps} steps")]
