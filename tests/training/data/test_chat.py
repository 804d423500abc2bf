"""Chat templates that are broken, leave texts out, or never end: one message, whichever data are read."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.errors import UserError
from tests.serving import until
from tests.training.data.reading import rows_of
from tests.training.data.tiny_tokenizers import EOS, chat_tokenizer, word_tokenizer
from training.data import chat
from training.data.forms import PAIRS, PROMPTS, SFT
from training.data.tokens import TextEncoder

GOOD = "{% for m in messages %}{{ m.role }} : {{ m.content }}<|im_end|>{% endfor %}"
BROKEN = {
    "syntax": ("{% for m in messages %}", r"fails with a question and its reply \(.*Unexpected end of template"),
    "filter": ("{{ messages | no_such }}", r"fails with .*No filter named 'no_such'"),
    "raise": ("{{ raise_exception('not me') }}", r"fails with .*\(not me\)"),
    "type": ("{{ messages + 3 }}", r"fails with .*can only concatenate list"),
    "attribute": ("{{ messages.a.b.c }}", r"fails with .*has no attribute"),
    "number": (3, "fails with a question and its reply"),
    "names": ({"tool_use": GOOD}, r"fails with .*default"),
    "sandbox": ("{{ messages.__class__.__mro__[1].__subclasses__() }}", r"fails with .*unsafe"),
    "macro": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails with .*recursion"),
}
ENDLESS = {
    "loops": "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
}
GROWING = {
    "text": "{% set n = namespace(t='xx') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}",
    "product": "{{ 'x' * 10 ** 11 }}",
    "turns": "{% set n = namespace(t='xx') %}{% for m in messages %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}",
}


def encoder(template) -> TextEncoder:
    """What all three programs make first of a tokenizer, whether their data hold messages or not."""
    tokenizer = word_tokenizer()
    tokenizer.chat_template = template
    return TextEncoder(tokenizer)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_template(name):
    template, message = BROKEN[name]
    with pytest.raises(UserError, match=rf"the chat template of the model {message}.*\. Mend chat_template in its"):
        encoder(template)


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_never_ends_is_stopped_in_its_own_process(name, monkeypatch):
    monkeypatch.setattr(chat, "SECONDS", 1)
    with pytest.raises(UserError, match="had not ended a question and its reply after 1 seconds. Mend"):
        encoder(ENDLESS[name])


@pytest.mark.parametrize("name", GROWING)
def test_a_template_that_takes_all_memory(name, monkeypatch):
    monkeypatch.setattr(chat, "MEMORY", 2**28)
    with pytest.raises(UserError, match="GB of memory for a question and its reply. Mend"):
        encoder(GROWING[name])


@pytest.mark.parametrize(
    "template, message",
    [
        ("", "of the-question and the-reply nothing is in ''|has no chat template"),
        (" ", "leaves texts out"),
        ("{% for m in messages %}{{ m.role }} : hi {% endfor %}", "leaves texts out: of the-question .*'user : hi '"),
        ("{{ messages[0].content }}", "leaves texts out: of the-reply nothing is in 'the-question'"),
    ],
)
def test_a_template_that_leaves_texts_out_is_for_no_messages(tmp_path, template, message):
    path = tmp_path / "rows.jsonl"
    dialogue = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path.write_text(json.dumps({"messages": dialogue}))
    tokenizer = chat_tokenizer(template)
    assert TextEncoder(tokenizer).stops == {EOS}  # texts can do without
    for form in (SFT, PROMPTS):
        with pytest.raises(UserError, match=message):
            rows_of(path, form, tokenizer)


def dialogue_file(tmp_path, content: str):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": content}]}))
    return path


@pytest.mark.parametrize(
    "then, message",
    [
        ("{{ raise_exception('no z') }}", r"line 1, column messages: .*refuses these messages \(no z\)\. Mend the rec"),
        ("{{ 1 + 'a' }}", r"line 1, column messages: the chat template of the model fails with these messages \(unsup"),
        (ENDLESS["loops"], r"line 1, column messages: .* had not ended these messages after 1 seconds"),
        (
            "{{ 10 ** (messages | length * 10 ** 9) }}",
            r"line 1, column messages: .* had not ended these messages after 1 seconds",
        ),
        (GROWING["text"], r"line 1, column messages: .* takes more than 1 GB of memory for these messages"),
        (
            "{{ '%1983d' | format(1) }}",
            r"line 1, column messages: .*makes 2,001 characters of these messages; at most 2,000",
        ),
    ],
)
def test_a_template_that_fails_with_one_record(tmp_path, monkeypatch, then, message):
    if "had not ended" in message:  # the others end by themselves, on a busy machine after more than a second
        monkeypatch.setattr(chat, "SECONDS", 1)
    monkeypatch.setattr(chat, "LONGEST", 2000)
    tokenizer = chat_tokenizer("{% if messages[0].content == 'z' %}" + then + "{% endif %}" + GOOD)
    assert rows_of(dialogue_file(tmp_path, "a"), PROMPTS, tokenizer)[0]["prompt"] == "user : a<|im_end|>"
    with pytest.raises(UserError, match=message):
        rows_of(dialogue_file(tmp_path, "z"), PROMPTS, tokenizer)
    assert rows_of(dialogue_file(tmp_path, "b"), PROMPTS, tokenizer)[0]["prompt"] == "user : b<|im_end|>"


def test_of_a_record_with_which_the_template_does_not_end_the_column_is_told(tmp_path, monkeypatch):
    """Its prompt and its answers are asked for at once, and it is one of these."""
    monkeypatch.setattr(chat, "SECONDS", 1)
    path, turn = tmp_path / "pairs.jsonl", {"role": "assistant", "content": "a"}
    sides = {"chosen": [turn], "rejected": [{**turn, "content": "z"}]}
    path.write_text(json.dumps({"prompt": [{"role": "user", "content": "q"}], **sides}))
    tokenizer = chat_tokenizer("{% if messages[-1].content == 'z' %}" + ENDLESS["loops"] + "{% endif %}" + GOOD)
    with pytest.raises(UserError, match="line 1, column rejected: .* had not ended these messages after 1 seconds"):
        rows_of(path, PAIRS, tokenizer)


def test_a_process_that_is_asked_for_nothing_ends_and_has_a_successor(monkeypatch):
    monkeypatch.setattr(chat, "IDLE", 0.01)
    tokenizer, messages = chat_tokenizer(GOOD), [{"role": "user", "content": "a"}]
    process = chat._process(tokenizer)
    for _ in range(2):
        assert chat.render(tokenizer, messages) == "user : a<|im_end|>"
        until(lambda: not Path(f"/proc/{process._child}").exists(), 30)


def test_a_process_that_others_have_ended_has_a_successor():
    tokenizer, messages = chat_tokenizer(GOOD), [{"role": "user", "content": "b"}]
    for _ in range(2):
        assert chat.render(tokenizer, messages) == "user : b<|im_end|>"
        os.kill(chat._process(tokenizer)._child, signal.SIGTERM)


def test_a_tokenizer_that_was_changed_is_rendered_with_as_it_is():
    tokenizer, messages = chat_tokenizer("{{ eos_token }}" + GOOD), [{"role": "user", "content": "a"}]
    assert chat.render(tokenizer, messages).startswith("</s>")
    tokenizer.eos_token = "<|im_end|>"
    assert chat.render(tokenizer, messages).startswith("<|im_end|>")


def test_a_record_of_which_the_template_makes_nothing(tmp_path):
    tokenizer = chat_tokenizer("{% if messages[0].content != 'z' %}" + GOOD + "{% endif %}")
    with pytest.raises(UserError, match="line 1, column messages, by the chat template: found ''; needed a text that"):
        rows_of(dialogue_file(tmp_path, "z"), PROMPTS, tokenizer)


def test_in_a_thread(monkeypatch):
    """Where no signal can be caught, the limits are the same."""
    monkeypatch.setattr(chat, "SECONDS", 1)
    tokenizer = chat_tokenizer("{% if messages[0].content == 'z' %}" + ENDLESS["loops"] + "{% endif %}" + GOOD)
    with ThreadPoolExecutor(1) as thread:
        good, endless = (
            thread.submit(chat.render, tokenizer, [{"role": "user", "content": content}]) for content in "az"
        )
    assert good.result() == "user : a<|im_end|>"
    with pytest.raises(UserError, match="had not ended these messages after 1 seconds"):
        endless.result()
