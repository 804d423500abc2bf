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

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow
import torch
from torch import Tensor

from engine.errors import UserError
from training.data.cache import IDS, cached_table, count_of, ids_at, table_of
from training.data.tokens import TextEncoder, padded


class SFTExample(NamedTuple):
    """The ids of a text, and the position of the first one that is to be learned (at least 1)."""

    token_ids: list[int]
    first_target: int


class SFTExamples(Sequence):
    """The examples of step 1: prompt + response + EOS, or text + EOS.

    Learned is the response with its EOS, or with loss_on="all" everything behind the first token; of a `text` always
    everything. `truncated` counts the texts that were cut on the right to max_length. Those end without EOS: a text
    that was cut has not ended there, and a model that learned so would stop in the middle of its sentences. `dropped`
    counts those of which nothing to be learned was left, because the prompt alone is too long.
    """

    def __init__(
        self, rows: Sequence[dict], tokenizer, max_length: int, loss_on: str = "response", cache: Path | None = None
    ):
        if loss_on not in ("response", "all"):
            raise UserError(f"loss_on is {loss_on!r}; choose 'response' or 'all'.")

        def examples(counts: Counter):
            encoder = TextEncoder(tokenizer)
            for row in rows:
                token_ids, context = _encoded(row, encoder)
                first_target = 1 if loss_on == "all" else max(context, 1)
                if first_target >= min(len(token_ids), max_length):
                    counts["dropped"] += 1
                    continue
                counts["truncated"] += len(token_ids) > max_length
                yield token_ids[:max_length], first_target

        schema = pyarrow.schema({"token_ids": IDS, "first_target": pyarrow.int32()})
        settings = {"kind": "sft", "max_length": max_length, "loss_on": loss_on}
        self.table = cached_table(lambda: table_of(schema, examples), cache, rows, tokenizer, **settings)
        self.truncated, self.dropped = count_of(self.table, "truncated"), count_of(self.table, "dropped")
        if not len(self):
            raise UserError(
                f"none of the {len(rows)} texts has a token to be learned within max_length {max_length}; "
                "raise it or shorten the prompts."
            )

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> SFTExample:
        return SFTExample(ids_at(self.table, "token_ids", index), self.table["first_target"][index].as_py())


def _encoded(row: dict, encoder: TextEncoder) -> tuple[list[int], int]:
    """The ids of a row, uncut, and the number of those at the start that are never learned."""
    if "text" in row:
        return encoder.ended(encoder.prompt(row["text"])), 1
    return encoder.answered(row["prompt"], row["response"])


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
