"""The routes of the service, the forms of requests, and the answers to mistakes.

PUT /               each model's response to a prompt or a chat, with its score, whole or streamed
GET /               the page that asks for these
POST /v1/scores     scores in this project's form
POST /get_reward    scores in the form of OpenRLHF's reward server
GET /health         the state of the service, and its load
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
MOST = 10_000  # items of a list
NESTED = 100_000  # lists and objects in a body: each takes some thirty times as much memory as its two characters
STRINGS = re.compile(rb'"(?:[^"\\]++|\\.?)*+"?', re.DOTALL)  # of a JSON text, the last one perhaps without its end
NO_OBJECT = "the body is no JSON object. Send one, with Content-Type: application/json"
SHORT = Field(max_length=MOST, fail_fast=True)  # the first wrong item ends the reading, and so does one too many


class Message(BaseModel):
    """A message of a chat; fields that a template may know are passed on."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str


class CompareRequest(BaseModel):
    """PUT /: what the models are asked, and how their responses are drawn.

    prompt: a text that models continue as it stands. messages: instead of it a chat, which each model is given through
    its own chat template. models: those that answer, by default all.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

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
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt, a text to continue, or messages, a chat")
        return self

    def settings(self, seed: int, prompt_length: int, context: int, most: int) -> Settings:
        """How a response is drawn to a prompt of this many tokens.

        seed: where the request has none. context: the most tokens of a prompt and its response. most: of a response.
        Raises: RequestError for what is too long.
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


Form = TypeVar("Form", bound=BaseModel)


def read(form: type[Form], body: bytes) -> Form:
    """The form of a JSON text. Raises: RequestError, which names the first thing that is wrong.

    One that would take far more memory than it has bytes is refused before it is read: other requests wait meanwhile.
    """

    def nested(text: bytes) -> int:
        return text.count(b"[") + text.count(b"{")

    if nested(body) > NESTED and nested(STRINGS.sub(b"", body)) > NESTED:  # brackets within texts are none
        raise RequestError(400, f"the body has more than {NESTED:,} lists and objects. Send less at once")
    try:
        return form.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> RequestError:
    found = error.errors(include_url=False, include_input=False)
    # Behind it stand other kinds of value.
    first = next((each for each in found if each["type"] == "too_long"), found[0])
    if first["type"] == "json_invalid":
        return RequestError(400, f"the body is no JSON: {first['ctx']['error']}")
    if first["type"] == "model_type":
        return RequestError(400, NO_OBJECT)
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])
        return RequestError(400, f"{name} is not supported here. Leave it out", name)
    # Fields and items; the other parts of a place are kinds of value that pydantic has tried.
    place = [
        str(part)
        for part in first["loc"]
        if isinstance(part, int) or (part.isidentifier() and part not in ("str", "int"))
    ]
    name, message = ".".join(place), first["msg"].removeprefix("Value error, ")
    return RequestError(400, f"{name}: {message}" if name else message, param=place[0] if place else None)


def make_app(service: Service) -> FastAPI:
    """The app that answers by this service, which starts and stops with it."""

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
    @app.get("/v1/health")  # beside /v1/scores, where --reward_url looks for it
    async def health() -> dict:
        return service.state()

    return app


def _add_errors(app: FastAPI) -> None:
    """Have every error answered in the form of `error_body`, with one line in the log."""

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

    @app.exception_handler(Exception)  # the service's own mistake, whose trace uvicorn logs
    async def failed(request: Request, error: Exception) -> Response:
        return JSONResponse(error_body("the service failed; its own log says where"), 500)


def _add_page(app: FastAPI) -> None:
    """The page; its policy lets it run its own script, have its own style, ask this service, and nothing else."""
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
        body = _comparison(await request.body(), _is_json(request))
        names = list(dict.fromkeys(body.models or service.models))
        if not names:
            raise RequestError(404, "this service has no models that answer; it was started with a reward model alone")
        # A random seed is one that JavaScript's numbers hold, so that it can be sent back.
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


def _is_json(request: Request) -> bool:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower().endswith("json")


def _comparison(body: bytes, is_json: bool) -> CompareRequest:
    """The request of a JSON object, of a JSON text, or of any other body, which then is the prompt itself."""
    try:
        if not is_json:
            body = json.dumps({"prompt": body.decode("utf-8")}).encode()
        elif body.lstrip()[:1] == b'"':
            body = json.dumps({"prompt": json.loads(body)}).encode()
    except UnicodeDecodeError:
        raise RequestError(400, "the body is no UTF-8") from None
    except ValueError as error:
        raise RequestError(400, f"the body is no JSON: {error}") from None
    return read(CompareRequest, body)


async def _prompts(service: Service, models: Sequence[ServedModel], body: CompareRequest) -> list[list[int]]:
    """The ids of the prompt, or of the chat by each model's own chat template. Raises: RequestError."""
    if body.messages is None:
        return await service.encoded(lambda: [_prompt_ids(model, str(body.prompt), "prompt") for model in models])
    for model in models:
        if not model.has_template:
            told = (
                f"the tokenizer of {model.name} has no chat template, so that it cannot be said how messages become "
                "its prompt. Send it a prompt, which is text, or start the service with --chat_template FILE"
            )
            raise RequestError(400, told, "messages")
    if len(body.messages) > service.context:  # a template may take time that grows with the square of it
        told = f"messages: there are {len(body.messages):,} of them; {service.context:,} tokens are taken"
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
    """Raise RequestError for a text that is too long by its number of characters: tokenizers take seconds for
    megabytes."""
    most = context * (longest_token + 1)  # some tokenizers drop the spaces between
    if count > most:
        told = f"{what}: it has {count} characters; {context} tokens have {most} at most"
        raise RequestError(400, told, what.partition("[")[0])


async def _compared(service: Service, responses: Responses, is_chat: bool) -> dict[str, dict]:
    """What is answered of each model's response, by the model's name, once all are whole."""
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
    """What is said of a response beside its text. is_chat: whether messages were sent."""
    told = {"score": score, "tokens": len(response.tokens), "finish_reason": response.reason}
    if model.has_template:
        told["chat_template"] = "applied" if is_chat else "not applied"
    return told


class EventStream(StreamingResponse):
    """A stream of server-sent events. held: contexts that are left when it has ended, or its client has gone."""

    def __init__(self, events: AsyncIterator[str], held: ExitStack):
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self.held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        with self.held:
            await super().__call__(scope, receive, send)


async def _events(service: Service, responses: Responses, seed: int, is_chat: bool) -> AsyncIterator[str]:
    """Pieces of each model's text, then what `_ending` says of it, then [DONE]; an error ends the stream without it."""

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
        """The score of each text of a request. lengths: their characters; encode: the token ids of the one at a place.
        Raises: RequestError."""
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
        """What a request has sent. A body of another type, which pages of any origin may send, is refused."""
        if not _is_json(request):
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
    """The token ids of a query in OpenRLHF's form, a prompt and its response as one text with special tokens spelt out:
    those that read as this text, and one EOS behind them, as OpenRLHF's own server puts there.

    Tokenizers of the SentencePiece kind write a space between BOS and the text, and read it as one more token: where
    the ids without that token read as this text, too, they are the ones that it was written from.
    """
    tokenizer, bos = encoder.tokenizer, encoder.spelt_bos(text)
    ids = encoder.prompt(text)
    if bos and text[len(bos) :].startswith(" "):
        without = encoder.prompt(text[len(bos) + 1 :])
        ids = without if tokenizer.decode(without) == text else ids
    while ids and ids[-1] in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        ids = ids[:-1]
    return encoder.ended(ids)
