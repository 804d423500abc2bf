"""Step 2 on stepwise data: what a process reward model learns, and how it is measured.

The response of a row is its steps in one text, tokenised as the policy's responses are in steps 1 and 3. A label
belongs to the token that ends its step (`StepEnds`), which is where step 3 reads the model. TRL tokenises each step
and its separator apart; where a token spans both, as ".\\n" does for Qwen, the policy would never write such ids.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pyarrow
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from engine.reward.steps import StepEnds
from training.data.examples import FittedRows
from training.data.token_cache import IDS, ids_at
from training.data.tokens import Fit, Lengths, RowFit, answered_texts, padded
from training.reporting.standard_errors import Estimate, Units, with_errors


class StepsExample(NamedTuple):
    """The ids of prompt + response + EOS, and a label for each: NaN for tokens that end no labelled step."""

    token_ids: list[int]
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
        count, wanted = len(_ends(ends, found)), len(row["labels"])
        if count > wanted or (count < wanted and not any(found.ends_lost)):
            return replace(found, reason=f"the tokenizer writes {count} ends of steps, and there are {wanted} labels")
        if all(label is None for label in row["labels"][:count]):
            return replace(found, reason=f"no labelled step ends within {max_length:,} tokens")
        return found

    return RowFit(lengths.encoder, lambda row: answered_texts(row["prompt"], row["response"]), fit)


def _ends(ends: StepEnds, found: Fit) -> list[int]:
    return ends.of(found.answers[0], ended=not any(found.ends_lost))


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
        def columns(found: Fit, row: dict) -> tuple:
            labels = [math.nan] * len(found.sequences[0])
            for place, label in zip(_ends(ends, found), row["labels"]):
                labels[len(found.prompt) + place] = math.nan if label is None else label
            return found.sequences[0], labels

        schema = pyarrow.schema({"token_ids": IDS, "labels": pyarrow.large_list(pyarrow.float32())})
        settings = {"kind": "steps", "max_length": max_length, "overlong": overlong, "stops": sorted(stops)}
        fit = steps_fit(tokenizer, ends, max_length, overlong, stops)
        super().__init__(rows, fit, schema, columns, tokenizer, cache, step_end=ends.text, **settings)

    def __getitem__(self, index: int) -> StepsExample:
        return StepsExample(*(ids_at(self.table, name, index) for name in ("token_ids", "labels")))


@dataclass(frozen=True, slots=True)
class StepsBatch:
    """A batch of right-padded examples. sequences, attention_mask: (B, S) int64. labels: (B, S) float32, NaN at tokens
    without one."""

    sequences: Tensor
    attention_mask: Tensor
    labels: Tensor

    def to(self, device) -> "StepsBatch":
        return StepsBatch(*(getattr(self, name).to(device) for name in self.__slots__))


def collate_steps(examples: list[StepsExample], pad_id: int) -> StepsBatch:
    """Make one batch of the examples, each padded to the length of the longest."""
    labels = pad_sequence([torch.tensor(example.labels) for example in examples], True, math.nan)
    return StepsBatch(*padded([example.token_ids for example in examples], pad_id), labels)


def measured_steps(log_odds: Tensor, batch: StepsBatch) -> dict[str, Tensor]:
    """{name: (B,) float32} sums over each example's labelled steps. log_odds: (B, S) float32.

    steps: their number. loss: -y log p - (1 - y) log(1 - p), with p the sigmoid of the log-odds, which is the cross
    entropy of two logits with this difference. right: how many the model takes for what they are, good from a label of
    a half on. bad: how many are bad. found: how many of the bad ones are right.
    """
    learned, good = ~batch.labels.isnan(), batch.labels >= 0.5
    losses = F.binary_cross_entropy_with_logits(log_odds, batch.labels.nan_to_num(), reduction="none")
    right = ((log_odds > 0) == good) & learned
    found = {"steps": learned, "loss": losses.where(learned, 0.0), "right": right}
    found |= {"bad": learned & ~good, "found": right & ~good}
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
