"""Lengths: how a row that is too long is made to fit, the same in steps 1, 2 and 3.

    lengths = Lengths(tokenizer, limit=256, overlong="cut_prompt")
    fit = lengths.answered(prompt, [chosen, rejected])
    fit.prompt, fit.answers        # their ids; fit.lost and fit.ends_lost say how many went

Three ways (`OVERLONG`):

cut_prompt    The answer with its EOS stays, and of the prompt as much as fits of what stands right before it, from a
              user's turn on where there are turns. The tokens that open a sequence stay, and what precedes the first
              turn, such as a system message. An answer that leaves the prompt no token loses its end instead, so that a
              quarter of the limit holds the prompt's end.
cut_answer    The end of prompt + answer goes. A prompt that is to be answered, which has no answer yet, is left out.
drop          The row is left out.

Both answers of a pair keep the same prompt: the longer one decides. A text without a prompt loses its end.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from engine.errors import UserError
from training.data.tokens import TextEncoder
from training.data.turns import Turns

OVERLONG = ("cut_prompt", "cut_answer", "drop")
WHOLE, CUT, DROPPED, EQUAL, EMPTY = "whole", "cut", "dropped", "equal", "empty"  # kinds of rows
ROWS, CHARACTERS = 1000, 2**20  # which a tokenizer is given at once, at most


@dataclass(frozen=True, slots=True)
class Fit:
    """What of a row a model is shown.

    prompt: its ids with the opening tokens; none for a text. answers: the ids of each answer, or of the text, with EOS
    unless the end was cut. needed: ids of prompt + longest answer before anything was cut. lost: how many ids of the
    prompt went, at position `gap` of what is left; ends_lost: how many at the end of each answer. learned: the first
    position of prompt + answer that is learned, in step 1. reason: why the row is left out, empty if it is not.
    left_out: the kind of a row that is: DROPPED for its length, EQUAL where its answers are the same, EMPTY where the
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
        """WHOLE, CUT, or what `left_out` says."""
        if self.reason:
            return self.left_out
        return CUT if self.lost or any(self.ends_lost) else WHOLE

    @property
    def sequences(self) -> list[list[int]]:
        """The ids of prompt + answer, for each answer."""
        return [self.prompt + answer for answer in self.answers]


@dataclass(frozen=True, slots=True)
class RowFit:
    """What of a row is shown to the model: `fit(row)`.

    texts: those of a row that `of` has the encoder encode, so that it can be given those of many rows at once.
    """

    encoder: TextEncoder
    texts: Callable[[dict], list[str]]
    of: Callable[[dict], Fit]

    def __call__(self, row: dict) -> Fit:
        return self.of(row)

    def each(self, rows: Iterable[dict]) -> Iterator[tuple[dict, Fit]]:
        """Each row, and what of it is shown."""
        for some, texts in together(rows, self.texts):
            self.encoder.ahead(texts)
            yield from ((row, self.of(row)) for row in some)
        self.encoder.ahead([])


def together(rows: Iterable[dict], texts: Callable[[dict], list[str]]) -> Iterator[tuple[list[dict], list[str]]]:
    """Rows, and their texts, as many at once as a tokenizer is to be given."""
    some: list[dict] = []
    many: list[str] = []
    size = 0
    for row in rows:
        some.append(row)
        many.extend(own := texts(row))
        size += sum(map(len, own))
        if len(some) >= ROWS or size >= CHARACTERS:
            yield some, many
            some, many, size = [], [], 0
    if some:
        yield some, many


def answered_texts(prompt: str, *answers: str) -> list[str]:
    """What `Lengths.answered` has encoded, where nothing needs to be cut."""
    return [prompt, *(prompt + answer for answer in answers)]


class Lengths:
    """Makes rows fit into `limit` tokens with one tokenizer; `overlong` is one of OVERLONG.

    stops: as of TextEncoder. Raises UserError for another `overlong`.
    """

    def __init__(self, tokenizer, limit: int, overlong: str = "cut_prompt", stops: Iterable[int] = ()):
        if overlong not in OVERLONG:
            raise UserError(f"overlong is {overlong!r}; choose {', '.join(map(repr, OVERLONG))}.")
        self.encoder, self.turns = TextEncoder(tokenizer, stops), Turns(tokenizer)
        self.limit, self.overlong = limit, overlong

    def answered(self, prompt: str, answers: Sequence[str]) -> Fit:
        """A prompt with one or more answers to it, each in a sequence of its own."""
        whole = self._whole(prompt, answers)
        if whole.needed <= self.limit:
            return whole
        if self.overlong == "drop":
            return self._dropped(whole)
        prompt_ids, gap = whole.prompt[: self.limit], min(len(whole.prompt), self.limit)
        if self.overlong == "cut_prompt":
            prompt_ids, gap = self._shorter(prompt, whole.prompt, self._room(whole))
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
        """A text without a prompt."""
        ids = self.encoder.ended(self.encoder.prompt(text))
        whole = Fit([], [ids], len(ids))
        if len(ids) <= self.limit:
            return whole
        if self.overlong == "drop":
            return self._dropped(whole)
        return replace(whole, answers=[ids[: self.limit]], ends_lost=[len(ids) - self.limit])

    def prompt(self, text: str) -> Fit:
        """A prompt that is to be answered."""
        ids = self.encoder.prompt(text)
        if not ids:
            return Fit([], [], 0, reason="the tokenizer makes no tokens of it", left_out=EMPTY)
        whole = Fit(ids, [], len(ids))
        if len(ids) <= self.limit:
            return whole
        if self.overlong != "cut_prompt":
            return self._dropped(whole)
        shorter, gap = self._shorter(text, ids, self.limit)
        return replace(whole, prompt=shorter, gap=gap, lost=len(ids) - len(shorter))

    def _whole(self, prompt: str, answers: Sequence[str]) -> Fit:
        ids = self.encoder.prompt(prompt)
        followed = [self.encoder.answered(prompt, answer)[0] for answer in answers]
        return Fit(ids, [both[len(ids) :] for both in followed], max(map(len, followed)))

    def _dropped(self, whole: Fit) -> Fit:
        return replace(whole, reason=f"{whole.needed:,} tokens, more than {self.limit:,}")

    def _room(self, whole: Fit) -> int:
        """How many tokens the prompt may have beside its longest answer, or beside what is left of that."""
        least = min(len(whole.prompt), len(self.encoder.opened(whole.prompt)) + 1)
        beside = self.limit - max(map(len, whole.answers))
        return beside if beside >= least else max(self.limit // 4, least)

    def _shorter(self, text: str, ids: list[int], room: int) -> tuple[list[int], int]:
        """(the ids of the prompt without so much of its beginning that `room` tokens are left, where that is missing).

        From a turn's border on it is tokenised anew, so that its ids are those of a prompt that begins there.
        """
        if len(ids) <= room:
            return ids, 0
        opening = self.encoder.opened(ids)

        def encode(part: str) -> list[int]:
            return self.encoder.prompt(type(text)(part))  # as a part of such a text

        head, starts = self.turns.head(text)
        bos = self.encoder.spelt_bos(text)
        if not head:
            head = bos
        for smaller in (bos, ""):
            if len(encode(head)) - len(opening) > (room - len(opening)) // 2:  # it would leave too little to the turns
                head, starts = smaller, self.turns.borders(text)

        def begun(start: int) -> list[int]:
            """The head and what begins at `start`, with which a template may write the BOS anew."""
            rest = text[start:]
            return encode(rest if head == bos and rest.startswith(bos) else head + rest)

        before = encode(head)
        first = bisect_left(starts, True, key=lambda start: len(begun(start)) <= room)
        if first < len(starts):
            return begun(starts[first]), len(before)
        return before + ids[len(before) - room :], len(before)
