"""Bodies that would take far more time and memory to read than to send."""

import asyncio
import json

import pytest
from pydantic import ValidationError

pytest.importorskip("fastapi", reason="the service needs fastapi: pip install .[serve]")

from training.tools.serve import app as requests
from training.tools.serve.server import HELD, Gate
from training.tools.serve.service import RequestError

ITEM = {"id": 1, "prompt": "", "response": ""}
MESSAGE = {"role": "user", "content": "w05"}
LISTS = {  # form, field, what is wrong as an item, what is right
    "stop": (requests.CompareRequest, "stop", 1, "w05"),
    "messages": (requests.CompareRequest, "messages", {}, MESSAGE),
    "models": (requests.CompareRequest, "models", 1, "one"),
    "items": (requests.ScoresRequest, "items", {}, ITEM),
    "queries": (requests.OpenRLHFRequest, "query", 1, "w05"),
}
OTHERS = {"messages": {}, "stop": {"prompt": "w05"}, "models": {"prompt": "w05"}, "items": {}, "queries": {}}


@pytest.mark.parametrize("name", LISTS)
def test_the_first_wrong_item_of_a_list_ends_its_reading(name):
    form, field, wrong, _ = LISTS[name]
    with pytest.raises(ValidationError) as caught:
        form.model_validate_json(json.dumps(OTHERS[name] | {field: [wrong] * 1000}))
    assert caught.value.error_count() < 10


@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_more_than_10000_items_is_refused(name):
    form, field, _, right = LISTS[name]
    with pytest.raises(RequestError, match=f"^{field}: List should have at most 10000 items"):
        requests.read(form, json.dumps(OTHERS[name] | {field: [right] * 10_001}).encode())


def test_a_body_of_very_many_lists_is_refused_and_brackets_within_texts_are_none():
    for within in ('"x": [%s[]]' % ("[]," * 100_000), '"x\\"": [%s{}]' % ("{}," * 100_000)):
        with pytest.raises(RequestError, match="more than 100,000 lists and objects"):
            requests.read(requests.CompareRequest, f'{{"prompt": "w05", {within}}}'.encode())
    text = '[{\\"' * 100_000
    assert requests.read(requests.OpenRLHFRequest, json.dumps({"query": [text, text]}).encode()).query == [text, text]


def test_bodies_beyond_what_may_be_held_at_once_are_refused_and_requests_without_one_are_not():
    async def answers() -> list[int]:
        found, done = [], asyncio.Event()

        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})

        async def ask(pieces: list[bytes], waits: bool) -> None:
            begun = False

            async def receive():
                nonlocal begun
                if begun and not pieces:
                    await done.wait()
                begun = True
                return {"type": "http.request", "body": pieces.pop() if pieces else b"", "more_body": waits}

            async def send(message):
                if message["type"] == "http.response.start":
                    found.append(message["status"])

            await gate({"type": "http", "method": "POST", "path": "/", "headers": []}, receive, send)

        gate = Gate(app, max_body=10, body_seconds=30)
        held = [asyncio.create_task(ask([b"x" * 10], True)) for _ in range(HELD)]
        await asyncio.sleep(0.01)
        await ask([b"x"], False)
        await ask([], False)
        for each in held:
            each.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        await ask([b"x" * 10], False)
        return found

    assert asyncio.run(answers()) == [503, 200, 200]
