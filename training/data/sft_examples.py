"""Examples of step 1: texts as token ids, and batches of them.

    rows, held_out = load_rows("reviews/sft.jsonl", SFT, tokenizer, phase=1, seed=0, held_out=0.05)
    examples = SFTExamples(rows, tokenizer, max_length=512, cache=cache_folder(None))
    for indices in epoch_batches(len(examples), batch_size=8, epoch=0, seed=0, rank=rank(), world=world_size()):
        batch = collate_sft([examples[index] for index in indices], pad_id)

As in steps 2 and 3, all rows are tokenised once, at the start: the order in which the examples are visited
(training/data/order.py) is then a question of numbers, the same for any number of ranks. What is cut or left out is
counted and never silent. `rows` is what load_rows gives, or a list of such rows; with a folder for `cache`, a later run
finds the ids there.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pyarrow
import torch
from torch import Tensor

from engine.errors import UserError
from training.data.cache import IDS, ids_at
from training.data.fitted_rows import FittedRows
from training.data.lengths import EMPTY, WHOLE, Fit, Lengths, RowFit, answered_texts
from training.data.tokens import padded


class SFTExample(NamedTuple):
    """The ids of a text, and the position of the first one that is to be learned (at least 1)."""

    token_ids: list[int]
    first_target: int


def sft_fit(
    tokenizer, max_length: int, loss_on: str = "response", overlong: str = "cut_prompt", stops: Iterable[int] = ()
) -> RowFit:
    """What of a row step 1 learns; arguments as of SFTExamples."""
    if loss_on not in ("response", "all"):
        raise UserError(f"loss_on is {loss_on!r}; choose 'response' or 'all'.")
    lengths = Lengths(tokenizer, max_length, overlong, stops)

    def fit(row: dict) -> Fit:
        if "text" in row:
            found, context = lengths.text(row["text"]), 1
        else:
            found = lengths.answered(row["prompt"], [row["response"]])
            context = max(len(found.prompt), 1)
        found = replace(found, learned=1 if loss_on == "all" else context)
        if not found.reason and found.learned >= len(found.sequences[0]):
            if found.kind == WHOLE:
                return replace(found, reason="the tokenizer makes no token of it that could be learned", left_out=EMPTY)
            return replace(found, reason=f"nothing that is to be learned is left within {max_length:,} tokens")
        return found

    def texts(row: dict) -> list[str]:
        return [row["text"]] if "text" in row else answered_texts(row["prompt"], row["response"])

    return RowFit(lengths.encoder, texts, fit)


class SFTExamples(FittedRows):
    """The examples of step 1: prompt + response + EOS, or text + EOS.

    Learned is the response with its EOS, or with loss_on="all" everything behind the first token; of a `text` always
    everything. What is longer than max_length is cut or left out as `overlong` says (training/data/lengths.py). What
    lost its end has no EOS: it has not ended there, and a model that learned so would stop in the middle of its
    sentences. stops: the ids beside EOS and the chat template's end of a turn at which step 3 stops: what is learned
    ends there, too.
    """

    def __init__(
        self,
        rows: Sequence[dict],
        tokenizer,
        max_length: int,
        loss_on: str = "response",
        cache: Path | None = None,
        overlong: str = "cut_prompt",
        stops: Iterable[int] = (),
    ):
        schema = pyarrow.schema({"token_ids": IDS, "first_target": pyarrow.int32()})
        settings = {"kind": "sft", "max_length": max_length, "loss_on": loss_on, "overlong": overlong}
        settings["stops"] = sorted(stops)
        fit = sft_fit(tokenizer, max_length, loss_on, overlong, stops)
        super().__init__(
            rows, fit, schema, lambda found, row: (found.sequences[0], found.learned), tokenizer, cache, **settings
        )
        if not len(self):
            raise UserError(
                f"none of the {len(rows)} texts has a token to be learned within max_length {max_length}; "
                "raise it or shorten the prompts."
            )

    def __getitem__(self, index: int) -> SFTExample:
        return SFTExample(ids_at(self.table, "token_ids", index), self.table["first_target"][index].as_py())


@dataclass(frozen=True, slots=True)
class SFTBatch:
    """Right-padded examples.

    sequences (B, S) int64; attention_mask (B, S) int64, 1 on tokens of the text, EOS included;
    loss_mask (B, S - 1) bool, slot t says whether token t + 1, which is predicted from position t, is to be learned.
    """

    sequences: Tensor
    attention_mask: Tensor
    loss_mask: Tensor

    def to(self, device) -> "SFTBatch":
        return SFTBatch(self.sequences.to(device), self.attention_mask.to(device), self.loss_mask.to(device))


def collate_sft(examples: list[SFTExample], pad_id: int) -> SFTBatch:
    """The examples as one batch, padded to the longest."""
    sequences, attention_mask = padded([example.token_ids for example in examples], pad_id)
    first_targets = torch.tensor([[example.first_target] for example in examples])
    is_target = (torch.arange(sequences.shape[1]) >= first_targets) & attention_mask.bool()
    return SFTBatch(sequences, attention_mask, is_target[:, 1:])
