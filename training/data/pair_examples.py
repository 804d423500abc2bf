"""Examples of step 2: preference pairs as token ids, and batches of them.

rows, held_out = load_rows("reviews/pairs.jsonl", PAIRS, tokenizer, phase=2, seed=0, held_out=0.05)
pairs = PairExamples(rows, tokenizer, max_length=512, cache=cache_folder(None))
batch = collate_pairs([pairs[0], pairs[1]], pad_id)
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
from training.data.lengths import EQUAL, Fit, Lengths, RowFit, answered_texts
from training.data.tokens import padded


class Pair(NamedTuple):
    """Two answers to one prompt, each as the ids of prompt + answer + EOS."""

    chosen: list[int]
    rejected: list[int]


def pair_fit(tokenizer, max_length: int, overlong: str = "cut_prompt", stops: Iterable[int] = ()) -> RowFit:
    """What of a pair is shown to the reward model; arguments as of PairExamples."""
    lengths = Lengths(tokenizer, max_length, overlong, stops)

    def fit(row: dict) -> Fit:
        found = lengths.answered(row["prompt"], [row["chosen"], row["rejected"]])
        same = found.answers[0] == found.answers[1]
        if row["chosen"] == row["rejected"] or (same and not any(found.ends_lost)):
            return replace(found, reason="chosen and rejected are the same", left_out=EQUAL)
        if same:
            return replace(found, reason=f"chosen and rejected are the same within {max_length:,} tokens")
        return found

    return RowFit(lengths.encoder, lambda row: answered_texts(row["prompt"], row["chosen"], row["rejected"]), fit)


class PairExamples(FittedRows):
    """The examples of step 2, a `Pair` each, both sides with the same prompt.

    What is longer than max_length is cut or left out as `overlong` says (training/data/lengths.py); what lost its end
    has no EOS, as in SFTExamples. Pairs whose sides are the same, from the start (`equal`) or by what was cut
    (`dropped`), are left out: nothing can be learned from them. stops: as of SFTExamples.
    """

    def __init__(
        self,
        rows: Sequence[dict],
        tokenizer,
        max_length: int,
        cache: Path | None = None,
        overlong: str = "cut_prompt",
        stops: Iterable[int] = (),
    ):
        schema = pyarrow.schema({"chosen": IDS, "rejected": IDS})
        settings = {"kind": "pairs", "max_length": max_length, "overlong": overlong, "stops": sorted(stops)}
        fit = pair_fit(tokenizer, max_length, overlong, stops)
        super().__init__(rows, fit, schema, lambda found, row: tuple(found.sequences), tokenizer, cache, **settings)
        if not len(self):
            raise UserError(
                f"none of the {len(rows)} pairs differs within max_length {max_length}; raise it, or look "
                "whether chosen and rejected are the same text."
            )

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
