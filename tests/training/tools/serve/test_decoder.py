"""Responses that come and go beside each other: each is what it would be alone; its text grows by whole characters,
with spaces where they belong and nothing of a stop string.
"""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from engine.algo.sampling import keyed_uniforms
from engine.models.reading import read_tokenizer
from scripts.harness.models import BOS, EOS, POSITIONS, VOCABULARY, make_tokenizer
from training.tools.serve.decoder import Decoder, Generation, ResponseText, Settings, draw, nucleus

PROMPTS = [[5, 9, 33], [60, 7], [8, 8, 8, 21, 40, 11, 30, 4, 5, 6], [12], [44, 10, 9, 9, 17], [30, 31]]


@pytest.fixture(scope="module")
def model(models):
    return AutoModelForCausalLM.from_pretrained(models["one"], dtype=torch.float32).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def tokenizer(models):
    return read_tokenizer(models["one"], "model")


def generation(tokenizer, prompt, **settings) -> Generation:
    given = Settings(**{"max_tokens": 20, "seed": 0} | settings)
    return Generation(prompt, given, frozenset([EOS]), tokenizer)


def decoded(model, generations, rows: int, every: int = 1, decoding: str = "auto") -> list[list[int]]:
    """The tokens of all, of which one more begins every so many tokens, where there is room."""
    decoder, waiting, turn = Decoder(model, 0, VOCABULARY, rows, POSITIONS, decoding), list(generations), 0
    while waiting or decoder.living:
        decoder.step()
        if waiting and turn % every == 0 and decoder.room:
            decoder.join([waiting.pop(0)])
        turn += 1
    return [each.tokens for each in generations]


def test_greedy_is_transformers_greedy(model, tokenizer):
    expected = [
        model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20)[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    for decoding in ("plain", "recorded"):
        found = decoded(model, [generation(tokenizer, prompt, temperature=0.0) for prompt in PROMPTS], 3, 2, decoding)
        assert found == expected


def test_samples_are_drawn_from_the_models_distribution_by_their_own_keys(model, tokenizer):
    """Against a loop without a cache: probabilities in float64, the first token over the uniform number."""
    found = decoded(model, [generation(tokenizer, prompt, seed=7, temperature=0.7) for prompt in PROMPTS], rows=4)
    zero = torch.zeros(1, dtype=torch.int64)
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        ids = list(prompt)
        for place, token in enumerate(tokens):
            logits = model(torch.tensor([ids])).logits[0, -1].double() / 0.7
            target = keyed_uniforms(7, zero, zero, place).item()
            cumulative = torch.softmax(logits, -1).cumsum(-1)
            assert token == int((cumulative <= target).sum())
            ids.append(token)
        assert len(tokens) == 20 or tokens[-1] == EOS


@pytest.mark.slow
def test_a_response_does_not_depend_on_its_company(model, tokenizer):
    alone = [decoded(model, [generation(tokenizer, prompt, seed=5)], rows=1)[0] for prompt in PROMPTS]
    company = [generation(tokenizer, prompt, seed=5) for prompt in PROMPTS]
    others = [generation(tokenizer, prompt[::-1] * 3, seed=i, max_tokens=5) for i, prompt in enumerate(PROMPTS)]
    mixed = [each for pair in zip(others, company, strict=True) for each in pair]
    decoded(model, mixed, rows=5)
    assert [each.tokens for each in company] == alone
    assert decoded(model, [generation(tokenizer, prompt, seed=6) for prompt in PROMPTS], rows=6) != alone


@pytest.mark.slow
def test_many_responses_one_after_another_fit_into_one_cache(model, tokenizer):
    """More tokens than the cache has slots, so that rows are moved; the longest prompt joins at the end."""
    long = [4 + i % 60 for i in range(POSITIONS - 2)]
    prompts = [*PROMPTS * 4, long]
    found = decoded(
        model,
        [generation(tokenizer, each, temperature=0.0, max_tokens=2 if each is long else 20) for each in prompts],
        2,
    )
    for prompt, tokens in zip(prompts, found, strict=True):
        expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=len(tokens))
        assert tokens == expected[0, len(prompt) :].tolist()


def test_one_that_nobody_wants_any_more_makes_room(model, tokenizer):
    decoder = Decoder(model, 0, VOCABULARY, 2, POSITIONS)
    wanted, left = generation(tokenizer, PROMPTS[0], temperature=0.0), generation(tokenizer, PROMPTS[1], max_tokens=40)
    decoder.join([left, wanted])
    decoder.step()
    left.cancelled = True
    decoder.step()
    assert decoder.room == 1 and decoder.living == [wanted] and len(left.tokens) == 3
    while decoder.living:
        decoder.step()
    expected = model.generate(torch.tensor([PROMPTS[0]]), do_sample=False, max_new_tokens=20)
    assert wanted.tokens == expected[0, 3:].tolist()


def test_nucleus_by_hand():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for top_p, kept in ((1e-50, [0]), (0.4, [0]), (0.5, [0]), (0.6, [0, 1]), (0.81, [0, 1, 2]), (1.0, [0, 1, 2, 3])):
        found = nucleus(logits, torch.tensor([top_p]))[0]
        assert torch.isfinite(found).nonzero().flatten().tolist() == kept, top_p
    rows = torch.tensor([[0.05, 0.5, 0.3, 0.15]] * 4).log()
    uniforms = torch.tensor([0.99, 0.99, 0.0, 0.7], dtype=torch.float64)
    tokens = draw(rows, uniforms, torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([1.0, 0.6, 0.6, 1.0]))
    assert tokens.tolist() == [3, 2, 1, 1]  # the last by probability alone; the third has nothing before token 1


def test_the_beginning_token_alone_is_a_prompt(model, tokenizer):
    found = decoded(model, [generation(tokenizer, [BOS], temperature=0.0)], rows=1)[0]
    assert found == model.generate(torch.tensor([[BOS]]), do_sample=False, max_new_tokens=20)[0, 1:].tolist()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: place for place, char in enumerate(["</s>", *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>")


def pieces(tokenizer, prompt: str, response: str, *stops: str) -> list[str]:
    ids = tokenizer(prompt + response).input_ids
    start = len(tokenizer(prompt).input_ids)
    text = ResponseText(tokenizer, ids[:start], stops)
    found = []
    for token in ids[start:]:
        found.append(text.add(token))
        if text.stopped:
            break
    return [*found, text.finish()]


def test_words_keep_the_space_between_prompt_and_response():
    assert pieces(make_tokenizer(), "w10 w11", " w12 w13") == [" w12", " w13", ""]


def test_special_tokens_are_left_out():
    assert pieces(make_tokenizer(), "w10", " w12 <unk> w13 </s>") == [" w12", "", " w13", "", ""]


def test_a_character_is_said_once_its_last_byte_is_there():
    assert pieces(byte_tokenizer(), "a", "é€b") == ["", "é", "", "", "€", "b", ""]


def test_what_never_becomes_a_character_is_said_at_the_end():
    tokenizer = byte_tokenizer()
    text = ResponseText(tokenizer, tokenizer("a").input_ids)
    first = tokenizer("é").input_ids[0]
    assert (text.add(first), text.finish()) == ("", "\ufffd")


@pytest.mark.parametrize(
    "response, stops, said",
    [
        ("one two", ("tw",), "one "),
        ("one two", ("xx", "e t"), "on"),
        ("aab", ("ab",), "a"),
        ("aabaac", ("aac",), "aab"),
        ("one", ("one more",), "one"),
        ("b and a", ("a", "b"), ""),
    ],
)
def test_nothing_of_a_stop_string_is_said(response, stops, said):
    found = pieces(byte_tokenizer(), "x", response, *stops)
    assert "".join(found) == said


def test_what_cannot_be_the_beginning_of_a_stop_string_is_said_at_once():
    assert pieces(byte_tokenizer(), "x", "abcabd", "abd") == ["", "", "abc", "", "", "", ""]
