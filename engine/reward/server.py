"""Scores from reward servers, which are asked over HTTP.

    settings = ServerSettings(urls=["http://10.0.0.7:8000/score"], form="items", columns=["answer"])
    reward = ServerReward(settings, tokenizer, rows=ConcatDataset([training_rows, held_out_rows]))

This file contains, from top to bottom: one exchange of a request and an answer (`exchange`), the two forms of requests
and answers (`FORMS`), the servers that share a rank's requests (`Servers`), and the reward source (`ServerReward`). A
failed exchange raises `Fault`, after which a server is asked again, or `Mistake`, after which the run stops. Requests
are sent by Python's standard library, with a time limit. Proxies are taken from the environment, as in urllib, but are
never used for addresses of this machine.

The form "items" is this project's own. Each score has the id of its response:

    {"items": [{"id": "7.0", "prompt": "...", "response": "...", "ended": true, "answer": "4"}, ...]}
    {"scores": [{"id": "7.0", "score": 1.0}, ...]}            in any order

The form "openrlhf" is the one that OpenRLHF's trainer uses, so that servers written for OpenRLHF can be used:

    {"query": ["prompt and response", ...], "prompts": ["...", ...], "labels": ["...", ...]}
    {"rewards": [1.0, ...], "scores": [...], "extra_logs": {...}}      rewards in the order of the queries

As in OpenRLHF, `rewards` are the scores that the policy learns from. `scores`, by which OpenRLHF filters groups, and
`extra_logs` are not read. Sources: OpenRLHF/OpenRLHF db825a24, openrlhf/utils/agent.py,
`SingleTurnAgentExecutor._fetch_rewards_via_http` (queries are texts with special tokens, without padding; labels are ""
if the data have none: `preprocess_data` in openrlhf/datasets/prompts_dataset.py of the same commit), and 58ec6ffd,
openrlhf/cli/serve_rm.py, `get_reward`.
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
from engine.reward.base import EarlyCalls, Numbers, RewardSource, decoded, keys_of, stop_all_ranks
from engine.trace import traced

PIECE = 1 << 16  # the number of bytes read at a time
SHOWN = 300  # the number of bytes of an error's body that a message shows


class Fault(Exception):
    """A failure after which the same request may succeed later: the server cannot be reached, is too slow, or answers
    that it is busy or has an internal error.

    retry_after: the seconds in the answer's Retry-After header, if it has one.
    """

    def __init__(self, message: str, retry_after: float | None = None):
        super().__init__(message)
        self.retry_after = retry_after


class Mistake(Exception):
    """A failure after which the same request would fail again: the server refuses the request, or the answer is not
    valid."""


def exchange(url: str, body: bytes | None, timeout: float, most_bytes: int) -> tuple[bytes, bool]:
    """Send a GET request, or a POST request with a JSON body if `body` is given.

    Args:
        timeout: the time limit in seconds for each wait for the answer, and for the whole body.
        most_bytes: the largest allowed size of an answer's body.

    Returns: the answer's body, and whether the body is known to be complete. If the server did not state the body's
        length, the body ends when the connection ends. The connection also ends if the server dies.
    Raises: Fault, Mistake.
    """
    headers = {"Accept": "application/json"} | ({} if body is None else {"Content-Type": "application/json"})
    request = urllib.request.Request(url, data=body, headers=headers)
    with _sorted_by_remedy(timeout), _opened(url, request, timeout) as answer:
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
    """The seconds in a Retry-After header (RFC 9110, 10.2.3); None if the header is missing or has a date. Few servers
    send a date."""
    return float(value) if value is not None and value.strip().isdecimal() else None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, because urllib would repeat a redirected POST as a GET."""

    def redirect_request(self, *args, **kwargs) -> None:
        return None


def _opened(url: str, request: urllib.request.Request, timeout: float) -> http.client.HTTPResponse:
    """The answer, after its whole head has arrived. Raises: as urllib."""
    proxies = urllib.request.ProxyHandler({} if is_this_machine(url) else None)
    return urllib.request.build_opener(proxies, _NoRedirects).open(request, timeout=timeout)


def _read(answer: http.client.HTTPResponse, deadline: float, most_bytes: int) -> bytes:
    pieces, size = [], 0
    while piece := answer.read1(PIECE):
        pieces.append(piece)
        size += len(piece)
        if size > most_bytes:
            raise Mistake(f"answered more than {most_bytes} bytes, which begin {shortened(pieces[0][:80])}")
        if time.monotonic() > deadline:
            raise TimeoutError
    if answer.length:  # bytes are missing: read1 raises nothing when the connection ends early
        raise http.client.IncompleteRead(b"", answer.length)
    return b"".join(pieces)


@contextlib.contextmanager
def _sorted_by_remedy(timeout: float) -> Iterator[None]:
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
        raise Mistake(f"has an invalid host name ({error})") from None


def _of_status(error: urllib.error.HTTPError) -> Fault | Mistake:
    body = b""
    with contextlib.suppress(OSError, http.client.HTTPException):
        body = error.read(SHOWN)
    query = urlsplit(error.url).query  # may contain a secret key, which the answer may repeat
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
        return Mistake(f"{said}, a redirect to {elsewhere}: give that URL")
    return Mistake(said)


def _of_connection(error: OSError | http.client.HTTPException, timeout: float) -> Fault | Mistake:
    if isinstance(error, ssl.SSLError) and not isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        return Mistake(f"cannot be reached by TLS ({error})")
    if isinstance(error, TimeoutError):
        return Fault(f"did not answer within {timeout:g} s")
    if isinstance(error, socket.gaierror):
        return Fault(f"has an unknown host name ({error.strerror})")
    return Fault(f"cannot be reached, or broke the connection ({type(error).__name__}: {_plain(error)})")


def _plain(text: object) -> str:
    """A text from a status line or header, without terminal control characters."""
    return "".join(char if char.isprintable() else " " for char in str(text)).strip()


OWN_FIELDS = ("id", "prompt", "response", "ended")
"""Names of an item's fields; a column of the data cannot have one of these names."""
LARGEST = 3.4028234663852886e38  # the largest finite float32


@dataclass(frozen=True, slots=True)
class Item:
    """A response to score.

    id: an id that is unique within a request. columns: columns of the prompt's row in the data. ended: whether the
    response reached an end token or stop string. The text does not show the end token, but a reward model may read it.
    """

    id: str
    prompt: str
    response: str
    columns: Mapping[str, object]
    ended: bool = True


class WrongAnswer(ValueError):
    """An answer that is not valid; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Form:
    """A format of requests and answers.

    request: a function items -> the request's JSON.
    scores: a function (the answer's JSON, items) -> the scores in the items' order.
    health: the path, relative to the server's URL, at which a healthy server answers a GET request; None if the form
        defines no such path.
    special_tokens: whether texts contain special tokens.
    most_columns: the largest number of columns of the data in a request; None for no limit.
    """

    request: Callable[[Sequence[Item]], dict]
    scores: Callable[[dict, Sequence[Item]], list]
    health: str | None
    special_tokens: bool
    most_columns: int | None


def encoded_request(form: str, items: Sequence[Item]) -> bytes:
    """The request's body. Raises: ValueError if a column has a value that JSON cannot represent, such as NaN."""
    try:
        return json.dumps(FORMS[form].request(items), allow_nan=False).encode("ascii")
    except (TypeError, ValueError) as error:
        raise ValueError(f"a column of the data has a value that JSON lacks ({error})") from None


def decoded_scores(form: str, body: bytes, items: Sequence[Item]) -> list[float]:
    """The score of each item, in the items' order. Raises: WrongAnswer if the body is not a valid answer of this
    form."""
    answer = parsed(body)
    if not isinstance(answer, dict):
        raise WrongAnswer(f"answered {shortened(answer)}, which is no JSON object")
    found = FORMS[form].scores(answer, items)
    for place, value in enumerate(found):
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise WrongAnswer(
                f"answered {shortened(value)} for response {place} of {len(items)}, which is not a number"
            )
        if not abs(value) <= LARGEST:
            raise WrongAnswer(f"answered {shortened(value)} for response {place} of {len(items)}, which is not finite")
    return [float(value) for value in found]


def parsed(body: bytes) -> object:
    """The value of a JSON text. Raises: WrongAnswer if it is not valid JSON, or has a name twice in one object."""
    try:
        return json.loads(body, object_pairs_hook=unique_names)
    except RepeatedName as error:
        what = f"{shortened(error.fields)}, with the name {shortened(error.name)} {error.count} times"
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
    by_id, asked = {entry["id"]: entry["score"] for entry in entries}, {item.id for item in items}
    if len(entries) != len(items) or by_id.keys() != asked:
        other = shortened(sorted(by_id.keys() ^ asked))
        raise WrongAnswer(
            f"answered {len(entries)} scores for {len(items)} responses; ids that only one of the two has: {other}"
        )
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


FIRST_DELAY, LONGEST_DELAY = 0.5, 30.0  # seconds from a fault to the next request: after the first fault, and at most
LONGEST_RETRY_AFTER = 120.0  # seconds; a longer Retry-After counts as this
BYTES, BYTES_AN_ITEM = 1 << 20, 1 << 14  # the largest answer: it may hold more than scores

T = TypeVar("T")


class ServerError(Exception):
    """No server gave scores. The message names the server, the request and the answer."""


@dataclass(slots=True)
class _Server:
    """The state of a server. faults: the number of faults in a row. due: the time, on the clock of `Servers`, before
    which the server is not asked again."""

    url: str
    faults: int = 0
    due: float = 0.0

    def __str__(self) -> str:
        return without_query(self.url)


class Servers:
    """Several servers that give the same scores and share the requests. Several threads may call this object.

    After a fault, a server is not asked for some time (`delay`). A request goes to the first server that may be asked;
    the number of the request, `turn`, decides at which server the search begins. If no server may be asked, the request
    waits. A failed request is repeated until `patience` seconds have passed since its first attempt, and once more at
    the end of this time. If the last attempt fails too, this request and all later requests raise ServerError.

    form: a key of FORMS. timeout: the time limit of one attempt in seconds, as in `exchange`. clock, wait: functions
    that tests replace. The default `wait` returns early if a request of another thread has failed for good.
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
        self.form = form
        self.timeout = timeout
        self.patience = patience
        self._servers = [_Server(url) for url in urls]
        self._failed, self._failure = threading.Event(), ""
        self._clock, self._wait = clock, wait or self._failed.wait

    def __len__(self) -> int:
        return len(self._servers)

    def ask(self, items: Sequence[Item], turn: int = 0) -> list[float]:
        """The scores of these items, in their order. turn: the number of the request, which decides which server is
        asked first.

        Raises: ServerError if no server gives scores in time. It is raised at once if a server refuses the request or
        its answer is not valid.
        """
        try:
            body = encoded_request(self.form, items)
        except ValueError as error:
            raise ServerError(f"{self._servers[0]} was not asked: {error}") from None
        first = turn % len(self)
        order = [*self._servers[first:], *self._servers[:first]]
        return self._until_answered(order, lambda server: self._answer(server, body, items), f"sent {_shown(body)}")

    def probe(self, item: Item) -> float:
        """The score of one item from the first server, after a request to its health path if the form has one.

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
        """The result of the first attempt that raises no Fault. attempt: a function that is called with one server at a
        time. what: a description of the request for messages.

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
            trace.moved("reward server")  # this rank makes progress, for --timeout_minutes
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
            except WrongAnswer as wrong:  # the server may have died before the end of its answer
                raise Fault(f"{wrong}, or the answer is not complete") from None
        try:
            return decoded_scores(self.form, answer, items)
        except WrongAnswer as wrong:
            raise Mistake(str(wrong)) from None

    def _back_off(self, server: _Server, fault: Fault) -> None:
        server.faults += 1
        server.due = self._clock() + delay(server.faults, fault.retry_after)
        if server.faults == 1:
            _say(f"the reward server {server} {fault}; the request is repeated for up to {self.patience:g} s")


def delay(faults: int, retry_after: float | None) -> float:
    """Seconds before a server is asked again, after `faults` faults in a row.

    The delay doubles with each fault, and is multiplied by a random factor from 0.5 to 1, so that ranks do not ask at
    the same moment. It is at least the server's Retry-After, of which at most LONGEST_RETRY_AFTER counts.
    """
    usual = min(LONGEST_DELAY, FIRST_DELAY * 2 ** min(faults - 1, 20)) * random.SystemRandom().uniform(0.5, 1.0)
    return max(usual, min(retry_after or 0.0, LONGEST_RETRY_AFTER))


def _shown(body: bytes) -> str:
    return f"{len(body)} bytes, {shortened(body[:200].decode('ascii'), 160)}"


def _say(what: str) -> None:
    print(f"rank {distributed.rank()}: {what}", flush=True)


PROBE_SECONDS = 10.0  # within which each server has to answer before a run starts


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How reward servers are asked.

    urls: the URLs of servers that give the same scores and share the requests.
    form: a key of FORMS.
    columns: the columns of the data that are sent with each response.
    batch_size: the largest number of responses in a request.
    timeout, patience: in seconds, as in `Servers`.
    """

    urls: Sequence[str]
    form: str = "items"
    columns: Sequence[str] = ()
    batch_size: int = 64
    timeout: float = 180.0
    patience: float = 600.0

    def item(self, id: str, prompt: str, response: str, row: dict | None, ended: bool = True) -> Item:
        """The item of a response. row: the prompt's row in the data; a column that is missing in the row is null in the
        item."""
        return Item(id, prompt, response, {name: (row or {}).get(name) for name in self.columns}, ended)


class ServerReward(RewardSource):
    """Scores from reward servers. Requests for all responses of a PPO step begin before the other models compute; when
    those have computed, `score` waits for the answers.

    Each rank sends its own responses, in requests of at most `batch_size` responses. At any time a rank has at most as
    many open requests as there are servers.

    rows: the rows of the data, as in FunctionReward; needed if the settings name columns.
    """

    def __init__(self, settings: ServerSettings, tokenizer, rows: Sequence[dict] | None = None):
        assert not settings.columns or rows is not None, f"columns {settings.columns}, and no rows were given"
        self.settings = settings
        self.tokenizer = tokenizer
        self.rows = rows
        self.servers = Servers(settings.urls, settings.form, timeout=settings.timeout, patience=settings.patience)
        self._early = EarlyCalls(threads=len(self.servers))
        self._turn = distributed.rank()  # ranks begin with different servers

    @traced("reward server")
    def score(self, rollout: Rollout) -> Tensor:
        """Returns the servers' scores unchanged: (B,) float32.

        Raises: RunStopped on all ranks if one rank gets no scores.
        """
        keys, items = self._items(rollout)
        self._begin(keys, items)
        values, problem = self._early.taken(keys, items)
        contract = "Nothing was learned from these responses. docs/reward_server.md describes requests and answers."
        stop_all_ranks(problem, "the reward server", contract)
        scores = [values[place] for place in range(len(items))]
        return torch.tensor(scores, dtype=torch.float32, device=rollout.sequences.device)

    def prepare(self, rollout: Rollout) -> None:
        """As in RewardSource: begins requests for those responses for which no request has begun."""
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
        """Begin requests for those responses for which no request has begun, equally many for each server."""
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
        except Exception as error:  # if it were raised here, the other ranks would wait forever
            return [], f"could not be asked ({type(error).__name__}: {error})"


def probe(settings: ServerSettings, prompt: str, row: dict) -> dict[str, float]:
    """Returns {URL: score}, the score that each server gives to the prompt with the response "probe".

    Raises: UserError if a server does not answer within PROBE_SECONDS, or its answer is not valid.
    """
    found = {}
    for url in settings.urls:
        patience = min(settings.patience, PROBE_SECONDS)
        servers = Servers([url], settings.form, timeout=min(settings.timeout, PROBE_SECONDS), patience=patience)
        try:
            found[url] = servers.probe(settings.item("probe", prompt, "probe", row))
        except ServerError as error:
            raise UserError(
                f"--reward_url {without_query(url)}: asked for the score of one text, {error}. Start or repair the "
                f"server, or give another URL or another --reward_url_form (it is {settings.form})."
            ) from None
    return found
