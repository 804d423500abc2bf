"""Turns texts into token ids, finds the ids that end a response, and cuts rows that are too long.

A prompt has the same ids in steps 1, 2 and 3, whatever text follows it. A response is tokenised as the continuation of
its prompt, so that SFT and the reward model learn from ids that the actor can sample. In all functions, `tokenizer` is
a Hugging Face tokenizer.

    lengths = Lengths(tokenizer, limit=256, overlong="cut_prompt")
    fit = lengths.answered(prompt, [chosen, rejected])
    fit.prompt, fit.answers        # their ids; fit.lost and fit.ends_lost: how many ids were cut

There are three ways to handle a row that is too long (`OVERLONG`):

cut_prompt    The prompt loses its beginning; the answer and its EOS stay. In a dialogue the rest of the prompt begins
              with a user's turn. The tokens that open a sequence stay, and so does the text before the first turn, such
              as a system message. If the answer would leave no token for the prompt, the answer loses its end too, and
              the end of the prompt gets a quarter of the limit.
cut_answer    The end of prompt + answer is cut. A prompt of step 3, which has no answer yet, is left out.
drop          The row is left out.

Both answers of a pair have the same prompt, cut so that the longer answer fits. A text without a prompt loses its end.
"""

import contextlib
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engine.errors import UserError, shortened
from engine.files import rust_panics
from training.data.chat import TURNS, Rendered, Turns, render

PARALLEL = "TOKENIZERS_PARALLELISM"  # the tokenizers library reads this environment variable in each call


class TextEncoder:
    """Encodes texts with one tokenizer. Properties of the tokenizer that can only be found by encoding or rendering a
    text are found once, at the start.

    opening: the ids that a sequence begins with (`opening_tokens`). stops: the ids at which step 3 stops a response:
    EOS, the id with which the chat template ends an answer, and the `stops` given, such as those of the generation
    config.
    """

    def __init__(self, tokenizer, stops: Iterable[int] = ()):
        self.tokenizer = tokenizer
        self.opening = opening_tokens(tokenizer)
        self.stops = {tokenizer.eos_token_id, end_of_turn(tokenizer), *stops} - {None}
        self._last = "", _encode(tokenizer, "")
        self._ahead: dict[str, list[int]] = {}

    def ahead(self, texts: Iterable[str]) -> None:
        """Encode all texts that will be asked for one by one later: a tokenizer is faster if it gets many texts at
        once."""
        many = list(dict.fromkeys(texts))
        with _all_cores():
            self._ahead = dict(zip(many, _encode(self.tokenizer, many))) if many else {}

    def prompt(self, text: str) -> list[int]:
        """The ids of a text that begins a sequence: the opening tokens and the text.

        A text that already begins with its BOS gets no second one. A text made by a chat template (`Rendered`) gets a
        BOS only if the template wrote one, as with apply_chat_template.
        """
        ids = self._bare(text)
        return ids if isinstance(text, Rendered) or self.opened(ids) else self.opening + ids

    def opened(self, ids: list[int]) -> list[int]:
        """The opening tokens if the ids begin with them, else []."""
        return self.opening if ids[: len(self.opening)] == self.opening else []

    def spelt_bos(self, text: str) -> str:
        """The BOS if the text spells it at its start, as rendered texts may; else ""."""
        bos = self.tokenizer.bos_token
        return bos if bos and text.startswith(bos) else ""

    def continuation(self, prompt: str, text: str) -> list[int]:
        """The ids of `text` after `prompt`, so that the ids of both decode to prompt + text.

        A SentencePiece tokenizer puts a space before any text that it encodes. Therefore prompt and `text` are encoded
        together, and the prompt's ids are cut off. A token may span the border of the two (" the" in "Review : " +
        "the"). The prompt keeps its own ids in this case too, because step 3 generates after them: `text` is encoded
        after a newline in place of the prompt; if a token spans this border too, `text` is encoded alone.
        """
        for before in (prompt, "\n", ""):
            head, both = self._bare(before), self._encoded(before + text)
            if both[: len(head)] == head:
                break
        return both[len(head) :]

    def answered(self, prompt: str, answer: str) -> tuple[list[int], int]:
        """(the ids of prompt + answer + EOS, the number of the prompt's ids)."""
        prompt_ids = self.prompt(prompt)
        return prompt_ids + self.ended(self.continuation(prompt, answer)), len(prompt_ids)

    def ended(self, ids: list[int]) -> list[int]:
        """The ids of an answer, with exactly one stop token at the end. If the ids end with stop tokens and blanks
        ("<|im_end|>", a newline, EOS), everything after the first of these stop tokens is cut off. Otherwise EOS is
        appended.

        A stop token that is followed by other tokens is a part of the text.
        """
        end = last = len(ids)
        while last and (ids[last - 1] in self.stops or not self.tokenizer.decode([ids[last - 1]]).strip()):
            last -= 1
            end = last + 1 if ids[last] in self.stops else end
        if end < len(ids) or (ids and ids[-1] in self.stops):
            return ids[:end]
        if (eos := self.tokenizer.eos_token_id) is None:
            raise UserError(
                f"the tokenizer of {self.tokenizer.name_or_path or 'the model'} has no EOS token, so no text can be "
                "shown to end; set eos_token in its tokenizer_config.json."
            )
        return [*ids, eos]

    def _bare(self, text: str) -> list[int]:
        """The ids of the text alone. The ids of the last text are cached, because they are needed again for each answer
        to the same prompt."""
        if text != self._last[0]:
            self._last = text, self._encoded(text)
        return self._last[1]

    def _encoded(self, text: str) -> list[int]:
        ids = self._ahead.get(text)
        return _encode(self.tokenizer, text) if ids is None else ids


def opening_tokens(tokenizer) -> list[int]:
    """The ids of the special tokens that the tokenizer itself puts before a text, such as BOS; often none.

    They are found by encoding a text, because each family of tokenizers has other settings. Tokens that the tokenizer
    puts after a text (EOS, SEP) are not included: this project adds the end of a text itself.
    """
    added, bare = tokenizer("x")["input_ids"], _encode(tokenizer, "x")
    start = next(start for start in range(len(added) + 1) if added[start : start + len(bare)] == bare)
    return added[:start]


def stop_token_ids(tokenizer, generation_config, model_config) -> list[int]:
    """The ids that end a response, in rising order.

    These are the EOS ids of the generation config (an int or a list), or, if it has none, those of the model's config;
    the tokenizer's EOS, with which steps 1 and 2 end their texts; and the token with which the tokenizer's chat
    template ends an assistant's turn. Chat models end their turns with this last token, but their configs often do not
    list it. Either config may be None.
    """
    stops = set()
    for config in (generation_config, model_config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            stops.update([ids] if isinstance(ids, int) else ids)
            break
    stops.update({tokenizer.eos_token_id, end_of_turn(tokenizer)} - {None})
    if not stops:
        raise UserError(
            f"no token ends a response of {tokenizer.name_or_path or 'the model'}: neither its generation "
            "config, its config nor its tokenizer has an EOS token. Set eos_token in its "
            "tokenizer_config.json."
        )
    return sorted(stops)


def end_of_turn(tokenizer) -> int | None:
    """The id of the token with which the chat template ends an answer: the first special or added token after an
    assistant's text. None if there is no template or no such token."""
    if not tokenizer.chat_template:
        return None
    _, found, tail = render(tokenizer, list(TURNS)).rpartition(TURNS[-1]["content"])
    if not found:
        return None
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    return next(
        (token for token in _encode(tokenizer, tail) if token in special and tokenizer.decode([token]).strip()), None
    )


@contextlib.contextmanager
def _all_cores() -> Iterator[None]:
    """Within this context tokenizers in Rust use all cores, because the other ranks of this machine only wait."""
    before = os.environ.get(PARALLEL)
    os.environ[PARALLEL] = "true"
    try:
        yield
    finally:
        # The variable stays set: otherwise the library warns of each process that is forked from now on.
        os.environ[PARALLEL] = before or "false"


def _encode(tokenizer, text):
    """The ids of a text, or of each text of a list, without special tokens and without warnings about the length."""
    nothing_else = {"return_attention_mask": False, "return_token_type_ids": False}
    try:
        with rust_panics():
            return tokenizer(text, add_special_tokens=False, verbose=False, **nothing_else)["input_ids"]
    except UserError as error:
        for each in () if isinstance(text, str) else text:
            _encode(tokenizer, each)  # raises an error that names the text
        raise UserError(f"{tokenizer.name_or_path}, text {shortened(text)}: {error}") from None


def padded(token_lists: list[list[int]], pad_id: int, left: bool = False) -> tuple[Tensor, Tensor]:
    """(ids, attention mask) of lists of token ids, both (B, length of the longest list) int64. left: whether the
    padding is on the left instead of the right.

    The mask is made from the lengths of the lists, not from the ids, because the pad token may also occur as a real
    token.
    """
    width = max(map(len, token_lists))
    ids = torch.full((len(token_lists), width), pad_id)
    mask = torch.zeros_like(ids)
    for row, token_ids in enumerate(token_lists):
        place = slice(width - len(token_ids), width) if left else slice(len(token_ids))
        ids[row, place] = torch.tensor(token_ids)
        mask[row, place] = 1
    return ids, mask


OVERLONG = ("cut_prompt", "cut_answer", "drop")
# kinds of rows
WHOLE = "whole"
CUT = "cut"
DROPPED = "dropped"
EQUAL = "equal"
EMPTY = "empty"
ROWS, CHARACTERS = 1000, 2**20  # the largest number of rows, and of characters, that a tokenizer is given at once


@dataclass(frozen=True, slots=True)
class Fit:
    """The part of a row that a model is shown.

    prompt: the ids of the prompt with the opening tokens; [] for a text. answers: the ids of each answer, or of the
        text, with EOS unless the end was cut. needed: number of ids of prompt + longest answer before cutting.
    lost: number of ids that were cut from the prompt. gap: position in the remaining ids at which they were cut.
    ends_lost: for each answer, the number of ids that were cut from its end. learned: in step 1, the first position of
        prompt + answer that is learned. reason: why the row is left out; "" if it is kept.
    left_out: the kind of a row that is left out: DROPPED for its length, EQUAL if its answers are equal, EMPTY if the
        tokenizer makes no tokens of it.
    """

    prompt: list[int]
    answers: list[list[int]]
    needed: int
    gap: int = 0
    lost: int = 0
    ends_lost: list[int] = field(default_factory=list)
    learned: int = 0
    reason: str = ""
    left_out: str = DROPPED

    @property
    def kind(self) -> str:
        """WHOLE, CUT, or, for a row that is left out, `left_out`."""
        if self.reason:
            return self.left_out
        return CUT if self.lost or any(self.ends_lost) else WHOLE

    @property
    def sequences(self) -> list[list[int]]:
        """The ids of prompt + answer, for each answer."""
        return [self.prompt + answer for answer in self.answers]


@dataclass(frozen=True, slots=True)
class RowFit:
    """A function from a row to the part of the row that the model is shown, a `Fit`.

    texts: row -> the texts that the function encodes. It lets the encoder encode the texts of many rows at once.
    """

    encoder: TextEncoder
    texts: Callable[[dict], list[str]]
    of: Callable[[dict], Fit]

    def __call__(self, row: dict) -> Fit:
        return self.of(row)

    def each(self, rows: Iterable[dict]) -> Iterator[tuple[dict, Fit]]:
        """(row, its Fit) for each row."""
        for some, texts in together(rows, self.texts):
            self.encoder.ahead(texts)
            yield from ((row, self.of(row)) for row in some)
        self.encoder.ahead([])


def together(rows: Iterable[dict], texts: Callable[[dict], list[str]]) -> Iterator[tuple[list[dict], list[str]]]:
    """Divide the rows into groups that are small enough for a tokenizer to encode at once; yields (rows of the group,
    their texts)."""
    some: list[dict] = []
    many: list[str] = []
    size = 0
    for row in rows:
        some.append(row)
        many.extend(own := texts(row))
        size += sum(map(len, own))
        if len(some) >= ROWS or size >= CHARACTERS:
            yield some, many
            some = []
            many = []
            size = 0
    if some:
        yield some, many


def answered_texts(prompt: str, *answers: str) -> list[str]:
    """The texts that `Lengths.answered` encodes if nothing needs to be cut."""
    return [prompt, *(prompt + answer for answer in answers)]


class Lengths:
    """Makes rows fit into `limit` tokens with one tokenizer.

    overlong: what happens to a row that is too long, one of OVERLONG. stops: see TextEncoder.
    """

    def __init__(self, tokenizer, limit: int, overlong: str = "cut_prompt", stops: Iterable[int] = ()):
        self.encoder, self.turns = TextEncoder(tokenizer, stops), Turns(tokenizer)
        self.limit, self.overlong = limit, overlong

    def answered(self, prompt: str, answers: Sequence[str]) -> Fit:
        """Fit a prompt with one or more answers. Each answer makes a sequence of its own with the prompt."""
        whole = self._whole(prompt, answers)
        if whole.needed <= self.limit:
            return whole
        if self.overlong == "drop":
            return self._dropped(whole)
        prompt_ids, gap = whole.prompt[: self.limit], min(len(whole.prompt), self.limit)
        if self.overlong == "cut_prompt":
            prompt_ids, gap = self.shorter(prompt, whole.prompt, self.room(whole))
        room = max(self.limit - len(prompt_ids), 0)
        return replace(
            whole,
            prompt=prompt_ids,
            answers=[answer[:room] for answer in whole.answers],
            gap=gap,
            lost=len(whole.prompt) - len(prompt_ids),
            ends_lost=[max(len(answer) - room, 0) for answer in whole.answers],
        )

    def text(self, text: str) -> Fit:
        """Fit a text without a prompt."""
        ids = self.encoder.ended(self.encoder.prompt(text))
        whole = Fit([], [ids], len(ids))
        if len(ids) <= self.limit:
            return whole
        if self.overlong == "drop":
            return self._dropped(whole)
        return replace(whole, answers=[ids[: self.limit]], ends_lost=[len(ids) - self.limit])

    def prompt(self, text: str) -> Fit:
        """Fit a prompt that has no answer yet."""
        ids = self.encoder.prompt(text)
        if not ids:
            return Fit([], [], 0, reason="the tokenizer makes no tokens of it", left_out=EMPTY)
        whole = Fit(ids, [], len(ids))
        if len(ids) <= self.limit:
            return whole
        if self.overlong != "cut_prompt":
            return self._dropped(whole)
        shorter, gap = self.shorter(text, ids, self.limit)
        return replace(whole, prompt=shorter, gap=gap, lost=len(ids) - len(shorter))

    def _whole(self, prompt: str, answers: Sequence[str]) -> Fit:
        ids = self.encoder.prompt(prompt)
        followed = [self.encoder.answered(prompt, answer)[0] for answer in answers]
        return Fit(ids, [both[len(ids) :] for both in followed], max(map(len, followed)))

    def _dropped(self, whole: Fit) -> Fit:
        return replace(whole, reason=f"{whole.needed:,} tokens, more than {self.limit:,}")

    def room(self, whole: Fit) -> int:
        """The largest number of prompt tokens that leaves room for the longest answer, which may be cut too."""
        least = min(len(whole.prompt), len(self.encoder.opened(whole.prompt)) + 1)
        beside = self.limit - max(map(len, whole.answers))
        return beside if beside >= least else max(self.limit // 4, least)

    def shorter(self, text: str, ids: list[int], room: int) -> tuple[list[int], int]:
        """(the ids of the prompt, cut to `room` tokens; the position of the cut).

        The head, such as a system message, stays; the text after the head loses its beginning. If the rest begins with
        a user's turn, it is tokenised again, so that it has the ids of a prompt that begins with this turn.
        """
        if len(ids) <= room:
            return ids, 0
        opening = self.encoder.opened(ids)

        def encode(part: str) -> list[int]:
            return self.encoder.prompt(type(text)(part))  # a part of a Rendered text is Rendered, too

        head, starts = self.turns.head(text)
        bos = self.encoder.spelt_bos(text)
        if not head:
            head = bos
        for smaller in (bos, ""):
            if len(encode(head)) - len(opening) > (room - len(opening)) // 2:  # too little room for turns
                head, starts = smaller, self.turns.borders(text)

        def begun(start: int) -> list[int]:
            """The ids of the head and of the text from `start` on. If the head is a BOS alone and the text from `start`
            on begins with another one, the BOS is not repeated."""
            rest = text[start:]
            return encode(rest if head == bos and rest.startswith(bos) else head + rest)

        before = encode(head)
        first = bisect_left(starts, True, key=lambda start: len(begun(start)) <= room)
        if first < len(starts):
            return begun(starts[first]), len(before)
        return before + ids[len(before) - room :], len(before)
