"""Where a number is NaN or infinite the run stops, on all ranks and before a weight changes."""

from typing import NoReturn

import torch
from torch import Tensor

from engine import distributed
from engine.errors import RunStopped
from engine.experience import Experience, TrainingBatch

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
    if distributed.any_rank(bool(bad.any())):
        what = [f"{name} ({int(rows.sum())})" for name, rows in by_row.items() if rows.any()]
        _stop(step, what, experience, bad.nonzero().flatten(), tokenizer)


def stop_unless_losses_finite(step: int, losses: dict[str, tuple[Tensor, list[TrainingBatch]]], tokenizer) -> None:
    """Stop on all ranks when a loss is not finite on any (all ranks call this).

    losses: by name, the losses (N,) of this rank's passes, and the rows of the first of them; further ones are texts.
    Raises: RunStopped with samples of the first pass whose loss went bad.
    """
    bad = {name: (~values.isfinite()).nonzero().flatten().tolist() for name, (values, _) in losses.items()}
    if not distributed.any_rank(any(bad.values())):
        return
    what = [f"{name} ({losses[name][0][places[0]].item()})" for name, places in bad.items() if places]
    parts = [losses[name][1][place] for name, places in bad.items() for place in places if place < len(losses[name][1])]
    _stop(step, what, parts[0] if parts else None, torch.arange(len(parts[0]) if parts else 0), tokenizer)


def stop_for_gradients(step: int, what: list[str], batch: TrainingBatch, tokenizer) -> NoReturn:
    """Stop because gradients that are named in `what` are not finite, which all ranks know (all call this)."""
    _stop(step, what, batch, torch.arange(len(batch)), tokenizer)


def _stop(step: int, what: list[str], rows_of, rows: Tensor, tokenizer) -> NoReturn:
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
        f"step {step}: a number is NaN or infinite, so no weight was changed.\n" + "\n".join(lines) + "\nLook at: the "
        "reward model's score of these texts, the learning rates and gradient norms of the steps before, objective/kl, "
        "and in fp16 the range of the model (bf16 has a wider one). Restart points written before this step are "
        "untouched; go on from one with --resume."
    )


def _described(batch: Experience | TrainingBatch, tokenizer, row: int) -> str:
    rollout = batch.rollout
    prompt = tokenizer.decode(rollout.prompts[row][rollout.attention_mask[row, : rollout.prompt_length].bool()])
    response = tokenizer.decode(rollout.responses[row][rollout.response_mask[row]])
    return f"  score {batch.scores[row].item():.4g}, prompt {prompt[-200:]!r}, response {response[:300]!r}"
