"""Which token a dialect's `truncate_token`, `query_start` and `query_end` mean under a tokenizer."""

from engine.algorithms.dialect import Dialect
from engine.errors import UserError


def token_id(tokenizer, dialect: Dialect, field: str) -> int | None:
    """The id of the token that the dialect's field names; None where it names none.

    A text that is a token as it stands is that one; another has to be encoded as one.

    Raises: UserError where it is no single token, or one that the tokenizer does not know.
    """
    text = getattr(dialect, field)
    if not text:
        return None
    if text == "eos":
        if tokenizer.eos_token_id is None:
            raise UserError(f"{field} 'eos': the tokenizer has no EOS token. Name another; an empty text is none.")
        return tokenizer.eos_token_id
    known = tokenizer.get_vocab().get(text)
    ids = [known] if known is not None else tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise UserError(
            f"{field} {text!r}: {len(ids)} tokens for this model's tokenizer; it should be one. Name "
            "another; an empty text is none."
        )
    if known is None and ids[0] == tokenizer.unk_token_id:
        raise UserError(
            f"{field} {text!r}: this model's tokenizer does not know it. Name another; an empty text is none."
        )
    return ids[0]


def end_token_id(tokenizer, dialect: Dialect) -> int | None:
    """The token that what is scored ends with: that of `truncate_token`, or else EOS, if there is one."""
    found = token_id(tokenizer, dialect, "truncate_token")
    return tokenizer.eos_token_id if found is None else found
