"""What clients may send: OpenAI's fields that mean something here, and this service's own forms.

A field of OpenAI's that would change the answer, and that there is not here, is refused by name unless it asks for what
happens anyway; one that changes nothing is taken.
"""

import re
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from training.serve.errors import RequestError
from training.serve.generation import Settings

STOPS, STOP_LENGTH, SAMPLES, TOP_LOGPROBS = 16, 200, 128, 20
MOST = 10_000  # items of a list
NESTED = 100_000  # lists and objects in a body: each takes some thirty times as much memory as its two characters
STRINGS = re.compile(rb'"(?:[^"\\]++|\\.?)*+"?', re.DOTALL)  # of a JSON text, the last one perhaps without its end
NO_OBJECT = "the body is no JSON object. Send one, with Content-Type: application/json"
TAKEN = ("user", "metadata", "safety_identifier", "prompt_cache_key", "store", "service_tier", "parallel_tool_calls")
"""Fields that change no answer."""
USUAL: dict[str, Sequence[Any]] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), (0,)),
    "logit_bias": ({},),
    "echo": (False,),
    "suffix": ("",),
    **dict.fromkeys(("tools", "functions"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "best_of": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "repetition_penalty": (1,),
}
"""Fields that there are not here, and the values by which they ask for what happens anyway; null always does."""

Text = Annotated[str, Field(min_length=1)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
# The first item that is wrong ends the reading, and so does one too many.
SHORT = Field(max_length=MOST, fail_fast=True)
Ids = Annotated[list[int], Field(fail_fast=True)]


class Form(BaseModel):
    """A request's JSON object."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, strict=True)

    @model_validator(mode="after")
    def _refuse_what_there_is_not(self):
        for name, value in (self.model_extra or {}).items():
            if value is None or name in TAKEN or value in USUAL.get(name, ()):
                continue
            raise RequestError(400, f"{name} is not supported here. Leave it out", name, "unsupported_parameter")
        return self


class StreamOptions(BaseModel):
    """What a stream says beside the responses."""

    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False


class Sampling(Form):
    """How responses are drawn: what all requests for some have in common."""

    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: Seed | None = None
    stop: str | Annotated[list[str], SHORT] | None = None
    stream: bool | None = False

    def settings(self, seed: int, sample: int, prompt_length: int, context: int, most: int) -> Settings:
        """How a response is drawn to a prompt of this many tokens.

        seed: where the request has none. context: the most tokens of a prompt and its response. most: of a response.
        Raises: RequestError for what is too long.
        """
        left, asked = context - prompt_length, self._asked()
        if left < 1:
            raise RequestError(
                400,
                f"the prompt has {prompt_length} tokens; together with its response it may have {context}",
                self.prompt_field(),
                "context_length_exceeded",
            )
        if asked is not None and asked > min(left, most):
            told = f"max_tokens {asked}: this prompt's responses may have {min(left, most)} tokens at most"
            raise RequestError(400, told, "max_tokens", "context_length_exceeded")
        return Settings(
            max_tokens=asked or min(left, most),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=self.seed if self.seed is not None else seed,
            sample=sample,
            stop=self._stops(),
            logprobs=self._logprobs(),
        )

    def _asked(self) -> int | None:
        return self.max_tokens

    def _logprobs(self) -> int | None:
        return None

    def prompt_field(self) -> str:
        return "prompt"

    def _stops(self) -> tuple[str, ...]:
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stops) > STOPS or not all(0 < len(stop) <= STOP_LENGTH for stop in stops):
            told = f"stop: give at most {STOPS} texts of 1 to {STOP_LENGTH} characters"
            raise RequestError(400, told, "stop")
        return stops


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    model: str
    prompt: Text | Annotated[list[Text], SHORT] | Ids | Annotated[list[Ids], SHORT]
    n: int | None = Field(None, ge=1, le=SAMPLES)
    logprobs: int | None = Field(None, ge=0, le=TOP_LOGPROBS)
    stream_options: StreamOptions | None = None

    def prompts(self) -> list[str | list[int]]:
        """Each prompt, a text or token ids."""
        many = isinstance(self.prompt, list) and not (self.prompt and isinstance(self.prompt[0], int))
        found = self.prompt if many else [self.prompt]
        if not found or not all(found):
            raise RequestError(400, "prompt: it is empty", "prompt")
        return found  # type: ignore[return-value]

    def _logprobs(self) -> int | None:
        return self.logprobs


class TextPart(BaseModel):
    """A part of a message: text, the only kind that there is here."""

    type: str
    text: str | None = None


class Message(BaseModel):
    """A message of a chat; fields that a template may know are passed on."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | Annotated[list[TextPart], SHORT]

    def plain(self) -> dict:
        """The message with its content as one text. Raises: RequestError for parts of other kinds."""
        content = self.content
        if not isinstance(content, str):
            other = next((part.type for part in content if part.type != "text" or part.text is None), None)
            if other is not None:
                raise RequestError(400, f"messages: a part of the type {other!r}; here there is text alone", "messages")
            content = "".join(part.text or "" for part in content)
        return {**(self.model_extra or {}), "role": self.role, "content": content}


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    model: str
    messages: Annotated[list[Message], SHORT] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1, le=SAMPLES)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=TOP_LOGPROBS)
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _check_together(self):
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens say the same; give one of them")
        return self

    def _asked(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def _logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompt_field(self) -> str:
        return "messages"


class CompareRequest(Sampling):
    """PUT /. prompt: a text that models continue as it stands. messages: in its place a chat, which each model is asked
    by its own chat template. models: those that are to answer, by default all."""

    prompt: Text | None = None
    messages: Annotated[list[Message], SHORT, Field(min_length=1)] | None = None
    models: Annotated[list[str], SHORT, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _check_together(self):
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt, a text to continue, or messages, a chat")
        return self

    def prompt_field(self) -> str:
        return "prompt" if self.messages is None else "messages"


class Item(BaseModel):
    """A response to be scored; other fields, such as a data set's columns, are passed over.

    id: comes back with the score. ended: whether the response came to an end of its own; its end token is then scored
    with it, as in training.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    id: str | int
    prompt: str
    response: str
    ended: bool = True


class ScoresRequest(BaseModel):
    """POST /v1/scores."""

    model_config = ConfigDict(strict=True)

    items: Annotated[list[Item], SHORT]


class OpenRLHFRequest(BaseModel):
    """POST /get_reward, as OpenRLHF's trainer sends it; its prompts and labels are passed over."""

    model_config = ConfigDict(extra="ignore", strict=True)

    query: Annotated[list[str], SHORT]


Read = TypeVar("Read", bound=BaseModel)


def read(form: type[Read], body: bytes) -> Read:
    """The form of a JSON text. Raises: RequestError, which names the first thing that is wrong.

    One that would take far more memory than it has bytes is refused before it is read: other requests wait meanwhile.
    """
    if nested(body) > NESTED and nested(STRINGS.sub(b"", body)) > NESTED:
        raise RequestError(400, f"the body has more than {NESTED:,} lists and objects. Send less at once")
    try:
        return form.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from None


def nested(body: bytes) -> int:
    """How many lists and objects begin in it, and brackets in its texts."""
    return body.count(b"[") + body.count(b"{")


def _refusal(error: ValidationError) -> RequestError:
    found = error.errors(include_url=False, include_input=False)
    # Behind it stand other kinds of value.
    first = next((each for each in found if each["type"] == "too_long"), found[0])
    if first["type"] == "json_invalid":
        return RequestError(400, f"the body is no JSON: {first['ctx']['error']}")
    if first["type"] == "model_type":
        return RequestError(400, NO_OBJECT)
    place = [str(part) for part in first["loc"] if _is_field(part)]
    name = ".".join(place)
    message = first["msg"].removeprefix("Value error, ")
    return RequestError(400, f"{name}: {message}" if name else message, param=place[0] if place else None)


def _is_field(part: str | int) -> bool:
    """Whether a part of a place names a field or an item, and no kind of value that pydantic has tried."""
    return isinstance(part, int) or (part.isidentifier() and part not in ("str", "int"))


def new_seed() -> int:
    """A seed for a request that has none."""
    return secrets.randbits(53)  # which JavaScript's numbers hold, so that it can be sent back
