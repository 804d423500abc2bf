"""Letters between ranks before there is a process group, through the key-value store where they are to meet.

    rank 0                              another rank
    box = Mailbox.served(environment)   box = Mailbox.reached(environment, seconds)
    box.letters()   <----------------   box.post({...})
    box.answer(rank, {...})   ------>   box.wait(seconds)

No collective call and no library beside torch's store: a rank with another version of something can still say so.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Mapping

from engine import distributed
from engine.errors import UserError
from engine.json_objects import parsed
from training.program.environment import AGENTS_STORE

BETWEEN = 0.1  # seconds between looks, of each rank
CROWD = 30.0  # seconds in which the store answers each of many ranks that come at once


class NoAnswer(Exception):
    """Rank 0 cannot be reached, or says nothing; the message says since when."""


class Mailbox:
    """Rank 0's letters, and its answers to each rank.

    store: torch's. rank: whose side this is. name: of what is written about; a launcher that starts ranks anew keeps
    the store, so that the number of the start is in it.
    """

    def __init__(self, store, rank: int, name: str):
        self.rank = rank
        self._store, self._name = store, name
        self._number = f"{name}/letter"  # how many there are, and where each stands
        self._taken: set[int] = set()
        self._answers: dict[int, int] = {}

    @classmethod
    def served(cls, name: str, environment: Mapping[str, str] = os.environ) -> "Mailbox":
        """Rank 0's side; raises UserError where another process listens at MASTER_PORT."""
        try:
            store = _store(environment, serve=environment.get(AGENTS_STORE) != "True")
        except RuntimeError as error:
            raise UserError(
                f"MASTER_PORT {environment['MASTER_PORT']} cannot be listened at ({str(error).splitlines()[0]}). Give "
                "another port (--master_port)."
            ) from None
        return cls(store, 0, _of_start(name, environment))

    @classmethod
    def reached(cls, name: str, seconds: float, environment: Mapping[str, str] = os.environ) -> "Mailbox":
        """Another rank's side; raises NoAnswer where rank 0 does not serve it within so many seconds."""
        where = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
        deadline, reason = time.monotonic() + seconds, "nobody listens there"
        while time.monotonic() < deadline:
            try:
                socket.create_connection((environment["MASTER_ADDR"], int(environment["MASTER_PORT"])), 1.0).close()
                return cls(_store(environment), int(environment["RANK"]), _of_start(name, environment))
            except OSError as error:
                reason = error.strerror or str(error)
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
            time.sleep(0.2)
        raise NoAnswer(f"no answer from rank 0 at {where} within {seconds:.0f} s ({reason})")

    def post(self, letter: dict) -> None:
        """Send rank 0 a letter; raises NoAnswer where it has gone."""
        try:
            number = self._store.add(self._number, 1)
            self._store.set(f"{self._number}/{number}", json.dumps({**letter, "rank": self.rank}))
        except RuntimeError as error:
            raise NoAnswer(f"rank 0 has gone ({str(error).splitlines()[0]})") from None

    def letters(self) -> list[dict]:
        """Those that rank 0 has not read yet, each with its "rank"; what is no letter is passed over."""
        found = []
        for number in range(1, self._store.add(self._number, 0) + 1):
            key = f"{self._number}/{number}"
            if number not in self._taken and self._store.check([key]):
                self._taken.add(number)
                letter = _object(self._store.get(key))
                found += [letter] if isinstance(letter.get("rank"), int) else []
        return found

    def answer(self, rank: int, answer: dict) -> None:
        """Tell a rank something; it hears all of it, in order."""
        number = self._answers[rank] = self._answers.get(rank, 0) + 1
        self._store.set(f"{self._name}/answer/{rank}/{number}", json.dumps(answer))

    def wait(self, seconds: float, reached: Callable[[], None] = lambda: None) -> dict:
        """The next of rank 0's answers to this rank; raises NoAnswer where none comes within so many seconds.

        reached: is called each time that the store has answered.
        """
        number = self._answers[self.rank] = self._answers.get(self.rank, 0) + 1
        key, deadline = f"{self._name}/answer/{self.rank}/{number}", time.monotonic() + seconds
        try:
            while not self._store.check([key]):
                if time.monotonic() > deadline:
                    raise NoAnswer(f"rank 0 has said nothing for {seconds:.0f} s")
                reached()
                time.sleep(BETWEEN)
            found = _object(self._store.get(key))
        except RuntimeError as error:
            raise NoAnswer(f"rank 0 has gone ({str(error).splitlines()[0]})") from None
        if not found:
            raise NoAnswer("what stands where rank 0 answers is not from rank 0")
        return found


def _object(text: bytes) -> dict:
    """What stands in the store, which anybody who reaches it can write to; empty for what is no object."""
    try:
        found = parsed(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _of_start(name: str, environment: Mapping[str, str]) -> str:
    return f"four_engine_rlhf/{name}/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _store(environment: Mapping[str, str], serve: bool = False):
    return distributed.key_value_store(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), serve, CROWD)
