"""Opens the data sets that `--data_path` names. A `Source` holds a data set's training records and held-out records.

    source = open_source("Dahoas/rm-static")        # or a file, or a folder; "data:eval" is the split eval of data
    source.training, source.held_out                # lists of Records

A name is looked for on this machine first. The Hugging Face Hub is never asked for a name that can only be a path. The
records of some well-known data sets are changed as DeepSpeed-Chat changes them (`KNOWN_SETS`), so that DeepSpeed-Chat's
recipes train on the same texts here.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
from fsspec.utils import glob_translate

from engine.errors import UserError
from engine.models.model_paths import can_be_hub_name, one_line
from training.data.files import (
    ENDINGS,
    ArrowRecords,
    DataFile,
    Records,
    check_arrow,
    data_ending,
    quoted,
    read_records,
    unread_columns,
)

HELD_OUT_SPLITS = {  # {split: words that mean it}; the first of these splits that a data set has is held out
    "test": {"test", "testing", "held", "heldout", "holdout"},
    "validation": {"validation", "valid", "val", "dev"},
    "eval": {"eval", "evaluation"},
}
WORDS = HELD_OUT_SPLITS | {"train": {"train", "training"}}
SHARD = re.compile(r"(.+)-\d+-of-\d+\b")  # train_sft-00000-of-00003.parquet, as `datasets` names files
NO_DATA = {"README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"}
COLUMNS = ("messages", "conversations", "text", "prompt", "chosen", "rejected", "response", "completion")
SHOWN = 5  # number of files that a line names
DEEPSPEED_CHAT_FILES = "local/jsonfile"  # DeepSpeed-Chat's name for data/train.json and data/eval.json
PROBE_SECONDS = 10
Splits = dict[str, list[Path | Records]]  # {split: its records, or the files that hold them}


@dataclass(frozen=True, slots=True)
class Source:
    """One data set. training: empty if the data set comes with held-out splits only. held_out: the held-out split that
    it comes with; empty if it has none. note: a line about what is not trained on; "" if there is nothing to tell."""

    name: str
    training: list[Records]
    held_out: list[Records]
    note: str = ""


def name_and_split(given: str) -> tuple[str, str | None]:
    """("data", "eval") for "data:eval"; (given, None) for a name without a split, or if a file has this very name."""
    name, _, split = given.rpartition(":")
    named = name and re.fullmatch(r"[\w-]+", split) and not Path(given).exists()
    return (name, split) if named else (given, None)


def open_source(given: str, config_name: str | None = None) -> Source:
    """The data set of this name: a file, a folder, or a name on the Hub; a split of it, as in "data:eval".

    config_name: which configuration to read, for a data set that has several. Raises: UserError if there is no data set
    of this name, or if the data set cannot be read, or the Hub cannot be reached.
    """
    name, asked = name_and_split(given)
    path, unread = Path(name).expanduser(), []
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except OSError as error:  # no permission to enter a folder of the path
        raise UserError(f"{name}: cannot be looked at ({error.strerror}). Check the path.") from None
    if is_folder:
        splits, unread = _folder_splits(path, config_name)
    elif name == DEEPSPEED_CHAT_FILES:
        splits = {split: [read_records(Path("data") / f"{split}.json")] for split in ("train", "eval")}
    elif exists or is_path(name):
        splits = {"train": [read_records(path)]}
    else:
        splits = _hub_splits(name, config_name)
    chosen = _chosen_splits(name, asked, splits)
    training, held_out = (_read(path, splits.get(split, [])) for split in chosen)
    note = "" if asked else _note(name, splits, *chosen, unread)
    change = known_change(name)
    if change is not None:
        training, held_out = ([ChangedRecords(part, change, name) for part in parts] for parts in (training, held_out))
    return Source(given, training, held_out, note)


def is_path(name: str) -> bool:
    """Whether the name can only be a path, not a name on the Hub."""
    return data_ending(name) in ENDINGS or not can_be_hub_name(name)


def split_of(name: str) -> str | None:
    """The split of which a word in the name speaks: "eval" for eval_prompts and for testSets "test"; None without such
    a word. A name with several words is held out."""
    words = {re.sub("(set)?s?$", "", word.lower()) for word in re.findall("[A-Z]?[a-z]+|[A-Z]+", name)}
    return next((split for split, known in WORDS.items() if known & words), None)


def _chosen_splits(name: str, asked: str | None, splits: Splits) -> tuple[str | None, str | None]:
    """(the split to train on, the split to hold out) of a data set's splits; None where there is none. asked: the only
    split that is read."""
    if asked is not None:
        if asked not in splits:
            raise UserError(f"{name}: found no split {asked}; it has {', '.join(splits)}.")
        return asked, None
    kinds = {split: split_of(split) for split in sorted(splits, key=len)}
    others = [split for split in splits if kinds[split] in ("train", None)]
    if "train" not in splits and len(others) > 1:
        raise UserError(
            f"{name}: found the splits {', '.join(splits)}, and none is called train. Name the one that is meant: "
            f"{name}:{others[0]}."
        )
    held_out = next((split for kind in HELD_OUT_SPLITS for split in kinds if kinds[split] == kind), None)
    return "train" if "train" in splits else next(iter(others), None), held_out


def _note(name: str, splits: Splits, training: str | None, held_out: str | None, unread: list[str]) -> str:
    """The note of a `Source`. unread: files that are in no split."""
    unread = [split for split in splits if split not in (training, held_out)] + unread
    files = [part.name for part in splits.get(held_out, []) if isinstance(part, Path)]
    apart = [f"held out: {held_out} ({_few(files)})" if files else f"held out: {held_out}"]
    told = apart * bool(files or not training) + [f"not read: {_few(unread)}"] * bool(unread)
    return f"{name}: {'; '.join(told)}. To train on a part, name its file or split ({name}:SPLIT)." if told else ""


def _few(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else "")


def _read(path: Path, parts: list[Path | Records]) -> list[Records]:
    """The records of each part of a split of the folder `path`. Raises UserError if its files are of several kinds: by
    their endings, or by the columns of their first records."""
    read = [read_records(part) if isinstance(part, Path) else part for part in parts]
    kinds = {}
    for file, records in zip(parts, read):
        if isinstance(file, Path) and len(records) and isinstance(first := records[0][1], dict):
            columns = [column for column in COLUMNS if column in first]
            kind = " ".join([data_ending(file).removesuffix("l"), *columns])
            kinds.setdefault(kind, f"{file.relative_to(path)} ({', '.join(columns)})")
    if len(kinds) > 1:
        raise UserError(
            f"{path}: found files of several kinds, by endings or columns: {'; '.join(kinds.values())}. Give those "
            "that are meant instead of the folder."
        )
    return read


def _folder_splits(path: Path, config_name: str | None = None) -> tuple[Splits, list[str]]:
    """(splits of a folder, names of files in it that are in no split). The folder was written by `save_to_disk`, or it
    holds data files."""
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return _saved_splits(path), []
    try:
        files = [file.relative_to(path) for file in sorted(path.rglob("*"), key=str) if file.is_file()]
        files = [file for file in files if not any(part.startswith((".", "__")) for part in file.parts)]
        data = [file for file in files if data_ending(file) in ENDINGS and file.name not in NO_DATA]
        if not data:
            raise ValueError(f"no file in it ends in {', '.join(ENDINGS)}")
        splits = _splits_of_card(path, data, config_name) or _splits_by_name(data)
    except Exception as error:  # a README.md can make the libraries raise any kind of error
        raise UserError(
            f"{path}: found no data set in this folder ({one_line(error)}). Give the files that are meant, or a "
            "folder of .jsonl, .json, .csv or .parquet files, or one of save_to_disk."
        ) from None
    unread = set(files).difference(*splits.values())
    unread = [str(file) for file in sorted(unread) if file.name not in NO_DATA and file.suffix not in ("", ".md")]
    return {split: [path / file for file in part] for split, part in splits.items()}, unread


def _splits_by_name(files: list[Path]) -> dict[str, list[Path]]:
    """{split: its files}. The outermost folder with a split's word in its name decides, else the file's name. Files
    without such a word are for training; but beside files whose words say so they are in no split."""
    splits: dict[str | None, list[Path]] = {}
    for file in files:
        shard = SHARD.match(file.name)
        named = [*map(split_of, file.parts[:-1]), shard[1] if shard else split_of(file.name.split(".")[0])]
        splits.setdefault(next(filter(None, named), None), []).append(file)
    unnamed = splits.pop(None, [])
    if unnamed and "train" not in map(split_of, splits):
        splits["train"] = unnamed
    return splits


def _splits_of_card(path: Path, files: list[Path], config_name: str | None) -> dict[str, list[Path]]:
    """{split: its files} by the `configs` of the folder's README.md, as on the Hub; {} if it has none. Its patterns are
    compared with the names of the files in the folder, so they reach no other file and no address."""
    card = huggingface_hub.metadata_load(path / "README.md") if (path / "README.md").is_file() else None
    configs = {config["config_name"]: config for config in (card or {}).get("configs") or []}
    if not configs:
        return {}
    default = [name for name in configs if len(configs) == 1 or name == "default" or configs[name].get("default")]
    config = configs.get(config_name or next(iter(default), None))
    if config is None:
        raise ValueError(f"README.md has the configurations {', '.join(configs)}")
    folder = config.get("data_dir") or ""
    listed = config.get("data_files")
    splits = {}
    if listed is None:
        return _splits_by_name([file for file in files if file.is_relative_to(folder)])
    for each in [listed] if isinstance(listed, str) else listed:
        split, patterns = ("train", each) if isinstance(each, str) else (each["split"], each["path"])
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            shown = re.compile(glob_translate(str(Path(folder, pattern))))
            found = [file for file in files if shown.match(str(file))]
            if not found:
                raise ValueError(f"README.md lists {pattern}, which is the relative name of no data file in it")
            splits.setdefault(split, []).extend(found)
    return {split: list(dict.fromkeys(found)) for split, found in splits.items()}


def _saved_splits(path: Path) -> Splits:
    """The splits of a folder that `save_to_disk` wrote. Raises UserError if it is broken, or names files elsewhere."""
    import datasets

    hashes = [bytes.fromhex(DataFile(file).hash()) for file in sorted(path.rglob("*")) if file.is_file()]
    try:
        several = path / "dataset_dict.json"
        for name in json.loads(several.read_text())["splits"] if several.exists() else [""]:
            for part in json.loads((path / name / "state.json").read_text())["_data_files"]:
                if name == ".." or "/" in name + part["filename"]:
                    raise ValueError(f"{name}/{part['filename']} is not the name of a file in it")
                check_arrow(path / name / part["filename"])
        saved = datasets.load_from_disk(str(path))
    except UserError:
        raise
    except Exception as error:  # bad files can make the library raise any kind of error
        raise UserError(
            f"{path}: found a data set of save_to_disk that is broken ({one_line(error)}). Save it again."
        ) from None
    return _dataset_splits(saved, str(path), hashlib.sha256(b"".join(hashes)).hexdigest())


def _hub_splits(name: str, config_name: str | None) -> Splits:
    from huggingface_hub import HfApi, constants

    if not constants.HF_HUB_OFFLINE:
        try:  # one request first: without a network the loader would retry for half a minute
            HfApi().dataset_info(name, timeout=PROBE_SECONDS)
        except Exception as error:  # also errors of the HTTP library, which may be one of several
            raise UserError(
                f"{name}: found no such file or folder in {Path.cwd()}, and no data set of "
                f"that name on the Hugging Face Hub can be reached ({one_line(error)}). Check the name; "
                "without a network, give local files, or set HF_HUB_OFFLINE=1 to read a data set that was "
                "loaded before."
            ) from None
    import datasets

    try:
        return _dataset_splits(datasets.load_dataset(name, config_name), name, None)
    except Exception as error:  # any kind of error of the library
        raise UserError(
            f"{name}: the data set cannot be loaded ({one_line(error)}). Check the name, or "
            "save it as .jsonl or .parquet files and give those."
        ) from None


def _dataset_splits(loaded, name: str, content: str | None) -> Splits:
    """The splits of a `Dataset` or `DatasetDict`. content: a hash of its files; None to use the library's
    fingerprint."""
    parts = loaded if isinstance(loaded, dict) else {"train": loaded}
    splits = {}
    for split, part in parts.items():
        table, fingerprint = part.data.table, f"{content or part._fingerprint} {split}"
        splits[str(split)] = [ArrowRecords(table, unread_columns(table.schema), f"{name}, split {split}", fingerprint)]
    return splits


class ChangedRecords:
    """The records of a known data set. Each is changed when it is asked for. name: the name of the change, which is
    part of the fingerprint."""

    def __init__(self, records: Records, change: Callable[[dict], dict], name: str):
        self.records = records
        self.change = change
        self.fingerprint = f"{records.fingerprint} {name}"

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> tuple[str, object]:
        where, record = self.records[index]
        try:
            return where, self.change(record)
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{where}: found {quoted(str(record))}, which lacks what this data set's records have "
                f"({error}). Save it with columns of other names and give that file."
            ) from None


def known_change(name: str) -> Callable[[dict], dict] | None:
    """The function that changes each record of the data set `name`, or of a local copy whose path ends with the name of
    a known data set; None for other data sets."""
    return next((change for known, change in KNOWN_SETS.items() if f"/{name.rstrip('/')}".endswith(f"/{known}")), None)


def _dialogue(record: dict, prompt: str, **answers: str) -> dict:
    """The record with its question and answers as the texts of a dialogue. prompt: the question. answers: {name of the
    column: answer}."""
    texts = {name: _between(" ", record[column]) for name, column in answers.items()}
    return {**record, "prompt": _between(" Human: ", record[prompt], " Assistant:"), **texts}


def _between(before: str, text: str | None, after: str = "") -> str | None:
    return before + text + after if isinstance(text, str) else text  # null stays null


def _spaced(record: dict) -> dict:
    return record | {name: _between(" ", record[name]) for name in ("prompt", "chosen", "rejected") if name in record}


def _shp(record: dict) -> dict:
    better, worse = ("A", "B") if record["labels"] == 1 else ("B", "A")
    return _dialogue(record, "history", chosen=f"human_ref_{better}", rejected=f"human_ref_{worse}")


def _yitingxie(record: dict) -> dict:
    answers = {name: record[name].split("Assistant:")[-1] for name in ("chosen", "rejected")}
    return {**record, "prompt": record["prompt"] + "Assistant:", **answers}


KNOWN_SETS: dict[str, Callable[[dict], dict]] = {
    DEEPSPEED_CHAT_FILES: _spaced,
    "Dahoas/synthetic-instruct-gptj-pairwise": lambda record: _dialogue(
        record, "prompt", chosen="chosen", rejected="rejected"
    ),
    "stanfordnlp/SHP": _shp,
    "wangrui6/Zhihu-KOL": lambda record: _dialogue(record, "INSTRUCTION", response="RESPONSE"),
    "yitingxie/rlhf-reward-datasets": _yitingxie,
}
