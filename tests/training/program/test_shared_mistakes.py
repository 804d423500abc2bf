"""A mistake that all ranks have found together keeps its exit code, though the launcher ends those that are behind."""

import os
import signal
import time

from engine.errors import SharedError
from tests.e2e.programs import Tiny, command_line
from tests.ports import free_port
from training import step3_rlhf
from training.flags.rlhf_arguments import RLHFFlags
from training.preflight import in_short
from training.program import startup, watch


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

    monkeypatch.setattr(in_short, "agree", refuse)
    monkeypatch.setattr(watch, "end", lambda code, message: ended.append(code))
    monkeypatch.setattr(startup, "time", type("Clock", (), {"sleep": staticmethod(launcher_ends_this)}))
    words = command_line(Tiny(tmp_path).flags(3, output_dir=tmp_path / "out"))
    assert startup.run(step3_rlhf.main, RLHFFlags, "", words) == 2
    assert ended == []
