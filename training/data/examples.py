"""Data sets: SFT texts, preference pairs and prompts as token ids, and batches of them as tensors.

    rows, held_out = load_rows("reviews/sft.jsonl", SFT, tokenizer, phase=1, seed=0, held_out=0.05)
    examples = SFTExamples(rows, tokenizer, max_length=512, cache=cache_folder(None))
    for indices in epoch_batches(len(examples), batch_size=8, epoch=0, seed=0, rank=rank(), world=world_size()):
        batch = collate_sft([examples[index] for index in indices], pad_id)

All are tokenised once, at the start: the order in which they are visited (training/data/order.py) is then a question of
numbers, the same for any number of ranks. What is cut or left out is counted and never silent. `rows` is what load_rows
gives, or a list of such rows; with a folder for `cache`, a later run finds the ids there.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow
import torch
from torch import Tensor

from engine.algo.truncation import trim_query
from engine.errors import UserError
from engine.experience import PromptBatch
from training.data.cache import cached_table, table_of
from training.data.tokens import TextEncoder, encode_prompt

IDS = pyarrow.large_list(pyarrow.int32())


class SFTExample(NamedTuple):
    """A text: its ids, and the position of the first one that is to be learned (at least 1)."""

    token_ids: list[int]
    first_target: int


class SFTExamples:
    """The texts of step 1: prompt + response + EOS, or text + EOS.

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
                token_ids, first_target = _sft_tokens(row, encoder)
                first_target = 1 if loss_on == "all" else max(first_target, 1)
                if first_target >= min(len(token_ids), max_length):
                    counts["dropped"] += 1
                    continue
                counts["truncated"] += len(token_ids) > max_length
                yield token_ids[:max_length], first_target

        schema = pyarrow.schema({"token_ids": IDS, "first_target": pyarrow.int32()})
        self.table = cached_table(
            lambda: table_of(schema, examples),
            cache,
            rows,
            tokenizer,
            kind="sft",
            max_length=max_length,
            loss_on=loss_on,
        )
        self.truncated, self.dropped = _counts(self.table)
        if not len(self):
            raise UserError(
                f"none of the {len(rows)} texts has a token to be learned within max_length {max_length}; "
                "raise it or shorten the prompts."
            )

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> SFTExample:
        return SFTExample(_ids(self.table, "token_ids", index), self.table["first_target"][index].as_py())


@dataclass(frozen=True, slots=True)
class SFTBatch:
    """Right-padded texts.

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
    sequences, attention_mask = _padded([example.token_ids for example in examples], pad_id)
    first_targets = torch.tensor([[example.first_target] for example in examples])
    is_target = (torch.arange(sequences.shape[1]) >= first_targets) & attention_mask.bool()
    return SFTBatch(sequences, attention_mask, is_target[:, 1:])


class Pair(NamedTuple):
    """Two answers to one prompt, as the ids of prompt + answer + EOS."""

    chosen: list[int]
    rejected: list[int]


class PairExamples:
    """The preferences of step 2.

    Both sides are cut on the right to max_length, without EOS where they are cut, as in SFTExamples. `truncated` counts
    the pairs of which a side was cut; `dropped` counts those whose sides are then the same, from which nothing can be
    learned.
    """

    def __init__(self, rows: Sequence[dict], tokenizer, max_length: int, cache: Path | None = None):
        def examples(counts: Counter):
            encoder = TextEncoder(tokenizer)
            for row in rows:
                whole = [encoder.answered(row["prompt"], row[side])[0] for side in ("chosen", "rejected")]
                chosen, rejected = (token_ids[:max_length] for token_ids in whole)
                if chosen == rejected:
                    counts["dropped"] += 1
                    continue
                counts["truncated"] += max(map(len, whole)) > max_length
                yield chosen, rejected

        schema = pyarrow.schema({"chosen": IDS, "rejected": IDS})
        self.table = cached_table(
            lambda: table_of(schema, examples), cache, rows, tokenizer, kind="pairs", max_length=max_length
        )
        self.truncated, self.dropped = _counts(self.table)
        if not len(self):
            raise UserError(
                f"none of the {len(rows)} pairs differs within max_length {max_length}; raise it, or look "
                "whether chosen and rejected are the same text."
            )

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Pair:
        return Pair(_ids(self.table, "chosen", index), _ids(self.table, "rejected", index))


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
    sequences, attention_mask = _padded([pair.chosen for pair in pairs] + [pair.rejected for pair in pairs], pad_id)
    return PairBatch(sequences, attention_mask, torch.tensor([_first_difference(*pair) for pair in pairs]))


class Prompts:
    """The prompts of step 3; `rows` is a sequence of those of the prompts kept, extra columns included.

    overlong: what becomes of prompts of more than max_prompt_length tokens. "truncate" cuts them on the left, behind
    the opening tokens, because what is to be answered stands at the end; "drop" leaves them out. `truncated` and
    `dropped` count them. A prompt's index, by which its samples are keyed, is its index among those kept.

    query_start, query_end: tokens between which the prompt stands in its text, if given (`trim_query`): what follows
    the start, cut on the right to max_prompt_length and then behind the last end. Texts without them are dropped.
    """

    def __init__(
        self,
        rows: Sequence[dict],
        tokenizer,
        max_prompt_length: int,
        overlong: str = "truncate",
        cache: Path | None = None,
        query_start: int | None = None,
        query_end: int | None = None,
    ):
        if overlong not in ("truncate", "drop"):
            raise UserError(f"overlong is {overlong!r}; choose 'truncate' or 'drop'.")
        encoder = TextEncoder(tokenizer)
        opening, trimmed = len(encoder.opening), query_start is not None or query_end is not None
        if max_prompt_length <= opening:
            raise UserError(
                f"max_prompt_length is {max_prompt_length}; it needs to be at least {opening + 1} to hold "
                "one token of a prompt and what the tokenizer puts before it."
            )

        def examples(counts: Counter):
            for row in rows:
                token_ids = encoder.prompt(row["prompt"])
                if trimmed:
                    token_ids = trim_query(token_ids[opening:], max_prompt_length - opening, query_start, query_end)
                    if token_ids is None:
                        counts["dropped"] += 1
                        continue
                    token_ids = encoder.opening + token_ids
                excess = len(token_ids) - max_prompt_length
                if excess > 0 and overlong == "drop":
                    counts["dropped"] += 1
                    continue
                if excess > 0:
                    counts["truncated"] += 1
                    token_ids = token_ids[:opening] + token_ids[opening + excess :]
                yield token_ids, json.dumps(row, default=str)

        schema = pyarrow.schema({"token_ids": IDS, "row": pyarrow.large_string()})
        self.table = cached_table(
            lambda: table_of(schema, examples),
            cache,
            rows,
            tokenizer,
            kind="prompts",
            max_length=max_prompt_length,
            overlong=overlong,
            **({"query": [query_start, query_end]} if trimmed else {}),
        )
        self.truncated, self.dropped = _counts(self.table)
        self.rows = _JsonColumn(self.table["row"])
        if not len(self) and trimmed:
            raise UserError(
                f"none of the {len(rows)} prompts has the dialect's query_start and query_end within "
                f"{max_prompt_length} tokens. Raise that, or leave them out (--set query_start= "
                "query_end=)."
            )
        if not len(self):
            raise UserError(
                f"none of the {len(rows)} prompts has at most {max_prompt_length} tokens; raise "
                "max_prompt_length, or truncate long prompts instead of dropping them."
            )

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> list[int]:
        return _ids(self.table, "token_ids", index)


class _JsonColumn(Sequence):
    """A column of JSON texts as what they stand for, parsed when asked for."""

    def __init__(self, column: pyarrow.ChunkedArray):
        self.column = column

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, index: int) -> dict:
        return json.loads(self.column[index].as_py())


def collate_prompts(token_lists: list[list[int]], indices: Tensor, visits: Tensor, pad_id: int) -> PromptBatch:
    """The prompts of one batch, left-padded to the longest.

    indices, visits: (B,) int64, as PromptOrder gives them. The visit stands in `samples`, without which a prompt would
    be given the same responses in each epoch.
    """
    input_ids, attention_mask = _padded(token_lists, pad_id, left=True)
    return PromptBatch(input_ids=input_ids, attention_mask=attention_mask, indices=indices, samples=visits)


def prompt_batch(texts: list[str], tokenizer, visit: int = 0) -> PromptBatch:
    """Texts as one batch of prompts with the indices 0, 1, ...: for use from Python, without a data set.

    visit: how often they were answered before. With the same number they are given the same responses again, as long as
    the policy is the same.
    """
    indices = torch.arange(len(texts))
    token_lists = [encode_prompt(tokenizer, text) for text in texts]
    return collate_prompts(token_lists, indices, torch.full_like(indices, visit), tokenizer.pad_token_id)


def _sft_tokens(row: dict, encoder: TextEncoder) -> tuple[list[int], int]:
    """The ids of a row of either kind, uncut, and the number of those that are context."""
    if "text" in row:
        return encoder.ended(encoder.prompt(row["text"])), 1
    return encoder.answered(row["prompt"], row["response"])


def _ids(table: pyarrow.Table, column: str, index: int) -> list[int]:
    return table[column][index].values.to_numpy().tolist()


def _counts(table: pyarrow.Table) -> tuple[int, int]:
    """(truncated, dropped)."""
    return tuple(int(table.schema.metadata.get(name, 0)) for name in (b"truncated", b"dropped"))


def _first_difference(a: list[int], b: list[int]) -> int:
    return next((position for position, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _padded(token_lists: list[list[int]], pad_id: int, left: bool = False) -> tuple[Tensor, Tensor]:
    """(ids, attention mask), both (B, longest) int64; the mask comes from the lengths, for pad may be a real token."""
    width = max(map(len, token_lists))
    ids = torch.full((len(token_lists), width), pad_id)
    mask = torch.zeros_like(ids)
    for row, token_ids in enumerate(token_lists):
        place = slice(width - len(token_ids), width) if left else slice(len(token_ids))
        ids[row, place] = torch.tensor(token_ids)
        mask[row, place] = 1
    return ids, mask
