"""One of two processes that build the same table: python build_cache.py FOLDER START, begins when the file START is."""

import sys
import time
from pathlib import Path

import pyarrow

from training.data.tables import MadeTable, cached_table


class Tokenizer:
    """As much of a tokenizer as a key is made from."""

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")


def main(folder: Path, start: Path) -> None:
    """Say that all is imported, wait, build, say what came of it."""
    print("ready", flush=True)
    while not start.exists():
        time.sleep(0.001)
    schema = pyarrow.schema({"n": pyarrow.int32()})
    numbers = ((n,) for n in range(20_000))
    table = cached_table(MadeTable(schema, lambda counts: numbers), folder, [], Tokenizer())
    assert table["n"].to_pylist() == list(range(20_000))
    print(f"{len(table)} rows")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
