"""Examples of step 2: preference pairs as token ids, and batches of them.

rows, held_out = load_rows("reviews/pairs.jsonl", PAIRS, tokenizer, phase=2, seed=0, held_out=0.05)
pairs = PairExamples(rows, tokenizer, max_length=512, cache=cache_folder(None))
batch = collate_pairs([pairs[0], pairs[1]], pad_id)
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


class Pair(NamedTuple):
    """Two answers to one prompt, each as the ids of prompt + answer + EOS."""

    chosen: list[int]
    rejected: list[int]


class PairExamples(Sequence):
    """The examples of step 2, a `Pair` each.

    Both sides are cut on the right to max_length, without EOS where they are cut, as in SFTExamples. `truncated` counts
    the pairs of which a side was cut; `dropped` counts those whose sides are then the same, from which nothing can be
    learned.
    """

    def __init__(self, rows: Sequence[dict], tokenizer, max_length: int, cache: Path | None = None):
        def pairs(counts: Counter):
            encoder = TextEncoder(tokenizer)
            for row in rows:
                uncut = [encoder.answered(row["prompt"], row[side])[0] for side in ("chosen", "rejected")]
                chosen, rejected = (token_ids[:max_length] for token_ids in uncut)
                if chosen == rejected:
                    counts["dropped"] += 1
                    continue
                counts["truncated"] += max(map(len, uncut)) > max_length
                yield chosen, rejected

        schema = pyarrow.schema({"chosen": IDS, "rejected": IDS})
        settings = {"kind": "pairs", "max_length": max_length}
        self.table = cached_table(lambda: table_of(schema, pairs), cache, rows, tokenizer, **settings)
        self.truncated, self.dropped = count_of(self.table, "truncated"), count_of(self.table, "dropped")
        if not len(self):
            raise UserError(
                f"none of the {len(rows)} pairs differs within max_length {max_length}; raise it, or look "
                "whether chosen and rejected are the same text."
            )

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Pair:
        return Pair(ids_at(self.table, "chosen", index), ids_at(self.table, "rejected", index))


@dataclass(frozen=True, slots=True)
class PairBatch:
    """Right-padded answers, the B chosen ones first, then their B rejected ones in the same order.

    sequences (2B, S) int64; attention_mask (2B, S) int64; first_difference (B,) int64, the first position at which a
    pair's two sequences differ, the end of the shorter one where that is how the longer one begins.
    """

    sequences: Tensor
    attention_mask: Tensor
    first_difference: Tensor

    def to(self, device) -> "PairBatch":
        return PairBatch(self.sequences.to(device), self.attention_mask.to(device), self.first_difference.to(device))


def collate_pairs(pairs: list[Pair], pad_id: int) -> PairBatch:
    """The pairs as one batch, padded to the longest answer of either kind."""
    sequences, attention_mask = padded([pair.chosen for pair in pairs] + [pair.rejected for pair in pairs], pad_id)
    return PairBatch(sequences, attention_mask, torch.tensor([_first_difference(*pair) for pair in pairs]))


def _first_difference(a: list[int], b: list[int]) -> int:
    return next((position for position, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
