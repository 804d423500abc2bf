"""Prompts: what step 3 answers, as token ids, and batches of them.

rows, held_out = load_rows("reviews/prompts.jsonl", PROMPTS, tokenizer, phase=3, seed=0, held_out=128)
prompts = Prompts(rows, tokenizer, max_prompt_length=256, cache=cache_folder(None))
indices, visits = PromptOrder(len(prompts), batch_size=64, seed=0).batch(step)
batch = collate_prompts([prompts[index] for index in indices.tolist()], indices, visits, pad_id)
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow
import torch
from torch import Tensor

from engine.algo.truncation import trim_query
from engine.errors import UserError
from engine.experience import PromptBatch
from training.data.cache import IDS, ids_at
from training.data.fitted_rows import FittedRows
from training.data.lengths import Fit, Lengths, RowFit
from training.data.records import Unread, shortened
from training.data.tokens import TextEncoder, padded


def prompt_fit(
    tokenizer,
    max_prompt_length: int,
    overlong: str = "cut_prompt",
    query_start: int | None = None,
    query_end: int | None = None,
) -> RowFit:
    """What of a prompt the actor is shown; arguments as of Prompts."""
    lengths = Lengths(tokenizer, max_prompt_length, overlong)
    opening = lengths.encoder.opening
    room = max_prompt_length - len(opening)
    if room < 1:
        raise UserError(
            f"max_prompt_length is {max_prompt_length}; it needs to be at least {len(opening) + 1} to hold "
            "one token of a prompt and what the tokenizer puts before it."
        )

    def query(row: dict) -> Fit:
        ids = lengths.encoder.prompt(row["prompt"])
        opened = lengths.encoder.opened(ids)
        found = trim_query(ids[len(opened) :], room, query_start, query_end)
        if found is None:
            return Fit(
                ids, [], min(len(ids), max_prompt_length), reason="the dialect's query_start or query_end is not in it"
            )
        return Fit(opened + found, [], len(opened) + len(found))

    trimmed = query_start is not None or query_end is not None
    return RowFit(
        lengths.encoder, lambda row: [row["prompt"]], query if trimmed else lambda row: lengths.prompt(row["prompt"])
    )


class Prompts(FittedRows):
    """The prompts of step 3, each a list of ids; `rows` are the rows of those that are kept, with all columns that are
    read.

    overlong: what becomes of prompts of more than max_prompt_length tokens (training/data/lengths.py). A prompt's
    index, by which its samples are keyed, is its index among those kept.

    query_start, query_end: tokens between which the prompt stands in its text, if given (`trim_query`): what follows
    the start, cut on the right to max_prompt_length and then behind the last end. Texts without them are dropped.
    """

    def __init__(
        self,
        rows: Sequence[dict],
        tokenizer,
        max_prompt_length: int,
        overlong: str = "cut_prompt",
        cache: Path | None = None,
        query_start: int | None = None,
        query_end: int | None = None,
    ):
        fit = prompt_fit(tokenizer, max_prompt_length, overlong, query_start, query_end)
        trimmed = query_start is not None or query_end is not None
        schema = pyarrow.schema({"token_ids": IDS, "row": pyarrow.large_string()})
        settings = {"kind": "prompts", "max_length": max_prompt_length, "overlong": overlong}
        settings |= {"query": [query_start, query_end]} if trimmed else {}

        def columns(found: Fit, row: dict) -> tuple[list[int], str]:
            kept = {name: value for name, value in row.items() if not isinstance(value, Unread)}
            return found.prompt, json.dumps(kept, default=str)  # str: of decimals, dates and times

        super().__init__(rows, fit, schema, columns, tokenizer, cache, **settings)
        self.rows = _JsonColumn(self.table["row"])
        if not len(self):
            raise UserError(
                f"none of the {len(rows)} prompts has the dialect's query_start and query_end within "
                f"{max_prompt_length} tokens. Raise that, or leave them out (--set query_start= query_end=)."
                if trimmed
                else f"none of the {len(rows)} prompts has at most {max_prompt_length} tokens; raise "
                "max_prompt_length, or cut long prompts (--overlong cut_prompt) instead of dropping them."
            )

    def __getitem__(self, index: int) -> list[int]:
        return ids_at(self.table, "token_ids", index)

    def refuse_unread(self, columns: Iterable[str], asked: str) -> None:
        """Raise UserError for a column that was not read; asked: who asks for these, as the message begins."""
        for name in columns:
            if name in self.unread:
                raise UserError(
                    f"{asked} the column {name}, which is not read: it holds {self.unread[name]}. Write what is "
                    "needed of it into a column of texts or numbers: a file's path, say, or base64."
                )


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
    input_ids, attention_mask = padded(token_lists, pad_id, left=True)
    return PromptBatch(input_ids=input_ids, attention_mask=attention_mask, indices=indices, samples=visits)


def prompt_batch(texts: list[str], tokenizer, visit: int = 0) -> PromptBatch:
    """Texts as one batch of prompts with the indices 0, 1, ...: for use from Python, without a data set.

    visit: how often they were answered before. With the same number they are given the same responses again, as long as
    the policy is the same. Raises UserError for a text of which the tokenizer makes no tokens.
    """
    indices, encoder = torch.arange(len(texts)), TextEncoder(tokenizer)
    token_lists = [encoder.prompt(text) for text in texts]
    if not all(token_lists):
        number = token_lists.index([])
        raise UserError(f"prompt {number + 1}, {shortened(texts[number])}: the tokenizer makes no tokens of it.")
    return collate_prompts(token_lists, indices, torch.full_like(indices, visit), tokenizer.pad_token_id)
