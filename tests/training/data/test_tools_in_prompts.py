"""Prompts with the tools of an environment, and with what an environment says at first, beside apply_chat_template."""

import json

import pytest

from engine.errors import UserError
from tests.training.data.tiny_tokenizers import chat_tokenizer
from training.data.examples import Prompts
from training.data.record_forms import PROMPTS, prompts_with, with_more
from training.data.row_selection import load_rows

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
OTHER = {"type": "function", "function": {"name": "other", "parameters": {}}}
TEMPLATE = (
    "{% for t in tools or [] %}<|im_start|> {{ t.function.name }} <|im_end|> {% endfor %}{% for m in messages %}"
    "<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> \n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {{ mood }}{% endif %}"
)
WORDS = "user assistant system add other glad"
MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "a b"},
    {"role": "assistant", "content": "c"},
]


def tokenizer_of(template: str = TEMPLATE):
    return chat_tokenizer(template, words=WORDS)


def rendered(tokenizer, messages, tools, **options) -> list[int]:
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=False, **options)


def prompts_of(records, tokenizer, folder, tools=(TOOL,), room=99, **options) -> Prompts:
    rows = [prompts_with(tools).row(f"line {number}", record, tokenizer) for number, record in enumerate(records, 1)]
    return Prompts(rows, tokenizer, room, cache=folder, with_dialogues=True, **options)


def test_prompts_equal_apply_chat_template(tmp_path):
    tokenizer = tokenizer_of()
    records = [{"prompt": MESSAGES[:2]}, {"prompt": MESSAGES[:2], "tools": [OTHER], "n": 1}, {"messages": MESSAGES}]
    prompts = prompts_of(records, tokenizer, tmp_path)
    asked = rendered(tokenizer, MESSAGES[:2], [TOOL], add_generation_prompt=True)
    assert list(prompts) == [asked] * 3 and prompts.notes == {}
    assert prompts.dialogues[0]["tools"] == [TOOL]
    assert "tools" not in prompts.rows[0] and prompts.rows[1]["tools"] == [OTHER]  # rows stay the user's


def test_the_cache_knows_the_tools(tmp_path):
    (tmp_path / "p.jsonl").write_text(f'{{"prompt": {json.dumps(MESSAGES[:2])}}}\n')
    tokenizer = tokenizer_of()
    ids = []
    for tools in ([TOOL], [OTHER], [], [TOOL]):
        rows, _ = load_rows(str(tmp_path / "p.jsonl"), prompts_with(tools), tokenizer, phase=3, seed=0)
        ids.append(Prompts(rows, tokenizer, 99, cache=tmp_path / "cache")[0])
    wanted = [rendered(tokenizer, MESSAGES[:2], tools, add_generation_prompt=True) for tools in ([TOOL], [OTHER], None)]
    assert ids == [*wanted, wanted[0]]
    assert len(list((tmp_path / "cache").glob("*.arrow"))) == 3
    assert prompts_with([]) is PROMPTS


def test_tools_that_no_prompt_describes_are_told(tmp_path):
    ignoring = tokenizer_of(TEMPLATE.replace("tools or []", "[]"))
    assert (
        "the chat template leaves out `tools`" in prompts_of([{"prompt": MESSAGES[:2]}], ignoring, None).note_lines()[0]
    )
    (line,) = prompts_of([{"prompt": "a b"}], tokenizer_of(), None).note_lines()
    assert "in 100.0 % of these 1 rows" in line and "the tools are not described" in line


def test_what_an_environment_says_at_first(tmp_path):
    tokenizer = tokenizer_of()
    parts = [*MESSAGES[:1], {"role": "user", "content": [{"type": "text", "text": "a"}]}]
    records = [
        {"prompt": MESSAGES[:2], "chat_template_kwargs": {"mood": "glad"}},
        {"prompt": "a b"},
        {"prompt": MESSAGES},
    ]
    prompts = prompts_of(records, tokenizer, tmp_path)
    more = [MESSAGES[0], {"role": "user", "content": "a b d e"}, MESSAGES[2]]
    glad = rendered(tokenizer, more[:2], [TOOL], add_generation_prompt=True, mood="glad")
    assert prompts.opened(0, " d e") == glad != prompts[0]
    assert prompts.opened(1, " d e") == tokenizer.encode("a b d e")
    assert prompts.opened(2, " d e") == rendered(tokenizer, more, [TOOL], continue_final_message=True)
    assert with_more(parts, "b")[-1]["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def test_what_an_environment_says_keeps_to_the_limit():
    tokenizer = tokenizer_of()
    record = {"prompt": [{"role": "user", "content": "a b"}]}
    length = len(prompts_of([record], tokenizer, None)[0])
    cut = prompts_of([record], tokenizer, None, room=length + 1)
    assert len(cut.opened(0, " c")) == length + 1
    assert len(cut.opened(0, " c d e")) == length + 1
    dropped = prompts_of([record], tokenizer, None, room=length + 1, overlong="drop")
    with pytest.raises(UserError, match=f"prompt 0 with what .* at first: {length + 3} tokens, more than {length + 1}"):
        dropped.opened(0, " c d e")
