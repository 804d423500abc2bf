"""From a file to rows: what is accepted, and that each mistake is told with its file, place and remedy."""

import json

import pytest

from engine.errors import UserError
from tests.training.data.reading import rows_of
from training.data.files import read_records
from training.data.forms import PAIRS, PROMPTS, SFT

SFT_NEEDS = (
    r"messages, or prompt \+ chosen, or prompt \+ response, or prompt \+ completion, or chosen \+ rejected, or text\."
)
PROMPTS_NEED = r"messages, or prompt, or chosen \+ rejected\."
GOOD = b'{"prompt": "a"}\n'


@pytest.fixture
def write(tmp_path):
    def write(content: bytes | str, name: str = "rows.jsonl"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_lines_are_read_in_order_and_blank_ones_passed_over(write):
    content = '\ufeff{"prompt": "a b"}\r\n\n   \n{"prompt": "\u2028 \u00e9 \\ud83d\\ude00"}'  # no newline at the end
    assert rows_of(write(content), PROMPTS) == [{"prompt": "a b"}, {"prompt": "\u2028 \u00e9 \U0001f600"}]


def test_a_json_file_is_a_list(write):
    rows = [{"prompt": "p", "chosen": "c", "rejected": "r"}]
    assert rows_of(write(json.dumps(rows, indent=2), "rows.json"), PAIRS) == rows
    line = json.dumps(rows[0])  # or one object a line
    assert rows_of(write(f"\n {line}\n\n{line}\n", "rows.json"), PAIRS) == rows * 2
    spread = json.dumps(rows[0], indent=2)  # or objects spread over lines
    assert rows_of(write(f"\ufeff{spread}\n{spread}{line}", "rows.json"), PAIRS) == rows * 3


def test_the_first_alternative_that_a_record_has_is_taken_and_prompts_keep_their_extra_columns(write):
    lines = [
        '{"prompt": "p", "response": "r", "text": "t", "stars": 5}',
        '{"prompt": "p", "response": null, "text": "t"}',
    ]
    assert rows_of(write("\n".join(lines)), SFT) == [{"prompt": "p", "response": "r"}, {"text": "t"}]
    assert rows_of(write(lines[0]), PROMPTS) == [{"prompt": "p", "response": "r", "text": "t", "stars": 5}]


def test_a_prompt_may_be_empty_only_where_something_follows_it(write):
    assert rows_of(write('{"prompt": "", "response": "r"}'), SFT) == [{"prompt": "", "response": "r"}]
    with pytest.raises(UserError, match="line 1, column prompt: found ''; needed a text that is not blank"):
        rows_of(write('{"prompt": ""}'), PROMPTS)


@pytest.mark.parametrize(
    "content, form, message",
    [
        (b"", PROMPTS, r"rows.jsonl: found no records; it needs at least one with " + PROMPTS_NEED),
        (b"\n \n", SFT, r"found no records; it needs at least one with " + SFT_NEEDS),
        (
            GOOD + b"\n{'prompt': 'a'}",
            PROMPTS,
            r"rows.jsonl, line 3: found .*'prompt'.*no JSON .*column 2.*one JSON object a line",
        ),
        (
            GOOD + b'{"prompt": "' + b"x" * 999,
            PROMPTS,
            r"line 2: found '\{\"prompt\": \"x{48}\.\.\.', which is no JSON",
        ),
        (GOOD + b'["a"]', PROMPTS, r"line 2: found a list \('\[\"a\"\]'\); a record is an object with " + PROMPTS_NEED),
        (GOOD + b'"a"', PROMPTS, r"line 2: found a string"),
        (b"{}", PROMPTS, r"line 1: found the columns: none; needed: " + PROMPTS_NEED),
        (
            b'{"prompt": "a", "answer": "b", "response": null}',
            SFT,
            r"line 1: found the columns: prompt, answer, response \(null\); "
            rf"needed: {SFT_NEEDS} Rename",
        ),
        (b'{"text": 5}', SFT, r"line 1, column text: found a number \('5'\); needed a string"),
        (b'{"text": ["a"]}', SFT, r"line 1, column text: found a list"),
        (b'{"text": " \\n"}', SFT, r"line 1, column text: found ' \\n'; needed a text that is not blank"),
        (b'{"prompt": "a", "chosen": "b", "rejected": ""}', PAIRS, r"line 1, column rejected: found ''"),
        (b'{"prompt": "a", "chosen": " ", "rejected": "b"}', PAIRS, r"line 1, column chosen: found ' '"),
        (GOOD + b'{"prompt": "\xff"}', PROMPTS, r"line 2: found the byte 0xff, which is not UTF-8"),
        (b"\xef\xbb\xbf" + GOOD + b'{"prompt": "\xfe"}', PROMPTS, r"line 2: found the byte 0xfe"),
        (GOOD + b"\0" * 8, PROMPTS, r"line 2: found a NUL character"),
        (
            GOOD + b'{\n"prompt": "a"}',
            PROMPTS,
            r"line 2: found '{'.* a line, or call the file .json if its JSON is spread",
        ),
        (b'{"prompt": "a\\u0000b"}', PROMPTS, r"line 1, column prompt: found a NUL character in 'a\\x00b'"),
        (b'{"prompt": "a\\ud800b"}', PROMPTS, r"line 1, column prompt: found half a surrogate pair"),
    ],
)
def test_mistakes_in_lines(write, content, form, message):
    with pytest.raises(UserError, match=message):
        rows_of(write(content), form)


@pytest.mark.parametrize(
    "content, message",
    [
        (b" ", r"rows.json: found no records"),
        (b"[]", r"rows.json: found no records"),
        (b'"prompt"', r"rows.json, line 1: found a string .*Put the records into \[ \]"),
        (b'[{"prompt": "a"}]\n[]', r"rows.json, line 2: found '\[\]', which is no JSON here .*or one object a line"),
        (GOOD + b'{\n"prompt": "a"}', r"rows.json, line 2: found '\{', which is no JSON .*one JSON object a line"),
        (b'{"prompt": \n"a"}\noops', r"rows.json, line 3: found 'oops', which is no JSON here"),
        (b'[{"prompt": "a"},\n\n oops]', r"rows.json, line 3: found ' oops\]'"),
        (
            b'[{"prompt": "a"}, 7]',
            r"rows.json, record 2: found a number \('7'\); a record is an object with " + PROMPTS_NEED,
        ),
        (
            b'[{"prompt": "a"}, {"promt": "b"}]',
            r"rows.json, record 2: found the columns: promt; needed: " + PROMPTS_NEED,
        ),
    ],
)
def test_mistakes_in_a_list(write, content, message):
    with pytest.raises(UserError, match=message):
        rows_of(write(content, "rows.json"), PROMPTS)


def test_mistakes_in_the_path(write, tmp_path):
    with pytest.raises(UserError, match=r"absent.jsonl: cannot be read \(No such file or directory\); check the path"):
        rows_of(tmp_path / "absent.jsonl", PROMPTS)
    with pytest.raises(UserError, match="found a directory; name one file in it"):
        read_records(tmp_path)
    with pytest.raises(UserError, match=r"rows.txt: found the ending '\.txt'"):
        rows_of(write(GOOD, "rows.txt"), PROMPTS)
