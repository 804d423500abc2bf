"""The end of a process: its exit code is the run's, whatever libraries do while they are taken down."""

import subprocess
import sys

import pytest

# abort() stands in the place of a library's destructor, as gloo's threads have been seen to end runs that were done.
PROGRAM = """
import atexit, ctypes, sys
from training.program.startup import leave

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
