"""Texts to ids at the border of prompt and response, the ids that end a response, and what becomes of rows that are too
long: a word a token, and what is left written out by hand.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from engine.errors import UserError
from tests.training.data.tiny_tokenizers import BOS, CHATML, EOS, chat_tokenizer, merging_tokenizer, word_tokenizer
from training.data.tokens import (
    CUT,
    DROPPED,
    WHOLE,
    Lengths,
    TextEncoder,
    opening_tokens,
    stop_token_ids,
)

SHARED = Path(__file__).resolve().parents[4] / "shared"
CHATML_WITH_END = "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> \n{% endfor %}</s>"


@pytest.fixture(scope="module")
def sentencepiece():
    model = SHARED / "models" / "stories260K"
    if not model.exists():
        pytest.skip("no SentencePiece tokenizer at ../shared/models/stories260K")
    return AutoTokenizer.from_pretrained(model)


@pytest.mark.parametrize(
    "before, after, opening",
    [("", "", []), ("<s>", "", [BOS]), ("", "</s>", []), ("<s>", "</s>", [BOS]), ("</s>", "", [EOS])],
)
def test_a_prompt_opens_as_the_tokenizer_has_it_and_never_closes(before, after, opening):
    tokenizer = word_tokenizer(before, after)
    assert opening_tokens(tokenizer) == opening
    assert TextEncoder(tokenizer).prompt("a b") == opening + [10, 11]
    assert TextEncoder(tokenizer).prompt("") == opening
    assert TextEncoder(tokenizer).continuation("a", " b") == [11]


def test_a_bos_that_is_spelled_out_is_not_doubled():
    assert TextEncoder(word_tokenizer("<s>")).prompt("<s> a") == [BOS, 10]


def test_eos_is_added_once():
    assert TextEncoder(word_tokenizer()).ended([10]) == [10, EOS]
    assert TextEncoder(word_tokenizer()).ended([10, EOS]) == [10, EOS]
    with pytest.raises(UserError, match="has no EOS token"):
        TextEncoder(word_tokenizer(eos_token=None)).ended([10])


@pytest.mark.parametrize(
    "prompt, text, ids",
    [
        ("c", "ab", [14]),  # "cab" is c, ab: cut behind the prompt
        ("a", "bc", [12, 13]),  # "abc" is ab, c: behind a newline, "\nbc" would merge too, so alone
        ("ca", "b", [12]),
        ("", "ab", [14]),
    ],
)
def test_a_continuation_keeps_the_ids_of_its_prompt(prompt, text, ids):
    assert TextEncoder(merging_tokenizer()).continuation(prompt, text) == ids


def test_a_continuation_gets_no_space_from_sentencepiece(sentencepiece):
    encoder = TextEncoder(sentencepiece)
    the, space, _t, _h, _e = sentencepiece.convert_tokens_to_ids(["▁the", "▁", "t", "h", "e"])
    assert encoder.continuation("Review :", " the") == [the]
    # "Review : the" would merge the space into "the"; encoded alone, "the" would be given a second space.
    assert encoder.prompt("Review : ")[-1] == space
    ids = encoder.prompt("Review : ") + encoder.continuation("Review : ", "the")
    assert the not in ids
    assert sentencepiece.decode(ids, skip_special_tokens=True) == "Review : the"


def test_an_answer_that_ends_its_turn_has_ended():
    tokenizer = chat_tokenizer(CHATML_WITH_END)
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    encoder = TextEncoder(tokenizer)
    assert encoder.answered("a", " b <|im_end|>") == ([10, 11, end_of_turn], 1)
    assert encoder.answered("a", " b") == ([10, 11, EOS], 1)
    assert encoder.ended([10, EOS]) == [10, EOS]


def config(eos_token_id):
    return SimpleNamespace(eos_token_id=eos_token_id)


@pytest.mark.parametrize(
    "generation_config, model_config, stops",
    [
        (config(30), config(31), [EOS, 30]),
        (config([30, 0]), config(31), [0, EOS, 30]),
        (config(0), config(31), [0, EOS]),  # id 0 is an id
        (config(None), config([31, EOS]), [EOS, 31]),
        (config(None), SimpleNamespace(), [EOS]),
        (None, None, [EOS]),
    ],
)
def test_stops_of_the_configs_and_the_tokenizer(generation_config, model_config, stops):
    assert stop_token_ids(word_tokenizer(), generation_config, model_config) == stops


@pytest.mark.parametrize(
    "template, ends",
    [
        (CHATML_WITH_END, True),
        ("{% for m in messages %}<|im_start|> {{ m.content }} {% endfor %}", False),  # nothing ends a turn
        ("{% for m in messages %}{{ m.role }} : {{ m.content }} </s>{% endfor %}", False),
        ("<|im_start|> {{ messages[0].content }} <|im_end|>", False),  # shows no assistant
    ],
)
def test_the_stop_of_the_chat_template(template, ends):
    tokenizer = chat_tokenizer(template)
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert stop_token_ids(tokenizer, None, None) == [EOS] + [end_of_turn] * ends


def test_a_model_that_nothing_stops_is_refused():
    with pytest.raises(UserError, match="no token ends a response"):
        stop_token_ids(word_tokenizer(eos_token=None), None, None)


WORDS = "Human: Assistant: user assistant system"
FIRST, SECOND, THIRD = (f"\n\nHuman: {words}\n\nAssistant:" for words in ("a b", "e f g", "j k l"))
DIALOGUE = f"{FIRST} c d{SECOND} h i{THIRD}"  # 6 + 7 + 5 = 18 tokens; from the second turn on 12, the last alone 5


def lengths(limit: int, overlong: str = "cut_prompt", before: str = "<s>") -> Lengths:
    return Lengths(word_tokenizer(before, words=WORDS), limit, overlong)


def words(made: Lengths, ids: list[int]) -> str:
    return " ".join(made.encoder.tokenizer.convert_ids_to_tokens(ids))


def shown(made: Lengths, *args) -> list[str]:
    """The words of the prompt, and of each answer."""
    fit = made.answered(*args)
    assert not fit.reason and all(len(ids) <= made.limit for ids in fit.sequences)
    return [words(made, ids) for ids in (fit.prompt, *fit.answers)]


@pytest.mark.parametrize(
    "limit, prompt",
    [
        # BOS, 18 and 3 of the answer
        (22, "<s> Human: a b Assistant: c d Human: e f g Assistant: h i Human: j k l Assistant:"),
        (21, "<s> Human: e f g Assistant: h i Human: j k l Assistant:"),
        (16, "<s> Human: e f g Assistant: h i Human: j k l Assistant:"),
        (15, "<s> Human: j k l Assistant:"),
        (9, "<s> Human: j k l Assistant:"),
        (8, "<s> j k l Assistant:"),  # the last turn is too long, too
        (5, "<s> Assistant:"),
    ],
)
def test_a_dialogue_loses_its_first_turns_and_keeps_its_answer(limit, prompt):
    made = lengths(limit)
    assert shown(made, DIALOGUE, [" m n"]) == [prompt, "m n </s>"]
    fit = made.answered(DIALOGUE, [" m n"])
    assert fit.lost == 19 - len(fit.prompt) and fit.needed == 22 and fit.kind == (CUT if fit.lost else WHOLE)
    # Step 3 cuts the same prompt by the same rule, to what is left beside such an answer.
    assert words(made, lengths(limit - 3).prompt(DIALOGUE).prompt) == prompt


@pytest.mark.parametrize("before", ["", "<s>"])
def test_whatever_the_limit_what_is_left_fits_and_stood_right_before_the_answer(before):
    answers = [" m n o", " p" * 11]
    for limit in range(2, 40):
        made = lengths(limit, before=before)
        for prompt in (DIALOGUE, "x y" + DIALOGUE, "a b c d e f", ""):
            fit, whole = made.answered(prompt, answers), lengths(99, before=before).answered(prompt, answers)
            opening, left = len(made.encoder.opening), [len(ids) for ids in fit.answers]
            assert all(len(ids) <= limit for ids in fit.sequences)
            kept = fit.prompt[fit.gap or opening :]
            assert whole.prompt[len(whole.prompt) - len(kept) :] == kept
            assert fit.answers == [ids[:count] for ids, count in zip(whole.answers, left)]
            assert [count + lost for count, lost in zip(left, fit.ends_lost or [0, 0])] == [4, 12]
            assert len(fit.prompt) + fit.lost == len(whole.prompt)


def test_what_is_left_has_the_ids_of_a_prompt_that_begins_there():
    made = lengths(16)
    assert made.answered(DIALOGUE, [" m n"]).prompt == made.encoder.prompt(f"{SECOND} h i{THIRD}")


def test_both_answers_of_a_pair_keep_the_same_prompt():
    # The longer answer leaves 15 - 6 = 9 tokens to the prompt, in which the last turn alone fits.
    made = lengths(15)
    kept = "<s> Human: j k l Assistant:"
    assert shown(made, DIALOGUE, [" m", " n o p q r"]) == [kept, "m </s>", "n o p q r </s>"]
    assert shown(made, DIALOGUE, [" n o p q r", " m"]) == [kept, "n o p q r </s>", "m </s>"]


def test_an_answer_that_is_too_long_by_itself_loses_its_end():
    # With EOS it has 8 tokens, and at 9 it would leave one, the BOS: a quarter of the limit, 2, is the prompt's.
    made = lengths(9)
    assert shown(made, "a b c", [" m n o p q r s"]) == ["<s> c", "m n o p q r s"]
    assert made.answered("a b c", [" m n o p q r s"]).ends_lost == [1]
    assert shown(lengths(10), "a b c", [" m n o p q r s"]) == ["<s> c", "m n o p q r s </s>"]
    assert shown(lengths(16), "a b c d", [" m" * 20, " n"]) == ["<s> b c d", ("m " * 12).strip(), "n </s>"]
    assert shown(lengths(16), "a b", [" m" * 20]) == ["<s> a b", ("m " * 13).strip()]  # all of a short prompt


def test_a_prompt_without_turns_loses_its_first_tokens():
    assert shown(lengths(6), "a b c d", [" m"]) == ["<s> b c d", "m </s>"]
    assert shown(lengths(6, before=""), "a b c d e", [" m"]) == ["b c d e", "m </s>"]


def test_what_stands_before_the_first_turn_stays_where_it_leaves_room():
    prompt = f"x y{FIRST} c d{THIRD}"
    assert shown(lengths(12), prompt, [" m"]) == ["<s> x y Human: j k l Assistant:", "m </s>"]
    assert shown(lengths(9), prompt, [" m"]) == ["<s> x y j k l Assistant:", "m </s>"]
    assert shown(lengths(6), prompt, [" m"]) == ["<s> k l Assistant:", "m </s>"]


def chat(messages: list[tuple[str, str]]) -> tuple:
    """A tokenizer with a chat template, and the prompt that it makes of messages, each (role, content)."""
    tokenizer = chat_tokenizer(CHATML, words=WORDS)
    listed = [{"role": role, "content": content} for role, content in messages]
    return tokenizer, tokenizer.apply_chat_template(listed, tokenize=False, add_generation_prompt=True)


def test_a_chat_keeps_its_system_message():
    tokenizer, prompt = chat([("system", "a b"), ("user", "c d"), ("assistant", "e f"), ("user", "g h")])
    answer = " i <|im_end|>"
    system, last = "<|im_start|> system a b <|im_end|>", "<|im_start|> user g h <|im_end|> <|im_start|> assistant"
    first = "<|im_start|> user c d <|im_end|> <|im_start|> assistant e f <|im_end|>"
    for limit, kept in ((24, f"{system} {first} {last}"), (23, f"{system} {last}"), (14, f"{system} {last}")):
        made = Lengths(tokenizer, limit)
        assert shown(made, prompt, [answer]) == [kept, "i <|im_end|>"]
    # One token less: the turn is cut behind the system message, and where that is more than half, it goes, too.
    assert shown(Lengths(tokenizer, 13), prompt, [answer])[0] == f"{system} {last.removeprefix('<|im_start|> ')}"
    assert shown(Lengths(tokenizer, 11), prompt, [answer])[0] == last


@pytest.mark.parametrize("limit", [19, 13, 6])
def test_prose_with_a_mark_in_it_loses_token_by_token(limit):
    prompt = "a b c d e f g h i j k l m n o p q r s t of the film Human: u"
    ids = lengths(limit).prompt(prompt).prompt
    assert ids == lengths(99).prompt(prompt).prompt[:1] + lengths(99).prompt(prompt).prompt[1 - limit :]


LLAMA_2 = (
    "{% if messages[0].role == 'system' %}{% set said = ' <<SYS>> ' + messages[0].content + ' <</SYS>>' %}"
    "{% set turns = messages[1:] %}{% else %}{% set said = '' %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if m.role == 'user' %}{{ '<s> [INST]' + (said if loop.first else '') }} {{ m.content }} "
    "[/INST]{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)


def test_a_system_message_within_the_first_turn_is_carried_into_the_one_that_is_left():
    tokenizer = chat_tokenizer(LLAMA_2, words="[INST] [/INST] <<SYS>> <</SYS>>")
    said = [("user", "c d"), ("assistant", "e f"), ("user", "g h"), ("assistant", "i"), ("user", "j k")]
    listed = [{"role": role, "content": content} for role, content in said]
    system = {"role": "system", "content": "a b"}

    def kept(messages: list[dict], limit: int) -> str:
        made = Lengths(tokenizer, limit)
        fit = made.prompt(tokenizer.apply_chat_template(messages, tokenize=False))
        assert len(fit.prompt) + fit.lost == fit.needed
        return words(made, fit.prompt)

    head, third, last = "<s> [INST] <<SYS>> a b <</SYS>>", "g h [/INST] i </s>", "<s> [INST] j k [/INST]"
    # 6 of the head, 6 of the first turn behind it with its reply, 7 and 5 of the next: 24.
    assert kept([system, *listed], 24) == f"{head} c d [/INST] e f </s> <s> [INST] {third} {last}"
    assert kept([system, *listed], 23) == kept([system, *listed], 16) == f"{head} {third} {last}"
    assert kept([system, *listed], 15) == kept([system, *listed], 12) == f"{head} j k [/INST]"
    assert kept([system, *listed], 11) == last  # the head is more than half
    assert kept([system, *listed], 4) == "<s> j k [/INST]"
    assert kept(listed, 12) == f"<s> [INST] {third} {last}"


def test_a_bos_that_only_the_template_writes_stays():
    tokenizer = chat_tokenizer("{{ bos_token }} " + CHATML, words=WORDS)
    listed = [{"role": "system", "content": "a b c d e f"}]
    listed += [{"role": role, "content": content} for role, content in (("user", "g"), ("assistant", "h"))] * 3
    text = tokenizer.apply_chat_template([*listed, {"role": "user", "content": "i"}], tokenize=False)
    made = Lengths(tokenizer, 12)  # the head has 10
    assert words(made, made.prompt(text).prompt) == "<s> <|im_start|> user i <|im_end|>"
    made = Lengths(tokenizer, 3)
    assert words(made, made.prompt(text).prompt) == "<s> i <|im_end|>"
    assert words(made, made.prompt("<s> a b c d").prompt) == "<s> c d"  # without turns, too


def test_cut_answer_cuts_the_end():
    made = lengths(7, "cut_answer")
    assert shown(made, "a b c d", [" m", " n o p"]) == ["<s> a b c d", "m </s>", "n o"]
    assert made.answered("a b c d", [" m", " n o p"]).ends_lost == [0, 2]
    fit = made.answered("a b c d e f g", [" m"])
    assert words(made, fit.prompt) == "<s> a b c d e f" and fit.answers == [[]] and fit.lost == 1


def test_drop_leaves_long_rows_out():
    made = lengths(7, "drop")
    assert made.answered("a b c d", [" m"]).kind == WHOLE
    fit = made.answered("a b c d", [" m", " n o"])
    assert fit.kind == DROPPED and fit.reason == "8 tokens, more than 7"
    assert made.text("a b c d e f").reason == "8 tokens, more than 7" and not made.text("a b c d e").reason


@pytest.mark.parametrize("overlong", ["cut_prompt", "cut_answer"])
def test_a_text_loses_its_end(overlong):
    made = lengths(4, overlong)
    fit = made.text("a b c d")
    assert [words(made, ids) for ids in fit.answers] == ["<s> a b c"] and fit.ends_lost == [2] and fit.kind == CUT


@pytest.mark.parametrize("overlong", ["cut_answer", "drop"])
def test_a_prompt_to_be_answered_is_whole_or_left_out(overlong):
    made = lengths(4, overlong)
    assert made.prompt("a b c").kind == WHOLE
    assert made.prompt("a b c d").reason == "5 tokens, more than 4"
