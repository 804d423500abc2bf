"""The checks that stop a run before its end, and the verdict on a run that has reached its end.

    step N stops the run on                     checked                         last step with sound weights
    a score or reference log-prob not finite    before the first update of N    N - 1
    a log-prob or value not finite              before the first update of N    N - 2: the updates of N - 1 may be bad
    log-probs of actor and reference that       before the first update of N    -
    differ while both are the same model
    a loss not finite                           before its update               N - 1
    a gradient not finite (outside fp16)        before its update               N - 1
    a gradient's norm not finite                after the last update of N      N - 1
    a weight not finite, or over fp16's range   after the last update of N      N - 1
    objective/kl over --max_kl                  before the first update of N    N - 2: the updates of N - 1 may be bad
    fp16: 16 overflows in a row, while the      at the 16th overflow            N: the updates were skipped
    loss scale is fixed or at its minimum

Each check covers all ranks. If a check fails on one rank, all ranks stop with exit code 1, and rank 0 prints the
reason. Nothing computed from a number that is not finite reaches a checkpoint or a saved model. In fp16 a single
overflow of a gradient does not stop the run: the update is skipped, the loss scale is lowered, and the metrics
policy/skipped, value/skipped and train/skipped count the overflow.

The verdict compares held-out metrics after the last step with those before the first step:

    step   held-out metrics after the last step                                               verdict
    1      loss not finite; or higher than before, and above ln V, the loss of a uniform
           guess among the V tokens of the vocabulary                                         BROKEN
    1      loss higher by more than noise, and by more than 0.02 nats per token               WORSE
    2      loss not finite; or accuracy not higher, and loss higher than before and than
           ln 2, the loss of a coin toss, each time by more than noise                        BROKEN
    2      loss higher by more than noise; or accuracy not higher, and loss not lower by
           more than noise                                                                    WORSE
    3      responses are empty; or are all the same, and score lower by more than noise       BROKEN
    3      score lower by more than noise; or responses all the same; or KL over 30 nats
           per response and 2 nats per token                                                  WORSE
    all    none of these                                                                      FINE

Noise is two standard errors of the change, computed from the differences on the same examples (metrics whose names end
with _change_se; standard_errors.py). The models are saved whatever the verdict is. A FINE run ends with the word "done"
and exit code 0. A WORSE run ends with a warning in place of "done", but also with exit code 0, because its owner may
judge otherwise. A BROKEN model is of no use: exit code 1 keeps a script from going on with it. Without held-out
prompts, step 3 is judged by its training curves, and the verdict is never BROKEN. The score is not judged if the reward
was changed during the run.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NoReturn

import torch
from torch import Tensor

from engine import distributed
from engine.errors import RunStopped
from engine.experience import Experience, TrainingBatch
from engine.rlhf_engine import RLHFEngine
from engine.zero.engines import TrainedModel
from training.reporting.health import ALARM, KL_FAR, at_end, column, score_unmoved
from training.reporting.standard_errors import NOISE, evaluations, of_one_reward, scored_otherwise

SHOWN = 2  # number of samples that a message shows of each rank

_MANTISSA = {"bf16": 2.0**-7, "fp16": 2.0**-10, "fp32": 2.0**-23}  # distance between 1 and the next larger number
SPREAD = 32.0
EXACT = 1e-3

_OF_MODELS = (
    "One of them does not hold the SFT model's weights, or computes with them otherwise: try --rollout_backend zero3 "
    "and --dtype fp32, and look at the DeepSpeed files of both."
)
_OF_SAMPLER = (
    "The actor's were taken from the sampler (old_logprobs=sampler), which does not hold the actor's weights, or "
    "computes with them otherwise. Take --old_logprobs forward: rollout/logprob_gap then tells how far the sampler is "
    "from the actor, and --set correction=token_truncate makes up for it."
)


@dataclass(frozen=True, slots=True)
class Guards:
    """The checks of each PPO step. All ranks call a check together, and stop together.

    max_kl: limit in nats per response. A rollout whose KL to the current reference is larger ends the run. None for no
        limit.
    first_kl_bound: the largest difference allowed between the log-probs of actor and reference while they are the same
        model (`rounding_bound`); None for no check.
    """

    models: RLHFEngine
    max_kl: float | None
    first_kl_bound: float | None

    def check_experience(self, step: int, experience: Experience) -> None:
        """Called before the experience is used. Raises: RunStopped if a number in it is not finite, or if the log-probs
        of actor and reference differ although they are the same model."""
        stop_unless_finite(step, experience, self.models.tokenizer)
        if self.models.reference.is_actor(step - 1):
            stop_unless_at_reference(step, experience, self.first_kl_bound)

    def check_kl(self, step: int, kl: float) -> None:
        """Called before the step's first update. kl: objective/kl, the KL of the policy after `step` - 1 steps.

        Raises: RunStopped if the KL is larger than max_kl.
        """
        if self.max_kl is None or not kl > self.max_kl:
            return
        moved = self.models.reference.moves(step - 1)
        since = " (to the reference as it has moved, not to the first one)" if moved else ""
        raise RunStopped(
            f"step {step}: objective/kl is {kl:.4g} nats a response{since}, over --max_kl {self.max_kl:g}, so the run "
            "ends before an update goes on from there. Raise --kl_coef or lower --actor_learning_rate; or raise "
            "--max_kl if such a distance is meant.",
            good_until=step - 2,
        )

    def check_weights(self, step: int) -> None:
        """Called after the step's last update. Raises: RunStopped if a weight or a gradient's norm is not finite."""
        stop_unless_weights_finite(step, self.models.trained)


def stop_unless_finite(step: int, experience: Experience, tokenizer) -> None:
    """Stop all ranks if a score, or the log-prob or value of a drawn token, is not finite on any rank (all ranks call
    this).

    Raises: RunStopped. The error message names the step and what was not finite, and shows each rank's first samples
    with such numbers.
    """
    mask = experience.rollout.actions
    by_row = {"score": ~experience.scores.isfinite()}
    for name in ("logprobs", "ref_logprobs", "values"):
        numbers = getattr(experience, name)
        if numbers is not None:
            by_row[name] = (~numbers.isfinite() & mask).any(-1)
    by_row |= {f"reward/{name}": ~scores.isfinite() for name, scores in experience.rewards.items()}
    bad = torch.stack(list(by_row.values())).any(0)
    if distributed.any_rank(bad.any()):
        trained = any(rows.any() for name, rows in by_row.items() if name in ("logprobs", "values"))
        what = [f"{name} ({int(rows.sum())})" for name, rows in by_row.items() if rows.any()]
        _stop(step, what, experience, bad.nonzero().flatten(), tokenizer, step - 1 - int(distributed.any_rank(trained)))


def stop_unless_at_reference(step: int, experience: Experience, bound: float | None) -> None:
    """Stop all ranks if the log-probs of actor and reference differ although they are the same model. Called in step 1,
    and in a step after a refresh of the reference (all ranks call this).

    bound: the largest allowed mean absolute difference of their log-probs, per token; None for no check. Raises:
    RunStopped.
    """
    if bound is None:
        return
    gaps = experience.kl.double().abs()
    sums = torch.stack([gaps.sum(), experience.rollout.actions.sum().double()])
    total, tokens = distributed.data_parallel_sum(sums).tolist()
    gap = total / max(tokens, 1.0)
    if gap > bound:
        sampled = experience.logprobs is experience.rollout.logprobs
        since = "no weight has been changed" if step == 1 else "the reference has just become the actor"
        raise RunStopped(
            f"step {step}: {since}, so actor and reference are one model, and the KL between them has to be 0. But "
            f"their log-probs differ by {gap:.3g} nats a token on average; rounding explains {bound:.3g}. "
            f"{_OF_SAMPLER if sampled else _OF_MODELS}"
        )


def rounding_bound(dtype: str, temperature: float = 1.0) -> float:
    """The bound for the mean difference, in nats, between two computations of a token's log-prob by the same model. A
    larger difference is not explained by rounding.

    A log-prob is the difference of two numbers that may be as large as logits become, about SPREAD. Rounding changes
    each of them by about one step of the dtype at this size: SPREAD * 2**-7 = 0.25 in bf16, and an eighth of this in
    fp16. This step is the bound. With small models, the measured mean difference between a sampler and a forward pass
    is a sixtieth of the bound, and between two forward passes it is 0; single tokens reach half of the bound. In fp32
    the bound is EXACT, a thousand times what was measured, because the sums of large models are longer. If torch
    multiplies fp32 matrices with TF32, the bound is that of fp16, because TF32's mantissa is as long. The log-probs of
    a model with random weights differ by whole nats. A temperature below 1, by which logits are divided, enlarges the
    differences and the bound.
    """
    step = _MANTISSA[dtype]
    if dtype == "fp32" and torch.get_float32_matmul_precision() != "highest":
        step = _MANTISSA["fp16"]
    return max(SPREAD * step, EXACT) / min(temperature, 1.0)


def stop_unless_losses_finite(
    step: int, losses: Mapping[str, Tensor], passes: Sequence[TrainingBatch], tokenizer
) -> None:
    """Stop all ranks if a loss is not finite on any rank (all ranks call this).

    losses: {"policy" or "value": the loss of each of this rank's passes, (N,)}. passes: the rows of each pass. If there
        are more losses than passes, the remaining losses are those of plain texts.
    Raises: RunStopped. The error message shows samples of the first pass whose loss is not finite.
    """
    if not distributed.any_rank(~torch.cat(list(losses.values())).isfinite().all()):
        return
    bad = {name: (~values.isfinite()).nonzero().flatten().tolist() for name, values in losses.items()}
    what = [f"{name} loss ({losses[name][places[0]].item()})" for name, places in bad.items() if places]
    parts = [passes[place] for places in bad.values() for place in places if place < len(passes)]
    _stop(step, what, parts[0] if parts else None, torch.arange(len(parts[0]) if parts else 0), tokenizer, step - 1)


_KERNELS = (
    "If the losses and earlier gradients were moderate, a kernel of attention can be at fault, cuDNN's above all: try "
    "--attn_implementation eager (docs/gpus.md)."
)


def stop_for_gradients(step: int, what: list[str], batch: TrainingBatch, tokenizer) -> NoReturn:
    """Stop the run because the gradients that `what` names are not finite. All ranks call this, each with the same
    `what`."""
    _stop(step, what, batch, torch.arange(len(batch)), tokenizer, step - 1, f" {_KERNELS}")


def stop_unless_weights_finite(step: int, models: Mapping[str, TrainedModel]) -> None:
    """Stop all ranks if a weight is not finite after the updates of `step`, or if the norm of a gradient was not.

    All ranks call this. models: {role: model}.
    Raises: RunStopped. Its message names the models.
    """
    bad = [f"weights of the {role}" for role, model in models.items() if not model.weights_finite()]
    bad += [f"norm of the {role}'s gradient" for role, model in models.items() if not math.isfinite(model.grad_norm)]
    if bad:
        raise RunStopped(
            f"step {step}: after its update not finite, or over what the dtype holds: {', '.join(bad)}. Nothing of "
            "this step was saved. Lower the learning rates; look at --max_grad_norm and at the gradient norms of the "
            f"steps before. {_KERNELS}",
            good_until=step - 1,
        )


def _stop(step: int, what: list[str], rows_of, rows: Tensor, tokenizer, good_until: int, advice: str = "") -> NoReturn:
    samples = [_described(rows_of, tokenizer, row) for row in rows[:SHOWN].tolist()]
    if rows_of is None:
        samples = ["  in a pass over the texts of mixed pretraining: look at these texts and at --unsup_coef"]
    found = distributed.all_gather_objects((what, samples))
    lines = [
        f"rank {rank}: not finite: {', '.join(what)}\n" + "\n".join(samples)
        for rank, (what, samples) in enumerate(found)
        if what
    ]
    raise RunStopped(
        f"step {step}: a number is NaN or infinite, and nothing was learned from it.\n" + "\n".join(lines) + "\n"
        "Look at: the reward model's score of these texts, the learning rates and gradient norms of the steps before, "
        f"objective/kl, and in fp16 the range of the model (bf16 has a wider one).{advice}",
        good_until=good_until,
    )


def _described(batch: Experience | TrainingBatch, tokenizer, row: int) -> str:
    rollout = batch.rollout
    prompt = tokenizer.decode(rollout.prompts[row][rollout.attention_mask[row, : rollout.prompt_length].bool()])
    response = tokenizer.decode(rollout.responses[row][rollout.response_mask[row]])
    return f"  score {batch.scores[row].item():.4g}, prompt {prompt[-200:]!r}, response {response[:300]!r}"


# The verdict on a run that has reached its end.

LOSS_TOLERANCE = 0.02
"""Nats per token. A rise by 0.02 is 2 % of perplexity; a model that is fine-tuned on other texts loses more."""
ALIKE = 0.01
"""Limit of distinct responses / held-out prompts: up to this share, the responses count as all the same."""
KL_A_TOKEN = 2.0
"""Nats per token. At 2 nats, a sampled token is on average e^2 = 7 times likelier than under the reference."""


class Kind(StrEnum):
    """The verdict on a run."""

    FINE = "fine"
    WORSE = "worse"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verdict and its reasons. seen: sentences with the numbers found and with advice; empty if the run is FINE."""

    kind: Kind = Kind.FINE
    seen: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """The change of a held-out metric. before, after: its values before the first step and at the last evaluation; NaN
    for a value that was not finite. noise: a change up to this size counts as chance."""

    before: float
    after: float
    noise: float

    @classmethod
    def of(cls, rows: Sequence[Mapping], name: str) -> "Change | None":
        """The change of the metric eval/`name`; None unless it was measured both before the first step and later."""
        name = f"eval/{name}"
        first, last = evaluations(rows, [name])
        return cls(first[name], last[name], NOISE * last.get(f"{name}_change_se", 0.0)) if first and last else None


def of_sft(rows: Sequence[Mapping], vocabulary: int) -> Verdict:
    """The verdict on step 1's metrics (`read_metrics`). vocabulary: number of tokens in the vocabulary."""
    loss, guess = Change.of(rows, "loss"), math.log(vocabulary)
    if loss is None or loss.after <= loss.before + max(LOSS_TOLERANCE, loss.noise):
        return Verdict()
    seen = f"held-out loss was {loss.before:.4g} nats a token before the first step and is {loss.after:.4g} now"
    broken = not loss.after <= guess  # True for NaN, too
    if loss.after > guess:
        seen += f"; a uniform guess over the vocabulary has {guess:.4g}"
    tried = "Try a tenth of --learning_rate, more --num_warmup_steps, or fewer --num_train_epochs."
    return Verdict(Kind.BROKEN if broken else Kind.WORSE, (f"{seen}. {tried}",))


def of_reward(rows: Sequence[Mapping]) -> Verdict:
    """The verdict on step 2's metrics."""
    noun = "step" if any("eval/step_loss" in row for row in rows) else "pair"
    loss, accuracy = Change.of(rows, f"{noun}_loss"), Change.of(rows, "accuracy")
    if loss is None or accuracy is None:
        return Verdict()
    seen = (
        f"held-out {noun} accuracy was {accuracy.before:.3f} before the first step and is {accuracy.after:.3f} now, "
        f"held-out loss was {loss.before:.4g} and is {loss.after:.4g} nats a {noun} (a coin: {math.log(2):.4g})"
    )
    coin = math.log(2) + NOISE * (_last(rows, f"eval/{noun}_loss_se") or 0.0)
    no_better, worse = accuracy.after <= accuracy.before, loss.after > loss.before + loss.noise
    if not math.isfinite(loss.after) or (worse and no_better and loss.after > coin):
        return Verdict(Kind.BROKEN, (f"{seen}. Try a tenth of --learning_rate.",))
    if worse and not no_better:
        tried = "better order, but far too sure. Try fewer --num_train_epochs or a lower --learning_rate."
    elif no_better and loss.after > loss.before - loss.noise:
        tried = (
            "nothing that helps was learned. Try another --learning_rate (lower where train/loss jumps, higher where "
            f"it stands still), more {noun}s, or more --num_train_epochs."
        )
    else:
        return Verdict()
    return Verdict(Kind.WORSE, (f"{seen}: {tried}",))


def of_ppo(rows: Sequence[Mapping], prompts: int) -> Verdict:
    """The verdict on step 3's metrics. prompts: number of held-out prompts; may be 0."""
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


def conclude(verdict: Verdict, saved: str) -> None:
    """Print the verdict at the end of a run (all ranks call this, after saving the models).

    saved: the place of the models, for the message. Raises: RunStopped on all ranks if the verdict is BROKEN.
    """
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
