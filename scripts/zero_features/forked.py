"""Step 3 on several ranks, each a fork of a process that has everything imported: its own start takes no time."""

import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.ports import free_port

NAMES = ("stdout", "stderr")
IMPORTED = (
    "training.step3_rlhf",
    "training.flags.rlhf_arguments",
    "deepspeed",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "pandas",
    "pyarrow.compute",
    "torch.utils.tensorboard",
    "torch.profiler",
)


@dataclass(frozen=True)
class Ended:
    """How the ranks of a run ended, and what they printed: by rank, an exit code (None: killed, for it hung)."""

    codes: list[int | None]
    stdout: list[str]
    stderr: list[str]
    seconds: float

    @property
    def printed(self) -> str:
        """All of it."""
        return "\n".join(self.stdout + self.stderr)


class Started:
    """Step 3 with this command line on so many ranks, which are killed after `limit` seconds.

    folder: where they write what they print.
    """

    def __init__(self, words: Sequence[str], ranks: int, limit: float, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.started, self.limit = folder, time.monotonic(), limit
        port = free_port()
        self.pids = [_forked(words, rank, ranks, port, folder) for rank in range(ranks)]
        self.codes: dict[int, int | None] = {}

    def ended(self) -> Ended | None:
        """How it ended, if it has."""
        late = time.monotonic() > self.started + self.limit
        for rank, pid in enumerate(self.pids):
            if rank in self.codes:
                continue
            if late:
                os.killpg(pid, signal.SIGKILL)
            found, status = os.waitpid(pid, 0 if late else os.WNOHANG)
            if found:
                self.codes[rank] = None if late else os.waitstatus_to_exitcode(status)
        if len(self.codes) < len(self.pids):
            return None
        ranks = range(len(self.pids))
        texts = [[(self.folder / f"{name}{rank}").read_text(errors="replace") for rank in ranks] for name in NAMES]
        return Ended([self.codes[rank] for rank in ranks], *texts, time.monotonic() - self.started)


def import_all() -> None:
    """Import what a run imports, also where it does so late."""
    for name in IMPORTED:
        importlib.import_module(name)


def _forked(words: Sequence[str], rank: int, ranks: int, port: int, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 70  # of what no program of ours ends with
    try:
        os.setsid()
        for number, name in enumerate(NAMES, start=1):
            os.dup2(os.open(folder / f"{name}{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        os.environ |= {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in own.items()}
        code = _program(words)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _program(words: Sequence[str]) -> int:
    from training import step3_rlhf
    from training.flags.rlhf_arguments import RLHFFlags
    from training.program.startup import run

    return run(step3_rlhf.main, RLHFFlags, "step 3", words)
