"""The host's name in a message, where a run has several."""

import socket
from collections.abc import Callable
from itertools import chain, repeat

import pytest

from engine import distributed
from engine.errors import SharedError, UserError
from training.data.tables import Found, KnownRows, handed_over
from training.runtime.agreement import agreed, checked


@pytest.fixture
def launched(monkeypatch) -> Callable:
    """A function that has this process launched so, on gpu1; with `others`, the (message, host) of the other ranks."""

    def launch(others=(), **environment):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(socket, "gethostname", lambda: "gpu1")
        said = chain([list(others)], repeat([(None, host) for _, host in others]))  # later they have nothing to say
        monkeypatch.setattr(distributed, "all_gather_objects", lambda own: [own, *next(said)])

    return launch


def missing():
    raise UserError("there is no folder X")


@pytest.mark.parametrize(
    "size, told", [("1", r"^on gpu1: there is no folder X$"), ("2", r"^there is no folder X$")], ids=["two", "one"]
)
def test_what_rank_0_alone_looks_at(size, told, launched):
    launched(RANK="0", WORLD_SIZE="2", LOCAL_SIZE=size)
    with pytest.raises(SharedError, match=told):
        checked(missing)


@pytest.mark.parametrize(
    "load, others, told",
    [
        (missing, [("there is no folder X", "gpu1")], "^there is no folder X$"),
        (missing, [(None, "gpu2")], "^on gpu1: there is no folder X$"),
        (lambda: 1, [("no disk", "gpu2"), (None, "gpu3"), ("no disk", "gpu4")], "^on gpu2, gpu4: no disk$"),
        (missing, [("there is no folder X", "gpu2")], "^there is no folder X$"),  # of no host in particular
        (missing, [("no disk", "gpu2")], "^on gpu1: there is no folder X$"),
    ],
)
def test_what_each_rank_looks_at(load, others, told, launched):
    launched(others)
    with pytest.raises(SharedError, match=told):
        agreed(load)


def test_what_none_finds_wrong(launched):
    launched([(None, "gpu2")])
    assert agreed(lambda: 1) == 1


def test_a_rank_takes_over_what_the_first_one_of_its_own_node_has_read(launched, monkeypatch):
    launched([], LOCAL_RANK="1")
    here, there = (Found([(KnownRows(rows, host),)]) for rows, host in ((3, "gpu1"), (5, "gpu2")))
    others = iter([[(None, "gpu1"), (None, "gpu2")], [(here, "gpu1"), (there, "gpu2")], [(None, "gpu1")]])
    monkeypatch.setattr(distributed, "all_gather_objects", lambda own: [own, *next(others)])
    assert agreed(handed_over(missing)) == (KnownRows(3, "gpu1"),)
