"""What the tests of whole programs share."""

import os
from pathlib import Path

import pytest

from engine.zero.communication import init
from scripts.harness.bad_world import BadWorld
from scripts.harness.programs import Tiny
from tests.e2e.chain import Chain, run_chain
from tests.e2e.launching import stand_in


@pytest.fixture(scope="session", autouse=True)
def process_group() -> None:
    """What DeepSpeed prints when it starts belongs to no test's output."""
    init()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory) -> None:
    """Tokenised data of tests do not go into the user's cache."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Tiny:
    """Models and data of a few kilobytes."""
    return Tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def chain(tiny, tmp_path_factory) -> Chain:
    """The three steps, one after the other, and the last resumed: every test that asks looks at another side."""
    return run_chain(tiny, tmp_path_factory.mktemp("chain"))


@pytest.fixture(scope="session")
def world(tiny, tmp_path_factory) -> BadWorld:
    """Files and folders that do not work."""
    return BadWorld(tmp_path_factory.mktemp("bad"), tiny)


@pytest.fixture
def bad(world) -> Path:
    """Where they are."""
    return world.folder


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory) -> Path:
    """A folder for the PATH: python, deepspeed and pdsh print their words, a NUL behind each."""
    folder = tmp_path_factory.mktemp("stand_ins")
    for name in ("python", "deepspeed", "pdsh"):
        stand_in(folder / name, f'{name} "$@"')
    return folder
