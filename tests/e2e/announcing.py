"""Step 3 that writes down, in the file $PHASES, when each rank enters which phase: run by trials that kill it."""

import json
import os
import time

from training.program import phases
from training.restarts.pending_point import PendingPoint
from training.step3_rlhf import program

WRITING = "writing beside training"


def announce(phase: str, step: int) -> None:
    """Add a line; one write, so that lines of several processes do not mix."""
    line = {"phase": phase, "step": step, "rank": int(os.environ["RANK"]), "pid": os.getpid(), "time": time.time()}
    descriptor = os.open(os.environ["PHASES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, json.dumps(line).encode() + b"\n")
    os.close(descriptor)


def announced() -> None:
    """Have phases of the main thread and the writing of restart points say when they begin."""
    enter, write = phases.Place.enter, PendingPoint._run

    def enter_and_announce(self, phase: str) -> None:
        announce(phase, self.step)
        enter(self, phase)

    def write_and_announce(self) -> None:
        announce(WRITING, self.step)
        write(self)
        announce(f"{WRITING} done", self.step)

    phases.Place.enter, PendingPoint._run = enter_and_announce, write_and_announce


if __name__ == "__main__":
    announced()
    program()
