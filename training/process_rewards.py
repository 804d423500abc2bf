"""Step 2 on stepwise data: what a process reward model learns, and how it is measured.

The response of a row is its steps in one text, tokenised as the policy's responses are in steps 1 and 3. A label
belongs to the token that ends its step (`StepEnds`), which is where step 3 reads the model. TRL tokenises each step
and its separator apart; where a token spans both, as ".\\n" does for Qwen, the policy would never write such ids.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pyarrow
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import UserError
from engine.reward.steps import StepEnds
from training.data.examples import FittedRows
from training.data.token_cache import IDS, ids_at
from training.data.tokens import Fit, Lengths, RowFit, answered_texts, padded
from training.reporting.metrics import Accumulator
from training.reporting.standard_errors import Estimate, Units, with_errors


class StepsExample(NamedTuple):
    """The ids of prompt + response + EOS, and for each labelled step the position of its last token and its label."""

    token_ids: list[int]
    positions: list[int]
    labels: list[float]


def steps_fit(
    tokenizer, ends: StepEnds, max_length: int, overlong: str = "cut_prompt", stops: Iterable[int] = ()
) -> RowFit:
    """A function from a row of the form `stepwise` to the part that the model is shown. Arguments: as in
    StepsExamples."""
    lengths = Lengths(tokenizer, max_length, overlong, stops)

    def fit(row: dict) -> Fit:
        found = lengths.answered(row["prompt"], [row["response"]])
        if found.reason:
            return found
        count, wanted = len(ends.of(found.answers[0], ended=not any(found.ends_lost))), len(row["labels"])
        if count > wanted or (count < wanted and not any(found.ends_lost)):
            return replace(found, reason=f"the tokenizer writes {count} ends of steps, and there are {wanted} labels")
        if all(label is None for label in row["labels"][:count]):
            return replace(found, reason=f"no labelled step ends within {max_length:,} tokens")
        return found

    return RowFit(lengths.encoder, lambda row: answered_texts(row["prompt"], row["response"]), fit)


class StepsExamples(FittedRows):
    """The examples of step 2 on stepwise data, each a `StepsExample`.

    Examples longer than max_length are cut or left out, as `overlong` says; steps whose end is cut are not learned.
    stops: as in SFTExamples.
    """

    def __init__(
        self,
        rows: Sequence[dict],
        tokenizer,
        ends: StepEnds,
        max_length: int,
        cache: Path | None = None,
        overlong: str = "cut_prompt",
        stops: Iterable[int] = (),
    ):
        schema = pyarrow.schema({"token_ids": IDS, "positions": IDS, "labels": pyarrow.large_list(pyarrow.float32())})
        settings = {"kind": "steps", "max_length": max_length, "overlong": overlong, "stops": sorted(stops)}
        settings["step_end"] = ends.text

        def columns(found: Fit, row: dict) -> tuple:
            places = ends.of(found.answers[0], ended=not any(found.ends_lost))
            learned = [(place, label) for place, label in zip(places, row["labels"]) if label is not None]
            positions = [len(found.prompt) + place for place, _ in learned]
            return found.sequences[0], positions, [label for _, label in learned]

        fit = steps_fit(tokenizer, ends, max_length, overlong, stops)
        super().__init__(rows, fit, schema, columns, tokenizer, cache, **settings)
        if not len(self):
            raise UserError(f"none of the {len(rows)} rows has a labelled step within max_length {max_length}.")

    def __getitem__(self, index: int) -> StepsExample:
        ids, positions = (ids_at(self.table, name, index) for name in ("token_ids", "positions"))
        return StepsExample(ids, positions, self.table["labels"][index].as_py())


@dataclass(frozen=True, slots=True)
class StepsBatch:
    """A batch of right-padded examples.

    sequences, attention_mask: (B, S) int64. learned: (B, S) bool, the tokens that have a label. labels: (B, S) float32,
    0 elsewhere.
    """

    sequences: Tensor
    attention_mask: Tensor
    learned: Tensor
    labels: Tensor

    def to(self, device) -> "StepsBatch":
        return StepsBatch(*(getattr(self, name).to(device) for name in self.__slots__))


def collate_steps(examples: list[StepsExample], pad_id: int) -> StepsBatch:
    """Make one batch of the examples, each padded to the length of the longest."""
    sequences, attention_mask = padded([example.token_ids for example in examples], pad_id)
    learned = torch.zeros_like(sequences, dtype=torch.bool)
    labels = torch.zeros(sequences.shape)
    for row, example in enumerate(examples):
        learned[row, example.positions] = True
        labels[row, example.positions] = torch.tensor(example.labels)
    return StepsBatch(sequences, attention_mask, learned, labels)


def step_losses(log_odds: Tensor, batch: StepsBatch) -> Tensor:
    """(B, S) float32, the loss of each labelled step, elsewhere 0: -y log p - (1 - y) log(1 - p), with p the sigmoid of
    the log-odds (B, S). It is the cross entropy of two logits whose difference the log-odds are."""
    losses = F.binary_cross_entropy_with_logits(log_odds, batch.labels, reduction="none")
    return torch.where(batch.learned, losses, torch.zeros_like(losses))


def right_steps(log_odds: Tensor, batch: StepsBatch) -> Tensor:
    """(B, S) bool, the labelled steps that the model takes for what they are: good from a label of a half on."""
    return ((log_odds > 0) == (batch.labels >= 0.5)) & batch.learned


def add_steps(metrics: Accumulator, losses: Tensor, log_odds: Tensor, batch: StepsBatch) -> None:
    """Add the metrics of the labelled steps."""
    count = batch.learned.sum()
    metrics.add("train/step_loss", losses.detach().sum(), count)
    metrics.add("train/accuracy", right_steps(log_odds.detach(), batch).sum(), count)


def measured_steps(log_odds: Tensor, batch: StepsBatch) -> dict[str, Tensor]:
    """{name: (B,)} sums over each example's labelled steps, for `held_out_steps`."""
    bad = batch.learned & (batch.labels < 0.5)
    right = right_steps(log_odds, batch)
    found = {"steps": batch.learned, "loss": step_losses(log_odds, batch), "right": right}
    found |= {"bad": bad, "found": right & bad}
    return {name: values.sum(-1).float() for name, values in found.items()}


def held_out_steps(units: Units, before: Units | None) -> dict[str, float]:
    """The metrics of held-out steps: the share that the model takes for what they are, among all and among the bad
    ones; the loss of a step; and the share of good steps, which is the accuracy of taking every step for good.

    units: sums over the steps of each example. before: those before training, or None.
    """

    def estimates(units: Units) -> dict[str, Estimate]:
        found = {
            "eval/accuracy": Estimate.of(units["right"], units["steps"]),
            "eval/step_loss": Estimate.of(units["loss"], units["steps"]),
        }
        return found | ({"eval/bad_found": Estimate.of(units["found"], units["bad"])} if any(units["bad"]) else {})

    good = 1 - sum(units["bad"]) / sum(units["steps"])
    return with_errors(estimates(units), before and estimates(before)) | {"eval/good": good}
