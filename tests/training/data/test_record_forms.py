"""The rows that steps 1, 2 and 3 make of each kind of record; messages through a template that is known by heart."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import UserError
from tests.training.data.reading import rows_of
from tests.training.data.tiny_tokenizers import chat_tokenizer, word_tokenizer
from training.data.record_forms import PAIRS, PROMPTS, SFT, TEXTS

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
HUMAN = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"


def turns(*contents: str, first: str = "user") -> list[dict]:
    """Messages of the user and the assistant in turns."""
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)]


def shared(*contents: str) -> list[dict]:
    """The same as ShareGPT writes them."""
    return [{"from": ["human", "gpt"][number % 2], "value": content} for number, content in enumerate(contents)]


def read(form, record, template=TEMPLATE):
    return form.row("rows.jsonl, line 3", record, chat_tokenizer(template) if template else word_tokenizer())


@pytest.mark.parametrize(
    "record, expected",
    [
        ({"text": "a", "stars": 5}, {"text": "a"}),
        ({"prompt": "a", "response": " b", "text": "c"}, {"prompt": "a", "response": " b"}),
        ({"prompt": "a", "response": None, "text": "c"}, {"text": "c"}),
        ({"prompt": "", "response": "b"}, {"prompt": "", "response": "b"}),
        ({"prompt": "a", "completion": " b", "text": "c", "label": None}, {"prompt": "a", "response": " b"}),
        ({"prompt": "a", "completion": " b", "response": " c"}, {"prompt": "a", "response": " c"}),
        (
            {"prompt": turns("a"), "completion": turns("b", "c", "d", first="assistant")},
            {"prompt": "<user>a<end>\n<assistant>", "response": "b<end>\n<user>c<end>\n<assistant>d<end>"},
        ),
        (
            {"prompt": "a", "completion": turns("b", first="assistant")},
            {"prompt": "<user>a<end>\n<assistant>", "response": "b<end>"},
        ),
        ({"conversations": shared("a", "b")}, {"prompt": "<user>a<end>\n<assistant>", "response": "b<end>"}),
        (
            {"conversation": shared("a", "b"), "system": "c"},
            {"prompt": "<system>c<end>\n<user>a<end>\n<assistant>", "response": "b<end>"},
        ),
        (
            {"messages": turns("a", "b"), "system": "c"},
            {"prompt": "<system>c<end>\n<user>a<end>\n<assistant>", "response": "b<end>"},
        ),
        ({"prompt": "a", "response": " b", "completion": ["c", "d"]}, {"prompt": "a", "response": " b"}),
        ({"prompt": "a", "completion": " b", "label": 1}, {"prompt": "a", "response": " b"}),
        ({"conversations": turns("a", "b"), "text": "c"}, {"text": "c"}),
        (
            {"conversations": shared("a", "b"), "chosen": HUMAN + " d", "rejected": HUMAN + " e"},
            {"prompt": HUMAN, "response": " d"},
        ),
        ({"prompt": "a", "chosen": " b", "rejected": " c", "response": " d"}, {"prompt": "a", "response": " b"}),
        ({"chosen": HUMAN + " d", "rejected": HUMAN + " e"}, {"prompt": HUMAN, "response": " d"}),
        (
            {"messages": turns("a", "b", "c", "d")},
            {"prompt": "<user>a<end>\n<assistant>b<end>\n<user>c<end>\n<assistant>", "response": "d<end>"},
        ),
        ({"messages": turns("a", "b", "c")}, {"prompt": "<user>a<end>\n<assistant>", "response": "b<end>"}),
        ({"prompt": turns("a"), "response": "b"}, {"prompt": "<user>a<end>\n<assistant>", "response": "b<end>"}),
        (
            {"prompt": "a", "chosen": turns("b", first="assistant"), "rejected": turns("c", first="assistant")},
            {"prompt": "<user>a<end>\n<assistant>", "response": "b<end>"},
        ),
        (
            {"prompt": "a", "chosen": turns("a", "b"), "rejected": turns("a", "c")},
            {"prompt": "<user>a<end>\n<assistant>", "response": "b<end>"},
        ),
    ],
)
def test_texts_of_step_1(record, expected):
    assert read(SFT, record) == expected


CHAT_PAIR = {"prompt": "<user>a<end>\n<assistant>", "chosen": "b<end>", "rejected": "c<end>"}


@pytest.mark.parametrize(
    "record, expected",
    [
        (
            {"prompt": "a", "chosen": " b", "rejected": " c", "stars": 5},
            {"prompt": "a", "chosen": " b", "rejected": " c"},
        ),
        ({"chosen": HUMAN + " d", "rejected": HUMAN + " dd"}, {"prompt": HUMAN, "chosen": " d", "rejected": " dd"}),
        ({"chosen": HUMAN + " d", "rejected": HUMAN}, {"prompt": HUMAN, "chosen": " d", "rejected": ""}),
        # They part in the second question: what the assistant said before is an answer that both begin with.
        (
            {
                "chosen": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c",
                "rejected": "\n\nHuman: a\n\nAssistant: b\n\nHuman: d",
            },
            {"prompt": "\n\nHuman: a\n\nAssistant:", "chosen": " b\n\nHuman: c", "rejected": " b\n\nHuman: d"},
        ),
        (
            {"conversations": shared("a"), "chosen": shared("", "b")[1:], "rejected": shared("", "c")[1:]},
            CHAT_PAIR,
        ),
        ({"chosen": turns("a", "b"), "rejected": turns("a", "b")}, CHAT_PAIR | {"rejected": "b<end>"}),
        ({"chosen": turns("a", "b"), "rejected": turns("a", "c")}, CHAT_PAIR),
        ({"prompt": "a", "chosen": turns("a", "b"), "rejected": turns("a", "c")}, CHAT_PAIR),
        (
            {"prompt": "a", "chosen": turns("b", first="assistant"), "rejected": turns("c", first="assistant")},
            CHAT_PAIR,
        ),
        ({"prompt": turns("a"), "chosen": "b", "rejected": "c"}, CHAT_PAIR),
        ({"conversations": shared("a"), "chosen": shared("-", "b")[1], "rejected": shared("-", "c")[1]}, CHAT_PAIR),
        ({"prompt": shared("a"), "chosen": shared("-", "b")[1:], "rejected": shared("-", "c")[1:]}, CHAT_PAIR),
        ({"prompt": turns("a"), "chosen": turns("b", first="assistant"), "rejected": "c"}, CHAT_PAIR),
        (
            {"chosen": turns("a", "b", "c", "d"), "rejected": turns("a", "b", "c", "e")},
            {
                "prompt": "<user>a<end>\n<assistant>b<end>\n<user>c<end>\n<assistant>",
                "chosen": "d<end>",
                "rejected": "e<end>",
            },
        ),
        (
            {"chosen": turns("a", "b", "c", "d"), "rejected": turns("a", "b", "e", "f")},
            {
                "prompt": "<user>a<end>\n<assistant>",
                "chosen": "b<end>\n<user>c<end>\n<assistant>d<end>",
                "rejected": "b<end>\n<user>e<end>\n<assistant>f<end>",
            },
        ),
    ],
)
def test_pairs_of_step_2(record, expected):
    assert read(PAIRS, record) == expected


@pytest.mark.parametrize(
    "record, prompt",
    [
        ({"prompt": "a", "answer": 7}, "a"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "a"),
        ({"chosen": HUMAN + " d", "rejected": HUMAN + " e"}, HUMAN),
        ({"messages": turns("a", "b", "c")}, "<user>a<end>\n<assistant>b<end>\n<user>c<end>\n<assistant>"),
        ({"messages": turns("a", "b"), "prompt": "a"}, "<user>a<end>\n<assistant>"),
        ({"prompt": turns("a")}, "<user>a<end>\n<assistant>"),
        ({"prompt": "a", "chosen": turns("a", "b"), "rejected": turns("a", "c")}, "<user>a<end>\n<assistant>"),
        (
            {"prompt": "a", "chosen": turns("b", first="assistant"), "rejected": turns("c", first="assistant")},
            "<user>a<end>\n<assistant>",
        ),
    ],
)
def test_prompts_of_step_3_keep_their_other_columns(record, prompt):
    others = {name: value for name, value in record.items() if name != "prompt"}
    assert read(PROMPTS, record) == {**others, "prompt": prompt}


def test_texts_for_pretraining_may_be_empty():
    assert read(TEXTS, {"text": "", "id": 3}) == {"text": ""}


@pytest.mark.parametrize(
    "form, record, message",
    [
        (
            SFT,
            {"prompt": "a"},
            r"found the columns: prompt; needed: messages, or prompt \+ chosen, or prompt \+ response, "
            r"or prompt \+ completion, or chosen \+ rejected, or text\. Rename or add them\.$",
        ),
        (SFT, {"prompt": "a", "response": " "}, "column response: found ' '; needed a text that is not blank"),
        (
            SFT,
            {"prompt": "a", "completion": " b", "label": False},
            r"found the column label \(False\) beside prompt and completion: by TRL's form for unpaired preferences",
        ),
        (SFT, {"text": turns("a", "b")}, "column text: found a list .*; needed a string"),
        (TEXTS, {"text": ["a"]}, "column text: found a list .*; needed a string"),
        (SFT, {"messages": turns("a")}, "column messages: found no message of the assistant"),
        (
            SFT,
            {"messages": turns("b", first="assistant")},
            "column messages: found no message that an assistant answers",
        ),
        (
            PAIRS,
            {"chosen": "a b", "rejected": "a c"},
            r"columns chosen and rejected: found no '\\n\\nAssistant:' in what "
            "both begin with",
        ),
        (PAIRS, {"prompt": "a", "completions": ["b"], "labels": [True]}, ".*labels are read with --step_end"),
        (PAIRS, {"chosen": 7, "rejected": "a"}, r"column chosen: found a number \('7'\)"),
        (PAIRS, {"chosen": turns("a", "b"), "rejected": "c"}, r"column rejected: found a string .*a list of messages"),
        (
            PAIRS,
            {"chosen": turns("a", "b"), "rejected": turns("c", "d")},
            r"columns chosen and rejected: they differ in their first message \(an object .*a.* and an object .*c",
        ),
        (
            PAIRS,
            {"prompt": turns("a"), "chosen": turns("b"), "rejected": turns("c", first="assistant")},
            r"column chosen: found a list .*no answer to the messages before: it does not begin with a message of",
        ),
        (
            PAIRS,
            {"instruction": "a", "output": "b"},
            "found the columns: .* no worse one to compare it with. Step 1 can",
        ),
        (PROMPTS, {"messages": []}, r"column messages: found a list \('\[\]'\); needed a list of messages"),
        (PROMPTS, {"messages": "a"}, "column messages: found a string"),
        (PROMPTS, {"messages": ["a"]}, "column messages, message 1: found a string .*with role and content"),
        (PROMPTS, {"messages": [{"role": "user"}]}, "column messages, message 1, content: found null"),
        (PROMPTS, {"messages": [{"content": "a"}]}, "column messages, message 1: found an object"),
        (PROMPTS, {"prompt": [{"role": "user", "content": "a\0"}]}, "column prompt, message 1, content: found a NUL"),
        (PROMPTS, {"prompt": "a", "images": ["a.png"]}, "column images: found a list .*texts alone here"),
        (
            SFT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
            "column messages, message 1, content: found a part of the type image_url. Models are shown texts alone",
        ),
        (
            PROMPTS,
            {"messages": [{"role": "tool", "content": "a"}]},
            r"column messages: the chat template of the model "
            r"refuses these messages \(no tools\)",
        ),
    ],
)
def test_mistakes_in_records(form, record, message):
    with pytest.raises(UserError, match="^rows.jsonl, line 3[:,] " + message):
        read(form, record)


def test_the_command_of_the_pages_writes_instructions_as_messages(tmp_path):
    path, tokenizer, root = tmp_path / "it's all.json", chat_tokenizer(TEMPLATE), Path(__file__).parents[3]
    records = [{"instruction": "a 'b'", "input": "c", "output": "d"}, {"instruction": "e", "input": "", "output": "f"}]
    path.write_text(json.dumps(records, indent=2))
    told = r"all.json, record 1: found the columns: instruction, input, output; needed: .* docs/data.md has a command"
    with pytest.raises(UserError, match=told):
        rows_of(path, SFT, tokenizer)
    program = re.search(r"<<'END'\n(.*?)END\n", (root / "docs" / "data.md").read_text(), re.DOTALL).group(1)
    new, environment = tmp_path / "new.jsonl", os.environ | {"PYTHONPATH": str(root)}
    with new.open("w") as out:
        command = [sys.executable, "-", str(path)]
        subprocess.run(command, input=program, text=True, stdout=out, check=True, env=environment)
    expected = [("<user>a 'b'\n\nc<end>\n<assistant>", "d<end>"), ("<user>e<end>\n<assistant>", "f<end>")]
    assert [(row["prompt"], row["response"]) for row in rows_of(new, SFT, tokenizer)] == expected


def test_records_within_a_record(tmp_path):
    path = tmp_path / "all.json"
    path.write_text(json.dumps({"version": 1, "data": [{"prompt": "a", "response": "b"}]}))
    with pytest.raises(UserError, match=r"""the columns: version, data; needed: .*: jq -c '\.\["data"\]\[\]' OLD"""):
        rows_of(path, SFT)


def test_messages_need_a_template():
    with pytest.raises(
        UserError,
        match="line 3, column messages: found messages, and the tokenizer of the model has "
        "no chat template .* set chat_template in its tokenizer_config.json",
    ):
        read(PROMPTS, {"messages": turns("a")}, template=None)


def test_a_template_has_to_begin_an_answer_as_it_asks_for_it():
    template = TEMPLATE.replace("%}<assistant>{%", "%}<assistant><think>{%")
    with pytest.raises(
        UserError,
        match=r"asks for an answer with .*<assistant><think>' and writes .*<assistant>b<end>.*--chat_template FILE",
    ):
        read(SFT, {"messages": turns("a", "b")}, template)
