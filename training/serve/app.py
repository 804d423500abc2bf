"""Which request leads where."""

import base64
import hashlib
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from training.serve import requests as forms
from training.serve.answers import ChatCompletions, Completions, ending, models_list
from training.serve.errors import RequestError, add_handlers
from training.serve.events import EventStream, comparison_events, completion_events, ending_with_error
from training.serve.models import ServedModel
from training.serve.queries import query_ids
from training.serve.service import Responses, Service, Wanted, unless_gone

PAGE = Path(__file__).with_name("page.html")


def make_app(service: Service) -> FastAPI:
    """The app that answers by this service, which starts and stops with it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        service.stop()

    app = FastAPI(openapi_url=None, lifespan=lifespan)
    add_handlers(app)
    _add_page(app)
    _add_openai(app, service)
    _add_comparison(app, service)
    _add_scores(app, service)
    return app


def _add_page(app: FastAPI) -> None:
    page = PAGE.read_text(encoding="utf-8")
    policy = _content_security_policy(page)

    @app.get("/")
    async def the_page() -> Response:
        headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "cache-control": "no-cache"}
        return Response(
            page, media_type="text/html; charset=utf-8", headers={**headers, "referrer-policy": "no-referrer"}
        )


def _content_security_policy(page: str) -> str:
    """What the page may do: run its own script, have its own style, ask this service; nothing else."""

    def hashes(tag: str) -> str:
        texts = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts
        )

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _add_openai(app: FastAPI, service: Service) -> None:
    created = int(time.time())

    @app.get("/health")
    @app.get("/v1/health")  # beside /v1/scores, where --reward_url looks for it
    async def health() -> dict:
        return service.state()

    @app.get("/v1/models")
    async def models() -> dict:
        return models_list(service.models.values(), created, service.context)

    @app.get("/v1/models/{name}")
    async def model(name: str) -> dict:
        return models_list([service.model(name)], created, service.context)["data"][0]

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await _read(forms.CompletionRequest, request)
        model = service.model(body.model)
        given = body.prompts()
        return await _openai_answer(
            service,
            request,
            body,
            Completions(model),
            lambda: service.encoded(lambda: [_prompt_ids(model, one) for one in given]),
            len(given),
        )

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await _read(forms.ChatRequest, request)
        model = service.model(body.model)
        return await _openai_answer(
            service, request, body, ChatCompletions(model), lambda: _chat_ids(service, [model], body.messages), 1
        )


async def _read(form: type[forms.Read], request: Request) -> forms.Read:
    """The form that a request's body holds. One of another type, which pages of any origin may send, is refused."""
    if not _is_json(request):
        raise RequestError(400, forms.NO_OBJECT)
    return forms.read(form, await request.body())


def _is_json(request: Request) -> bool:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower().endswith("json")


async def _openai_answer(
    service: Service,
    request: Request,
    body: forms.CompletionRequest | forms.ChatRequest,
    form: Completions,
    encode: Callable[[], Coroutine[Any, Any, list[list[int]]]],
    count: int,
) -> Response:
    """n responses to each of so many prompts, whole or streamed."""
    seed = forms.new_seed()
    with ExitStack() as stack:
        stack.enter_context(service.admitted(count * (body.n or 1)))
        wanted = [
            Wanted(form.model, prompt, body.settings(seed, sample, len(prompt), service.context, service.most_tokens))
            for prompt in await unless_gone(request, encode())
            for sample in range(body.n or 1)
        ]
        responses = stack.enter_context(Responses(service, wanted))
        if body.stream:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            return EventStream(ending_with_error(completion_events(form, responses, with_usage)), stack.pop_all())
        return JSONResponse(form.whole(await unless_gone(request, responses.all())))


def _prompt_ids(model: ServedModel, prompt: str | list[int], field: str = "prompt") -> list[int]:
    """A prompt's token ids. Raises: RequestError where there are none, or the model does not know them."""
    if isinstance(prompt, str):
        _check_characters(len(prompt), model.decoder.context, model.longest_token, field)
    ids = model.encoder.prompt(prompt) if isinstance(prompt, str) else prompt
    if not ids:
        raise RequestError(400, f"{field}: the tokenizer makes no tokens of it", field)
    if not all(0 <= token < model.decoder.vocabulary_size for token in ids):
        raise RequestError(400, f"{field}: token ids are 0 to {model.decoder.vocabulary_size - 1}", field)
    return ids


def _check_characters(count: int, context: int, longest_token: int, what: str) -> None:
    """Raise RequestError for a text that needs no tokenizer, which takes seconds for megabytes, to be known as too
    long."""
    most = context * (longest_token + 1)  # some tokenizers drop the spaces between
    if count > most:
        told = f"{what}: it has {count} characters; {context} tokens have {most} at most"
        raise RequestError(400, told, what.partition("[")[0], "context_length_exceeded")


async def _chat_ids(service: Service, models: Sequence[ServedModel], messages: list[forms.Message]) -> list[list[int]]:
    """The ids of a chat for each of the models, by its own chat template."""
    for model in models:
        if not model.has_template:
            told = (
                f"the tokenizer of {model.name} has no chat template, so that it cannot be said how messages become "
                "its prompt. Send it a prompt, which is text, or start the service with --chat_template FILE"
            )
            raise RequestError(400, told, "messages", "no_chat_template")
    if len(messages) > service.context:  # a template may take time that grows with the square of it
        told = f"messages: there are {len(messages):,} of them; {service.context:,} tokens are taken"
        raise RequestError(400, told, "messages", "context_length_exceeded")
    texts = [await service.rendered(model, messages) for model in models]
    return await service.encoded(
        lambda: [_prompt_ids(model, text, "messages") for model, text in zip(models, texts, strict=True)]
    )


def _add_comparison(app: FastAPI, service: Service) -> None:
    @app.put("/")
    async def compare(request: Request) -> Response:
        body = _comparison(await request.body(), _is_json(request))
        names = list(dict.fromkeys(body.models or service.models))
        if not names:
            raise RequestError(404, "this service has no models that answer; it was started with a reward model alone")
        seed = body.seed if body.seed is not None else forms.new_seed()
        models = [service.model(name) for name in names]
        is_chat = body.messages is not None
        with ExitStack() as stack:
            stack.enter_context(service.admitted(len(models)))
            encoded = (
                _chat_ids(service, models, body.messages)
                if is_chat
                else service.encoded(lambda: [_prompt_ids(model, body.prompt) for model in models])
            )
            prompts = await unless_gone(request, encoded)
            wanted = [
                Wanted(model, prompt, body.settings(seed, 0, len(prompt), service.context, service.most_tokens))
                for model, prompt in zip(models, prompts, strict=True)
            ]
            responses = stack.enter_context(Responses(service, wanted))
            if body.stream:
                events = comparison_events(service, responses, seed, is_chat)
                return EventStream(ending_with_error(events), stack.pop_all())
            found = await unless_gone(request, _compared(service, responses, is_chat))
            asked = body.model_dump(include={"prompt", "messages"}, exclude_none=True)
            return JSONResponse({**asked, "seed": seed, **found})


def _comparison(body: bytes, is_json: bool) -> forms.CompareRequest:
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
    return forms.read(forms.CompareRequest, body)


async def _compared(service: Service, responses: Responses, is_chat: bool) -> dict[str, dict]:
    whole = await responses.all()
    scores: list[float | None] = [None] * len(whole)
    if service.scorer is not None:
        scores = [*await service.scores([each.wanted.prompt_ids + each.tokens for each in whole])]
    return {
        each.wanted.model.name: {"response": each.text, **ending(each, score, is_chat)}
        for each, score in zip(whole, scores, strict=True)
    }


def _add_scores(app: FastAPI, service: Service) -> None:
    def short_enough(characters: int, what: str) -> None:
        _check_characters(characters, service.context, service.scorer.longest_token, what)

    @app.post("/v1/scores")
    async def scores(request: Request) -> dict:
        body = await _read(forms.ScoresRequest, request)

        def encode() -> list[list[int]]:
            for place, item in enumerate(body.items):
                short_enough(len(item.prompt) + len(item.response), f"items[{place}]")
            return [ids_of(item) for item in body.items]

        def ids_of(item: forms.Item) -> list[int]:
            encoder = service.scorer.encoder
            ids, _ = encoder.answered(item.prompt, item.response)
            return ids if item.ended else encoder.prompt(item.prompt) + encoder.continuation(item.prompt, item.response)

        found = await _scored(service, request, encode, "items", len(body.items))
        return {"scores": [{"id": item.id, "score": score} for item, score in zip(body.items, found, strict=True)]}

    @app.post("/get_reward")
    async def get_reward(request: Request) -> dict:
        body = await _read(forms.OpenRLHFRequest, request)

        def encode() -> list[list[int]]:
            for place, text in enumerate(body.query):
                short_enough(len(text), f"query[{place}]")
            return [query_ids(service.scorer.encoder, text) for text in body.query]

        found = await _scored(service, request, encode, "query", len(body.query))
        return {"rewards": found, "scores": found, "extra_logs": {"scores": found}}


async def _scored(
    service: Service, request: Request, encode: Callable[[], list[list[int]]], field: str, count: int
) -> list[float]:
    if service.scorer is None:
        told = "this service has no reward model; start it with --reward_model_name_or_path"
        raise RequestError(404, told, code="no_reward_model")
    with service.admitted(count):
        sequences = await service.encoded(encode)
        for place, ids in enumerate(sequences):
            if not 0 < len(ids) <= service.context:
                told = f"{field}[{place}] has {len(ids)} tokens; it may have 1 to {service.context}"
                raise RequestError(400, told, field, "context_length_exceeded")
        return await unless_gone(request, service.scores(sequences))
