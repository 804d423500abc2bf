"""Fields of a dialect as words of a command line: `kl_coef=0.2 score_clip=none query_start=.`"""

import types
import typing
from collections.abc import Sequence

from engine.algorithms.dialect import Dialect
from engine.errors import UserError

TRUTHS = {"true": True, "yes": True, "false": False, "no": False}


def parse_settings(words: Sequence[str]) -> dict[str, object]:
    """{field: value} of words FIELD=VALUE, each value of its field's kind.

    "none" stands for None where a field may be that, "true" or "false" for truth values, two numbers with a comma
    between them for betas; nothing behind the sign is the empty text.

    Raises: UserError for a word without a sign, a field that does not exist or comes twice, a value of another kind.
    """
    kinds, found = typing.get_type_hints(Dialect), {}
    for word in words:
        name, sign, text = word.partition("=")
        if not sign:
            raise UserError(f"{word!r}: dialect fields are set as FIELD=VALUE.")
        Dialect.check_field(name)
        if name in found:
            raise UserError(f"{word!r}: {name} is set twice. Say it once.")
        if name == "name":
            raise UserError(f"{word!r}: a dialect's name is not set. --dialect chooses one.")
        found[name] = _value(word, text, kinds[name])
    return found


def _value(word: str, text: str, kind):
    optional = isinstance(kind, types.UnionType)
    if optional:
        if text.lower() == "none":
            return None
        kind = next(one for one in typing.get_args(kind) if one is not type(None))
    try:
        if kind is bool:
            return TRUTHS[text.lower()]
        if typing.get_origin(kind) is tuple:
            first, second = text.split(",")
            return float(first), float(second)
        return kind(text)
    except (KeyError, ValueError):
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}.get(kind, "two numbers: 0.9,0.95")
        raise UserError(f"{word!r}: give {wanted}{', or none' if optional else ''}.") from None
