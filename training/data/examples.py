"""Turns rows into token ids and batches, for step 1, step 2, the prompts of step 3, and mixed pretraining.

    rows, held_out = load_rows("reviews/sft.jsonl", SFT, tokenizer, phase=1, seed=0, held_out=0.05)
    examples = SFTExamples(rows, tokenizer, max_length=512, cache=cache_folder(None))
    for indices in epoch_batches(len(examples), batch_size=8, epoch=0, seed=0, rank=0, world=1):
        batch = collate_sft([examples[index] for index in indices], pad_id)

All rows are tokenised once, at the start. The order in which examples are visited (training/data/order.py) depends on
the number of examples, and is the same for any number of ranks. Rows that are cut or left out are counted and reported.
In all classes, `rows` is a result of load_rows or a list of rows, and `cache` is the folder in which the token ids are
kept for later runs.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import torch
from torch import Tensor

from engine import distributed
from engine.algo.truncation import trim_query
from engine.errors import UserError
from engine.experience import PromptBatch
from training.data.files import Unread, quoted
from training.data.record_forms import PROMPTS, with_more
from training.data.token_cache import IDS, MadeTable, Progress, cached_table, count_of, ids_at
from training.data.tokens import (
    CUT,
    DROPPED,
    EMPTY,
    EQUAL,
    WHOLE,
    Fit,
    Lengths,
    RowFit,
    TextEncoder,
    answered_texts,
    padded,
    together,
)

NOTED = 3  # how many row numbers are kept for each kind of row, so that these rows can be shown
ENOUGH = 0.95  # a run warns if a smaller share of the rows fits


class FittedRows(Sequence):
    """An Arrow table of the rows that are kept, and counts of the rows that are cut or left out.

    rows: the rows before they are made to fit. fit: row -> the part that the model is shown.
    cut: how many rows were cut. dropped: how many rows were left out because of their length.
    equal: how many pairs were left out because their answers are equal.
    empty: how many rows were left out because the tokenizer makes no tokens of them.
    needed: the length into which 95 % of the rows fit; rows that count as `equal` or `empty` are not considered.
    noted: {kind of row: numbers of its first rows}. notes: {note (`Row.notes`): (number of the first row with this
    note, number of rows with it)}. unread: {name of a column that was not read: description of its content}.
    """

    def __init__(
        self,
        rows: Sequence[dict],
        fit: RowFit,
        schema: pyarrow.Schema,
        columns: Callable[[Fit, dict], tuple],
        tokenizer,
        cache: Path | None,
        **settings,
    ):
        """columns: (fitted part, row) -> the values of a kept row in the table. settings: everything that `fit` depends
        on; part of the key of the cached table.

        Raises UserError if the tokenizer makes no tokens of any row.
        """

        def examples(counts: Counter) -> Iterator[tuple]:
            lengths = Counter()
            noted = defaultdict(list)
            notes = {}
            unread = {}
            progress = Progress(len(rows), "tokenising")
            for number, (row, found) in enumerate(progress.over(fit.each(rows))):
                counts[found.kind] += 1
                for each in getattr(row, "notes", ()):
                    first, count = notes.get(each, (number, 0))
                    notes[each] = first, count + 1
                if found.kind not in (EQUAL, EMPTY):  # rows of these kinds are left out at any length
                    lengths[found.needed] += 1
                if len(noted[found.kind]) < NOTED:
                    noted[found.kind].append(number)
                unread |= {name: value.why for name, value in row.items() if isinstance(value, Unread)}
                if not found.reason:
                    yield columns(found, row)
            counts.update(needed=_enough(lengths))
            counts["noted"], counts["notes"], counts["unread"] = map(json.dumps, (noted, notes, unread))

        self.source, self.fit = rows, fit
        self.table = cached_table(MadeTable(schema, examples), cache, rows, tokenizer, **settings)
        self.cut, self.dropped, self.equal = (count_of(self.table, kind) for kind in (CUT, DROPPED, EQUAL))
        self.empty = count_of(self.table, EMPTY)
        self.needed = count_of(self.table, "needed")
        metadata = self.table.schema.metadata
        self.noted, self.notes, self.unread = (
            json.loads(metadata.get(name, b"{}")) for name in (b"noted", b"notes", b"unread")
        )
        if 0 < self.empty == len(rows):
            raise UserError(
                f"the tokenizer of {tokenizer.name_or_path or 'the model'} makes no tokens of any of the {len(rows):,} "
                f"rows, from {place_of(rows, 0)} on. Give data, or a model, that its tokenizer was made for."
            )

    def __len__(self) -> int:
        return len(self.table)

    def told(self, noun: str) -> str:
        """A text with the numbers of kept, cut and dropped rows: "1,834 of 1,842 texts (226 cut: 12.3 %, 8 dropped: 0.4
        %)"; percentages are of all rows."""
        parts = [self._share(self.cut, "cut"), self._share(self.dropped, "dropped")]
        if self.equal:
            parts.append(self._share(self.equal, "left out as chosen and rejected are the same"))
        if self.empty:
            parts.append(self._share(self.empty, "left out as the tokenizer makes no tokens of them"))
        whole = f" of {len(self.source):,}" if len(self) < len(self.source) else ""
        return f"{len(self):,}{whole} {noun} ({', '.join(parts)})"

    def note_lines(self) -> list[str]:
        """A line for each note, with the share of the rows that have it."""
        return [
            f"in {100 * count / len(self.source):.1f} % of these {len(self.source):,} rows, first in "
            f"{place_of(self.source, first)}: {note}"
            for note, (first, count) in self.notes.items()
        ]

    def warnings(
        self, flag: str, limit: int, overlong: str, most: Callable[[], int | None] = lambda: None
    ) -> list[str]:
        """A warning, with advice, if more than 5 % of the rows do not fit; else [].

        limit: the value of `flag`. most: () -> the largest value of `flag` that the models' number of positions allows;
        None if the models set no limit.
        """
        too_long = self.cut + self.dropped
        if self.needed <= limit or too_long <= (1 - ENOUGH) * len(self.source):
            return []
        other = "" if overlong == "cut_prompt" else ", or give --overlong cut_prompt, which keeps answers"
        share = 100 * too_long / len(self.source)
        done = " or ".join(word for word, count in (("cut", self.cut), ("dropped", self.dropped)) if count)
        return [
            f"warning: {share:.1f} % of these {len(self.source):,} rows are longer than {flag} {limit}, and were "
            f"{done}; {100 * ENOUGH:.0f} % of them fit into {self.needed}. "
            f"{_remedy(flag, limit, self.needed, most())}{other}."
        ]

    def _share(self, count: int, what: str) -> str:
        return f"{count:,} {what}" + (f": {100 * count / len(self.source):.1f} %" if count else "")


def place_of(rows: Sequence[dict], number: int) -> str:
    """The file and line of row `number`, as a text."""
    return rows.where(number) if hasattr(rows, "where") else f"row {number + 1}"


def _enough(lengths: Mapping[int, int]) -> int:
    """The smallest length into which the fraction ENOUGH of the rows fits; 0 if there are no rows. lengths: {length:
    number of rows}."""
    place, seen = math.ceil(ENOUGH * sum(lengths.values())), 0
    for length in sorted(lengths):
        seen += lengths[length]
        if seen >= place:
            return length
    return 0


def _remedy(flag: str, limit: int, needed: int, most: int | None) -> str:
    if most is None:
        return f"Give {flag} {needed}, if the model and memory allow"
    if needed <= most:
        return f"Give {flag} {needed}, if memory allows"
    if limit < most:
        return (
            f"The model's positions allow {flag} {most} at most: give that, if memory allows, or another model, or "
            "shorter rows"
        )
    return "The model has no positions for more: give another model, or shorter rows"


class SFTExample(NamedTuple):
    """The ids of a text, and the position of the first id that is learned (at least 1)."""

    token_ids: list[int]
    first_target: int


def sft_fit(
    tokenizer, max_length: int, loss_on: str = "response", overlong: str = "cut_prompt", stops: Iterable[int] = ()
) -> RowFit:
    """A function from a row to the part of the row that step 1 learns. Arguments: as in SFTExamples."""
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

    The loss covers the response and its EOS. With loss_on="all", and for a `text`, it covers all tokens but the first.
    Examples longer than max_length are cut or left out, as `overlong` says (training/data/tokens.py). An example that
    lost its end gets no EOS, because the model would learn to stop in the middle of a sentence. stops: the token ids at
    which step 3 stops, in addition to EOS and the token with which the chat template ends a turn. An example that ends
    with one of these tokens gets no EOS in addition.
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
    """A batch of right-padded examples.

    sequences: (B, S) int64. attention_mask: (B, S) int64, 1 for tokens of the text, EOS included; 0 for padding.
    loss_mask: (B, S - 1) bool; entry t says whether token t + 1, which is predicted at position t, is learned.
    """

    sequences: Tensor
    attention_mask: Tensor
    loss_mask: Tensor

    def to(self, device) -> "SFTBatch":
        return SFTBatch(self.sequences.to(device), self.attention_mask.to(device), self.loss_mask.to(device))


def collate_sft(examples: list[SFTExample], pad_id: int) -> SFTBatch:
    """Make one batch of the examples, each padded to the length of the longest."""
    sequences, attention_mask = padded([example.token_ids for example in examples], pad_id)
    first_targets = torch.tensor([[example.first_target] for example in examples])
    is_target = (torch.arange(sequences.shape[1]) >= first_targets) & attention_mask.bool()
    return SFTBatch(sequences, attention_mask, is_target[:, 1:])


class Pair(NamedTuple):
    """Two answers to one prompt, each as the ids of prompt + answer + EOS."""

    chosen: list[int]
    rejected: list[int]


def pair_fit(tokenizer, max_length: int, overlong: str = "cut_prompt", stops: Iterable[int] = ()) -> RowFit:
    """A function from a pair to the part of the pair that the reward model is shown. Arguments: as in PairExamples."""
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
    """The examples of step 2. Each is a `Pair`, whose two answers have the same prompt.

    Pairs longer than max_length are cut or left out, as `overlong` says (training/data/tokens.py). An answer that lost
    its end has no EOS, as in SFTExamples. Pairs of equal answers are left out, since nothing can be learned from them;
    they count as `equal`. Pairs whose answers become equal when they are cut are left out too; they count as `dropped`.
    stops: as in SFTExamples.
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
    """A batch of B right-padded pairs: first the B chosen answers, then the B rejected answers in the same order.

    sequences: (2B, S) int64. attention_mask: (2B, S) int64. first_difference: (B,) int64, the first position at which a
    pair's two sequences differ; if the longer sequence begins with the shorter one, the length of the shorter one.
    """

    sequences: Tensor
    attention_mask: Tensor
    first_difference: Tensor

    def to(self, device) -> "PairBatch":
        return PairBatch(self.sequences.to(device), self.attention_mask.to(device), self.first_difference.to(device))


def collate_pairs(pairs: list[Pair], pad_id: int) -> PairBatch:
    """Make one batch of the pairs, each sequence padded to the length of the longest."""
    sequences, attention_mask = padded([pair.chosen for pair in pairs] + [pair.rejected for pair in pairs], pad_id)
    return PairBatch(sequences, attention_mask, torch.tensor([_first_difference(*pair) for pair in pairs]))


def _first_difference(a: list[int], b: list[int]) -> int:
    return next((position for position, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def prompt_fit(
    tokenizer,
    max_prompt_length: int,
    overlong: str = "cut_prompt",
    query_start: int | None = None,
    query_end: int | None = None,
) -> RowFit:
    """A function from a row to the part of the prompt that the actor is shown. Arguments: as in Prompts."""
    lengths = Lengths(tokenizer, max_prompt_length, overlong)
    opening = lengths.encoder.opening
    room = max_prompt_length - len(opening)

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
    """The prompts of step 3, each a list of token ids. The attribute `rows` holds the rows of the kept prompts, with
    all columns that could be read.

    overlong: what happens to prompts of more than max_prompt_length tokens (training/data/tokens.py). Only kept prompts
    are numbered. A prompt's number is part of the key of the random numbers with which its responses are drawn.

    with_dialogues: whether the attribute `dialogues` holds each kept prompt's `Row.dialogue`, for reward models that
    read texts. Otherwise it holds None for each. messages: how many dialogues it holds.

    query_start, query_end: token ids. If given, only a part of the text is the prompt (`trim_query`): the part begins
    after the first start token, is cut to max_prompt_length tokens, and then ends with its last end token. Texts
    without these tokens are dropped.
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
        with_dialogues: bool = False,
    ):
        fit = prompt_fit(tokenizer, max_prompt_length, overlong, query_start, query_end)
        trimmed = query_start is not None or query_end is not None
        schema = pyarrow.schema({"token_ids": IDS, "row": pyarrow.large_string()})
        settings = {"kind": "prompts", "max_length": max_prompt_length, "overlong": overlong}
        settings |= {"query": [query_start, query_end]} if trimmed else {}
        if with_dialogues:
            schema = schema.append(pyarrow.field("dialogue", pyarrow.large_string()))
            settings["dialogues"] = True

        def columns(found: Fit, row: dict) -> tuple:
            kept = {name: value for name, value in row.items() if not isinstance(value, Unread)}
            values = found.prompt, json.dumps(kept, default=str)  # decimals, dates and times become texts
            dialogue = getattr(row, "dialogue", None)
            kept_too = dialogue and json.dumps(dialogue, default=str)
            return (*values, kept_too) if with_dialogues else values

        super().__init__(rows, fit, schema, columns, tokenizer, cache, **settings)
        self.tokenizer = tokenizer
        self.rows = _JsonColumn(self.table["row"])
        self.dialogues = _JsonColumn(self.table["dialogue"]) if with_dialogues else [None] * len(self)
        self.messages = len(self) - self.table["dialogue"].null_count if with_dialogues else 0
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

    def opened(self, index: int, said: str) -> list[int]:
        """The ids of a prompt with a text at the end of the user's last message, or of the prompt if it is a text; cut
        as the prompts are. Needs with_dialogues.

        Raises: UserError if the prompt becomes one that would be left out, or that the chat template refuses.
        """
        row, dialogue = self.rows[index], self.dialogues[index]
        record = {"prompt": row["prompt"] + said}
        if dialogue is not None:
            options = {"tools": dialogue["tools"], "chat_template_kwargs": row.get("chat_template_kwargs")}
            record = {"prompt": with_more(dialogue["messages"], said), **options}
        place = f"prompt {index} with what the environment says at first"
        found = self.fit(PROMPTS.row(place, record, self.tokenizer))
        if found.reason:
            raise UserError(f"{place}: {found.reason}")
        return found.prompt

    def refuse_unread(self, columns: Iterable[str], asked: str) -> None:
        """Raise UserError if one of the columns was not read. asked: the beginning of the message, which says who needs
        the columns."""
        for name in columns:
            if name in self.unread:
                raise UserError(
                    f"{asked} the column {name}, which is not read: it holds {self.unread[name]}. Write what is "
                    "needed of it into a column of texts or numbers: a file's path, say, or base64."
                )


class _JsonColumn(Sequence):
    """The values of a column of JSON texts, each parsed when it is asked for; None where the column has none."""

    def __init__(self, column: pyarrow.ChunkedArray):
        self.column = column

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, index: int) -> Any:
        text = self.column[index].as_py()
        return None if text is None else json.loads(text)


def collate_prompts(token_lists: list[list[int]], indices: Tensor, visits: Tensor, pad_id: int) -> PromptBatch:
    """A batch of these prompts, left-padded to the longest.

    indices, visits: (B,) int64, from PromptOrder. The visits become `samples` of the batch, so that a prompt gets other
    random numbers, and thus other responses, in each epoch.
    """
    input_ids, attention_mask = padded(token_lists, pad_id, left=True)
    return PromptBatch(input_ids=input_ids, attention_mask=attention_mask, indices=indices, samples=visits)


def prompt_batch(texts: list[str], tokenizer, visit: int = 0) -> PromptBatch:
    """This rank's share of a step's prompts, made from texts; for use from Python, without a data set.

    texts: the prompts of all ranks, which get the indices 0, 1, ... visit: how often these texts were answered before.
    With the same `visit`, the same policy gives the same responses.
    Raises: UserError if the ranks cannot have equally many texts, or the tokenizer makes no tokens of a text.
    """
    if len(texts) % distributed.data_parallel_size():
        raise UserError(f"{len(texts)} texts cannot be divided equally among {distributed.world_size()} ranks.")
    indices, encoder = torch.arange(len(texts))[distributed.rank_share(len(texts))], TextEncoder(tokenizer)
    token_lists = [encoder.prompt(text) for text in texts]
    if not all(token_lists):
        number = token_lists.index([])
        raise UserError(f"prompt {number + 1}, {quoted(texts[number])}: the tokenizer makes no tokens of it.")
    own = [token_lists[index] for index in indices.tolist()]
    return collate_prompts(own, indices, torch.full_like(indices, visit), tokenizer.pad_token_id)


class TextBlocks(Sequence):
    """The texts of the rows as token ids, concatenated and divided into blocks of exactly block_length ids."""

    def __init__(self, rows: Sequence[dict], tokenizer, block_length: int, cache: Path | None = None):
        def blocks(counts):
            encoder, ids = TextEncoder(tokenizer), []
            progress = Progress(len(rows), "tokenising texts")
            for some, texts in together(progress.over(rows), lambda row: [row["text"]]):
                encoder.ahead(texts)
                for row in some:
                    if row["text"].strip():
                        ids.extend(encoder.prompt(row["text"]))
                    cut = len(ids) - len(ids) % block_length
                    yield from ((ids[start : start + block_length],) for start in range(0, cut, block_length))
                    del ids[:cut]

        schema = pyarrow.schema({"ids": pyarrow.list_(pyarrow.int32(), block_length)})
        settings = {"kind": "blocks", "block_length": block_length}
        self.table = cached_table(MadeTable(schema, blocks), cache, rows, tokenizer, **settings)
        if not len(self):
            raise UserError(
                f"the {len(rows)} texts for pretraining make no block of {block_length} tokens; give more "
                "text, or lower the lengths of prompts and answers."
            )

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> list[int]:
        return ids_at(self.table, "ids", index)
