"""What a model is shown of some rows, as lines for people: what was cut and dropped, where what is learned begins.

cut, hh.jsonl, line 7: 256 of 412 tokens
  [156 tokens cut] '\\n\\nHuman: Can you help me?\\n\\nAssistant:' -> ' Of course.</s>'
"""

from collections.abc import Sequence

from training.data.examples import FittedRows, place_of
from training.data.tokens import CUT, DROPPED, EMPTY, EQUAL, WHOLE, Fit

LONGEST = 160  # characters of one text; what is longer loses its middle
SIDES = ("chosen", "rejected")


def shown_rows(
    rows: FittedRows, tokenizer, each: int, kinds: Sequence[str] = (WHOLE, CUT, DROPPED, EQUAL, EMPTY)
) -> list[str]:
    """Lines on the first `each` rows (at most NOTED of fitted_rows.py) of each of these kinds."""
    return [
        line
        for kind in kinds
        for number in rows.noted.get(kind, [])[:each]
        for line in _lines(kind, place_of(rows.source, number), rows.fit(rows.source[number]), tokenizer)
    ]


def _lines(kind: str, place: str, fit: Fit, tokenizer) -> list[str]:
    left = len(fit.prompt) + max(map(len, fit.answers), default=0)
    size = {CUT: f"{left:,} of {fit.needed:,} tokens", WHOLE: f"{fit.needed:,} tokens"}.get(kind, fit.reason)
    cut, ends = _cut(fit.gap, fit.lost), fit.ends_lost or [0] * len(fit.answers)
    if kind == EMPTY:
        texts = []
    elif not fit.answers:
        texts = [_marked(fit.prompt, cut, tokenizer) + " ->"]
    elif len(fit.answers) == 1:
        (ids,) = fit.sequences
        texts = [_marked(ids, [*cut, (fit.learned, "->"), *_cut(len(ids), ends[0])], tokenizer)]
    else:
        texts = ["prompt: " + _marked(fit.prompt, cut, tokenizer)] + [
            f"{side}: -> " + _marked(ids, _cut(len(ids), lost), tokenizer, len(fit.prompt))
            for side, ids, lost in zip(SIDES, fit.sequences, ends)
        ]
    return [f"{kind}, {place}: {size}", *(f"  {text}" for text in texts)]


def _cut(position: int, count: int) -> list[tuple[int, str]]:
    return [(position, f"[{count:,} token{'s' * (count > 1)} cut]")] if count else []


def _marked(ids: list[int], marks: list[tuple[int, str]], tokenizer, start: int = 0) -> str:
    """The text of the ids from position `start` on, with the words of `marks` put in at their positions."""
    words, told = [], 0
    for position in sorted({start, *(position for position, _ in marks), len(ids)}):
        text = tokenizer.decode(ids[:position], clean_up_tokenization_spaces=False)  # not alone: spaces would be lost
        words += [_shortened(text[told:])] * (position > start and len(text) > told)
        words += [word for place, word in marks if place == position]
        told = len(text)
    return " ".join(words)


def _shortened(text: str) -> str:
    if len(text) > LONGEST:
        half = LONGEST // 2
        return f"{text[:half]!r} ... {text[-half:]!r}"
    return repr(text)
