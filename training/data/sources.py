"""Opens the data sets that `--data_path` names. A `Source` holds a data set's training records and held-out records.

    source = open_source("Dahoas/rm-static")        # or a file, or a folder
    source.training, source.held_out                # lists of Records

A name is looked for on this machine first. The Hugging Face Hub is never asked for a name that can only be a path. The
records of some well-known data sets are changed as DeepSpeed-Chat changes them (`KNOWN_SETS`), so that DeepSpeed-Chat's
recipes train on the same texts here.
"""

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from engine.errors import UserError
from engine.models.places import can_be_hub_name
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

HELD_OUT_SPLITS = ("test", "validation", "eval")  # the first of these splits that a data set has is held out
DEEPSPEED_CHAT_FILES = "local/jsonfile"  # DeepSpeed-Chat's name for data/train.json and data/eval.json
PROBE_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Source:
    """One data set. held_out: the held-out split that the data set comes with; empty if it has none."""

    name: str
    training: list[Records]
    held_out: list[Records]


def open_source(name: str, config_name: str | None = None) -> Source:
    """The data set of this name: a file, a folder, or a name on the Hub.

    config_name: which configuration to read, for a data set that has several on the Hub. Raises: UserError if there is
    no data set of this name, or if the data set cannot be read, or the Hub cannot be reached.
    """
    if not name:
        raise UserError("--data_path: found an empty name; give a file, a folder, or a data set on the Hub.")
    path = Path(name).expanduser()
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except OSError as error:  # no permission to enter a folder of the path
        raise UserError(f"{name}: cannot be looked at ({error.strerror}). Check the path.") from None
    if is_folder:
        splits = _folder_splits(path, config_name)
    elif name == DEEPSPEED_CHAT_FILES:
        splits = {split: [read_records(Path("data") / f"{split}.json")] for split in ("train", "eval")}
    elif exists or is_path(name):
        splits = {"train": [read_records(path)]}
    else:
        splits = _hub_splits(name, config_name)
    training, held_out = _chosen_splits(name, splits)
    change = known_change(name)
    if change is not None:
        training, held_out = ([ChangedRecords(part, change, name) for part in parts] for parts in (training, held_out))
    return Source(name, training, held_out)


def is_path(name: str) -> bool:
    """Whether the name can only be a path, not a name on the Hub."""
    return data_ending(name) in ENDINGS or not can_be_hub_name(name)


def _chosen_splits(name: str, splits: dict[str, list[Records]]) -> tuple[list[Records], list[Records]]:
    """(training records, held-out records) of a data set's splits. The held-out records may be []."""
    others = [split for split in splits if split not in HELD_OUT_SPLITS]
    if "train" not in splits and len(others or splits) > 1:
        raise UserError(
            f"{name}: found the splits {', '.join(splits)}, and none is called train. Save the "
            "one that is meant as a .jsonl or .parquet file and give that."
        )
    training = "train" if "train" in splits else next(iter(others or splits))
    held_out = next((split for split in HELD_OUT_SPLITS if split in splits and split != training), None)
    return splits[training], splits[held_out] if held_out else []


def _folder_splits(path: Path, config_name: str | None = None) -> dict[str, list[Records]]:
    """The splits of a folder. The folder was written by `save_to_disk`, or it holds data files. Data files are assigned
    to splits by the rules for data-set repositories: names such as train.json and test.json, folders such as train/ and
    test/, or a README.md that lists the files of each split."""
    import datasets

    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        content = hash_of_files(file for file in sorted(path.rglob("*")) if file.is_file())
        try:
            several = path / "dataset_dict.json"
            for name in json.loads(several.read_text())["splits"] if several.exists() else ["."]:
                for part in json.loads((path / name / "state.json").read_text())["_data_files"]:
                    check_arrow(path / name / part["filename"])
            saved = datasets.load_from_disk(str(path))
        except UserError:
            raise
        except Exception as error:  # bad files can make the library raise any kind of error
            raise UserError(
                f"{path}: found a data set of save_to_disk that is broken ({_first_line(error)}). Save it again."
            ) from None
        return _dataset_splits(saved, str(path), content)
    try:
        with tempfile.TemporaryDirectory() as unused:  # the builder asks for a cache folder, and writes nothing
            found = datasets.load_dataset_builder(str(path.absolute()), config_name, cache_dir=unused).config.data_files
    except Exception as error:  # any kind of error of the library; a loading script is not run
        raise UserError(
            f"{path}: found no data set in this folder ({_first_line(error)}). Give a folder of .jsonl, "
            ".json, .csv or .parquet files, one of save_to_disk, or a file."
        ) from None
    files = {str(split): [Path(file) for file in paths] for split, paths in found.items()}
    used = {data_ending(file) for paths in files.values() for file in paths}
    _refuse_mixture(path, used)
    if used.issubset(ENDINGS):
        return {split: [read_records(file) for file in paths] for split, paths in files.items()}
    content = hash_of_files(file for paths in files.values() for file in paths)
    return _dataset_splits(_loaded(str(path.absolute()), config_name), str(path), content)  # .bz2, say


def _refuse_mixture(path: Path, used: set[str]) -> None:
    """Raise UserError if the folder has data files that would be ignored, because most files have another ending. used:
    the files that would be read."""
    stray = next(
        (
            file
            for file in sorted(path.iterdir())
            if data_ending(file) in set(ENDINGS) - used and file.name != "dataset_infos.json"
        ),
        None,
    )
    if stray and not (path / "README.md").exists():
        raise UserError(
            f"{path}: found files that end in {', '.join(sorted(used))} and also {stray.name}; the files "
            "of a folder end alike. Give the files one by one instead of the folder."
        )


def _hub_splits(name: str, config_name: str | None) -> dict[str, list[Records]]:
    from huggingface_hub import HfApi, constants

    if not constants.HF_HUB_OFFLINE:
        try:  # one request first: without a network the loader would retry for half a minute
            HfApi().dataset_info(name, timeout=PROBE_SECONDS)
        except Exception as error:  # also errors of the HTTP library, which may be one of several
            raise UserError(
                f"{name}: found no such file or folder in {Path.cwd()}, and no data set of "
                f"that name on the Hugging Face Hub can be reached ({_first_line(error)}). Check the name; "
                "without a network, give local files, or set HF_HUB_OFFLINE=1 to read a data set that was "
                "loaded before."
            ) from None
    return _dataset_splits(_loaded(name, config_name), name, None)


def _loaded(name: str, config_name: str | None = None):
    import datasets

    try:
        return datasets.load_dataset(name, config_name)
    except Exception as error:  # any kind of error of the library
        raise UserError(
            f"{name}: the data set cannot be loaded ({_first_line(error)}). Check the name, or "
            "save it as .jsonl or .parquet files and give those."
        ) from None


def _dataset_splits(loaded, name: str, content: str | None) -> dict[str, list[Records]]:
    """The splits of a `Dataset` or `DatasetDict`. content: a hash of its files; None to use the library's
    fingerprint."""
    parts = loaded if isinstance(loaded, dict) else {"train": loaded}
    splits = {}
    for split, part in parts.items():
        table, fingerprint = part.data.table, f"{content or part._fingerprint} {split}"
        splits[str(split)] = [ArrowRecords(table, unread_columns(table.schema), f"{name}, split {split}", fingerprint)]
    return splits


def hash_of_files(paths: Iterable[Path]) -> str:
    """SHA-256 of the contents of the files, in this order, as hexadecimal digits."""
    total = hashlib.sha256()
    for path in paths:
        total.update(bytes.fromhex(DataFile(path).hash()))
    return total.hexdigest()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].removesuffix(".")[:300]


class ChangedRecords:
    """The records of a known data set. Each is changed when it is asked for. name: the name of the change, which is
    part of the fingerprint."""

    def __init__(self, records: Records, change: Callable[[dict], dict], name: str):
        self.records, self.change, self.fingerprint = records, change, f"{records.fingerprint} {name}"

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
