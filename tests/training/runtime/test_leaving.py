"""The end of a process: its exit code is the run's, whatever libraries do while they are taken down."""

import subprocess
import sys

import pytest

from training.runtime import watch
from training.runtime.stopping import Reason, StopRequest
from training.runtime.watch import Watch

# abort() stands in the place of a library's destructor, as gloo's threads have been seen to end runs that were done.
PROGRAM = """
import atexit, ctypes, sys
from training.runtime.startup import leave

libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc.abort, None, None)
atexit.register(print, "closed what was open")
print("said")
leave(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code, said", [(0, "said\nclosed what was open\n"), (1, "said\n"), (75, "said\n")])
def test_no_destructor_changes_the_exit_code(code, said):
    ended = subprocess.run([sys.executable, "-c", PROGRAM, str(code)], capture_output=True, text=True, timeout=600)
    assert (ended.returncode, ended.stdout) == (code, said), ended.stderr


@pytest.mark.parametrize("say", [lambda own: own.leave(2), lambda own: own.tell("no such folder", 2)])
def test_a_rank_that_ends_by_itself_keeps_its_code_where_the_launcher_then_asks_it_to_end(say, monkeypatch):
    ended = []
    monkeypatch.setattr(watch, "end", lambda code, message: ended.append(code))
    monkeypatch.setattr(watch, "LAST_LOOK", 0.0)
    own = Watch(StopRequest(), 30.0)
    say(own)
    own.request.ask(
        Reason.SIGTERM
    )  # srun's, which takes the largest code: 75 would have the job put back and run again
    own._follow()
    assert ended == []
