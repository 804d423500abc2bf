"""The routes of the service, the forms of requests, and the answers to wrong requests.

PUT /               each model's response to a prompt or a chat, with its score; complete or streamed
GET /               the web page, which sends PUT /
POST /v1/scores     scores in this project's own form
POST /get_reward    scores in the form of OpenRLHF's reward server
GET /health         the state and load of the service
"""

import json
import re
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from training.data.tokens import TextEncoder
from training.tools.pages.page import sha256
from training.tools.serve.decoder import Generation, Settings
from training.tools.serve.models import ServedModel
from training.tools.serve.service import RequestError, Responses, Service, error_body, log_error

PAGE = Path(__file__).with_name("page.html")
STOPS, STOP_LENGTH = 16, 200
MOST = 10_000  # largest number of items in a list
NESTED = 100_000  # largest number of lists and objects, and of fields, in a body; each takes 30 times its own memory
STRINGS = re.compile(rb'"(?:[^"\\]++|\\.?)*+"?', re.DOTALL)  # the strings of a JSON text; the last may lack its end
NO_OBJECT = "the body is no JSON object. Send one, with Content-Type: application/json"
SHORT = Field(max_length=MOST, fail_fast=True)  # reading ends at the first wrong item, or after MOST items


class Message(BaseModel):
    """A message of a chat. Fields beside role and content are passed to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str


class CompareRequest(BaseModel):
    """The body of PUT /: a prompt or a chat, and how responses are drawn.

    prompt: a text that the models continue. messages: a chat, in place of a prompt; each model's own chat template
    renders it. models: names of the models that answer; by default all models.
    """

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, strict=True)  # "forbid" makes an error for each

    prompt: Annotated[str, Field(min_length=1)] | None = None
    messages: Annotated[list[Message], SHORT, Field(min_length=1)] | None = None
    models: Annotated[list[str], SHORT, Field(min_length=1)] | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Annotated[list[str], SHORT] | None = None
    stream: bool | None = False

    @model_validator(mode="after")
    def _check_together(self):
        for name in self.model_extra:
            raise RequestError(400, f"{name} is not supported here. Leave it out", name)
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt, a text to continue, or messages, a chat")
        return self

    def settings(self, seed: int, prompt_length: int, context: int, most: int) -> Settings:
        """The settings for drawing a response. prompt_length: number of tokens of the prompt.

        seed: the seed to use if the request has none. context: largest number of tokens of prompt and response
        together. most: largest number of tokens of a response. Raises: RequestError if the prompt, max_tokens or a stop
        string is too long.
        """
        left = context - prompt_length
        if left < 1:
            told = f"the prompt has {prompt_length} tokens; together with its response it may have {context}"
            raise RequestError(400, told, "prompt" if self.messages is None else "messages")
        if self.max_tokens is not None and self.max_tokens > min(left, most):
            told = f"max_tokens {self.max_tokens}: this prompt's responses may have {min(left, most)} tokens at most"
            raise RequestError(400, told, "max_tokens")
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stops) > STOPS or not all(0 < len(stop) <= STOP_LENGTH for stop in stops):
            raise RequestError(400, f"stop: give at most {STOPS} texts of 1 to {STOP_LENGTH} characters", "stop")
        return Settings(
            max_tokens=self.max_tokens or min(left, most),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=self.seed if self.seed is not None else seed,
            stop=stops,
        )


class Item(BaseModel):
    """A response to score. Other fields, such as columns of a data set, are ignored.

    id: returned with the score. ended: whether the response ended by itself; the reward model then reads it with an end
    token, as in training.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    id: str | int
    prompt: str
    response: str
    ended: bool = True


class ScoresRequest(BaseModel):
    """The body of POST /v1/scores."""

    model_config = ConfigDict(strict=True)

    items: Annotated[list[Item], SHORT]


class OpenRLHFRequest(BaseModel):
    """The body of POST /get_reward, as OpenRLHF's trainer sends it. The fields `prompts` and `labels` are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)

    query: Annotated[list[str], SHORT]


Form = TypeVar("Form", bound=BaseModel)


def read(form: type[Form], body: bytes) -> Form:
    """Parse a JSON body into an object of the class `form`. Raises: RequestError, which names the first mistake.

    A body that would take far more memory than it has bytes is refused before it is parsed, because other requests have
    to wait while a body is parsed.
    """

    def parts(text: bytes) -> int:
        return max(text.count(b"[") + text.count(b"{"), text.count(b":"))

    if parts(body) > NESTED and parts(STRINGS.sub(b"", body)) > NESTED:  # without those in strings
        raise RequestError(400, f"the body has more than {NESTED:,} fields, or lists and objects. Send less at once")
    try:
        return form.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> RequestError:
    found = error.errors(include_url=False, include_input=False)
    # An error "too_long" is reported rather than others, which are about alternative types of the same value.
    first = next((each for each in found if each["type"] == "too_long"), found[0])
    if first["type"] == "json_invalid":
        return RequestError(400, f"the body is no JSON: {first['ctx']['error']}")
    if first["type"] == "model_type":
        return RequestError(400, NO_OBJECT)
    # Keep names of fields and numbers of items; the other parts of `loc` are types that pydantic has tried.
    place = [
        str(part)
        for part in first["loc"]
        if isinstance(part, int) or (part.isidentifier() and part not in ("str", "int"))
    ]
    name, message = ".".join(place), first["msg"].removeprefix("Value error, ")
    return RequestError(400, f"{name}: {message}" if name else message, param=place[0] if place else None)


def make_app(service: Service) -> FastAPI:
    """Make the web app of a service. The service starts and stops together with the app."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        service.stop()

    app = FastAPI(openapi_url=None, lifespan=lifespan)
    _add_errors(app)
    _add_page(app)
    _add_comparison(app, service)
    _add_scores(app, service)

    @app.get("/health")
    @app.get("/v1/health")  # a run with --reward_url looks for it beside /v1/scores
    async def health() -> dict:
        return service.state()

    return app


def _add_errors(app: FastAPI) -> None:
    """Have every error answered with an `error_body`, and logged in one line."""

    def answer(request: Request, error: RequestError) -> Response:
        log_error(f"{request.method} {request.url.path}", error.status, error.message)
        return JSONResponse(error_body(error.message, error.param), error.status, error.headers)

    @app.exception_handler(RequestError)
    async def refused(request: Request, error: RequestError) -> Response:
        return answer(request, error)

    @app.exception_handler(HTTPException)
    async def of_routing(request: Request, error: HTTPException) -> Response:
        path = request.url.path[:200]
        told = {404: f"there is no {path} here", 405: f"{path} has no {request.method}"}
        message = told.get(error.status_code, str(error.detail))
        return answer(request, RequestError(error.status_code, message, headers=error.headers))

    @app.exception_handler(Exception)  # a bug in the service; uvicorn logs its stack trace
    async def failed(request: Request, error: Exception) -> Response:
        return JSONResponse(error_body("the service failed; its own log says where"), 500)


def _add_page(app: FastAPI) -> None:
    """Serve the page. Its content security policy allows only its own script, its own style and requests to this
    service."""
    page = PAGE.read_text(encoding="utf-8")
    script, style = (
        " ".join(map(sha256, re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL))) for tag in ("script", "style")
    )
    headers = {
        "content-security-policy": f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "x-content-type-options": "nosniff",
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
    }

    @app.get("/")
    async def the_page() -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)


def _add_comparison(app: FastAPI, service: Service) -> None:
    @app.put("/")
    async def compare(request: Request) -> Response:
        body = _comparison(await request.body(), _content_type(request))
        names = list(dict.fromkeys(body.models or service.models))
        if not names:
            raise RequestError(404, "this service has no models that answer; it was started with a reward model alone")
        # 53 bits fit into a number of JavaScript, so the page can send the seed back.
        seed = body.seed if body.seed is not None else secrets.randbits(53)
        models = [service.model(name) for name in names]
        with ExitStack() as stack:
            stack.enter_context(service.admitted(len(models)))
            wanted = [
                (model, prompt, body.settings(seed, len(prompt), service.context, service.most_tokens))
                for model, prompt in zip(models, await _prompts(service, models, body), strict=True)
            ]
            responses = stack.enter_context(Responses(service, wanted))
            is_chat = body.messages is not None
            if body.stream:
                return EventStream(_events(service, responses, seed, is_chat), stack.pop_all())
            found = await _compared(service, responses, is_chat)
            asked = body.model_dump(include={"prompt", "messages"}, exclude_none=True)
            return JSONResponse({**asked, "seed": seed, **found})


def _content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _comparison(body: bytes, kind: str) -> CompareRequest:
    """Parse the body of PUT /: a JSON object; or a JSON string or plain text, which is then the prompt.

    A body that begins with { is JSON too, unless it is sent as text/plain: `curl -d` calls everything a form.
    """
    try:
        if not (kind.endswith("json") or (kind != "text/plain" and body.lstrip().startswith(b"{"))):
            body = json.dumps({"prompt": body.decode("utf-8")}).encode()
        elif body.lstrip()[:1] == b'"':
            body = json.dumps({"prompt": json.loads(body)}).encode()
    except UnicodeDecodeError:
        raise RequestError(400, "the body is no UTF-8") from None
    except ValueError as error:
        raise RequestError(400, f"the body is no JSON: {error}") from None
    return read(CompareRequest, body)


async def _prompts(service: Service, models: Sequence[ServedModel], body: CompareRequest) -> list[list[int]]:
    """The token ids of the prompt for each model. A chat is rendered by each model's own chat template. Raises:
    RequestError."""
    if body.messages is None:
        return await service.encoded(lambda: [_prompt_ids(model, str(body.prompt), "prompt") for model in models])
    for model in models:
        if not model.has_template:
            told = (
                f"the tokenizer of {model.name} has no chat template to make a prompt of the messages. Send a "
                "prompt, which is text, or start the service with --chat_template FILE"
            )
            raise RequestError(400, told, "messages")
    if len(body.messages) > service.context:  # a template's time may grow with the square of the number of messages
        told = f"messages: there are {len(body.messages):,}; a prompt has at most {service.context:,} tokens"
        raise RequestError(400, told, "messages")
    messages = [message.model_dump() for message in body.messages]
    texts = [await service.rendered(model, messages) for model in models]
    return await service.encoded(
        lambda: [_prompt_ids(model, text, "messages") for model, text in zip(models, texts, strict=True)]
    )


def _prompt_ids(model: ServedModel, text: str, field: str) -> list[int]:
    _check_characters(len(text), model.decoder.context, model.longest_token, field)
    ids = model.encoder.prompt(text)
    if not ids:
        raise RequestError(400, f"{field}: the tokenizer makes no tokens of it", field)
    return ids


def _check_characters(count: int, context: int, longest_token: int, what: str) -> None:
    """Raise RequestError if a text has more characters than `context` tokens can have. Such a text is not tokenised,
    because tokenizers take seconds for megabytes of text. count: number of characters of the text."""
    most = context * (longest_token + 1)  # + 1, as some tokenizers drop spaces between words
    if count > most:
        told = f"{what}: it has {count} characters; {context} tokens have at most {most}"
        raise RequestError(400, told, what.partition("[")[0])


async def _compared(service: Service, responses: Responses, is_chat: bool) -> dict[str, dict]:
    """Wait until all responses have ended; returns {name of a model: its part of the answer}."""
    async for _ in responses.updates():
        pass
    generations = responses.generations
    scores: list[float | None] = [None] * len(generations)
    if service.scorer is not None:
        scores = [*await service.scores([each.prompt_ids + each.tokens for each in generations])]
    return {
        model.name: {"response": "".join(each.pieces), **_ending(model, each, score, is_chat)}
        for model, each, score in zip(responses.models, generations, scores, strict=True)
    }


def _ending(model: ServedModel, response: Generation, score: float | None, is_chat: bool) -> dict:
    """The fields of the answer that belong to one model, without the text of its response. is_chat: whether the request
    had messages."""
    told = {"score": score, "tokens": len(response.tokens), "finish_reason": response.reason}
    if model.has_template:
        told["chat_template"] = "applied" if is_chat else "not applied"
    return told


class EventStream(StreamingResponse):
    """A stream of server-sent events. held: contexts that are exited when the stream ends or the client disconnects."""

    def __init__(self, events: AsyncIterator[str], held: ExitStack):
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self.held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream (called by ASGI)."""
        with self.held:
            await super().__call__(scope, receive, send)


async def _events(service: Service, responses: Responses, seed: int, is_chat: bool) -> AsyncIterator[str]:
    """Yields the events of a streamed answer: pieces of the models' texts; when a response ends, the fields of
    `_ending`; at the end [DONE]. If there is an error, the last event is the error, without [DONE]."""

    def event(data: dict) -> str:
        return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"

    try:
        yield event({"seed": seed})
        async for number, text, is_whole in responses.updates():
            model, response = responses.models[number], responses.generations[number]
            if text:
                yield event({"model": model.name, "text": text})
            if is_whole:
                score = None
                if service.scorer is not None:
                    (score,) = await service.scores([response.prompt_ids + response.tokens])
                yield event({"model": model.name, **_ending(model, response, score, is_chat)})
        yield "data: [DONE]\n\n"
    except RequestError as error:
        log_error("a stream", error.status, error.message)
        yield event(error_body(error.message, error.param))


def _add_scores(app: FastAPI, service: Service) -> None:
    async def scored(field: str, lengths: list[int], encode: Callable[[TextEncoder, int], list[int]]) -> list[float]:
        """The score of each text of a request. field: name of the field that has the texts. lengths: number of
        characters of each text. encode: (encoder, number of a text) -> its token ids. Raises: RequestError."""
        scorer = service.scorer
        if scorer is None:
            raise RequestError(404, "this service has no reward model; start it with --reward_model_name_or_path")

        def encoded() -> list[list[int]]:
            for place, length in enumerate(lengths):
                _check_characters(length, service.context, scorer.longest_token, f"{field}[{place}]")
            return [encode(scorer.encoder, place) for place in range(len(lengths))]

        with service.admitted(len(lengths)):
            sequences = await service.encoded(encoded)
            for place, ids in enumerate(sequences):
                if not 0 < len(ids) <= service.context:
                    told = f"{field}[{place}] has {len(ids)} tokens; it may have 1 to {service.context}"
                    raise RequestError(400, told, field)
            return await service.scores(sequences)

    async def body_of(form: type[Form], request: Request) -> Form:
        """Read the body of a request. Its content type must be JSON: a browser lets web pages of any origin send bodies
        of some other types."""
        if not _content_type(request).endswith("json"):
            raise RequestError(400, NO_OBJECT)
        return read(form, await request.body())

    @app.post("/v1/scores")
    async def scores(request: Request) -> dict:
        items = (await body_of(ScoresRequest, request)).items

        def encode(encoder: TextEncoder, place: int) -> list[int]:
            item = items[place]
            ids, _ = encoder.answered(item.prompt, item.response)
            return ids if item.ended else encoder.prompt(item.prompt) + encoder.continuation(item.prompt, item.response)

        lengths = [len(item.prompt) + len(item.response) for item in items]
        found = await scored("items", lengths, encode)
        return {"scores": [{"id": item.id, "score": score} for item, score in zip(items, found, strict=True)]}

    @app.post("/get_reward")
    async def get_reward(request: Request) -> dict:
        texts = (await body_of(OpenRLHFRequest, request)).query
        lengths = [len(text) for text in texts]
        found = await scored("query", lengths, lambda encoder, place: query_ids(encoder, texts[place]))
        return {"rewards": found, "scores": found, "extra_logs": {"scores": found}}


def query_ids(encoder: TextEncoder, text: str) -> list[int]:
    """The token ids of a query in OpenRLHF's form: a prompt and its response as one text, in which special tokens are
    spelt out. The ids end with one EOS, as on OpenRLHF's own server.

    A SentencePiece tokenizer writes a space between BOS and the text when it decodes. When the text is encoded again,
    this space becomes an additional token. If the ids without this token decode to the same text, they are the original
    ids and are returned instead.
    """
    tokenizer, bos = encoder.tokenizer, encoder.spelt_bos(text)
    ids = encoder.prompt(text)
    if bos and text[len(bos) :].startswith(" "):
        without = encoder.prompt(text[len(bos) + 1 :])
        ids = without if tokenizer.decode(without) == text else ids
    while ids and ids[-1] in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        ids = ids[:-1]
    return encoder.ended(ids)
