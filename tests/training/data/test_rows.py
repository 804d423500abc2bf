"""Reading and splitting rows: what is accepted, and that each mistake is told with its file, line and remedy."""

import json

import pytest

from engine.errors import UserError
from training.data.rows import PAIR_COLUMNS, PROMPT_COLUMNS, SFT_COLUMNS, read_rows, split_held_out

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
    assert read_rows(write(content), PROMPT_COLUMNS) == [{"prompt": "a b"}, {"prompt": "\u2028 \u00e9 \U0001f600"}]


def test_a_json_file_is_a_list(write):
    rows = [{"prompt": "p", "chosen": "c", "rejected": "r"}]
    assert read_rows(write(json.dumps(rows, indent=2), "rows.json"), PAIR_COLUMNS) == rows
    line = json.dumps(rows[0])  # or one object a line
    assert read_rows(write(f"\n {line}\n\n{line}\n", "rows.json"), PAIR_COLUMNS) == rows * 2


def test_the_first_alternative_that_a_row_has_is_taken_and_extra_columns_stay(write):
    lines = [
        '{"prompt": "p", "response": "r", "text": "t", "stars": 5}',
        '{"prompt": "p", "response": null, "text": "t"}',
    ]
    assert read_rows(write("\n".join(lines)), SFT_COLUMNS) == [
        {"prompt": "p", "response": "r", "stars": 5},
        {"text": "t"},
    ]


def test_a_prompt_may_be_empty_only_where_something_follows_it(write):
    assert read_rows(write('{"prompt": "", "response": "r"}'), SFT_COLUMNS) == [{"prompt": "", "response": "r"}]
    with pytest.raises(UserError, match="line 1, column prompt: found ''; needed a text that is not blank"):
        read_rows(write('{"prompt": ""}'), PROMPT_COLUMNS)


@pytest.mark.parametrize(
    "content, columns, message",
    [
        (b"", PROMPT_COLUMNS, r"rows.jsonl: found no rows; it needs at least one with prompt\."),
        (b"\n \n", SFT_COLUMNS, r"found no rows; it needs at least one with prompt \+ response, or text\."),
        (
            GOOD + b"\n{'prompt': 'a'}",
            PROMPT_COLUMNS,
            r"rows.jsonl, line 3: found .*'prompt'.*no JSON .*column 2.*one JSON object a line",
        ),
        (
            GOOD + b'{"prompt": "' + b"x" * 999,
            PROMPT_COLUMNS,
            r"line 2: found '\{\"prompt\": \"x{48}\.\.\.', which is no JSON",
        ),
        (GOOD + b'["a"]', PROMPT_COLUMNS, r"line 2: found a list \('\[\"a\"\]'\); a row is an object with prompt"),
        (GOOD + b'"a"', PROMPT_COLUMNS, r"line 2: found a string"),
        (b"{}", PROMPT_COLUMNS, r"line 1: found the columns: none; needed: prompt\."),
        (
            b'{"prompt": "a", "answer": "b", "response": null}',
            SFT_COLUMNS,
            r"line 1: found the columns: prompt, answer, response \(null\); "
            r"needed: prompt \+ response, or text\. Rename",
        ),
        (b'{"text": 5}', SFT_COLUMNS, r"line 1, column text: found a number \('5'\); needed a string"),
        (b'{"text": ["a"]}', SFT_COLUMNS, r"line 1, column text: found a list"),
        (b'{"text": " \\n"}', SFT_COLUMNS, r"line 1, column text: found ' \\n'; needed a text that is not blank"),
        (b'{"prompt": "a", "chosen": "b", "rejected": ""}', PAIR_COLUMNS, r"line 1, column rejected: found ''"),
        (b'{"prompt": "a", "chosen": " ", "rejected": "b"}', PAIR_COLUMNS, r"line 1, column chosen: found ' '"),
        (GOOD + b'{"prompt": "\xff"}', PROMPT_COLUMNS, r"line 2: found the byte 0xff, which is not UTF-8"),
        (b"\xef\xbb\xbf" + GOOD + b'{"prompt": "\xfe"}', PROMPT_COLUMNS, r"line 2: found the byte 0xfe"),
        (GOOD + b"\0" * 8, PROMPT_COLUMNS, r"line 2: found a NUL character"),
        (b'{"prompt": "a\\u0000b"}', PROMPT_COLUMNS, r"line 1, column prompt: found a NUL character in 'a\\x00b'"),
        (b'{"prompt": "a\\ud800b"}', PROMPT_COLUMNS, r"line 1, column prompt: found half a surrogate pair"),
    ],
)
def test_mistakes_in_lines(write, content, columns, message):
    with pytest.raises(UserError, match=message):
        read_rows(write(content), columns)


@pytest.mark.parametrize(
    "content, message",
    [
        (b" ", r"rows.json: found no rows"),
        (b"[]", r"rows.json: found no rows"),
        (b'"prompt"', r"rows.json, line 1: found a string .*Put the rows into \[ \]"),
        (b'[{"prompt": "a"}]\n[]', r"rows.json, line 2: found '\[\]', which is no JSON here .*or one object a line"),
        (GOOD + b'{\n"prompt": "a"}', r"rows.json, line 2: found '\{', which is no JSON .*one JSON object a line"),
        (b'[{"prompt": "a"},\n\n oops]', r"rows.json, line 3: found ' oops\]'"),
        (b'[{"prompt": "a"}, 7]', r"rows.json, row 2: found a number \('7'\); a row is an object with prompt"),
        (b'[{"prompt": "a"}, {"promt": "b"}]', r"rows.json, row 2: found the columns: promt; needed: prompt"),
    ],
)
def test_mistakes_in_a_list(write, content, message):
    with pytest.raises(UserError, match=message):
        read_rows(write(content, "rows.json"), PROMPT_COLUMNS)


def test_mistakes_in_the_path(write, tmp_path):
    with pytest.raises(UserError, match=r"absent.jsonl: cannot be read \(No such file or directory\); check the path"):
        read_rows(tmp_path / "absent.jsonl", PROMPT_COLUMNS)
    with pytest.raises(UserError, match="found a directory; name one file in it"):
        read_rows(tmp_path, PROMPT_COLUMNS)
    with pytest.raises(UserError, match=r"rows.txt: found the ending '\.txt'"):
        read_rows(write(GOOD, "rows.txt"), PROMPT_COLUMNS)


@pytest.mark.parametrize(
    "held_out, count",
    [(0.2, 4), (0.999, None), (3, 3), (19, 19), (3.0, 3), (20, None), (0, None), (0.01, None), (1.5, None), (-1, None)],
)
def test_split_sizes(held_out, count):
    if count is None:
        with pytest.raises(UserError, match=rf"cannot hold out {held_out} of 20 rows: both parts need"):
            split_held_out(list(range(20)), held_out, seed=0)
    else:
        assert [len(part) for part in split_held_out(list(range(20)), held_out, seed=0)] == [20 - count, count]


def test_split_is_a_partition_in_file_order_drawn_by_the_seed():
    rows = list(range(100))
    training, held_out = split_held_out(rows, 0.3, seed=0)
    assert sorted(training + held_out) == rows
    assert training == sorted(training) and held_out == sorted(held_out)
    assert held_out != rows[:30] and held_out != rows[70:]
    assert split_held_out(rows, 0.3, seed=0) == (training, held_out)
    assert split_held_out(rows, 0.3, seed=1) != (training, held_out)
