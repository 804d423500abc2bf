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

Noise is two standard errors of the change: paired, example by example, where the run has measured that (metrics named
_change_se; training/reporting/standard_errors.py); else, but for step 1, of two means of other examples. The models are
saved whatever the verdict. FINE ends with the word "done" and exit code 0. WORSE is a judgement that its owner may not
share: exit code 0, and loud words in place of "done". BROKEN is none: no use of such a model is thinkable, and exit
code 1 keeps a script from training on it. Without held-out prompts step 3 is judged by its training curves, and never
as BROKEN. A score of another reward than before the first step is not judged.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from engine import distributed
from engine.errors import RunStopped
from training.reporting.health import ALARM, KL_FAR, at_end, column, score_unmoved
from training.reporting.reward_change import of_one_reward, scored_otherwise
from training.reporting.standard_errors import NOISE

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


def of_sft(rows: Sequence[Mapping], vocabulary: int) -> Verdict:
    """Of step 1's metrics (`read_metrics`). vocabulary: how many tokens a uniform guess chooses from."""
    before, after = _first_and_last(rows, "eval/loss")
    if before is None or after is None:
        return Verdict()
    tried = "Try a tenth of --learning_rate, more --num_warmup_steps, or fewer --num_train_epochs."
    seen = f"held-out loss was {before:.4g} nats a token before the first step and is {after:.4g} now"
    if not math.isfinite(after):
        return Verdict(Kind.BROKEN, (f"{seen}. {tried}",))
    if after <= before + max(LOSS_TOLERANCE, _paired_noise(rows, "eval/loss") or 0.0):
        return Verdict()
    if after > math.log(vocabulary):
        return Verdict(
            Kind.BROKEN, (f"{seen}; a uniform guess over the vocabulary has {math.log(vocabulary):.4g}. {tried}",)
        )
    return Verdict(Kind.WORSE, (f"{seen}. {tried}",))


def of_reward(rows: Sequence[Mapping], pairs: int) -> Verdict:
    """Of step 2's metrics. pairs: how many are held out."""
    loss, accuracy, spread = (
        _first_and_last(rows, f"eval/{name}") for name in ("pair_loss", "accuracy", "pair_loss_std")
    )
    if None in (*loss, *accuracy, *spread):
        return Verdict()
    seen = (
        f"held-out pair accuracy was {accuracy[0]:.3f} before the first step and is {accuracy[1]:.3f} now, held-out "
        f"loss was {loss[0]:.4g} and is {loss[1]:.4g} nats a pair (a coin: {math.log(2):.4g})"
    )
    if not math.isfinite(loss[1]):
        return Verdict(Kind.BROKEN, (f"{seen}. Try a tenth of --learning_rate.",))
    error = spread[1] / pairs**0.5
    noise = _paired_noise(rows, "eval/pair_loss")
    if noise is None:
        noise = NOISE * math.hypot(spread[0] / pairs**0.5, error)
    no_better = accuracy[1] <= accuracy[0]
    worse = loss[1] > loss[0] + noise
    if worse and no_better and loss[1] > math.log(2) + NOISE * error:
        return Verdict(Kind.BROKEN, (f"{seen}. Try a tenth of --learning_rate.",))
    if worse and not no_better:
        return Verdict(
            Kind.WORSE,
            (f"{seen}: better order, but far too sure. Try fewer --num_train_epochs or a lower --learning_rate.",),
        )
    if worse or (no_better and loss[1] > loss[0] - noise):
        return Verdict(
            Kind.WORSE,
            (
                f"{seen}: nothing that helps was learned. Try another --learning_rate (lower where train/loss jumps, "
                "higher where it stands still), more pairs, or more --num_train_epochs.",
            ),
        )
    return Verdict()


def of_ppo(rows: Sequence[Mapping], prompts: int) -> Verdict:
    """Of step 3's metrics. prompts: how many are held out; 0 where none are."""
    if not prompts or None in _first_and_last(rows, "eval/score"):
        return _of_curves(rows)
    lower = _score_lower(rows, prompts)
    alike, empty = _alike(rows, prompts), _empty(rows)
    far = _too_far(*(_last(rows, f"eval/{name}") for name in ("kl", "response_length")))
    seen = [text for text in (empty, alike, lower, far) if text]
    if not seen:
        return Verdict()
    tried = "Try a lower --actor_learning_rate, a higher --kl_coef, or --max_kl; read samples/after.jsonl."
    broken = bool(empty or (alike and lower))
    return Verdict(Kind.BROKEN if broken else Kind.WORSE, (*(f"{text}." for text in seen), tried))


def _of_curves(rows: Sequence[Mapping]) -> Verdict:
    seen = []
    score = score_unmoved(of_one_reward(rows))
    if score is not None and score.severity == ALARM:
        seen.append(score.text)
    far = _too_far(at_end(rows, "objective/kl"), at_end(rows, "rollout/response_length"))
    if far:
        seen.append(f"{far}. Try a lower --actor_learning_rate, a higher --kl_coef, or --max_kl.")
    return Verdict(Kind.WORSE, tuple(seen)) if seen else Verdict()


def _score_lower(rows: Sequence[Mapping], prompts: int) -> str | None:
    (before, after), spread = _first_and_last(rows, "eval/score"), _first_and_last(rows, "eval/score_std")
    noise = _paired_noise(rows, "eval/score")
    if noise is None:
        noise = NOISE * math.hypot(*(one or 0.0 for one in spread)) / prompts**0.5
    if after >= before - noise or any(map(scored_otherwise, rows)):
        return None
    return (
        f"the held-out score was {before:.4g} before the first step and is {after:.4g} now, with a noise of {noise:.2g}"
    )


def _alike(rows: Sequence[Mapping], prompts: int) -> str | None:
    before, after = _first_and_last(rows, "eval/distinct_responses")
    most = max(1.0, ALIKE * prompts)
    if before is None or after is None or after > most or before <= 4 * most:
        return None
    return f"the {prompts} held-out responses are all the same: {after:.0f} different ones, and {before:.0f} before"


def _empty(rows: Sequence[Mapping]) -> str | None:
    before, after = _first_and_last(rows, "eval/response_length")
    if before is None or after is None or after > 1.0 or before < 3.0:
        return None
    return f"the held-out responses are empty: {after:.3g} tokens with their end, and {before:.3g} before"


def _too_far(kl: float | None, length: float | None) -> str | None:
    if kl is None or kl <= KL_FAR or kl <= KL_A_TOKEN * (length or 0.0):
        return None
    return f"the KL to the reference is {kl:.4g} nats a response of {length or 0.0:.3g} tokens, which is beyond reason"


def _paired_noise(rows: Sequence[Mapping], name: str) -> float | None:
    """Of a metric's change, by its differences example by example; None where those were not measured."""
    error = _last(rows, f"{name}_change_se")
    return None if error is None else NOISE * error


def _first_and_last(rows: Sequence[Mapping], name: str) -> tuple[float | None, float | None]:
    """A metric at step 0 and after the last step at which it was measured; NaN where it was not finite."""
    first = [row[name] for row in rows if name in row and row["step"] == 0]
    last = [row[name] for row in rows if name in row and row["step"] > 0]
    return (first[0] if first else None), (last[-1] if last else None)


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
