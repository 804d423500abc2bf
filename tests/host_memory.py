"""Host memory of several processes together, sampled while they work.

with HostMemory(pids) as meter:
    load()
meter.peak - meter.before   # bytes
"""

import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path

_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ ")  # the line of /proc/PID/smaps that a mapping begins with


class HostMemory:
    """Bytes of host memory of some processes together (PSS: a page that n of them have mapped counts 1/n for each, so
    that one of a file which all read counts once): `before`, the `peak` of samples within this context, and `after`.

    A page of a file that is mapped counts from when it is first read until it is unmapped; the system's own cache of
    files does not count. Nor do libraries: their pages are shared with whatever else runs on the machine, so that a
    share of them grows when a process ends that has nothing to do with these.
    """

    def __init__(self, pids: Sequence[int], interval: float = 0.01):
        self.pids, self.interval = pids, interval
        self.before = self.peak = self.after = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "HostMemory":
        self.before = self.peak = self.now()
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._done.set()
        self._thread.join()
        self.after = self.now()

    def now(self) -> int:
        """Bytes at this moment."""
        return sum(_pss(pid) for pid in self.pids)

    def _sample(self) -> None:
        while not self._done.is_set():
            self.peak = max(self.peak, self.now())
            time.sleep(self.interval)


def _pss(pid: int) -> int:
    kilobytes, counts = 0, True
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if line.startswith("Pss:"):
            kilobytes += int(line.split()[1]) * counts
        elif _MAPPING.match(line):
            counts = ".so" not in line
    assert kilobytes, "the system does not count"
    return kilobytes * 1024
