"""Data sets: SFT texts, preference pairs and prompts as token ids, and batches of them as tensors.

    examples = SFTExamples(read_rows("reviews/sft.jsonl", SFT_COLUMNS), tokenizer, max_length=512)
    for indices in epoch_batches(len(examples), batch_size=8, epoch=0, seed=0, rank=rank(), world=world_size()):
        batch = collate_sft([examples[index] for index in indices], pad_id)

All are tokenised once, at the start, on every rank: the order in which they are visited (training/order.py) is then a
question of numbers, the same for any number of ranks. What is cut or left out is counted and never silent.
"""
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.errors import UserError
from engine.experience import PromptBatch
from training.tokens import encode_continuation, encode_prompt, opening_tokens, with_eos


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

    def __init__(self, rows: list[dict], tokenizer, max_length: int, loss_on: str = "response"):
        if loss_on not in ("response", "all"):
            raise UserError(f"loss_on is {loss_on!r}; choose 'response' or 'all'.")
        self.examples = []
        self.truncated = self.dropped = 0
        for row in rows:
            token_ids, first_target = _sft_tokens(row, tokenizer)
            first_target = 1 if loss_on == "all" else max(first_target, 1)
            if first_target >= min(len(token_ids), max_length):
                self.dropped += 1
                continue
            self.truncated += len(token_ids) > max_length
            self.examples.append(SFTExample(token_ids[:max_length], first_target))
        if not self.examples:
            raise UserError(f"none of the {len(rows)} texts has a token to be learned within max_length {max_length}; "
                            "raise it or shorten the prompts.")

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> SFTExample:
        return self.examples[index]


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

    def __init__(self, rows: list[dict], tokenizer, max_length: int):
        self.pairs = []
        self.truncated = self.dropped = 0
        for row in rows:
            whole = [_answered(tokenizer, row["prompt"], row[side])[0] for side in ("chosen", "rejected")]
            pair = Pair(*(token_ids[:max_length] for token_ids in whole))
            if pair.chosen == pair.rejected:
                self.dropped += 1
                continue
            self.truncated += max(map(len, whole)) > max_length
            self.pairs.append(pair)
        if not self.pairs:
            raise UserError(f"none of the {len(rows)} pairs differs within max_length {max_length}; raise it, or look "
                            "whether chosen and rejected are the same text.")

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Pair:
        return self.pairs[index]


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
    """The prompts of step 3; `rows` are those of the prompts kept, extra columns included.

    overlong: what becomes of prompts of more than max_prompt_length tokens. "truncate" cuts them on the left, behind
    the opening tokens, because what is to be answered stands at the end; "drop" leaves them out. `truncated` and
    `dropped` count them. A prompt's index, by which its samples are keyed, is its index among those kept.
    """

    def __init__(self, rows: list[dict], tokenizer, max_prompt_length: int, overlong: str = "truncate"):
        if overlong not in ("truncate", "drop"):
            raise UserError(f"overlong is {overlong!r}; choose 'truncate' or 'drop'.")
        opening = len(opening_tokens(tokenizer))
        if max_prompt_length <= opening:
            raise UserError(f"max_prompt_length is {max_prompt_length}; it needs to be at least {opening + 1} to hold "
                            "one token of a prompt and what the tokenizer puts before it.")
        self.rows, self.token_lists = [], []
        self.truncated = self.dropped = 0
        for row in rows:
            token_ids = encode_prompt(tokenizer, row["prompt"])
            excess = len(token_ids) - max_prompt_length
            if excess > 0 and overlong == "drop":
                self.dropped += 1
                continue
            if excess > 0:
                self.truncated += 1
                token_ids = token_ids[:opening] + token_ids[opening + excess:]
            self.rows.append(row)
            self.token_lists.append(token_ids)
        if not self.rows:
            raise UserError(f"none of the {len(rows)} prompts has at most {max_prompt_length} tokens; raise "
                            "max_prompt_length, or truncate long prompts instead of dropping them.")

    def __len__(self) -> int:
        return len(self.token_lists)

    def __getitem__(self, index: int) -> list[int]:
        return self.token_lists[index]


def collate_prompts(token_lists: list[list[int]], indices: Tensor, visits: Tensor, pad_id: int) -> PromptBatch:
    """The prompts of one batch, left-padded to the longest.

    indices, visits: (B,) int64, as PromptOrder gives them. The visit stands in `samples`, without which a prompt would
    be given the same responses in each epoch.
    """
    input_ids, attention_mask = _padded(token_lists, pad_id, left=True)
    return PromptBatch(input_ids=input_ids, attention_mask=attention_mask, indices=indices, samples=visits)


def prompt_batch(texts: list[str], tokenizer) -> PromptBatch:
    """Texts as one batch of prompts with the indices 0, 1, ...: for use from Python, without a data set."""
    indices = torch.arange(len(texts))
    token_lists = [encode_prompt(tokenizer, text) for text in texts]
    return collate_prompts(token_lists, indices, torch.zeros_like(indices), tokenizer.pad_token_id)


def _sft_tokens(row: dict, tokenizer) -> tuple[list[int], int]:
    """The ids of a row of either kind, uncut, and the number of those that are context."""
    if "text" in row:
        return with_eos(tokenizer, encode_prompt(tokenizer, row["text"])), 1
    return _answered(tokenizer, row["prompt"], row["response"])


def _answered(tokenizer, prompt: str, answer: str) -> tuple[list[int], int]:
    """The ids of prompt + answer + EOS, and the number of those that are the prompt's."""
    prompt_ids = encode_prompt(tokenizer, prompt)
    return with_eos(tokenizer, prompt_ids + encode_continuation(tokenizer, prompt, answer)), len(prompt_ids)


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
