"""What the service makes of a request's body: OpenRLHF's queries, which are the ids that a text was written from, and
bodies that would take far more time and memory to read than to send.
"""

import asyncio
import json

import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from scripts.harness.models import BOS, EOS
from tests.training.data.tiny_tokenizers import SPECIAL, word_tokenizer
from training.data.tokens import TextEncoder
from training.tools.serve import app as requests
from training.tools.serve import server
from training.tools.serve.app import query_ids
from training.tools.serve.server import HELD, Gate
from training.tools.serve.service import RequestError

pytest.importorskip("fastapi", reason="the service needs fastapi: pip install .[serve]")

SPACE, A, B, SPACE_A = 10, 11, 12, 13


def spelling_tokenizer() -> PreTrainedTokenizerFast:
    """Characters, a space before each text and before what follows a special token, as SentencePiece has it."""
    vocabulary = {token: place for place, token in enumerate(SPECIAL.values())}
    vocabulary |= {"\u2581": SPACE, "a": A, "b": B, "\u2581a": SPACE_A}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("\u2581", "a")], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def test_the_space_that_a_tokenizer_writes_behind_bos_is_no_token():
    encoder = TextEncoder(spelling_tokenizer())
    written = [BOS, SPACE_A, B, SPACE_A, EOS]
    text = encoder.tokenizer.decode(written)
    assert text == "<s> ab a</s>"
    assert encoder.prompt(text) == [BOS, SPACE, *written[1:]]  # as the text alone is read
    assert query_ids(encoder, text) == query_ids(encoder, text.removesuffix("</s>")) == written


@pytest.mark.parametrize("before", ["", "<s>"])
def test_where_words_are_tokens_the_space_is_none_either_way(before):
    encoder = TextEncoder(word_tokenizer(before))
    assert query_ids(encoder, "<s> a b </s>") == [BOS, 10, 11, EOS]
    assert query_ids(encoder, "<s> a b <pad> </s> </s>") == [BOS, 10, 11, EOS]
    assert query_ids(encoder, "a b") == [*([BOS] if before else []), 10, 11, EOS]


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


def test_a_body_of_very_many_parts_is_refused_and_marks_within_texts_are_none():
    for parts in ("[]," * 100_000 + "[]", "{}," * 100_000 + "{}", "{" + '"\\"":0,' * 100_000 + '"":0}'):
        within = f'"x": [{parts}]'
        with pytest.raises(RequestError, match="more than 100,000 fields, or lists and objects"):
            requests.read(requests.CompareRequest, f'{{"prompt": "w05", {within}}}'.encode())
    text = '[{:\\"' * 100_000
    assert requests.read(requests.OpenRLHFRequest, json.dumps({"query": [text, text]}).encode()).query == [text, text]


def test_the_first_unknown_field_ends_the_checking():
    """Each error of pydantic takes 10 us."""
    with pytest.raises(RequestError, match="^k0 is not supported here") as caught:
        requests.CompareRequest.model_validate({"prompt": "w05"} | {f"k{number}": 0 for number in range(1000)})
    assert caught.value.param == "k0"


def test_bodies_beyond_what_may_be_held_at_once_are_refused_and_requests_without_one_are_not(monkeypatch):
    monkeypatch.setattr(server, "LINGERING", 0.05)

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
