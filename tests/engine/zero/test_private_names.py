"""Every private name of DeepSpeed's that engine/zero uses is where the table has it; what has moved is named."""

import functools
import importlib
import inspect
import re

import deepspeed
import pytest

from scripts.harness.ranks import run_ranks
from tests.engine.zero.private_names import PRIVATE_NAMES, PrivateName


def moved(entry: PrivateName) -> str | None:
    """A sentence about a name that is not where the table has it; None if it is there."""
    owner = _imported(entry.owner)
    if owner is not None:
        kinds = inspect.getmro(owner)[:-1] if inspect.isclass(owner) else [owner]
        set_as_attribute = re.compile(rf"\.{entry.name}\b\s*(:[^=\n]+)?=[^=]")
        if hasattr(owner, entry.name) or any(set_as_attribute.search(_source(kind)) for kind in kinds):
            return None
        if inspect.isclass(owner) and entry.name in getattr(owner, "__annotations__", {}):
            return None
    return (
        f"{entry.owner}.{entry.name} has moved in deepspeed {deepspeed.__version__}. engine/zero needs it for: "
        f"{entry.use}. Public instead: {entry.public}."
    )


def _imported(path: str):
    module, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        pass
    try:
        return getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError:
        return None


@functools.cache
def _source(kind) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""


@pytest.mark.parametrize("entry", PRIVATE_NAMES, ids=lambda entry: f"{entry.owner.rpartition('.')[2]}.{entry.name}")
def test_it_is_there(entry):
    assert moved(entry) is None, moved(entry)


@pytest.mark.slow
def test_how_shards_lie(tmp_path):
    """Rank r holds the r-th run of the flattened weight, all runs of one length, the last one padded with anything.

    By hand: 15 numbers on 2 ranks are runs of 8, of which the last has 7; 1 number is a run of 1 and one of padding.
    """
    one, other = run_ranks("tests.engine.zero.work_shards:shards", folder=str(tmp_path))
    assert one["matrix"].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert other["matrix"].tolist()[:7] == [8, 9, 10, 11, 12, 13, 14] and len(other["matrix"]) == 8
    assert one["number"].tolist() == [7.0] and len(other["number"]) == 1
    assert one["masters"] == other["masters"] == [("float32", 9)]
    assert one["refreshed"] == other["refreshed"] == [[float(2 * n) for n in range(15)]] * 2
