"""What the tests of whole programs share."""

import os
from pathlib import Path

import pytest

from engine.zero.communication import init
from scripts.harness.bad_world import BadWorld
from scripts.harness.programs import Tiny


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
def world(tiny, tmp_path_factory) -> BadWorld:
    """Files and folders that do not work."""
    return BadWorld(tmp_path_factory.mktemp("bad"), tiny)


@pytest.fixture
def bad(world) -> Path:
    """Where they are."""
    return world.folder
