"""Scores from reward servers, asked over HTTP.

    settings = ServerSettings(urls=["http://10.0.0.7:8000/score"], form="items", columns=["answer"])
    reward = ServerReward(settings, tokenizer, rows=ConcatDataset([training_rows, held_out_rows]))

The file goes from one exchange (`exchange`: by the standard library, with a time limit for the whole request; what
goes wrong is a `Fault`, after which the server is asked again, or a `Mistake`) over the two forms of request and answer
(`FORMS`) and the servers that share a rank's requests (`Servers`) to the source of scores (`ServerReward`). Proxies are
taken from the environment as urllib does, never for addresses of this machine.

items is a form of ours, in which ids say which score is whose:

    {"items": [{"id": "7.0", "prompt": "...", "response": "...", "ended": true, "answer": "4"}, ...]}
    {"scores": [{"id": "7.0", "score": 1.0}, ...]}            in any order

openrlhf is what OpenRLHF's trainer sends, so that servers which were written for it serve here:

    {"query": ["prompt and response", ...], "prompts": ["...", ...], "labels": ["...", ...]}
    {"rewards": [1.0, ...], "scores": [...], "extra_logs": {...}}      rewards in the order of the queries

Sources: OpenRLHF/OpenRLHF db825a24, openrlhf/utils/agent.py, `SingleTurnAgentExecutor._fetch_rewards_via_http` (queries
are texts with their special tokens, without padding; labels are "" where the data have none: `preprocess_data` in
openrlhf/datasets/prompts_dataset.py of the same commit), and 58ec6ffd, openrlhf/cli/serve_rm.py, `get_reward`. Of its
answer `rewards` is what is learned from there, and here. Its `scores`, by which it leaves groups out, and `extra_logs`
are not read.
"""

import contextlib
import http.client
import ipaddress
import json
import random
import re
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from urllib.parse import parse_qsl, urljoin, urlsplit

import torch
from torch import Tensor

from engine import distributed, trace
from engine.errors import UserError, shortened, without_query
from engine.experience import Rollout
from engine.files import RepeatedName, unique_names
from engine.reward.base import EarlyCalls, Numbers, RewardSource, decoded, keys_of, stop_together
from engine.trace import traced

PIECE = 1 << 16  # bytes read at once
SHOWN = 300  # bytes of an error's body


class Fault(Exception):
    """A failure that may be over when the server is asked again: it is away, too slow, or says that it is busy or
    broken.

    retry_after: seconds after which the server asks to be asked again, if it says so.
    """

    def __init__(self, message: str, retry_after: float | None = None):
        super().__init__(message)
        self.retry_after = retry_after


class Mistake(Exception):
    """A failure that asking again does not help: the server refuses the request, or its answer is not valid."""


def exchange(url: str, body: bytes | None, timeout: float, most_bytes: int) -> tuple[bytes, bool]:
    """GET, or POST of JSON where there is a body; returns the answer's body, and whether it is known to be whole: that
    of an answer without a length ends where the connection does, however that came.

    timeout: seconds until there is a connection and all of the answer's head, and then until the answer ends.
    most_bytes: of the answer. Raises: Fault, Mistake.
    """
    headers = {"Accept": "application/json"} | ({} if body is None else {"Content-Type": "application/json"})
    request = urllib.request.Request(url, data=body, headers=headers)
    with _sorted_by_remedy(url, timeout), _opened(url, request, timeout) as answer:
        if answer.status != 200 and body is not None:
            raise Mistake(f"answered {answer.status} {_plain(answer.reason)} without scores")
        found = _read(answer, time.monotonic() + timeout, most_bytes)
        whole = answer.headers.get("Content-Length") is not None or answer.headers.get("Transfer-Encoding") is not None
        return found, whole


def is_this_machine(url: str) -> bool:
    """Whether the URL's host is an address of this machine itself."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def retry_after(value: str | None) -> float | None:
    """Seconds, of a Retry-After header (RFC 9110, 10.2.3); None where it says none, or a date, as few servers do."""
    return float(value) if value is not None and value.strip().isdecimal() else None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """urllib would turn a POST that is sent elsewhere into a GET."""

    def redirect_request(self, *args, **kwargs) -> None:
        return None


class _Breakable(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Makes connections, and breaks them off where the answer's head is late: urllib bounds each wait for bytes alone,
    and a server, or a proxy before it, may send some for ever (RFC 9110, 15.2: any number of 1xx answers)."""

    def __init__(self):
        super().__init__()
        self.late, self._made = False, list[http.client.HTTPConnection]()

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._maker(http.client.HTTPConnection), request)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._maker(http.client.HTTPSConnection), request)

    def _maker(self, kind: type[http.client.HTTPConnection]) -> Callable[..., http.client.HTTPConnection]:
        """A function that makes connections of this kind, as urllib calls it."""

        def make(*args, **kwargs) -> http.client.HTTPConnection:
            self._made.append(kind(*args, **kwargs))
            return self._made[-1]

        return make

    def break_off(self) -> None:
        """Close the connections, so that threads that wait for their bytes stop waiting."""
        self.late = True
        for connection in self._made:
            with contextlib.suppress(OSError, AttributeError):  # not connected yet, or not any more
                connection.sock.shutdown(socket.SHUT_RDWR)


def _opened(url: str, request: urllib.request.Request, timeout: float) -> http.client.HTTPResponse:
    """The answer, with its whole head. Raises: TimeoutError where that does not come in time, as urllib otherwise."""
    proxies = urllib.request.ProxyHandler({} if is_this_machine(url) else None)
    connections = _Breakable()
    opener = urllib.request.build_opener(proxies, _NoRedirects, connections)
    alarm = threading.Timer(timeout, connections.break_off)
    alarm.daemon = True
    alarm.start()
    try:
        answer = opener.open(request, timeout=timeout)
    except (OSError, http.client.HTTPException):
        if connections.late:
            raise TimeoutError from None
        raise
    finally:
        alarm.cancel()
    if connections.late:  # a head that breaks off between two lines is taken for a whole one
        answer.close()
        raise TimeoutError
    return answer


def _read(answer: http.client.HTTPResponse, deadline: float, most_bytes: int) -> bytes:
    pieces, size = [], 0
    while piece := answer.read1(PIECE):
        pieces.append(piece)
        size += len(piece)
        if size > most_bytes:
            raise Mistake(f"answered more than {most_bytes} bytes, which begin {shortened(pieces[0][:80])}")
        if time.monotonic() > deadline:
            raise TimeoutError
    if answer.length:  # read1 ends without a word where the connection does
        raise http.client.IncompleteRead(b"", answer.length)
    return b"".join(pieces)


@contextlib.contextmanager
def _sorted_by_remedy(url: str, timeout: float) -> Iterator[None]:
    try:
        yield
    except urllib.error.HTTPError as error:
        with error:
            raise _of_status(error) from None
    except urllib.error.URLError as error:
        reason = error.reason if isinstance(error.reason, OSError) else OSError(error.reason)
        raise _of_connection(reason, timeout) from None
    except (OSError, http.client.HTTPException) as error:
        raise _of_connection(error, timeout) from None
    except UnicodeError as error:
        raise Mistake(f"has a host that can be none ({error})") from None


def _of_status(error: urllib.error.HTTPError) -> Fault | Mistake:
    body = b""
    with contextlib.suppress(OSError, http.client.HTTPException):
        body = error.read(SHOWN)
    query = urlsplit(error.url).query  # it may hold a key, and be said again
    secrets = [query, *(value for _, value in parse_qsl(query) if len(value) > 3)]
    hidden = re.compile("|".join(re.escape(secret) for secret in secrets if secret) or "(?!)")
    told, reason, elsewhere = (
        hidden.sub("...", text)
        for text in (body.decode(errors="replace"), _plain(error.reason), _plain(error.headers.get("Location")))
    )
    said = f"answered {error.code} {reason}" + (f" {shortened(told)}" if told else "")
    if error.code == 429 or error.code >= 500:
        return Fault(said, retry_after(error.headers.get("Retry-After")))
    if 300 <= error.code < 400:
        return Mistake(f"{said}, and would have it asked at {elsewhere}: give that URL")
    return Mistake(said)


def _of_connection(error: OSError | http.client.HTTPException, timeout: float) -> Fault | Mistake:
    if isinstance(error, ssl.SSLError) and not isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        return Mistake(f"cannot be spoken to by TLS ({error})")
    if isinstance(error, TimeoutError):
        return Fault(f"did not answer within {timeout:g} s")
    if isinstance(error, socket.gaierror):
        return Fault(f"has a host that is not known ({error.strerror})")
    return Fault(f"cannot be reached, or broke off ({type(error).__name__}: {_plain(error)})")


def _plain(text: object) -> str:
    """What a server has written into a status line or header, without what a terminal would obey."""
    return "".join(char if char.isprintable() else " " for char in str(text)).strip()


OWN_FIELDS = ("id", "prompt", "response", "ended")
"""Names of an item's fields that no column of the data can have."""
LARGEST = 3.4028234663852886e38  # of float32


@dataclass(frozen=True, slots=True)
class Item:
    """A response that is to be scored.

    id: unlike those of all others of a request. columns: of the data's row that the prompt came from. ended: whether
    the response came to an end of its own, which its text does not say: a model that scores reads that end, too.
    """

    id: str
    prompt: str
    response: str
    columns: Mapping[str, object]
    ended: bool = True


class WrongAnswer(ValueError):
    """An answer that is not valid; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Form:
    """How items become a request's JSON, and how an answer's JSON becomes scores in their order.

    health: a name beside the URL's last part which GET answers where the server is well; None where there is none.
    special_tokens: whether texts hold them. most_columns: of the data, that a request has room for; None for any.
    """

    request: Callable[[Sequence[Item]], dict]
    scores: Callable[[dict, Sequence[Item]], list]
    health: str | None
    special_tokens: bool
    most_columns: int | None


def encoded_request(form: str, items: Sequence[Item]) -> bytes:
    """The request's body. Raises: ValueError for a column that holds what JSON cannot say, NaN say."""
    try:
        return json.dumps(FORMS[form].request(items), allow_nan=False).encode("ascii")
    except (TypeError, ValueError) as error:
        raise ValueError(f"a column of the data holds what JSON cannot say ({error})") from None


def decoded_scores(form: str, body: bytes, items: Sequence[Item]) -> list[float]:
    """The score of each item, in the items' order. Raises: WrongAnswer, which says what the answer is instead."""
    answer = parsed(body)
    if not isinstance(answer, dict):
        raise WrongAnswer(f"answered {shortened(answer)}, which is no JSON object")
    found = FORMS[form].scores(answer, items)
    for place, value in enumerate(found):
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise WrongAnswer(f"answered {shortened(value)} for response {place} of {len(items)}, which is no number")
        if not abs(value) <= LARGEST:
            raise WrongAnswer(f"answered {shortened(value)} for response {place} of {len(items)}, which is not finite")
    return [float(value) for value in found]


def parsed(body: bytes) -> object:
    """What the JSON says. Raises: WrongAnswer where it is none, or says a thing twice."""
    try:
        return json.loads(body, object_pairs_hook=unique_names)
    except RepeatedName as error:
        what = f"{shortened(error.fields)}, in which {shortened(error.name)} stood {error.count} times"
        raise WrongAnswer(f"answered {what}") from None
    except (ValueError, RecursionError):
        raise WrongAnswer(f"answered {shortened(body[:200])}, which is no JSON") from None


def _items_request(items: Sequence[Item]) -> dict:
    return {
        "items": [{name: getattr(item, name) for name in OWN_FIELDS} | dict(item.columns) for item in items],
    }


def _items_scores(answer: dict, items: Sequence[Item]) -> list:
    entries = _list(answer, "scores")
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("id"), str) or "score" not in entry:
            raise WrongAnswer(
                f'answered {shortened(entry)} among its scores; needed {{"id": a text, "score": a number}}'
            )
    given, asked = Counter(entry["id"] for entry in entries), {item.id for item in items}
    for id in given:
        if id not in asked:
            raise WrongAnswer(f"answered a score for the id {shortened(id)}, which it was not asked for")
        if given[id] > 1:
            raise WrongAnswer(f"answered {given[id]} scores for the id {shortened(id)}")
    missing = [item.id for item in items if item.id not in given]
    if missing:
        raise WrongAnswer(
            f"answered {len(entries)} scores for {len(items)} responses; the first id without one is {missing[0]!r}"
        )
    by_id = {entry["id"]: entry["score"] for entry in entries}
    return [by_id[item.id] for item in items]


def _openrlhf_request(items: Sequence[Item]) -> dict:
    labels = [next(iter(item.columns.values()), "") for item in items]
    return {
        "query": [item.prompt + item.response for item in items],
        "prompts": [item.prompt for item in items],
        "labels": labels,
    }


def _openrlhf_scores(answer: dict, items: Sequence[Item]) -> list:
    rewards = _list(answer, "rewards")
    if len(rewards) != len(items):
        raise WrongAnswer(f"answered {len(rewards)} rewards for {len(items)} responses: {shortened(rewards)}")
    return rewards


def _list(answer: dict, name: str) -> list:
    found = answer.get(name)
    if not isinstance(found, list):
        raise WrongAnswer(f'answered {shortened(answer)}; needed an object with a list "{name}"')
    return found


FORMS = {
    "items": Form(_items_request, _items_scores, health="health", special_tokens=False, most_columns=None),
    "openrlhf": Form(_openrlhf_request, _openrlhf_scores, health=None, special_tokens=True, most_columns=1),
}


FIRST_DELAY, LONGEST_DELAY = 0.5, 30.0  # seconds before a server is asked again
LONGEST_RETRY_AFTER = 120.0  # seconds that a server may put itself off for
BYTES, BYTES_AN_ITEM = 1 << 20, 1 << 14  # of an answer, which may hold more than scores

T = TypeVar("T")


class ServerError(Exception):
    """No scores: the message says which server, what it was sent and what it answered."""


@dataclass(slots=True)
class _Server:
    """A server's state. faults: how many in a row. due: the clock's time from which it may be asked again."""

    url: str
    faults: int = 0
    due: float = 0.0

    def __str__(self) -> str:
        return without_query(self.url)


class Servers:
    """Servers that all give the same score to a response. Calls may come from several threads.

    A request goes to the first server of its turn that is not known to be away. One that fails is left out for a while
    (`delay`), in which the others do its work; with none left the request waits. It is made again until `patience`
    seconds have passed since it was first made, and once at their end. From then on all requests fail.

    form: of FORMS. timeout: seconds for one attempt. clock, wait: for tests; by default waiting ends
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
        try:
            body = encoded_request(self.form, items)
        except ValueError as error:
            raise ServerError(f"{self._servers[0]} was not asked: {error}") from None
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
                if server.faults:
                    server.faults, server.due = 0, 0.0
                    _say(f"the reward server {server} answers again")
                return answer
        raise ServerError(self._failure)

    def _fail(self, why: str) -> None:
        if not self._failed.is_set():
            self._failure = why
            self._failed.set()

    def _answer(self, server: _Server, body: bytes, items: Sequence[Item]) -> list[float]:
        answer, whole = exchange(server.url, body, self.timeout, BYTES + BYTES_AN_ITEM * len(items))
        if not whole:
            try:
                parsed(answer)
            except WrongAnswer as wrong:  # the server may have died in the middle of it
                raise Fault(f"{wrong}, or not all of it") from None
        try:
            return decoded_scores(self.form, answer, items)
        except WrongAnswer as wrong:
            raise Mistake(str(wrong)) from None

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


def _shown(body: bytes) -> str:
    return f"{len(body)} bytes, {shortened(body[:200].decode('ascii'), 160)}"


def _say(what: str) -> None:
    print(f"rank {distributed.rank()}: {what}", flush=True)


PROBE_SECONDS = 10.0  # that a server may take to be there before a run is refused


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """urls: of servers that say the same, and share the work. form: of FORMS. columns: of the data, sent
    along. batch_size: the most responses in a request. timeout, patience: seconds, as in `Servers`."""

    urls: Sequence[str]
    form: str = "items"
    columns: Sequence[str] = ()
    batch_size: int = 64
    timeout: float = 180.0
    patience: float = 600.0

    def item(self, id: str, prompt: str, response: str, row: dict | None, ended: bool = True) -> Item:
        """What is sent of a response; row: of the data, of which the columns are taken; null where it lacks one."""
        return Item(id, prompt, response, {name: (row or {}).get(name) for name in self.columns}, ended)


class ServerReward(RewardSource):
    """Asks for all of a step's responses of this rank before the other models compute, and waits when they are done.

    Each rank asks for its own responses, in requests of at most `batch_size`, one at a time of each server.

    rows: the data's, as in FunctionReward; needed where there are columns.
    """

    def __init__(self, settings: ServerSettings, tokenizer, rows: Sequence[dict] | None = None):
        assert not settings.columns or rows is not None, f"columns {settings.columns}, and no rows were given"
        self.settings, self.tokenizer, self.rows = settings, tokenizer, rows
        self.servers = Servers(settings.urls, settings.form, timeout=settings.timeout, patience=settings.patience)
        self._early = EarlyCalls(threads=len(self.servers))
        self._turn = distributed.rank()  # so that ranks begin with different servers

    @traced("reward server")
    def score(self, rollout: Rollout) -> Tensor:
        """(B,) float32, as the servers gave them.

        Raises: RunStopped on all ranks where one gets no scores.
        """
        keys, items = self._items(rollout)
        self._begin(keys, items)
        values, problem = self._early.taken(keys, items)
        contract = "Nothing was learned from these responses. docs/reward_server.md has what is sent and answered."
        stop_together(problem, "the reward server", contract)
        scores = [values[place] for place in range(len(items))]
        return torch.tensor(scores, dtype=torch.float32, device=rollout.sequences.device)

    def prepare(self, rollout: Rollout) -> None:
        """As in RewardSource: requests are begun for responses that there are none for yet."""
        self._begin(*self._items(rollout))

    def begin(self, rollout: Rollout) -> None:
        """As in RewardSource."""
        self.prepare(rollout)

    def _items(self, rollout: Rollout) -> tuple[list[tuple[int, int]], list[Item]]:
        keys = keys_of(rollout)
        texts = zip(*decoded(rollout, self.tokenizer, FORMS[self.settings.form].special_tokens), strict=True)
        rows = self.rows if self.settings.columns else None
        items = [
            self.settings.item(f"{index}.{sample}", *pair, None if rows is None else rows[index], ended)
            for (index, sample), pair, ended in zip(keys, texts, rollout.ended.tolist(), strict=True)
        ]
        return keys, items

    def _begin(self, keys: list[tuple[int, int]], items: list[Item]) -> None:
        """Requests for those that there are none for, as many for each server."""
        left = self._early.left(keys, items)
        size = min(self.settings.batch_size, -(-len(left) // len(self.servers)))
        for start in range(0, len(left), max(size, 1)):
            part = left[start : start + size]
            asked = [items[place] for place in part]
            self._early.begin([keys[place] for place in part], asked, partial(self._asked, asked, self._turn))
            self._turn += 1

    def _asked(self, items: list[Item], turn: int) -> Numbers:
        try:
            return self.servers.ask(items, turn), None
        except ServerError as error:
            return [], str(error)
        except Exception as error:  # on this rank alone: the others would wait for it in vain
            return [], f"could not be asked ({type(error).__name__}: {error})"


def probe(settings: ServerSettings, prompt: str, row: dict) -> dict[str, float]:
    """What each server says of one text, by its URL: the prompt with the response "probe".

    Raises: UserError where one is not there within PROBE_SECONDS, or answers what is no score.
    """
    found = {}
    for url in settings.urls:
        patience = min(settings.patience, PROBE_SECONDS)
        servers = Servers([url], settings.form, timeout=min(settings.timeout, PROBE_SECONDS), patience=patience)
        try:
            found[url] = servers.probe(settings.item("probe", prompt, "probe", row))
        except ServerError as error:
            raise UserError(
                f"--reward_url {without_query(url)}: asked for the score of one text, {error}. Start the server, "
                f"or mend it, or give another URL or --reward_url_form (this one is {settings.form})."
            ) from None
    return found
