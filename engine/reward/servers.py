"""Reward servers that share the requests of a rank, and are asked again after faults that may pass.

servers = Servers(["http://10.0.0.7:8000/score"], "items", timeout=180.0, patience=600.0)
scores = servers.ask(items)
"""

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urljoin

from engine import distributed, trace
from engine.errors import shortened, without_query
from engine.reward.http_exchange import Fault, Mistake, exchange
from engine.reward.server_forms import FORMS, Item, WrongAnswer, decoded, encoded, parsed

FIRST_DELAY, LONGEST_DELAY = 0.5, 30.0  # seconds before a server is asked again
LONGEST_RETRY_AFTER = 120.0  # seconds that a server may put itself off for
BYTES, BYTES_AN_ITEM = 1 << 20, 1 << 14  # of an answer, which may hold more than scores

T = TypeVar("T")


class ServerError(Exception):
    """No scores: the message says which server, what it was sent and what it answered."""


@dataclass(slots=True)
class _Server:
    """faults: in a row. due: when it may be asked again, by the clock."""

    url: str
    faults: int = 0
    due: float = 0.0

    def __str__(self) -> str:
        return without_query(self.url)


class Servers:
    """Servers that all say the same of a response; calls may come from several threads.

    A request goes to the first server of its turn that is not known to be away. One that fails is left out for a while
    (`delay`), in which the others do its work; with none left the request waits. It is made again until `patience`
    seconds have passed since it was first made, and once at their end. From then on all requests fail.

    form: of `server_forms.FORMS`. timeout: seconds for one attempt. clock, wait: for tests; by default waiting ends
    where another thread's request has failed for good.
    """

    def __init__(
        self,
        urls: Sequence[str],
        form: str,
        *,
        timeout: float,
        patience: float,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
    ):
        assert urls, "no reward server"
        self.form, self.timeout, self.patience = form, timeout, patience
        self._servers = [_Server(url) for url in urls]
        self._failed, self._failure = threading.Event(), ""
        self._clock, self._wait = clock, wait or self._failed.wait

    def __len__(self) -> int:
        return len(self._servers)

    def ask(self, items: Sequence[Item], turn: int = 0) -> list[float]:
        """The scores of these items, in their order; turn: which server comes first.

        Raises: ServerError where no server gives scores in time, at once where one refuses or answers nonsense.
        """
        body = self._body(items)
        first = turn % len(self)
        order = [*self._servers[first:], *self._servers[:first]]
        return self._until_answered(order, lambda server: self._answer(server, body, items), f"sent {_shown(body)}")

    def probe(self, item: Item) -> float:
        """The score of one item by the first server, whose health path is asked before, if the form has one.

        Raises: ServerError.
        """
        health = FORMS[self.form].health
        if health is not None:
            url = urljoin(self._servers[0].url, health)
            self._until_answered(
                self._servers[:1], lambda _: exchange(url, None, self.timeout, BYTES), f"whose health is asked at {url}"
            )
        (score,) = self.ask([item])
        return score

    def _until_answered(self, order: Sequence[_Server], attempt: Callable[[_Server], T], what: str) -> T:
        """What the attempt returns at the first server at which it raises no Fault; what: of the request, for messages.

        Raises: ServerError.
        """
        began, attempts = self._clock(), 0
        deadline = began + self.patience
        while not self._failed.is_set():
            now = self._clock()
            server = min(order, key=lambda each: max(each.due - now, 0.0))
            if server.due > now:
                self._wait(max(min(server.due, deadline) - now, 0.0))
                if self._failed.is_set():
                    break
            trace.moved("reward server")  # a rank that waits for it does not stand still
            attempts += 1
            try:
                answer = attempt(server)
            except Mistake as mistake:
                self._fail(f"{server} {mistake} ({what})")
            except Fault as fault:
                self._back_off(server, fault)
                passed = self._clock() - began
                if passed >= self.patience:
                    self._fail(f"{server} {fault} (attempt {attempts} in {passed:.1f} s; {what})")
            else:
                self._recovered(server)
                return answer
        raise ServerError(self._failure)

    def _fail(self, why: str) -> None:
        if not self._failed.is_set():
            self._failure = why
            self._failed.set()

    def _body(self, items: Sequence[Item]) -> bytes:
        try:
            return encoded(self.form, items)
        except ValueError as error:
            raise ServerError(f"{self._servers[0]} was not asked: {error}") from None

    def _answer(self, server: _Server, body: bytes, items: Sequence[Item]) -> list[float]:
        answer, whole = exchange(server.url, body, self.timeout, BYTES + BYTES_AN_ITEM * len(items))
        try:
            if not whole:
                _refuse_part(answer)
            return decoded(self.form, answer, items)
        except WrongAnswer as wrong:
            raise Mistake(str(wrong)) from None

    def _recovered(self, server: _Server) -> None:
        if server.faults:
            server.faults, server.due = 0, 0.0
            _say(f"the reward server {server} answers again")

    def _back_off(self, server: _Server, fault: Fault) -> None:
        server.faults += 1
        server.due = self._clock() + delay(server.faults, fault.retry_after)
        if server.faults == 1:
            _say(f"the reward server {server} {fault}; a request is made again for up to {self.patience:g} s")


def delay(faults: int, retry_after: float | None) -> float:
    """Seconds before a server is asked again after so many faults in a row: twice as many each time, from half to all
    of them by chance, so that ranks do not come at once; as many as the server asks for, within reason."""
    usual = min(LONGEST_DELAY, FIRST_DELAY * 2 ** min(faults - 1, 20)) * random.SystemRandom().uniform(0.5, 1.0)
    return max(usual, min(retry_after or 0.0, LONGEST_RETRY_AFTER))


def _refuse_part(answer: bytes) -> None:
    """Raise Fault for what is no JSON, of a server that may have died in the middle of it."""
    try:
        parsed(answer)
    except WrongAnswer as wrong:
        raise Fault(f"{wrong}, or not all of it") from None


def _shown(body: bytes) -> str:
    return f"{len(body)} bytes, {shortened(body[:200].decode('ascii'), 160)}"


def _say(what: str) -> None:
    print(f"rank {distributed.rank()}: {what}", flush=True)
