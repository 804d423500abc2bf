"""Where turns begin, in chats and in dialogues that are written as texts; positions counted by hand."""

import pytest

from tests.training.data.tiny_tokenizers import CHATML, chat_tokenizer, word_tokenizer
from training.data.chat import Turns


@pytest.mark.parametrize(
    "template, mark",
    [
        (CHATML, "<|im_start|> user "),
        ("{% for m in messages %}{{ m.role }} : {{ m.content }}<|im_end|>{% endfor %}", "user : "),
        (  # the BOS and a system message of its own before the first turn, </s> behind a reply
            "<s>[SYS] be kind [/SYS]{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
            "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}",
            "[INST] ",
        ),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", None),  # nothing but a line's end
        ("{% if messages|length > 2 %}{{ raise_exception('two') }}{% endif %}{{ messages[0].content }}", None),
    ],
)
def test_what_a_template_writes_before_a_users_turn(template, mark):
    assert Turns(chat_tokenizer(template)).mark == mark


@pytest.mark.parametrize(
    "text, borders",
    [
        ("\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:", [0, 24]),
        ("Human: a\n\nAssistant: b\n\nHuman: say Human: c\n\nAssistant:", [0, 22]),  # a quoted mark is none
        (" Human: a Assistant: b Human: c Assistant:", [0, 22]),
        ("Human: a Assistant: b Human: c Assistant:", [0, 21]),
        ("x\n\nHuman: a\n\nAssistant:", [1]),
        ("Human: a Assistant:", [0]),
        (" \n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:", [1, 25]),  # with DeepSpeed-Chat's space
        (" Human: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:", [0, 23]),
        # What is quoted: of the same form within one turn, and of the other one
        ("\n\nHuman: a\n\nAssistant: b\n\nHuman: c '\n\nHuman: d\n\nAssistant: e'\n\nAssistant:", [0, 24]),
        (" Human: a Assistant: b Human: the film Human: c Assistant:", [0, 22]),
        (" Human: a Assistant: b Human: '\n\nHuman: c\n\nAssistant: d' Assistant:", [0, 22]),
        ("\n\nHuman: ' Human: a Assistant: b Human: c'\n\nAssistant:", [0]),
        # Behind an instruction
        ("x Human: y\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:", [10, 34]),
        # Prose
        ("a b", []),
        ("Review of the film Human: Nature", []),
        ("\n\nHuman: a", []),
        ("She said she was Human: that was all .\n\nSummary:", []),
        ("class A: pass # class Human: pass", []),
        ("An Assistant: helps a Human: being", []),
    ],
)
def test_where_turns_begin(text, borders):
    assert Turns(word_tokenizer()).borders(text) == borders


@pytest.mark.parametrize(
    "system, around",
    [
        ("[INST] <<SYS>> {{ m.content }} <</SYS>> ", ("<<SYS>> ", " <</SYS>>  ")),
        ("[INST] {{ m.content }}\n\n", None),  # where it ends cannot be seen
        ("<<SYS>> {{ m.content }} <</SYS>> [INST] ", None),  # before the turn
        ("", None),
        ("{{ raise_exception('no system messages') }}", None),
    ],
)
def test_what_a_template_writes_around_a_system_message_within_the_first_turn(system, around):
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}" + system + "{% elif m.role == 'user' %}"
        "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'system' %}[INST]{% endif %} {{ m.content }} "
        "[/INST]{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
    )
    turns = Turns(chat_tokenizer(template))
    assert turns.mark == "[INST] " and turns.around_system == around
