"""How the service ends, and how it does not begin."""

import importlib.util
import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from scripts.harness.models import make_causal_lm, make_scorer
from tests.serving import make_endless, serving, until
from training.tools.serve.__main__ import main

pytest.importorskip("fastapi", reason="the service needs fastapi: pip install .[serve]")


@pytest.mark.slow
def test_what_is_not_finished_in_time_is_told_so(tmp_path):
    words = ("--drain_seconds", "0.3", "--max_seq_len", "200000", "--max_answer_seq_len", "100000")
    body = {"prompt": "w05", "temperature": 0, "max_tokens": 50_000}
    models = {"endless": make_endless(tmp_path / "endless", positions=200_000)}
    with serving(models, tmp_path / "log", *words, "--rows_at_once", "1") as running:
        with ThreadPoolExecutor(1) as clients:
            answer = clients.submit(running.request, "PUT", "/", body)
            until(lambda: running.request("GET", "/health")[1]["decoding"] == 1, 30)
            assert running.end(signal.SIGINT) == 1
            status, found, _ = answer.result()
        assert status == 503 and "not done in time" in found["error"]["message"]
        log = running.log.read_text()
        assert "not finished within --drain_seconds 0.3: 1" in log and "Traceback" not in log


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    make_causal_lm(folder / "one")
    make_scorer(folder / "reward")
    make_scorer(folder / "other")
    tokenizer = folder / "other" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"w50"', '"x50"'))
    return folder


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "nothing to serve: give --models"),
        (["--models", "one"], "--models one: give NAME=PATH"),
        (["--models", "seed={0}/one"], "seed is taken"),
        (["--models", "a={0}/one", "a={0}/one"], "the name a is given twice"),
        (["--models", "a={0}/none/none"], "--models a: there is no folder"),
        (["--models", "a={0}/reward"], "--models a: .* is no language model"),
        (["--reward_model_name_or_path", "{0}/one"], "is no reward model"),
        (["--models", "a={0}/one", "--reward_model_name_or_path", "{0}/other"], "gives other ids"),
        (["--models", "a={0}/one", "--port", "70000"], "--port 70000: must be at most 65535"),
        (["--models", "a={0}/one", "--device", "tpu"], "--device tpu: give cpu"),
        (["--models", "a={0}/one", "--device", "cuda:99"], "--device cuda:99: torch sees"),
        (["--models", "a={0}/one", "--max_body_mb", "inf"], "--max_body_mb inf"),
        (["--models", "a={0}/one", "--chat_template", "{0}/none"], "--chat_template .* cannot be read"),
        (["--modles", "a={0}/one"], "Did you mean --models"),
    ],
)
def test_a_mistake_ends_it_before_it_begins(folder, capfd, words, message):
    port = [] if "--port" in words else ["--port", "0"]
    code = main([*(word.format(folder) for word in words), *port])
    error = capfd.readouterr().err.splitlines()[-1]
    assert code == 2 and error.startswith("error: ") and re.search(message, error), error


def test_a_port_that_is_taken(folder, capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--models", f"a={folder}/one", "--port", str(port)]) == 2
    assert f"--port {port}: another program listens there" in capfd.readouterr().err


def test_packages_that_are_missing_are_named_with_the_command(folder, capfd, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "uvicorn" else find(name))
    assert main(["--models", f"a={folder}/one"]) == 2
    assert "uvicorn is not installed" in (error := capfd.readouterr().err) and "pip install '.[serve]'" in error
