"""What the tests of whole programs share."""
import pytest

from engine import distributed
from tests.e2e.programs import Tiny


@pytest.fixture(scope="session", autouse=True)
def process_group() -> None:
    """What DeepSpeed prints when it starts belongs to no test's output."""
    distributed.init()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Tiny:
    """Models and data of a few kilobytes."""
    return Tiny(tmp_path_factory.mktemp("tiny"))
