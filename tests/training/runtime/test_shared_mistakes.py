"""Mistakes in flags: told to ranks on hosts that do not have them; those that all ranks share keep their exit code."""

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

from engine import distributed
from engine.errors import SharedError
from scripts.harness import free_port
from scripts.harness.programs import Tiny, command_line
from training import step3_rlhf
from training.config.step3 import RLHFFlags
from training.runtime import joining, startup, watch
from training.runtime.joining import MeetingPoint
from training.tools.preflight import preflight


def test_a_file_that_one_host_lacks_is_told_where_the_others_wait(tmp_path, monkeypatch, capfd):
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**place, "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu02")
    monkeypatch.setattr(joining, "LOOK_EVERY", 0.0)
    served = distributed.key_value_store("127.0.0.1", int(os.environ["MASTER_PORT"]), serve=True)
    first, missing = MeetingPoint({**os.environ, "RANK": "0"}), tmp_path / "none.yaml"
    flags = Tiny(tmp_path).flags(3, output_dir=tmp_path / "out", config=missing)
    with ThreadPoolExecutor() as pool:
        hearing = pool.submit(_heard, first)
        assert startup.run(step3_rlhf.main, RLHFFlags, "", command_line(flags)) == 2
        message, code = hearing.result()
    assert (message.startswith("error: on gpu02: "), str(missing) in message, code) == (True, True, 2), message
    assert "error" not in capfd.readouterr().err  # rank 0 prints it
    del served


def _heard(first: MeetingPoint) -> tuple[str, int]:
    """By rank 0: what another one has said."""
    deadline = time.monotonic() + 60.0
    while (failure := first.failure()) is None:
        assert time.monotonic() < deadline, "nothing was said"
        time.sleep(0.05)
    first.let_others_hear()
    return failure


def test_a_rank_that_lets_the_first_print_is_not_taken_for_one_that_was_asked_to_end(tmp_path, monkeypatch):
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**place, "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    ended, pause = [], time.sleep

    def refuse(args):
        raise SharedError("the nodes of this run do not fit together: gpu02: has torch 2.12.1, the others 2.13.0.")

    def launcher_ends_this(seconds: float) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        pause(1.0)

    monkeypatch.setattr(preflight, "agree", refuse)
    monkeypatch.setattr(watch, "end", lambda code, message: ended.append(code))
    monkeypatch.setattr(startup, "time", type("Clock", (), {"sleep": staticmethod(launcher_ends_this)}))
    words = command_line(Tiny(tmp_path).flags(3, output_dir=tmp_path / "out"))
    assert startup.run(step3_rlhf.main, RLHFFlags, "", words) == 2
    assert ended == []
