"""The forms of requests. A body is checked here before anything is computed for it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from engine.errors import UserError
from engine.rollout.base import SamplingConfig

MOST = 1000  # largest number of items in a list
STOPS = 16  # largest number of stop texts
SMALLEST_TEMPERATURE = 0.01  # logits that are divided by a smaller number may overflow
KINDS = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


class RequestError(UserError):
    """Raised if a request is refused, or could not be answered. status: the HTTP status of the answer. param: the
    request's field with the mistake, if there is one."""

    def __init__(self, status: int, message: str, param: str | None = None):
        super().__init__(message)
        self.status, self.param = status, param


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The body of PUT /: a prompt or a chat, and how responses are drawn.

    prompt: a text that the models continue. messages: a chat in place of a prompt; each model's own chat template
    renders it. models: names of the models that answer; by default all. temperature, seed, stop: as in SamplingConfig.
    max_tokens: largest number of tokens of a response. stream: whether the answer comes as server-sent events.
    """

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    models: list[str] | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    seed: int | None = None
    stop: list[str] | None = None
    stream: bool = False

    @property
    def field(self) -> str:
        """The name of the field that has the prompt."""
        return "prompt" if self.messages is None else "messages"

    def sampling(self, seed: int, length: int, context: int, most: int, **others) -> SamplingConfig:
        """The settings for drawing the response to a prompt of `length` tokens.

        context: largest number of tokens of prompt and response together. most: largest number of tokens of a response.
        others: further fields of SamplingConfig. Raises: RequestError if the prompt or max_tokens is too large.
        """
        if length >= context:
            told = f"the prompt has {length} tokens; together with its response it may have {context}"
            raise RequestError(400, told, self.field)
        most = min(context - length, most)
        if self.max_tokens is not None and self.max_tokens > most:
            told = f"max_tokens {self.max_tokens}: this prompt's responses may have {most} tokens at most"
            raise RequestError(400, told, "max_tokens")
        return SamplingConfig(
            max_new_tokens=self.max_tokens or most,
            temperature=self.temperature,
            seed=seed,
            stop_strings=tuple(self.stop or ()),
            **others,
        )


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a request's body. Raises: RequestError."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not a number of JSON")

    try:
        found = json.loads(body.decode("utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}") from None
    return _checked(found, "the body", dict)


def read_comparison(given: Mapping[str, Any]) -> Comparison:
    """The request of PUT /. Raises: RequestError."""
    kinds: dict[str, tuple[type, ...]] = {
        "prompt": (str,),
        "messages": (list,),
        "models": (list,),
        "max_tokens": (int,),
        "temperature": (float, int),
        "seed": (int,),
        "stop": (str, list),
        "stream": (bool,),
    }
    for name in given:
        if name not in kinds:
            raise RequestError(400, f"{name} is not supported here. Leave it out", name)
    found = {name: _checked(value, name, *kinds[name]) for name, value in given.items() if value is not None}
    if isinstance(found.get("stop"), str):
        found["stop"] = [found["stop"]]
    for name in ("models", "stop"):
        for number, text in enumerate(found.get(name, ())):
            _checked(text, f"{name}[{number}]", str)
    for number, message in enumerate(found.get("messages", ())):
        place = f"messages[{number}]"
        for name in ("role", "content"):
            _checked(_checked(message, place, dict).get(name), f"{place}.{name}", str)
    asked = Comparison(**found)
    mistakes = [
        ("prompt", asked.prompt == "", "it is empty"),
        ("messages", asked.messages == [], "there are none"),
        ("max_tokens", asked.max_tokens is not None and asked.max_tokens < 1, "give at least 1"),
        (
            "temperature",
            asked.temperature != 0 and not SMALLEST_TEMPERATURE <= asked.temperature <= 2,
            f"give 0, or {SMALLEST_TEMPERATURE} to 2",
        ),
        ("seed", not -(2**63) <= (asked.seed or 0) < 2**63, "give a number of 64 bits"),
        ("stop", len(asked.stop or ()) > STOPS or "" in (asked.stop or ()), f"give at most {STOPS} texts, none empty"),
    ]
    for name, is_wrong, told in mistakes:
        if is_wrong:
            raise RequestError(400, f"{name}: {told}", name)
    if (asked.prompt is None) == (asked.messages is None):
        raise RequestError(400, "give either prompt, a text to continue, or messages, a chat")
    return asked


def read_items(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The items of POST /v1/scores, each with id, prompt, response and ended: whether the response ended by itself.
    `messages` and `tools` replace the prompt: the reward model's own chat template renders them. Other fields, such as
    columns of a data set, are ignored. Raises: RequestError."""
    items = _checked(given.get("items"), "items", list)
    kinds = {"id": (str, int), "prompt": (str,), "response": (str,), "ended": (bool,)}
    for number, item in enumerate(items):
        place = f"items[{number}]"
        _checked(item, place, dict).setdefault("ended", True)
        for name, allowed in kinds.items():
            _checked(item.get(name), f"{place}.{name}", *allowed)
    return items


def _checked(value: Any, place: str, *kinds: type) -> Any:
    """The value. Raises: RequestError if it is of none of these classes, if it is a list of more than MOST items, or if
    it is a text that UTF-8 cannot hold (a lone surrogate)."""
    field = place.partition("[")[0]
    if type(value) not in kinds:  # bool is a subclass of int
        told = "it is missing" if value is None else f"give {' or '.join(KINDS[kind] for kind in kinds)}"
        raise RequestError(400, f"{place}: {told}", None if place == "the body" else field)
    if isinstance(value, list) and len(value) > MOST:
        raise RequestError(400, f"{place}: a list may have at most {MOST} items", field)
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise RequestError(400, f"{place}: the text is not valid Unicode", field) from None
    return value
