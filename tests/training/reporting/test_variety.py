"""Words counted by hand, and texts whose compression is known beforehand to be small or large."""

import random

from training.reporting.evaluation import compressed_bytes, distinct_bigrams, new_words


def test_distinct_bigrams_counted_by_hand():
    # a-b, b-a, b-c; the pair across the two responses does not count, nor does a single word
    assert distinct_bigrams([" a b a b", " b c", " c"]) == 3


FIRST = ["the film", "a film end", "the odd"]
PROMPTS = ["an end", "an end", "of"]


def test_new_words_counted_by_hand():
    # "the" and "film" stand in two of the first texts, "a" and "odd" in the one of their own place, "end" in a prompt
    assert new_words(FIRST, FIRST, PROMPTS) == [0.0, 1 / 3, 1 / 2]
    # "a" and "odd" stand in other places' first texts; "zork" nowhere, twice; "The" is another word than "the"
    assert new_words(["a odd an", "zork of zork", "the The"], FIRST, PROMPTS) == [0.0, 2 / 3, 1 / 2]


def test_an_invented_word_is_new_however_often_it_is_used():
    assert new_words(["zork"] * 3, FIRST, PROMPTS) == [1.0] * 3


def test_new_words_of_no_words():
    assert new_words([], [], []) == []
    assert new_words([" "] * 3, FIRST, PROMPTS) == [0.0] * 3


def test_what_texts_share_is_compressed_once():
    draw = random.Random(0)
    texts = ["".join(draw.choices("abcdefgh", k=200)) for _ in range(20)]
    alike, different = compressed_bytes(texts[:1] * 20), compressed_bytes(texts)
    assert different > 20 * 200 * 3 / 8, "3 bits a letter is what such texts cannot go below"
    assert alike < 250


def test_half_of_a_character_is_compressed_too():
    assert compressed_bytes(["\ud800"]) > 0  # a lone surrogate, which UTF-8 has no bytes for
