"""When a run stops by itself in the middle: numbers that are not finite, actor and reference that should be one model
and are not, and a policy that has gone too far.

    what                                        looked at                            weights sound until step
    a score or reference log-prob not finite    before the step's first update       the one before this
    a log-prob or value not finite              before the step's first update       two before this: the last update
    a KL where actor and reference are one      before the step's first update       -
    a loss not finite                           before its update                    the one before this
    a gradient not finite (outside fp16)        before its update                    the one before this
    a gradient's norm not finite                after its update                     the one before this
    a weight not finite, or over fp16's range   after the step's last update         the one before this
    objective/kl over --max_kl                  before the step's first update       two before this: the last update
    fp16: 16 overflows in a row, the loss       at the 16th                          any: nothing was changed
    scale at its floor or fixed

Each is decided over all ranks, and all of them stop, with exit code 1, rank 0 telling; nothing that was computed from
such a number reaches a restart point or a saved model. In fp16 a gradient that overflows once is no reason to stop: the
update is left out and the loss scale lowered, which policy/skipped, value/skipped and train/skipped count. How a run
that came to its end is judged stands in training/reporting/verdict.py.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from engine import distributed
from engine.errors import RunStopped
from engine.experience import Experience, TrainingBatch
from engine.rlhf_engine import RLHFEngine
from engine.zero.engines import TrainedModel

SHOWN = 2  # samples of each rank

_MANTISSA = {"bf16": 2.0**-7, "fp16": 2.0**-10, "fp32": 2.0**-23}  # the step between a number and the next, of 1
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
    """What is looked at in each step of PPO; all ranks call each together, and stop together.

    max_kl: nats a response; a rollout further from the reference, as it stands then, ends the run. None for no limit.
    first_kl_bound: how far actor and reference may be apart where they are one model (`rounding_bound`); None for no
        look.
    """

    models: RLHFEngine
    max_kl: float | None
    first_kl_bound: float | None

    def check_experience(self, step: int, experience: Experience) -> None:
        """Before anything is made of it. Raises: RunStopped where a number is not finite, or actor and reference are
        one model and do not agree."""
        stop_unless_finite(step, experience, self.models.tokenizer)
        if self.models.reference.is_actor(step - 1):
            stop_unless_at_reference(step, experience, self.first_kl_bound)

    def check_kl(self, step: int, kl: float) -> None:
        """Before the first update. kl: objective/kl. Raises: RunStopped where the policy has gone too far."""
        stop_if_too_far(step, kl, self.max_kl, moved=bool(self.models.reference.moves(step - 1)))

    def check_weights(self, step: int) -> None:
        """After the last update. Raises: RunStopped where a weight is not finite."""
        stop_unless_weights_finite(step, self.models.trained)


def stop_unless_finite(step: int, experience: Experience, tokenizer) -> None:
    """Stop on all ranks when a score, log-prob or value is not finite on any (all ranks call this).

    Raises: RunStopped, naming the step, what was not finite, and the first such samples of each rank.
    """
    mask = experience.rollout.response_mask
    by_row = {"score": ~experience.scores.isfinite()}
    for name in ("logprobs", "ref_logprobs", "values"):
        numbers = getattr(experience, name)
        if numbers is not None:
            by_row[name] = (~numbers.isfinite() & mask).any(-1)
    bad = torch.stack(list(by_row.values())).any(0)
    if distributed.any_rank(bad.any()):
        trained = any(rows.any() for name, rows in by_row.items() if name in ("logprobs", "values"))
        what = [f"{name} ({int(rows.sum())})" for name, rows in by_row.items() if rows.any()]
        _stop(step, what, experience, bad.nonzero().flatten(), tokenizer, step - 1 - int(distributed.any_rank(trained)))


def stop_unless_at_reference(step: int, experience: Experience, bound: float | None) -> None:
    """Stop on all ranks where actor and reference do not agree on responses, though they are one model (all ranks call
    this): in step 1, and in a step after a refresh of the reference.

    bound: of the mean absolute difference of their log-probs, a token; None for no such look. Raises: RunStopped.
    """
    if bound is None:
        return
    gaps = experience.kl.double().abs()
    sums = torch.stack([gaps.sum(), experience.rollout.response_mask.sum().double()])
    total, tokens = distributed.all_reduce_sum(sums).tolist()
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
    """How far apart two computations of a token's log-prob by one model may be on average, in nats, by rounding alone.

    A log-prob is the difference of two numbers as large as logits become, about SPREAD, and each is off by about one
    step of the dtype there: SPREAD * 2**-7 = 0.25 in bf16, and an eighth of that in fp16. Means measured
    with small models are a sixtieth of that between a sampler's log-probs and a forward pass's, and 0 between forward
    passes; single tokens reach half of it. In fp32 it is EXACT, a thousand times what was measured, as sums are longer
    in large models; or fp16's bound, where torch was told to multiply matrices with TF32, whose mantissa is as long.
    Weights that are random are nats away. Dividing logits by a temperature under 1 enlarges all of it.
    """
    step = _MANTISSA[dtype]
    if dtype == "fp32" and torch.get_float32_matmul_precision() != "highest":
        step = _MANTISSA["fp16"]
    return max(SPREAD * step, EXACT) / min(temperature, 1.0)


def stop_unless_losses_finite(
    step: int, losses: Mapping[str, Tensor], passes: Sequence[TrainingBatch], tokenizer
) -> None:
    """Stop on all ranks when a loss is not finite on any (all ranks call this).

    losses: by name ("policy", "value"), those of this rank's passes, (N,). passes: their rows; further losses are of
        texts.
    Raises: RunStopped with samples of the first pass whose loss went bad.
    """
    if not distributed.any_rank(~torch.cat(list(losses.values())).isfinite().all()):
        return
    bad = {name: (~values.isfinite()).nonzero().flatten().tolist() for name, values in losses.items()}
    what = [f"{name} loss ({losses[name][places[0]].item()})" for name, places in bad.items() if places]
    parts = [passes[place] for places in bad.values() for place in places if place < len(passes)]
    _stop(step, what, parts[0] if parts else None, torch.arange(len(parts[0]) if parts else 0), tokenizer, step - 1)


def stop_for_gradients(step: int, what: list[str], batch: TrainingBatch, tokenizer) -> NoReturn:
    """Stop because gradients that are named in `what` are not finite, which all ranks know (all call this)."""
    _stop(step, what, batch, torch.arange(len(batch)), tokenizer, step - 1)


def stop_unless_weights_finite(step: int, models: Mapping[str, TrainedModel]) -> None:
    """Stop on all ranks when a weight is not finite after the updates of `step`, or a gradient's norm was not.

    All ranks call this. models: by role.
    Raises: RunStopped, naming the models.
    """
    bad = [f"weights of the {role}" for role, model in models.items() if not model.weights_finite()]
    bad += [f"norm of the {role}'s gradient" for role, model in models.items() if not math.isfinite(model.grad_norm)]
    if bad:
        raise RunStopped(
            f"step {step}: after its update not finite, or over what the dtype holds: {', '.join(bad)}. Nothing of "
            "this step was saved. Lower the learning rates; look at --max_grad_norm and at the gradient norms of the "
            "steps before.",
            good_until=step - 1,
        )


def stop_if_too_far(step: int, kl: float, limit: float | None, moved: bool = False) -> None:
    """Stop, before the first update of `step`, where the KL of its responses is over --max_kl.

    kl: objective/kl, nats a response over all ranks, the same on each. It is that of the policy after `step` - 1 steps.
    moved: whether the reference is another one than at the start.
    """
    if limit is not None and kl > limit:
        since = " (to the reference as it has moved, not to the first one)" if moved else ""
        raise RunStopped(
            f"step {step}: objective/kl is {kl:.4g} nats a response{since}, over --max_kl {limit:g}, so the run ends "
            "before an update goes on from there. Raise --kl_coef or lower --actor_learning_rate; or raise --max_kl if "
            "such a distance is meant.",
            good_until=step - 2,
        )


def _stop(step: int, what: list[str], rows_of, rows: Tensor, tokenizer, good_until: int) -> NoReturn:
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
        "objective/kl, and in fp16 the range of the model (bf16 has a wider one).",
        good_until=good_until,
    )


def _described(batch: Experience | TrainingBatch, tokenizer, row: int) -> str:
    rollout = batch.rollout
    prompt = tokenizer.decode(rollout.prompts[row][rollout.attention_mask[row, : rollout.prompt_length].bool()])
    response = tokenizer.decode(rollout.responses[row][rollout.response_mask[row]])
    return f"  score {batch.scores[row].item():.4g}, prompt {prompt[-200:]!r}, response {response[:300]!r}"
