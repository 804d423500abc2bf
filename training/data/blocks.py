"""Examples of mixed pretraining: texts as one long list of token ids, cut into blocks of one length.

    rows, _ = load_rows("Salesforce/wikitext", TEXTS, tokenizer, phase=3, seed=0, config_name="wikitext-2-raw-v1")
    blocks = TextBlocks(rows, tokenizer, block_length=512)
    ids = collate_blocks([blocks[0], blocks[1]])               # (2, 512) int64

As in DeepSpeed-Chat each text begins with the tokenizer's own opening tokens, none ends with EOS, and what is left over
behind the last block is dropped.
"""

from collections.abc import Sequence
from pathlib import Path

import pyarrow
import torch
from torch import Tensor

from engine.errors import UserError
from training.data.build_lock import note
from training.data.cache import cached_table, ids_at
from training.data.lengths import together
from training.data.progress import Progress
from training.data.table_files import MadeTable
from training.data.tokens import TextEncoder


class TextBlocks(Sequence):
    """The ids of the rows' `text`, one text behind the other, in blocks of exactly block_length ids."""

    def __init__(self, rows: Sequence[dict], tokenizer, block_length: int, cache: Path | None = None):
        def blocks(counts):
            encoder, ids = TextEncoder(tokenizer), []
            progress = Progress(len(rows), "tokenising texts", told=note)
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


def collate_blocks(blocks: list[list[int]]) -> Tensor:
    """(B, L) int64."""
    return torch.tensor(blocks)
