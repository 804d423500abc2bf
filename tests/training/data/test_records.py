"""Data files of each kind, and that whatever is broken in them is told with file, place and reason."""

import gzip
import hashlib
import json
import random
import re
from datetime import datetime
from decimal import Decimal

import pyarrow
import pytest
from pyarrow import parquet

from engine.errors import UserError
from tests.training.data.reading import rows_of
from training.data.files import Unread, read_records
from training.data.forms import PAIRS, SFT


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
        ("line 6", {"text": "d", "stars": None}),
    ]


def test_a_cell_may_be_long(write):
    assert all_of(write(b"text\n" + b"x" * 1_000_000, "rows.csv")) == [("line 2", {"text": "x" * 1_000_000})]


@pytest.mark.parametrize(
    "content, message",
    [
        (b"text\na\nb,c\n", r"rows.csv, line 3: found 2 cells in the 1 columns text\. Put cells"),
        (b'text\na\n"b\nc\n', r"""rows.csv, line 3: found '"b', which is no CSV \(unexpected end of data\)"""),
        (b'text\n"a"b\n', r"""line 2: found '"a"b', which is no CSV"""),
        (b"text,text\na,b\n", r"line 1: found the column names text, text; each may stand there once"),
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
    with pytest.raises(UserError, match="rows.parquet: found the column names text, text; each may stand there once"):
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


# --- 2,000 broken records ---------------------------------------------------------------------------------------------

GOOD = {"prompt": "a", "chosen": "b", "rejected": "c"}


def broken_object(rng: random.Random) -> object:
    """A JSON value that is no record of a pair."""
    name = rng.choice(list(GOOD))
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice([None, 7, -1.5, True, "text", [], [GOOD], {}])
    if kind == 1:
        return {key: value for key, value in GOOD.items() if key != name}
    if kind == 2:
        return GOOD | {name: rng.choice([None, 7, 0.5, False, [], ["b"], [7], {}, {"role": "user"}])}
    if kind == 3:
        return GOOD | {rng.choice(["chosen", "rejected"]): rng.choice(["", " ", "\n\t"])}
    if kind == 4:
        return GOOD | {name: rng.choice(["\0", "a\0b", "\ud800", "x\udfff"])}
    return {name.upper(): rng.choice(["x", "y" * 200])}


def broken_bytes(rng: random.Random) -> bytes:
    """A line of bytes that is no JSON, or none of UTF-8."""
    line = json.dumps(GOOD | {"prompt": "\u00e9\U0001f600" * rng.randrange(1, 9)}, ensure_ascii=False).encode()
    kind = rng.randrange(5)
    if kind == 0:
        return line[: rng.randrange(1, len(line) - 1)]  # half-written, often in the middle of a character
    if kind == 1:
        return line.replace(b"\xc3\xa9", bytes([rng.randrange(0x80, 0x100)]), 1)
    if kind == 2:
        return line.replace(b'"b"', b'"\0"')
    if kind == 3:
        return line + rng.choice([b"}", b",", b" oops", b"\x1a"])
    return rng.choice([b"{", b"nul", b"'a'", b"{]", b'{"prompt" "a"}', b"\xff\xfe{", b"\x80"])


def broken_cells(rng: random.Random) -> bytes:
    """A line of a CSV file with the columns prompt, chosen, rejected."""
    return rng.choice(
        [
            b"a",
            b"a,b",
            b"a,b,c,d",
            b'a,b,"c',
            b'a,"b"x,c',
            b"a,,c",
            b",b,c",
            b"a, ,c",
            b"a,b,\0",
            b"a,b,\xc3",
            b"\xff,b,c",
            b'"a\0",b,c',
            b"a,b,\xf0\x9f\x98",
        ]
    )


def test_two_thousand_broken_records_are_told_with_their_place(write):
    rng = random.Random(0)
    good = json.dumps(GOOD).encode()
    for number in range(2_000):
        before = rng.randrange(4)
        kind = rng.choice(["object", "bytes", "list", "csv"])
        if kind == "csv":
            path = write(b"prompt,chosen,rejected\n" + b"a,b,c\n" * before + broken_cells(rng) + b"\n", "rows.csv")
            place = f"line {before + 2}"
        elif kind == "list":
            path = write(json.dumps([GOOD] * before + [broken_object(rng), GOOD]).encode(), "rows.json")
            place = f"record {before + 1}"
        else:
            line = json.dumps(broken_object(rng)).encode() if kind == "object" else broken_bytes(rng)
            path = write((good + b"\n") * before + line + b"\n" + good, "rows.jsonl")
            place = f"line {before + 1}"
        with pytest.raises(UserError) as caught:
            rows_of(path, PAIRS)
        message = str(caught.value)
        assert re.match(rf"{re.escape(str(path))}, {place}\b", message), (number, message)
        assert "found " in message and len(message) < len(str(path)) + 700, (number, message)


@pytest.mark.parametrize("megabytes", [1, 4])
def test_huge_broken_lines_make_short_messages(write, megabytes):
    huge = "x" * (megabytes << 20)
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
