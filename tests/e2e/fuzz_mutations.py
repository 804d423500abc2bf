"""Random changes: of bytes, of texts, of JSON values and of the words of a command line. Drawn from an `rng`."""

import json
import random
from collections.abc import Callable

LONG = 5000
TEXTS = (
    "",
    " ",
    "\0",
    "\n",
    "\ud800",
    "é",
    "\U0001f600",
    "\u202e",
    "\x1b[31m",
    "-1",
    "--",
    "~",
    ".",
    "..",
    "*",
    "%s",
    "{0}",
    "null",
    "None",
    "true",
    "nan",
    "inf",
    "1e400",
    "9" * LONG,
    "x" * LONG,
    "a/b/c",
    "://",
    "$(id)",
)
NUMBERS = (
    0,
    -1,
    1,
    2,
    3.5,
    -0.0,
    2**31,
    2**63,
    -(2**63),
    10**30,
    1e-300,
    1e308,
    float("inf"),
    float("-inf"),
    float("nan"),
)


def other_value(rng: random.Random) -> object:
    """A JSON value of any kind."""
    return rng.choice([*TEXTS, *NUMBERS, True, False, None, [], {}, [[]], [None], [1, "a"], {"a": {}}, {"": None}])


def nested(value: object, depth: int) -> object:
    """The value within so many lists."""
    for _ in range(depth):
        value = [value]
    return value


def changed_json(value: object, rng: random.Random) -> object:
    """A copy of a JSON value in which one thing is another, gone, doubled, renamed or nested."""
    copy = json.loads(json.dumps(value))
    places = list(_places(copy))
    if not places or rng.random() < 0.03:
        return other_value(rng)
    holder, key = rng.choice(places)
    change = rng.randrange(6)
    if change == 0:
        del holder[key]
    elif change == 1 and isinstance(holder, dict):
        holder[rng.choice([key.upper(), key[:-1], key + "_", *TEXTS])] = holder.pop(key)
    elif change == 2:
        holder[key] = nested(holder[key], rng.choice([1, 1, 2, 50, 300]))
    elif change == 3:
        holder[key] = _near(holder[key], rng)
    elif change == 4:
        other, name = rng.choice(places)
        holder[key] = json.loads(json.dumps(other[name])) if other is not holder or name in _keys(holder) else None
    else:
        holder[key] = other_value(rng)
    return copy


def _near(value: object, rng: random.Random) -> object:
    """A value like this one, of the same kind where there is one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return rng.choice([-value, value + 1, value - 1, value * 10**9, value / 7, str(value), [value]])
    if isinstance(value, str):
        return changed_text(value, rng)
    if isinstance(value, list):
        return rng.choice(
            [value * 2, value[:-1], value[::-1], [*value, other_value(rng)], dict(enumerate(map(str, value)))]
        )
    return list(value.items()) if isinstance(value, dict) else "null"


def _keys(holder) -> list:
    return list(holder) if isinstance(holder, dict) else list(range(len(holder)))


def _places(value: object):
    """(holder, key) of everything inside of the value."""
    if isinstance(value, (dict, list)):
        for key in _keys(value):
            yield value, key
            yield from _places(value[key])


def changed_text(text: str, rng: random.Random) -> str:
    """The text with a part of it gone, doubled or another."""
    start = rng.randrange(len(text) + 1)
    end = min(len(text), start + rng.randrange(1, 9))
    middle = rng.choice(["", text[start:end] * 2, rng.choice(TEXTS), chr(rng.randrange(1, 0x3000))])
    return text[:start] + middle + text[end:]


def changed_bytes(content: bytes, rng: random.Random) -> bytes:
    """The bytes with some flipped, gone, doubled or inserted, or cut off."""
    place = rng.randrange(len(content) + 1)
    size = rng.choice([1, 1, 8, 100])
    changes: list[Callable[[], bytes]] = [
        lambda: content[:place],
        lambda: (
            content[:place]
            + bytes(byte ^ 1 << rng.randrange(8) for byte in content[place : place + 1])
            + content[place + 1 :]
        ),
        lambda: content[:place] + content[place + size :],
        lambda: content[: place + size] + content[place:],
        lambda: (
            content[:place]
            + rng.choice([b"\0", b"\xff", b"\xef\xbb\xbf", b"\n", b'"', b"[", b"{", b"\x80" * 9])
            + content[place:]
        ),
        lambda: content[:place] + rng.randbytes(size) + content[place + size :],
        lambda: b"",
    ]
    return rng.choices(changes, [2, 4, 2, 2, 3, 2, 0.3])[0]()


def changed_words(words: list[str], rng: random.Random) -> list[str]:
    """A command line in which one word is another, gone, doubled or elsewhere."""
    words = list(words)
    place = rng.randrange(len(words))
    change = rng.randrange(6)
    if change == 0:
        del words[place]
    elif change == 1:
        words.insert(place, words[place])
    elif change == 2:
        other = rng.randrange(len(words))
        words[place], words[other] = words[other], words[place]
    elif change == 3 and not words[place].startswith("--"):
        words[place] = str(other_value(rng))
    else:
        words[place] = changed_text(words[place], rng)
    return [word.replace("\0", "\x01") for word in words]  # no system passes NUL on
