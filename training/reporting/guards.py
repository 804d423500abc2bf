"""When a run stops by itself in the middle: numbers that are not finite, and a policy that has gone too far.

    what                                        looked at                            weights sound until step
    a score or reference log-prob not finite    before the step's first update       the one before this
    a log-prob or value not finite              before the step's first update       two before this: the last update
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
from collections.abc import Mapping
from typing import NoReturn

import torch
from torch import Tensor

from engine import distributed
from engine.errors import RunStopped
from engine.experience import Experience, TrainingBatch
from engine.zero.engines import TrainedModel

SHOWN = 2  # samples of each rank


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


def stop_unless_losses_finite(step: int, losses: dict[str, tuple[Tensor, list[TrainingBatch]]], tokenizer) -> None:
    """Stop on all ranks when a loss is not finite on any (all ranks call this).

    losses: by name, the losses (N,) of this rank's passes, and the rows of the first of them; further ones are texts.
    Raises: RunStopped with samples of the first pass whose loss went bad.
    """
    if not distributed.any_rank(~torch.cat([values for values, _ in losses.values()]).isfinite().all()):
        return
    bad = {name: (~values.isfinite()).nonzero().flatten().tolist() for name, (values, _) in losses.items()}
    what = [f"{name} ({losses[name][0][places[0]].item()})" for name, places in bad.items() if places]
    parts = [losses[name][1][place] for name, places in bad.items() for place in places if place < len(losses[name][1])]
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
