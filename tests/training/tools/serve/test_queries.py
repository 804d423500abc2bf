"""OpenRLHF's queries: the ids that a text was written from."""

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from tests.training.data.tiny_tokenizers import SPECIAL, word_tokenizer
from training.data.tokens import TextEncoder

pytest.importorskip("fastapi", reason="the service needs fastapi: pip install .[serve]")

from training.tools.serve.app import query_ids

BOS, EOS, SPACE, A, B, SPACE_A = 1, 2, 10, 11, 12, 13


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
