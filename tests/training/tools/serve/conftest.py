"""One service for all tests of this folder that leave it as it is."""

import pytest

from tests.serving import make_models, serving

LIMITS = ("--queue_size", "150", "--max_body_mb", "0.1", "--body_seconds", "1", "--max_answer_seq_len", "40")


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def service(models, tmp_path_factory):
    pytest.importorskip("fastapi", reason="the service needs fastapi: pip install .[serve]")
    log = tmp_path_factory.mktemp("service") / "log"
    with serving(models, log, *LIMITS) as running:
        yield running
