"""How texts become token ids, and which ids end a response: the same in steps 1, 2 and 3.

A prompt has the same ids in all steps, whatever follows it: those that the actor is given in step 3. A response is
tokenised as the continuation of its prompt, so that SFT and reward model learn on ids that the actor can sample.
`tokenizer` is a Hugging Face tokenizer throughout.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from engine.errors import UserError
from training.data.chat import TURNS, Rendered, render

PARALLEL = "TOKENIZERS_PARALLELISM"  # which the library looks at in each call


class TextEncoder:
    """Texts to ids with one tokenizer; what has to be tried out about the tokenizer is tried once.

    opening: the ids that a sequence begins with (`opening_tokens`). stops: the ids at which step 3 stops: EOS, the one
    with which the chat template ends an answer, and what is given, such as those of the generation config.
    """

    def __init__(self, tokenizer, stops: Iterable[int] = ()):
        self.tokenizer = tokenizer
        self.opening = opening_tokens(tokenizer)
        self.stops = {tokenizer.eos_token_id, end_of_turn(tokenizer), *stops} - {None}
        self._last = "", _encode(tokenizer, "")
        self._ahead: dict[str, list[int]] = {}

    def ahead(self, texts: Iterable[str]) -> None:
        """Encode texts that will be asked for one by one until the next call: a tokenizer is faster at many at once."""
        many = list(dict.fromkeys(texts))
        with _all_cores():
            self._ahead = dict(zip(many, _encode(self.tokenizer, many))) if many else {}

    def prompt(self, text: str) -> list[int]:
        """The ids of a text that begins a sequence: the opening tokens, once, and the text.

        A text that spells its BOS out gets no second one; one that a chat template made (`Rendered`) gets none that the
        template does not write, as with apply_chat_template.
        """
        ids = self._bare(text)
        return ids if isinstance(text, Rendered) or self.opened(ids) else self.opening + ids

    def opened(self, ids: list[int]) -> list[int]:
        """The opening tokens where the ids begin with them, else none."""
        return self.opening if ids[: len(self.opening)] == self.opening else []

    def spelt_bos(self, text: str) -> str:
        """The BOS where the text begins with it, as texts made with a chat template do; empty where it does not."""
        bos = self.tokenizer.bos_token
        return bos if bos and text.startswith(bos) else ""

    def continuation(self, prompt: str, text: str) -> list[int]:
        """The ids of `text` where it follows `prompt`, so that the ids of both spell prompt + text.

        A SentencePiece tokenizer puts a space before whatever it is given. So `text` is encoded together with the
        prompt, whose ids are then cut off. Where a token would span the border ("Review : " + "the" has the one token
        " the"), the prompt's ids win, because step 3 generates from them: a newline takes the prompt's place, and where
        that merges too, `text` is encoded alone.
        """
        for before in (prompt, "\n", ""):
            head, both = self._bare(before), self._encoded(before + text)
            if both[: len(head)] == head:
                break
        return both[len(head) :]

    def answered(self, prompt: str, answer: str) -> tuple[list[int], int]:
        """The ids of prompt + answer + EOS, and the number of those that are the prompt's."""
        prompt_ids = self.prompt(prompt)
        return prompt_ids + self.ended(self.continuation(prompt, answer)), len(prompt_ids)

    def ended(self, ids: list[int]) -> list[int]:
        """`ids` up to and with the token at which step 3 stops, or where their end has none, with EOS behind them.

        Behind that token may stand blanks and other stops alone ("<|im_end|>", a newline, EOS): what stands before
        others is a part of the text.
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
        """The ids of the text alone; those of the last one are kept, for each answer to a prompt asks for them anew."""
        if text != self._last[0]:
            self._last = text, self._encoded(text)
        return self._last[1]

    def _encoded(self, text: str) -> list[int]:
        ids = self._ahead.get(text)
        return _encode(self.tokenizer, text) if ids is None else ids


def opening_tokens(tokenizer) -> list[int]:
    """The special tokens that the tokenizer itself puts before a text, such as BOS; often none.

    Found by trying, because each family of tokenizers has other settings for them. Tokens that it puts behind a text
    (EOS, SEP) are not among them: the examples decide where a text ends.
    """
    added, bare = tokenizer("x")["input_ids"], _encode(tokenizer, "x")
    start = next(start for start in range(len(added) + 1) if added[start : start + len(bare)] == bare)
    return added[:start]


def stop_token_ids(tokenizer, generation_config, model_config) -> list[int]:
    """The ids that end a response, ascending.

    Those of the generation config (an int or a list), or else of the model's config; the tokenizer's EOS, with which
    steps 1 and 2 end their texts; and the token with which the tokenizer's chat template ends an assistant's turn,
    which chat models use and their configs often leave out. Either config may be None.
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
    """The token with which the chat template ends an answer: the first special or added one behind what an assistant
    says; None without a template or such a token."""
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
    """Have tokenizers in Rust use them: other ranks of this machine wait for this one meanwhile."""
    before = os.environ.get(PARALLEL)
    os.environ[PARALLEL] = "true"
    try:
        yield
    finally:
        os.environ[PARALLEL] = (
            before or "false"
        )  # named, or the library warns of each process that is forked from now on


def _encode(tokenizer, text):
    """The ids of the text alone, or of each of a list; not verbose, for texts too long are cut and counted later."""
    nothing_else = {"return_attention_mask": False, "return_token_type_ids": False}
    return tokenizer(text, add_special_tokens=False, verbose=False, **nothing_else)["input_ids"]


def padded(token_lists: list[list[int]], pad_id: int, left: bool = False) -> tuple[Tensor, Tensor]:
    """(ids, attention mask) of lists of token ids, both (B, longest) int64; padded on the right, or on the left.

    The mask comes from the lengths and not from the ids, for pad may be a real token.
    """
    width = max(map(len, token_lists))
    ids = torch.full((len(token_lists), width), pad_id)
    mask = torch.zeros_like(ids)
    for row, token_ids in enumerate(token_lists):
        place = slice(width - len(token_ids), width) if left else slice(len(token_ids))
        ids[row, place] = torch.tensor(token_ids)
        mask[row, place] = 1
    return ids, mask
