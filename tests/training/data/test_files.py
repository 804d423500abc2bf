"""Data files of each kind, from file to rows: what is accepted, and one message with file, place and remedy for
whatever is broken, changes while it is read, is too large or too deep, or is no file.
"""

import gzip
import hashlib
import json
import os
import re
import socket
from datetime import datetime
from decimal import Decimal

import pyarrow
import pytest
from pyarrow import parquet

from engine.errors import UserError
from engine.files import open_file
from engine.zero.config import stage_of_file
from tests.training.data.reading import rows_of
from training.config.parsing import read_yaml
from training.data.files import DataFile, Unread, read_records
from training.data.record_forms import PAIRS, PROMPTS, SFT
from training.data.sources import open_source


@pytest.fixture
def write(tmp_path):
    def write(content: bytes, name: str):
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write


def all_of(path) -> list:
    records = read_records(path)
    return [(where.removeprefix(f"{path}, "), record) for where, record in (records[i] for i in range(len(records)))]


def test_csv_cells_are_texts_and_empty_ones_are_absent(write):
    path = write('\ufefftext,stars\r\n"a, ""b""\nc",007\r\n\r\nNA,\r\nd\n'.encode(), "rows.csv")
    assert all_of(path) == [
        ("line 2", {"text": 'a, "b"\nc', "stars": "007"}),
        ("line 5", {"text": "NA", "stars": None}),
        ("line 6", {"text": "d"}),
    ]


@pytest.mark.parametrize(
    "content, message",
    [
        (b"text\na\nb,c\n", r"rows.csv, line 3: found 2 cells in the 1 columns text\. Put cells"),
        (b'text\na\n"b\nc\n', r"""rows.csv, line 3: found '"b', which is no CSV \(unexpected end of data\)"""),
        (b'text\n"a"b\n', r"""line 2: found '"a"b', which is no CSV"""),
        (b"text,text\na,b\n", r"line 1: found the column names text, text; each may occur once"),
        (b"text\na\nb\xff\n", r"line 3: found the byte 0xff"),
        (b"text\na\n\0\n", r"line 3: found a NUL character"),
        (
            b"txt\na\n",
            r"line 2: found the columns: txt; "
            r"needed: messages, or prompt \+ chosen, or prompt \+ response, or prompt \+ completion, "
            r"or chosen \+ rejected, or text",
        ),
        (b"text,stars\n,5\n", r"line 2: found the columns: text \(null\), stars"),
        (b"text\n", r"rows.csv: found no records"),
        (b"", r"rows.csv: found no records"),
    ],
)
def test_mistakes_in_csv(write, content, message):
    with pytest.raises(UserError, match=message):
        rows_of(write(content, "rows.csv"), SFT)


def test_parquet(tmp_path):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": ["a", None], "stars": [1, 2]}), path)
    assert all_of(path) == [("record 1", {"text": "a", "stars": 1}), ("record 2", {"text": None, "stars": 2})]
    with pytest.raises(UserError, match=r"rows.parquet, record 2: found the columns: text \(null\), stars"):
        rows_of(path, SFT)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"rows.parquet: found no Parquet that can be read \(.+\)\. Write it again"):
        read_records(path)


def test_a_parquet_file_with_texts_that_are_no_utf8(tmp_path):
    texts = pyarrow.array([b"good", b"\xff\xfe"]).cast(pyarrow.binary())
    parquet.write_table(
        pyarrow.table({"text": pyarrow.StringArray.from_buffers(2, *texts.buffers()[1:])}), tmp_path / "rows.parquet"
    )
    records = read_records(tmp_path / "rows.parquet")
    assert records[0][1] == {"text": "good"}
    with pytest.raises(
        UserError, match=r"rows.parquet, record 2, column text: found what cannot be read \(.*utf-8.*\);"
    ):
        rows_of(tmp_path / "rows.parquet", SFT)


def audio_and_others() -> pyarrow.Table:
    """Two records with columns of many types beside their messages, which are maps as other programs write dicts."""
    said, maps = [[("role", "user"), ("content", "Hi!")]], pyarrow.map_(pyarrow.string(), pyarrow.string())
    texts = pyarrow.ExtensionArray.from_storage(pyarrow.json_(), pyarrow.array(['{"b": [1]}']))
    lists = pyarrow.ListArray.from_arrays([0, 1, 1], texts)
    columns = {
        "messages": pyarrow.array([said, said], pyarrow.list_(maps)),
        "audio": pyarrow.array([{"bytes": b"RIFF", "path": "a.wav"}] * 2),
        "pages": pyarrow.array([[{"image": {"bytes": b"PNG"}}]] * 2),
        "raw": pyarrow.array([b"\xff", b"a"]).dictionary_encode(),
        "numbers": pyarrow.array([[(1, 2)]] * 2, pyarrow.map_(pyarrow.int64(), pyarrow.int64())),
        "source": pyarrow.array(["web", "book"]).dictionary_encode(),
        "price": pyarrow.array([Decimal("1.50")] * 2),
        "day": pyarrow.array([0, 2**40], pyarrow.timestamp("s")),
        "meta": pyarrow.StructArray.from_arrays([lists], ["a"], mask=pyarrow.array([False, True])),
    }
    features = json.dumps({"info": {"features": {"audio": {"sampling_rate": 16000, "_type": "Audio"}}}})
    return pyarrow.table(columns).replace_schema_metadata({"huggingface": features})


def test_tables_are_read_as_they_are_stored_and_bytes_are_not(tmp_path):
    path = tmp_path / "rows.parquet"
    parquet.write_table(audio_and_others(), path)
    records = read_records(path)
    assert records[0][1] == {
        "messages": [{"role": "user", "content": "Hi!"}],
        "audio": Unread("bytes (of the type struct<bytes: binary, path: string>)"),
        "pages": Unread("bytes (of the type list<element: struct<image: struct<bytes: binary>>>)"),
        "raw": Unread("bytes (of the type dictionary<values=binary, indices=int32, ordered=0>)"),
        "numbers": Unread("a map whose keys are no texts (of the type map<int64, int64 ('numbers')>)"),
        "source": "web",
        "price": Decimal("1.50"),
        "day": datetime(1970, 1, 1),
        "meta": {"a": [{"b": [1]}]},
    }
    second = records[1][1]
    assert second["source"] == "book" and second["meta"] is None
    assert second["day"] == Unread("what cannot be read (date value out of range)")  # the year 36812
    assert records.fingerprint == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_column_of_bytes_where_a_text_is_needed(tmp_path):
    parquet.write_table(pyarrow.table({"text": [b"a", b"b"]}), tmp_path / "rows.parquet")
    with pytest.raises(UserError, match=r"record 1, column text: found bytes \(of the type binary\); needed a string"):
        rows_of(tmp_path / "rows.parquet", SFT)


def test_two_columns_of_a_name(tmp_path):
    table = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(UserError, match="rows.parquet: found the column names text, text; each may occur once"):
        read_records(tmp_path / "rows.parquet")


@pytest.mark.parametrize(
    "content, name, message",
    [
        (b"[" * 100_000, "rows.json", r"rows.json, line 1: found '\[{60}\.\.\.', which is no JSON here .*too deep"),
        (b"{}\n" + b'{"a":' * 100_000, "rows.jsonl", r"line 2: found .*too deep"),
        (b'{"text": ' + b"1" * 5000 + b"}", "rows.jsonl", r"line 1: found .*, which is no JSON"),
        (
            gzip.compress(b'{"text": "a"}', mtime=0),
            "rows.jsonl",
            r"rows.jsonl: holds gzip data\. Call it rows.jsonl.gz",
        ),
    ],
)
def test_what_makes_a_parser_give_up(write, content, name, message):
    with pytest.raises(UserError, match=message):
        all_of(write(content, name))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet"])
def test_the_fingerprint_is_of_the_content(tmp_path, name):
    def saved(folder: str, text: str) -> str:
        path = tmp_path / folder / name
        path.parent.mkdir(exist_ok=True)
        if name.endswith(".parquet"):
            parquet.write_table(pyarrow.table({"text": [text]}), path)
        else:
            path.write_text(json.dumps({"text": text}) if "json" in name else f"text\n{text}\n")
        return read_records(path).fingerprint

    found = saved("one", "a")
    assert found == saved("two", "a") == hashlib.sha256((tmp_path / "one" / name).read_bytes()).hexdigest()
    assert found != saved("one", "b")


GOOD = {"prompt": "a", "chosen": "b", "rejected": "c"}


def test_huge_broken_lines_make_short_messages(write):
    huge = "x" * (1 << 20)
    for content, name, place in [
        (json.dumps(GOOD | {"chosen": [huge]}), "rows.jsonl", "line 1, column chosen"),
        (json.dumps(GOOD)[:-1] + huge, "rows.jsonl", "line 1"),
        (json.dumps({huge: "a"}), "rows.jsonl", "line 1"),
        (json.dumps([{"prompt": huge}]), "rows.json", "record 1"),
        (f"prompt,chosen,rejected\n{huge},b\n", "rows.csv", "line 2"),
        (f'prompt,chosen,rejected\n"{huge},b\n', "rows.csv", "line 2"),
    ]:
        path = write(content.encode(), name)
        with pytest.raises(UserError, match=f"{re.escape(str(path))}, {place}") as caught:
            rows_of(path, PAIRS)
        assert len(str(caught.value)) < len(str(path)) + 700


SFT_NEEDS = (
    r"messages, or prompt \+ chosen, or prompt \+ response, or prompt \+ completion, or chosen \+ rejected, or text\."
)
PROMPTS_NEED = r"messages, or prompt, or chosen \+ rejected\."
GOOD_LINE = b'{"prompt": "a"}\n'


@pytest.fixture
def write_rows(tmp_path):
    def write(content: bytes | str, name: str = "rows.jsonl"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_lines_are_read_in_order_and_blank_ones_passed_over(write_rows):
    content = '\ufeff{"prompt": "a b"}\r\n\n   \n{"prompt": "\u2028 \u00e9 \\ud83d\\ude00"}'  # no newline at the end
    assert rows_of(write_rows(content), PROMPTS) == [{"prompt": "a b"}, {"prompt": "\u2028 \u00e9 \U0001f600"}]


def test_a_json_file_is_a_list(write_rows):
    rows = [{"prompt": "p", "chosen": "c", "rejected": "r"}]
    assert rows_of(write_rows(json.dumps(rows, indent=2), "rows.json"), PAIRS) == rows
    line = json.dumps(rows[0])  # or one object a line
    assert rows_of(write_rows(f"\n {line}\n\n{line}\n", "rows.json"), PAIRS) == rows * 2
    spread = json.dumps(rows[0], indent=2)  # or objects spread over lines
    assert rows_of(write_rows(f"\ufeff{spread}\n{spread}{line}", "rows.json"), PAIRS) == rows * 3


def test_the_first_alternative_that_a_record_has_is_taken_and_prompts_keep_their_extra_columns(write_rows):
    lines = [
        '{"prompt": "p", "response": "r", "text": "t", "stars": 5}',
        '{"prompt": "p", "response": null, "text": "t"}',
    ]
    assert rows_of(write_rows("\n".join(lines)), SFT) == [{"prompt": "p", "response": "r"}, {"text": "t"}]
    assert rows_of(write_rows(lines[0]), PROMPTS) == [{"prompt": "p", "response": "r", "text": "t", "stars": 5}]


def test_a_prompt_may_be_empty_only_where_something_follows_it(write_rows):
    assert rows_of(write_rows('{"prompt": "", "response": "r"}'), SFT) == [{"prompt": "", "response": "r"}]
    with pytest.raises(UserError, match="line 1, column prompt: found ''; needed a text that is not blank"):
        rows_of(write_rows('{"prompt": ""}'), PROMPTS)


@pytest.mark.parametrize(
    "content, form, message",
    [
        (b"", PROMPTS, r"rows.jsonl: found no records; it needs at least one with " + PROMPTS_NEED),
        (b"\n \n", SFT, r"found no records; it needs at least one with " + SFT_NEEDS),
        (
            GOOD_LINE + b"\n{'prompt': 'a'}",
            PROMPTS,
            r"rows.jsonl, line 3: found .*'prompt'.*no JSON .*column 2.*one JSON object a line",
        ),
        (
            GOOD_LINE + b'{"prompt": "' + b"x" * 999,
            PROMPTS,
            r"line 2: found '\{\"prompt\": \"x{48}\.\.\.', which is no JSON",
        ),
        (
            GOOD_LINE + b'["a"]',
            PROMPTS,
            r"line 2: found a list \('\[\"a\"\]'\); a record is an object with " + PROMPTS_NEED,
        ),
        (GOOD_LINE + b'"a"', PROMPTS, r"line 2: found a string"),
        (b"{}", PROMPTS, r"line 1: found the columns: none; needed: " + PROMPTS_NEED),
        (
            b'{"prompt": "a", "answer": "b", "response": null}',
            SFT,
            r"line 1: found the columns: prompt, answer, response \(null\); "
            rf"needed: {SFT_NEEDS} Null counts as absent. Rename",
        ),
        (b'{"text": 5}', SFT, r"line 1, column text: found a number \('5'\); needed a string"),
        (b'{"text": ["a"]}', SFT, r"line 1, column text: found a list"),
        (b'{"text": " \\n"}', SFT, r"line 1, column text: found ' \\n'; needed a text that is not blank"),
        (b'{"prompt": "a", "chosen": "b", "rejected": ""}', PAIRS, r"line 1, column rejected: found ''"),
        (b'{"prompt": "a", "chosen": " ", "rejected": "b"}', PAIRS, r"line 1, column chosen: found ' '"),
        (GOOD_LINE + b'{"prompt": "\xff"}', PROMPTS, r"line 2: found the byte 0xff, which is not UTF-8"),
        (b"\xef\xbb\xbf" + GOOD_LINE + b'{"prompt": "\xfe"}', PROMPTS, r"line 2: found the byte 0xfe"),
        (GOOD_LINE + b"\0" * 8, PROMPTS, r"line 2: found a NUL character"),
        (
            GOOD_LINE + b'{\n"prompt": "a"}',
            PROMPTS,
            r"line 2: found '{'.* a line, or call the file .json if its JSON is spread",
        ),
        (b'{"prompt": "a\\u0000b"}', PROMPTS, r"line 1, column prompt: found a NUL character in 'a\\x00b'"),
        (b'{"prompt": "a\\ud800b"}', PROMPTS, r"line 1, column prompt: found half a surrogate pair"),
    ],
)
def test_mistakes_in_lines(write_rows, content, form, message):
    with pytest.raises(UserError, match=message):
        rows_of(write_rows(content), form)


@pytest.mark.parametrize(
    "content, message",
    [
        (b" ", r"rows.json: found no records"),
        (b"[]", r"rows.json: found no records"),
        (b'"prompt"', r"rows.json, line 1: found a string .*Put the records into \[ \]"),
        (b'[{"prompt": "a"}]\n[]', r"rows.json, line 2: found '\[\]', which is no JSON here .*or one object a line"),
        (GOOD_LINE + b'{\n"prompt": "a"}', r"rows.json, line 2: found '\{', which is no JSON .*one JSON object a line"),
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
def test_mistakes_in_a_list(write_rows, content, message):
    with pytest.raises(UserError, match=message):
        rows_of(write_rows(content, "rows.json"), PROMPTS)


def test_mistakes_in_the_path(write_rows, tmp_path):
    with pytest.raises(UserError, match=r"absent.jsonl: cannot be read \(No such file or directory\); check the path"):
        rows_of(tmp_path / "absent.jsonl", PROMPTS)
    with pytest.raises(UserError, match=r"cannot be read \(Is a directory\)"):
        read_records(tmp_path)
    with pytest.raises(UserError, match=r"rows.txt: found the ending '\.txt'"):
        rows_of(write_rows(GOOD_LINE, "rows.txt"), PROMPTS)


@pytest.fixture
def odd(tmp_path):
    """A folder with a pipe, a socket and a link to a device, all named like data files."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(tmp_path / "socket.jsonl"))
        (tmp_path / "device.jsonl").symlink_to("/dev/zero")
        yield tmp_path


@pytest.mark.parametrize(
    "name, kind", [("pipe", "a pipe, which can be read once only"), ("socket", "a socket"), ("device", "a device")]
)
def test_what_is_no_file_is_refused_and_never_opened(odd, name, kind):
    path = odd / f"{name}.jsonl"
    with pytest.raises(UserError, match=rf"{name}.jsonl: cannot be read \(it is {kind}\); check the path"):
        open_source(str(path))
    with pytest.raises(UserError, match=rf"--config .*{name}.jsonl: cannot be read \(it is {kind}\)"):
        read_yaml(str(path))
    with pytest.raises(OSError, match=kind):
        open_file(path)
    assert stage_of_file(str(path), "actor") is None


def test_what_is_no_file_in_a_folder_is_passed_over(odd):
    with pytest.raises(UserError, match="found no data set in this folder"):
        open_source(str(odd))
    (odd / "train.jsonl").write_text('{"text": "a"}\n')
    assert len(open_source(str(odd)).training[0]) == 1


@pytest.mark.parametrize("change", ["appended", "cut", "written again"])
def test_a_file_that_changes_while_it_is_read(tmp_path, change):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"a{number}"}) + "\n" for number in range(2000)))
    records = read_records(path)
    assert records[1999][1] == {"text": "a1999"}
    content = path.read_bytes()
    os.utime(path, ns=(0, 0))  # so that the new time is another one, however coarse the file system's clock
    records = read_records(path)
    if change == "appended":
        path.write_bytes(content + b"{}\n")
    elif change == "cut":
        os.truncate(path, 10)  # reading a mapped file behind this would kill the process
    else:
        path.write_bytes(content.replace(b"a1", b"b1"))
    with pytest.raises(UserError, match=r"rows.jsonl: was changed while it was read\. Start again"):
        records[1999]


def test_a_file_that_is_replaced_is_read_to_its_end_as_it_was(tmp_path):
    path, other = tmp_path / "rows.jsonl", tmp_path / "other.jsonl"
    path.write_text('{"text": "old"}\n' * 2)
    other.write_text('{"text": "new"}\n')
    records = read_records(path)
    other.replace(path)
    assert [records[0][1], records[1][1]] == [{"text": "old"}] * 2


def test_parts_of_a_file(tmp_path):
    (tmp_path / "rows.csv").write_bytes(b"abc\ndef")
    file = DataFile(tmp_path / "rows.csv")
    assert list(file.lines()) == [b"abc\n", b"def"]
    assert (file.read(), file.read(2, 5), file.read(5), file.read(9, 12)) == (b"abc\ndef", b"c\nd", b"ef", b"")
    assert file.hash() == hashlib.sha256(b"abc\ndef").hexdigest()


def test_a_text_of_ten_megabytes_is_refused_by_its_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        file.write('{"text": "a"}\n{"text": "' + "word " * 2_000_001 + '"}\n')
    with pytest.raises(UserError, match=r"line 2, column text: found 10,000,005 characters; needed at most 10,000,000"):
        rows_of(path, SFT)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_lists_within_lists(tmp_path, name):
    def write(depth: int):
        record = '{"prompt": "a", "more": ' + "[" * depth + "]" * depth + "}"
        (tmp_path / name).write_text(f"[{record}]" if name == "rows.json" else record)
        return tmp_path / name

    assert list(rows_of(write(90), PROMPTS)[0]) == ["prompt", "more"]
    with pytest.raises(UserError, match=re.escape(": found more than 100 lists within lists. Correct")):
        rows_of(write(150), PROMPTS)
    for depth in (850, 900, 950, 1000, 100_000):
        with pytest.raises(UserError, match="lists within lists|too deep"):
            rows_of(write(depth), PROMPTS)
