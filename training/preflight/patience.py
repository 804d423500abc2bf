"""How long a rank waits for answers of the host that serves the ranks' store."""

import os
import socket
import sys
import threading
import time

from training.program.roll_call import USER_ERROR


class Patience:
    """Within this block the process ends with code 2 where rank 0 has not answered for so many seconds: torch's store
    waits for ever for a host that is cut off."""

    def __init__(self, seconds: float):
        self._seconds, self._since, self._over = seconds, time.monotonic(), threading.Event()

    def __enter__(self) -> "Patience":
        self.renew()
        threading.Thread(target=self._look, name="patience", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def renew(self) -> None:
        """Rank 0 has answered."""
        self._since = time.monotonic()

    def _look(self) -> None:
        while not self._over.wait(min(1.0, self._seconds)):
            if time.monotonic() > self._since + self._seconds:
                where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
                told = f"no answer from rank 0 at {where} within {self._seconds:.0f} s"
                print(f"error: on {socket.gethostname()}: {told}", file=sys.stderr, flush=True)
                os._exit(USER_ERROR)
