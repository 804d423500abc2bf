"""Data sets by path: files, folders of every kind, DeepSpeed-Chat's names; and names that are none."""

import gzip
import json

import datasets
import pytest

from engine.errors import UserError
from training.data import sources
from training.data.files import Unread
from training.data.sources import known_change, name_and_split, open_source


def lines(*texts: str) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def texts_of(parts) -> list[str]:
    return [part[index][1]["text"] for part in parts for index in range(len(part))]


@pytest.fixture
def folder(tmp_path):
    def write(**files: str | bytes):
        for name, content in files.items():
            path = tmp_path / "set" / name.replace("__", "/").replace("_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(tmp_path / "set")

    return write


def card(config: str) -> str:
    return f"---\nconfigs:\n- {{config_name: {config}}}\n---\n".replace("}, {", "}\n- {")


@pytest.mark.parametrize(
    "files, training, held_out",
    [
        ({"a_jsonl": lines("a"), "b_jsonl": lines("b")}, ["a", "b"], []),
        ({"train_jsonl": lines("a"), "test_jsonl": lines("b")}, ["a"], ["b"]),
        ({"train__1_csv": "text\na\n", "validation__1_csv": "text\nb\n"}, ["a"], ["b"]),
        ({"data__train_json": json.dumps([{"text": "a"}]), "data__eval_json": lines("b")}, ["a"], ["b"]),
        ({"train_jsonl": lines("a"), "validation_jsonl": lines("b"), "test_jsonl": lines("c")}, ["a"], ["c"]),
        (
            {"train_jsonl_gz": gzip.compress(lines("a").encode()), "test_jsonl_gz": gzip.compress(lines("b").encode())},
            ["a"],
            ["b"],
        ),
        (
            {
                "x_jsonl": lines("a"),
                "y_jsonl": lines("b"),
                "README_md": "---\nconfigs:\n- config_name: default\n"
                "  data_files:\n  - {split: train, path: y.jsonl}\n---\n",
            },
            ["b"],
            [],
        ),
    ],
)
def test_folders(folder, files, training, held_out):
    source = open_source(folder(**files))
    assert (texts_of(source.training), texts_of(source.held_out)) == (training, held_out)


@pytest.mark.parametrize(
    "names, training, note",
    [  # by hand: what a person who reads the names would train on
        (["a", "b", "eval-a"], ["a", "b"], "held out: eval (eval-a.jsonl)"),
        (["a", "evalQuestions", "latest"], ["a", "latest"], "held out: eval (evalQuestions.jsonl)"),
        (["train", "b"], ["train"], "not read: b.jsonl"),
        (["train", "validation", "test"], ["train"], "held out: test (test.jsonl); not read: validation"),
        (["train__eval", "TESTSET__train"], ["train__eval"], "held out: test (train.jsonl)"),
        (["train_of_eval"], [], "held out: eval (train_of_eval.jsonl)"),
        (["data__chat-0-of-1", "dev-0-of-1"], ["data__chat-0-of-1"], "held out: dev (dev-0-of-1.jsonl)"),
        (
            [f"b{number}" for number in range(7)] + ["train"],
            ["train"],
            "not read: b0.jsonl, b1.jsonl, b2.jsonl, b3.jsonl, b4.jsonl and 2 more",
        ),
    ],
)
def test_each_file_of_a_folder_is_in_a_split_or_is_named(tmp_path, names, training, note):
    for name in names:
        path = tmp_path / "set" / f"{name.replace('__', '/')}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(lines(name))
    source = open_source(str(tmp_path / "set"))
    assert (texts_of(source.training), source.note.split(": ", 1)[1].split(". To train")[0]) == (training, note)


def test_files_that_no_step_can_read_are_named_and_no_code_is_run(folder):
    path = folder(a_jsonl=lines("a"), set_py="1 / 0", b_txt="", README_md="A set.", LICENSE="", _hidden__c_csv="")
    assert "set: not read: b.txt, set.py. To train" in open_source(path).note


@pytest.mark.parametrize("listed", ["ftp://127.0.0.1/a.jsonl", "../set/a.jsonl", "/etc/a.jsonl", "b.jsonl", "**.jsonl"])
def test_a_card_lists_files_below_its_folder_alone(folder, monkeypatch, listed):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("connected"))
    path = folder(a_jsonl=lines("a"), README_md=card(f"default, data_files: '{listed}'"))
    with pytest.raises(UserError, match="set: found no data set in this folder .*(README.md lists|Invalid pattern)"):
        open_source(path)


def test_the_configuration_of_a_card(folder):
    cards = card("a, data_dir: x}, {config_name: b, default: true, data_files: [{split: test, path: ['y/*']}]")
    path = folder(x__a_jsonl=lines("a"), y__b_jsonl=lines("b"), y__z__c_jsonl=lines("c"), README_md=cards)
    assert texts_of(open_source(path).held_out) == ["b"] and texts_of(open_source(path, "a").training) == ["a"]
    assert "held out: test (b.jsonl); not read: x/a.jsonl, y/z/c.jsonl" in open_source(path).note


def test_a_split_is_named_behind_a_colon(tmp_path, monkeypatch):
    part = datasets.Dataset.from_dict({"text": ["a", "b"]})
    saved, hub = str(tmp_path / "saved"), datasets.DatasetDict(train_sft=part, test_sft=part.select([1]))
    hub.save_to_disk(saved)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config: {"owner/name": hub}[name])
    for name in (saved, "owner/name"):
        assert [texts_of(open_source(name).training), texts_of(open_source(name).held_out)] == [["a", "b"], ["b"]]
        one = open_source(f"{name}:test_sft")
        assert (one.name, texts_of(one.training), one.held_out) == (f"{name}:test_sft", ["b"], [])
        with pytest.raises(UserError, match="found no split test; it has train_sft, test_sft"):
            open_source(f"{name}:test")
    (tmp_path / "saved:test_sft").mkdir()  # this very name
    with pytest.raises(UserError, match="saved:test_sft: found no data set"):
        open_source(f"{saved}:test_sft")
    assert name_and_split("w:rows.jsonl") == ("w:rows.jsonl", None)


def test_records_of_a_folder_are_told_with_file_and_line(folder):
    path = folder(train_jsonl=lines("a") + "oops\n")
    with pytest.raises(UserError, match=r"set/train.jsonl, line 2: found 'oops'"):
        texts_of(open_source(path).training)


@pytest.mark.parametrize("with_test", [False, True])
def test_what_save_to_disk_wrote(tmp_path, with_test):
    part = datasets.Dataset.from_dict({"text": ["a", "b"]})
    path = str(tmp_path / "saved")
    (datasets.DatasetDict(train=part, test=part.select([1])) if with_test else part).save_to_disk(path)
    source = open_source(path)
    assert texts_of(source.training) == ["a", "b"] and texts_of(source.held_out) == ["b"] * with_test
    assert source.training[0][1] == (f"{path}, split train, record 2", {"text": "b"})
    (tmp_path / "saved" / "other").mkdir()
    (tmp_path / "saved" / "other" / "state.json").write_text('{"epoch": 1}')  # another program's
    assert texts_of(open_source(path).training) == ["a", "b"]
    (tmp_path / "saved" / ("train" if with_test else "") / "state.json").write_text("{")
    with pytest.raises(UserError, match="saved: found a data set of save_to_disk that is broken"):
        open_source(path)


def test_a_saved_set_is_read_as_it_is_stored_whatever_its_format(tmp_path):
    features = datasets.Features(
        {"text": datasets.Value("string"), "n": datasets.Value("int64"), "i": datasets.Image()}
    )
    saved = datasets.Dataset.from_dict({"text": ["a"], "n": [7], "i": [{"bytes": b"no picture"}]}, features)
    saved.with_format("torch", columns=["n"]).save_to_disk(str(tmp_path / "saved"))
    record = open_source(str(tmp_path / "saved")).training[0][0][1]
    assert record == {"text": "a", "n": 7, "i": Unread("bytes (of the type struct<bytes: binary, path: string>)")}
    assert type(record["n"]) is int


@pytest.mark.parametrize(
    "name, content, reason",
    [
        ("README.md", "---\na: [\n---\n", "found no data set in this folder"),
        ("README.md", "---\na: " + "[" * 2_000 + "\n---\n", "found no data set in this folder .maximum recursion"),
        ("README.md", card("a, data_files: x.jsonl}, {config_name: b"), "found .* .README.md has the .* a, b"),
        ("dataset_dict.json", '{"splits": ["../set"]}', "found a data set of save_to_disk that is broken"),
        ("state.json", "[" * 200_000, "found a data set of save_to_disk that is broken"),
        ("dataset_dict.json", "[1]", "found a data set of save_to_disk that is broken"),
    ],
)
def test_a_folder_that_the_library_cannot_make_sense_of(tmp_path, folder, name, content, reason):
    path = folder(train_jsonl=lines("a"))
    (tmp_path / "set" / name).write_text(content)
    with pytest.raises(UserError, match=f"{path}: {reason}"):
        open_source(path)


def test_the_local_files_of_deepspeed_chat(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="data/train.json: cannot be read"):
        open_source("local/jsonfile")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.json").write_text(json.dumps([{"prompt": "a", "chosen": "b", "rejected": None}]))
    (tmp_path / "data" / "eval.json").write_text(json.dumps([{"prompt": "d", "chosen": "e", "rejected": "f"}]))
    source = open_source("local/jsonfile")
    assert source.training[0][0] == ("data/train.json, record 1", {"prompt": " a", "chosen": " b", "rejected": None})
    assert source.held_out[0][0] == ("data/eval.json, record 1", {"prompt": " d", "chosen": " e", "rejected": " f"})


@pytest.mark.parametrize(
    "name, record, expected",
    [
        (
            "Dahoas/synthetic-instruct-gptj-pairwise",
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            {"prompt": " Human: a Assistant:", "chosen": " b", "rejected": " c"},
        ),
        (
            "copies/stanfordnlp/SHP/",
            {"history": "a", "human_ref_A": "b", "human_ref_B": "c", "labels": 1},
            {"prompt": " Human: a Assistant:", "chosen": " b", "rejected": " c"},
        ),
        (
            "stanfordnlp/SHP",
            {"history": "a", "human_ref_A": "b", "human_ref_B": "c", "labels": 0},
            {"prompt": " Human: a Assistant:", "chosen": " c", "rejected": " b"},
        ),
        (
            "wangrui6/Zhihu-KOL",
            {"INSTRUCTION": "a", "RESPONSE": "b"},
            {"prompt": " Human: a Assistant:", "response": " b"},
        ),
        (
            "yitingxie/rlhf-reward-datasets",
            {"prompt": "a\n", "chosen": "Assistant: b", "rejected": "Assistant: c"},
            {"prompt": "a\nAssistant:", "chosen": " b", "rejected": " c"},
        ),
    ],
)
def test_sets_that_deepspeed_chat_knows(name, record, expected):
    assert known_change(name)(record).items() >= expected.items()


def test_other_sets_are_taken_as_they_are():
    assert known_change("Dahoas/rm-static") is known_change("my-stanfordnlp/SHP") is None


@pytest.mark.parametrize(
    "name, message",
    [
        ("./absent", r"absent: cannot be read \(No such file or directory\); check the path"),
        ("/absent/rows.jsonl", r"/absent/rows.jsonl: cannot be read \(No such file"),
        ("~/absent-folder-of-data", "absent-folder-of-data: cannot be read"),
        ("a/b/c", "a/b/c: cannot be read"),
        ("absent.csv", r"absent.csv: cannot be read \(No such file or directory\); check the path"),
        ("reviews/absent.parquet", "reviews/absent.parquet: cannot be read"),
        ("not a name", "not a name: cannot be read"),
    ],
)
def test_paths_are_never_asked_for_on_the_hub(monkeypatch, tmp_path, name, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "_hub_splits", lambda *names: pytest.fail("asked the Hub"))
    with pytest.raises(UserError, match=message):
        open_source(name)


def test_folders_that_are_no_data_set(folder, tmp_path):
    (tmp_path / "set").mkdir()
    with pytest.raises(UserError, match="set: found no data set in this folder"):
        open_source(str(tmp_path / "set"))
    with pytest.raises(UserError, match=r"set: found files of several kinds.*: a\.jsonl \(text\); c\.csv \(text\)"):
        open_source(folder(a_jsonl=lines("a"), b_jsonl=lines("b"), c_csv="text\na\n"))


def test_a_data_set_without_a_training_split_is_refused(tmp_path):
    part = datasets.Dataset.from_dict({"text": ["a"]})
    datasets.DatasetDict(train_sft=part, train_prefs=part).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(UserError, match="found the splits train_sft, train_prefs, and none .*/saved:train_sft"):
        open_source(str(tmp_path / "saved"))


class Hub:
    """Stands in for the Hub, which has one data set."""

    def dataset_info(self, name, timeout):
        if name != "owner/name":
            raise ConnectionError("no such thing\nand more")


def test_names_of_the_hub(monkeypatch):
    loaded = datasets.DatasetDict(
        train=datasets.Dataset.from_dict({"text": ["a", "b"]}), test=datasets.Dataset.from_dict({"text": ["c"]})
    )
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config: loaded)
    source = open_source("owner/name")
    assert source.training[0][1] == ("owner/name, split train, record 2", {"text": "b"})
    assert texts_of(source.held_out) == ["c"]
    assert source.training[0].fingerprint != source.held_out[0].fingerprint
    with pytest.raises(
        UserError,
        match=r"^owner/other: found no such file or folder in .*, and no data set of "
        r"that name .* \(no such thing\)\. Check the name",
    ):
        open_source("owner/other")


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch):
    asked = []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        "huggingface_hub.HfApi.dataset_info",
        lambda self, name, timeout: asked.append(timeout) or Hub().dataset_info(name, timeout),
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda *names: pytest.fail("asked again"))
    with pytest.raises(UserError, match="no data set of that name on the Hugging Face Hub can be reached"):
        open_source("nobody/nothing")
    assert asked == [sources.PROBE_SECONDS]
