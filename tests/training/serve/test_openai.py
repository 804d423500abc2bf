"""The forms of OpenAI, as its own client reads them."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.models.reading import read_tokenizer
from scripts.harness.models import EOS, VOCABULARY
from training.serve.decoder import Decoder
from training.serve.generation import Generation, Settings

openai = pytest.importorskip("openai", reason="the client is not installed: pip install .[dev]")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client(service):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{service.port}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def respond(models):
    """The words that a model draws to a prompt's ids, alone, with these settings."""

    def found(name: str, prompt: list[int], **settings) -> list[str]:
        model = AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.float32).eval()
        tokenizer = read_tokenizer(models[name], "model")
        one = Generation(prompt, Settings(**settings), frozenset([EOS]), tokenizer, lambda update: None)
        decoder = Decoder(model, 0, VOCABULARY, 1, 64, "plain")
        decoder.join([one])
        while decoder.living:
            decoder.step()
        return [f"w{token:02d}" for token in one.tokens if token > 3]

    return found


def test_models(client):
    assert [model.id for model in client.models.list()] == ["one", "two"]
    assert client.models.retrieve("one").object == "model"


def test_a_completion(client, respond):
    found = client.completions.create(model="one", prompt="w05 w09", seed=11, max_tokens=10, temperature=0.8)
    (choice,) = found.choices
    assert choice.text.split() == respond("one", [5, 9], seed=11, max_tokens=10, temperature=0.8)
    assert found.object == "text_completion" and found.model == "one" and choice.finish_reason in ("stop", "length")
    assert found.usage.prompt_tokens == 2 and found.usage.total_tokens == 2 + found.usage.completion_tokens


def test_several_prompts_with_several_responses(client, respond):
    found = client.completions.create(model="one", prompt=["w05 w09", "w60"], n=3, seed=11, max_tokens=8)
    assert [choice.index for choice in found.choices] == list(range(6))
    texts = [choice.text.split() for choice in found.choices]
    expected = [
        respond("one", prompt, seed=11, sample=sample, max_tokens=8) for prompt in ([5, 9], [60]) for sample in range(3)
    ]
    assert texts == expected and len({tuple(text) for text in texts}) == 6
    assert found.usage.prompt_tokens == 3
    ids = client.completions.create(model="one", prompt=[[5, 9], [60]], n=3, seed=11, max_tokens=8)
    assert [choice.text.split() for choice in ids.choices] == expected


def test_a_streamed_completion_is_the_same(client):
    given = {"model": "one", "prompt": "w05 w09", "seed": 4, "max_tokens": 12, "n": 2}
    whole = client.completions.create(**given)
    chunks = list(client.completions.create(**given, stream=True, stream_options={"include_usage": True}))
    for choice in whole.choices:
        pieces = [each for chunk in chunks for each in chunk.choices if each.index == choice.index]
        assert "".join(piece.text for piece in pieces) == choice.text and len(pieces) > 4
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == [choice.finish_reason]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stop_string_ends_a_response_and_is_no_part_of_it(client):
    given = {"model": "one", "prompt": "w05 w09", "seed": 8, "max_tokens": 30}
    words = client.completions.create(**given).choices[0].text.split()
    fourth = words[3]
    assert fourth not in words[:3]
    for stop in (fourth, ["never", fourth]):
        found = client.completions.create(**given, stop=stop)
        assert found.choices[0].text.split() == words[:3] and found.choices[0].finish_reason == "stop"
        assert found.usage.completion_tokens == 4
        chunks = client.completions.create(**given, stop=stop, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == found.choices[0].text


def test_a_chat_goes_through_the_template(client, respond):
    messages = [{"role": "user", "content": "w05"}, {"role": "assistant", "content": [{"type": "text", "text": "w09"}]}]
    found = client.chat.completions.create(model="two", messages=messages, seed=2, max_completion_tokens=7)
    expected = respond("two", [5, 9, 60], seed=2, max_tokens=7)  # w60 is the template's generation prompt
    message = found.choices[0].message
    assert (message.role, message.content.split()) == ("assistant", expected)
    assert found.object == "chat.completion" and found.usage.prompt_tokens == 3
    chunks = list(
        client.chat.completions.create(model="two", messages=messages, seed=2, max_completion_tokens=7, stream=True)
    )
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason is not None
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content


def test_logprobs(client):
    given = {"seed": 2, "max_tokens": 5, "temperature": 0}
    chat = client.chat.completions.create(
        model="two", messages=[{"role": "user", "content": "w05"}], logprobs=True, top_logprobs=2, **given
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == chat.usage.completion_tokens
    for entry in content:  # greedy: the token that was drawn is the first of the most probable ones
        assert entry.top_logprobs[0].token == entry.token and entry.top_logprobs[0].logprob == entry.logprob <= 0
        assert len(entry.top_logprobs) == 2 and bytes(entry.bytes).decode() == entry.token
    text = client.completions.create(model="two", prompt="w05 w60", logprobs=2, **given)
    found = text.choices[0].logprobs
    assert found.token_logprobs == [entry.logprob for entry in content]
    words = [token for token in found.tokens if "</s>" not in token]
    assert "".join(words) == text.choices[0].text and found.text_offset[0] == 0


def test_mistakes_are_the_clients_own_exceptions(client):
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'") as missing:
        client.completions.create(model="gpt", prompt="w05")
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="frequency_penalty is not supported") as refused:
        client.chat.completions.create(
            model="two", messages=[{"role": "user", "content": "w05"}], frequency_penalty=0.5
        )
    assert refused.value.param == "frequency_penalty"
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model="one", messages=[{"role": "user", "content": "w05"}])
