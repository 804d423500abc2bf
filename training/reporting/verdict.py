"""How a run that came to its end is judged: whether training destroyed its model.

    step   held out, after the last step against before the first                             verdict
    1      loss not finite; or worse than before and over that of a uniform guess, ln V       BROKEN
    1      loss worse beyond noise, and by more than 0.02 nats a token                        WORSE
    2      loss not finite; or worse than before and than a coin's, ln 2, both beyond noise,
           and accuracy no better than before                                                 BROKEN
    2      loss worse beyond noise; or accuracy no better and loss not lower beyond noise     WORSE
    3      responses empty; or all the same, and the score lower beyond noise                 BROKEN
    3      score lower beyond noise; responses all the same; KL over 30 nats a response and
           2 nats a token                                                                     WORSE
    all    none of these                                                                      FINE

Noise is two standard errors of the change, paired example by example (metrics named _change_se;
training/reporting/standard_errors.py). The models are saved whatever the verdict. FINE ends with the word "done" and
exit code 0. WORSE is a judgement that the run's owner may not share: exit code 0, and loud words in place of "done".
BROKEN leaves no use of the model: exit code 1 keeps a script from training on it. Without held-out prompts step 3 is
judged by its training curves, and never as BROKEN. A score of another reward than before the first step is not judged.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from engine import distributed
from engine.errors import RunStopped
from training.reporting.health import ALARM, KL_FAR, at_end, column, score_unmoved
from training.reporting.standard_errors import NOISE, of_one_reward, scored_otherwise

LOSS_TOLERANCE = 0.02
"""Nats a token: 2 % of perplexity, less than fine-tuning on other texts costs."""
ALIKE = 0.01
"""Distinct responses, as a share of the held-out prompts, up to which they count as all the same."""
KL_A_TOKEN = 2.0
"""Nats: at every token the policy is on average 7 times surer than the reference was."""


class Kind(StrEnum):
    """What a run came to."""

    FINE = "fine"
    WORSE = "worse"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Verdict:
    """seen: what was found, in numbers, and what to try; empty where the run is FINE."""

    kind: Kind = Kind.FINE
    seen: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """A held-out metric before the first step and after the last step at which it was measured; NaN where it was not
    finite. noise: within which a change is chance."""

    before: float
    after: float
    noise: float

    @classmethod
    def of(cls, rows: Sequence[Mapping], name: str) -> "Change | None":
        """That of eval/`name`; None where it was not measured before or not after."""
        measured = [row for row in rows if f"eval/{name}" in row]
        first = [row for row in measured if row["step"] == 0]
        last = [row for row in measured if row["step"] > 0]
        if not first or not last:
            return None
        error = last[-1].get(f"eval/{name}_change_se", 0.0)
        return cls(first[0][f"eval/{name}"], last[-1][f"eval/{name}"], NOISE * error)


def of_sft(rows: Sequence[Mapping], vocabulary: int) -> Verdict:
    """Of step 1's metrics (`read_metrics`). vocabulary: how many tokens a uniform guess chooses from."""
    loss, guess = Change.of(rows, "loss"), math.log(vocabulary)
    if loss is None or loss.after <= loss.before + max(LOSS_TOLERANCE, loss.noise):
        return Verdict()
    seen = f"held-out loss was {loss.before:.4g} nats a token before the first step and is {loss.after:.4g} now"
    broken = not loss.after <= guess  # NaN is, too
    if loss.after > guess:
        seen += f"; a uniform guess over the vocabulary has {guess:.4g}"
    tried = "Try a tenth of --learning_rate, more --num_warmup_steps, or fewer --num_train_epochs."
    return Verdict(Kind.BROKEN if broken else Kind.WORSE, (f"{seen}. {tried}",))


def of_reward(rows: Sequence[Mapping]) -> Verdict:
    """Of step 2's metrics."""
    loss, accuracy = Change.of(rows, "pair_loss"), Change.of(rows, "accuracy")
    if loss is None or accuracy is None:
        return Verdict()
    seen = (
        f"held-out pair accuracy was {accuracy.before:.3f} before the first step and is {accuracy.after:.3f} now, "
        f"held-out loss was {loss.before:.4g} and is {loss.after:.4g} nats a pair (a coin: {math.log(2):.4g})"
    )
    coin = math.log(2) + NOISE * (_last(rows, "eval/pair_loss_se") or 0.0)
    no_better, worse = accuracy.after <= accuracy.before, loss.after > loss.before + loss.noise
    if not math.isfinite(loss.after) or (worse and no_better and loss.after > coin):
        return Verdict(Kind.BROKEN, (f"{seen}. Try a tenth of --learning_rate.",))
    if worse and not no_better:
        tried = "better order, but far too sure. Try fewer --num_train_epochs or a lower --learning_rate."
    elif no_better and loss.after > loss.before - loss.noise:
        tried = (
            "nothing that helps was learned. Try another --learning_rate (lower where train/loss jumps, higher where "
            "it stands still), more pairs, or more --num_train_epochs."
        )
    else:
        return Verdict()
    return Verdict(Kind.WORSE, (f"{seen}: {tried}",))


def of_ppo(rows: Sequence[Mapping], prompts: int) -> Verdict:
    """Of step 3's metrics. prompts: how many are held out; 0 where none are."""
    score = Change.of(rows, "score")
    if not prompts or score is None:
        return _of_curves(rows)
    lower = alike = empty = None
    if score.after < score.before - score.noise and not any(map(scored_otherwise, rows)):
        lower = (
            f"the held-out score was {score.before:.4g} before the first step and is {score.after:.4g} now, with a "
            f"noise of {score.noise:.2g}"
        )
    different, most = Change.of(rows, "distinct_responses"), max(1.0, ALIKE * prompts)
    if different is not None and different.after <= most and different.before > 4 * most:
        alike = (
            f"the {prompts} held-out responses are all the same: {different.after:.0f} different ones, and "
            f"{different.before:.0f} before"
        )
    length = Change.of(rows, "response_length")
    if length is not None and length.after <= 1.0 and length.before >= 3.0:
        empty = (
            f"the held-out responses are empty: {length.after:.3g} tokens with their end, and {length.before:.3g} "
            "before"
        )
    far = _too_far(*(_last(rows, f"eval/{name}") for name in ("kl", "response_length")))
    seen = [f"{text}." for text in (empty, alike, lower, far) if text]
    if not seen:
        return Verdict()
    tried = "Try a lower --actor_learning_rate, a higher --kl_coef, or --max_kl; read samples/after.jsonl."
    return Verdict(Kind.BROKEN if empty or (alike and lower) else Kind.WORSE, (*seen, tried))


def _of_curves(rows: Sequence[Mapping]) -> Verdict:
    seen = []
    score = score_unmoved(of_one_reward(rows))
    if score is not None and score.severity == ALARM:
        seen.append(score.text)
    far = _too_far(at_end(rows, "objective/kl"), at_end(rows, "rollout/response_length"))
    if far:
        seen.append(f"{far}. Try a lower --actor_learning_rate, a higher --kl_coef, or --max_kl.")
    return Verdict(Kind.WORSE, tuple(seen)) if seen else Verdict()


def _too_far(kl: float | None, length: float | None) -> str | None:
    if kl is None or kl <= KL_FAR or kl <= KL_A_TOKEN * (length or 0.0):
        return None
    return f"the KL to the reference is {kl:.4g} nats a response of {length or 0.0:.3g} tokens, which is beyond reason"


def _last(rows: Sequence[Mapping], name: str) -> float | None:
    return next(reversed(column(rows, name)), None)


def conclude(judge: Callable[[], Verdict], saved: str) -> None:
    """Say a run's last words by rank 0's `judge()` (all ranks call this, when the models are saved).

    saved: where the models are. Raises: RunStopped on all ranks for one that is BROKEN.
    """
    verdict = distributed.broadcast_object(judge() if distributed.is_main() else None)
    lines = "\n".join(f"  {text}" for text in verdict.seen)
    if verdict.kind == Kind.BROKEN:
        raise RunStopped(f"training has broken the model. Do not use it; it is saved in {saved}.\n{lines}")
    if distributed.is_main():
        if verdict.kind == Kind.WORSE:
            print(
                f"WARNING: by what was held out, the model is worse than before, or no better. It is saved in {saved}."
            )
            print(lines, flush=True)
        else:
            print(f"done: saved in {saved}", flush=True)
