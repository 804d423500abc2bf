"""Scores from reward servers: which responses are sent, when, in how many requests; what is asked again, for how long,
and what is refused, on real servers of this machine; and answers that are odd to the byte.
"""

import contextlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from engine.errors import RunStopped, UserError
from engine.reward.base import CombinedReward
from engine.reward.server import (
    Fault,
    Item,
    Mistake,
    ServerError,
    ServerReward,
    Servers,
    ServerSettings,
    WrongAnswer,
    decoded_scores,
    delay,
    encoded_request,
    exchange,
    probe,
    retry_after,
)
from scripts.harness import free_port
from scripts.harness.models import BOS, EOS, PAD, make_tokenizer
from tests.engine.fake_models import rollout_of
from tests.reward_server import serving

TOKENIZER = make_tokenizer()
ROLLOUT = rollout_of([[BOS, 5], [6, 7, 8], [9]], [[20, EOS], [EOS], [21, 22, 23]], PAD, width=5, prompt_width=4)
ROLLOUT = replace(ROLLOUT, ended=torch.tensor([True, True, False]))  # the last one was cut off
SCORES = [20.0, -1.0, 22.0]


def reward(*urls: str, rows=None, **settings) -> ServerReward:
    return ServerReward(ServerSettings(urls=urls, patience=1.0, **settings), TOKENIZER, rows)


def test_what_is_sent_of_a_rollout():
    rows = [{"answer": number} for number in "abc"]
    with serving() as server:
        scores = reward(server.url, rows=rows, columns=["answer", "level"]).score(ROLLOUT)
    assert scores.tolist() == SCORES and scores.dtype == torch.float32
    told = [
        ("0.0", "w05", " w20", True, "a"),
        ("1.0", "w06 w07 w08", "", True, "b"),
        ("2.0", "w09", " w21 w22 w23", False, "c"),
    ]
    names = ("id", "prompt", "response", "ended", "answer")
    expected = [dict(zip(names, each, strict=True)) | {"level": None} for each in told]
    assert server.asked == [{"items": expected}]


def test_openrlhfs_queries_have_special_tokens_and_no_padding():
    rows = [{"answer": number} for number in "abc"]
    with serving() as server:
        reward(server.url, form="openrlhf", rows=rows, columns=["answer"]).score(ROLLOUT)
    (asked,) = server.asked
    assert asked["query"] == ["<s> w05 w20 </s>", "w06 w07 w08 </s>", "w09 w21 w22 w23"]
    assert asked["prompts"] == ["<s> w05", "w06 w07 w08", "w09"] and asked["labels"] == ["a", "b", "c"]


def sizes(server) -> list[int]:
    return sorted(len(asked["items"]) for asked in server.asked)


def test_requests_of_at_most_so_many_responses():
    with serving() as server:
        assert reward(server.url, batch_size=2).score(ROLLOUT).tolist() == SCORES
        assert sizes(server) == [1, 2]


def test_several_servers_share_the_responses():
    with serving() as one, serving() as other:
        assert reward(one.url, other.url).score(ROLLOUT).tolist() == SCORES
        assert sorted(sizes(one) + sizes(other)) == [1, 2] and len(one.asked) == 1


def test_what_was_prepared_is_asked_for_once_and_before_anybody_waits():
    with serving() as server:
        prepared, answered = reward(server.url), threading.Event()
        behave = server.behave
        server.behave = lambda *given: (behave(*given), answered.set())
        CombinedReward({"server": (prepared, 0.5)}).prepare(ROLLOUT)
        assert answered.wait(60)
        parts = [prepared.score(ROLLOUT.select(torch.tensor(rows))).tolist() for rows in ([2], [0, 1])]
        assert parts == [[22.0], [20.0, -1.0]] and sizes(server) == [3]


def test_what_was_begun_while_others_were_drawn_is_not_prepared_again():
    with serving() as server:
        begun = reward(server.url)
        begun.begin(ROLLOUT.select(torch.tensor([1])))
        begun.prepare(ROLLOUT)
        assert begun.score(ROLLOUT).tolist() == SCORES
        assert sizes(server) == [1, 2]


def test_a_server_that_gives_no_scores_stops_the_run():
    told = r"^the reward server http.*/score answered 2 scores for 3 .* Nothing was"
    with serving({0: "short"}) as server, pytest.raises(RunStopped, match=told):
        reward(server.url).score(ROLLOUT)


def test_the_probe():
    with serving() as one, serving({0: "nan"}) as other:
        assert probe(ServerSettings(urls=[one.url], columns=["answer"]), "w05", {"answer": "a"}) == {one.url: -1.0}
        asked = {"id": "probe", "prompt": "w05", "response": "probe", "ended": True, "answer": "a"}
        assert one.asked == [{"items": [asked]}]
        both = ServerSettings(urls=[one.url, other.url])
        with pytest.raises(UserError, match=f"^--reward_url {other.url}: .*answered nan for response 0 of 1"):
            probe(both, "w05", {})
    away = f"http://127.0.0.1:{free_port()}/score"
    with pytest.raises(UserError, match=f"^--reward_url {away}: .*cannot be reached.*--reward_url_form"):
        probe(ServerSettings(urls=[away], patience=0.2), "w05", {})


def test_the_server_and_the_requests_of_the_page():
    page = (Path(__file__).parents[3] / "docs" / "reward_server.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    named = {"__name__": "page"}
    exec(source, named)
    server = ThreadingHTTPServer(("127.0.0.1", 0), named["Handler"])
    named["Handler"].log_message = lambda *given: None
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/score"
    assert probe(ServerSettings(urls=[url]), "w05", {}) == {url: -0.05}  # of "probe", a hundredth a letter
    assert reward(url).score(ROLLOUT).tolist() == pytest.approx([-0.04, 0.0, -0.12])
    server.shutdown()
    server.server_close()
    items = [Item("7.0", "What is 2 + 2?", " 4", {"answer": "4"}), Item("9.0", "What is 1 + 2?", " 5", {"answer": "3"})]
    whole = Item("", "<s> What is 2 + 2?", " 4 </s>", {"answer": "4"})
    asked, answer, theirs, their_answer = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert json.loads(encoded_request("items", items)) == json.loads(asked)
    assert decoded_scores("items", answer.encode(), items) == [1.0, 0.0]
    assert json.loads(encoded_request("openrlhf", [whole])) == json.loads(theirs)
    assert decoded_scores("openrlhf", their_answer.encode(), [whole]) == [1.0]


ITEMS = [Item(f"{number}.0", f"p{number}", f" w{number}0", {}) for number in range(1, 4)]
SENT_SCORES = [10.0, 20.0, 30.0]


class Time:
    """A clock that waiting moves, and nothing else; `meanwhile` happens while it is waited."""

    def __init__(self):
        self.now, self.waits, self.meanwhile = 0.0, [], lambda: None

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds
        self.meanwhile()


@pytest.fixture
def time():
    return Time()


def servers(time: Time, *urls: str, form: str = "items", timeout: float = 30.0, patience: float = 60.0) -> Servers:
    return Servers(urls, form, timeout=timeout, patience=patience, clock=lambda: time.now, wait=time.wait)


@pytest.mark.parametrize("form", ["items", "openrlhf"])
def test_scores_come_in_the_order_of_the_items(time, form):
    with serving() as server:
        assert servers(time, server.url, form=form).ask(ITEMS) == SENT_SCORES
    assert time.waits == []


@pytest.mark.parametrize("fault", ["500", "503", "busy 0", "cut"])
def test_passing_faults_are_asked_again_after_growing_waits(time, capfd, fault):
    with serving({1: fault, 2: fault, 3: fault}) as server:
        assert servers(time, server.url).ask(ITEMS) == SENT_SCORES
        assert len(server.asked) == 4 and all(asked == server.asked[0] for asked in server.asked)
    assert [0.5 * low <= wait <= low for low, wait in zip((0.5, 1.0, 2.0), time.waits, strict=True)] == [True] * 3
    told = capfd.readouterr().out.splitlines()
    assert len(told) == 2 and "the request is repeated for up to 60 s" in told[0] and "answers again" in told[1]


def test_a_server_says_when_to_be_asked_again_within_reason(time):
    with serving({1: "busy 7", 2: "busy 100000"}) as server:
        assert servers(time, server.url, patience=1000.0).ask(ITEMS) == SENT_SCORES
    assert time.waits == [7.0, 120.0]


def test_a_server_that_is_too_slow(time):
    with serving({1: "slow 1"}) as server:
        assert servers(time, server.url, timeout=0.2).ask(ITEMS) == SENT_SCORES
    assert len(time.waits) == 1


def test_a_server_that_comes_back(time):
    port, back = free_port(), []

    def come_back() -> None:
        if time.now > 20 and not back:
            context = serving(port=port)
            back.append((context, context.__enter__()))

    time.meanwhile = come_back
    try:
        assert servers(time, f"http://127.0.0.1:{port}/score").ask(ITEMS) == SENT_SCORES
    finally:
        back[0][0].__exit__(None, None, None)
    assert 20 < time.now < 60


def test_a_server_that_stays_away(time):
    asked = servers(time, f"http://127.0.0.1:{free_port()}/score?key=SECRET", patience=50.0)
    with pytest.raises(
        ServerError, match=r"/score cannot be reached, or broke the connection \(ConnectionRefusedError: .*"
    ) as error:
        asked.ask(ITEMS)
    assert time.now == 50.0 and len(time.waits) < 12
    assert "SECRET" not in str(error.value)
    assert "in 50.0 s; sent" in str(error.value) and "w10" in str(error.value)
    with pytest.raises(ServerError):
        asked.ask(ITEMS)  # whoever else asks is not made to wait
    assert time.now == 50.0


REFUSED = {
    "400": "answered 400 Bad Request",
    "404": "answered 404 Not Found",
    "redirect": "answered 302 Found .*a redirect to /elsewhere: give that URL",
    "short": r"answered 2 scores for 3 responses; ids that only one of the two has: \['3.0'\]",
    "double": "answered 4 scores for 3 responses",
    "unknown": r"answered . scores for 3 responses; ids that only one of the two has: .*'another'",
    "nan": "answered nan for response 0 of 3, which is not finite",
    "infinite": "answered inf for response 0 of 3, which is not finite",
    "text": "answered '1.0' for response 0 of 3, which is not a number",
    "truth": "answered True for response 0 of 3, which is not a number",
    "null": "answered None for response 0 of 3, which is not a number",
    "not json": "answered b'<html>', which is no JSON",
    "huge": r"answered more than 1097728 bytes, which begin b'\[\[",  # 2^20 + 3 * 2^14
}


@pytest.mark.parametrize("behaviour", REFUSED)
def test_mistakes_are_told_at_once(time, behaviour):
    with serving({0: behaviour}) as server:
        with pytest.raises(ServerError, match=f"^{server.url} {REFUSED[behaviour]}.*sent .* bytes, .*w10"):
            servers(time, server.url).ask(ITEMS)
        assert len(server.asked) == 1 and time.waits == []


@pytest.mark.parametrize("behaviour", ["short", "nan"])
def test_mistakes_of_openrlhfs_form(time, behaviour):
    told = {"short": r"answered 2 rewards for 3 responses: \[10.0, 20.0\]", "nan": "which is not finite"}
    with serving({0: behaviour}) as server, pytest.raises(ServerError, match=told[behaviour]):
        servers(time, server.url, form="openrlhf").ask(ITEMS)


@pytest.mark.parametrize("url, told", [(f"http://{'a' * 64}/", "has an invalid host name"), ("https://{}/", "TLS")])
def test_addresses_at_which_there_can_be_no_scores(time, url, told):
    with serving() as server, pytest.raises(ServerError, match=told):
        servers(time, url.format(server.http.server_address[0] + f":{server.http.server_port}")).ask(ITEMS)
    assert time.waits == []


def test_one_that_is_away_is_left_out_while_another_answers(time):
    with serving() as server:
        both = servers(time, f"http://127.0.0.1:{free_port()}/score", server.url)
        assert [both.ask(ITEMS, turn) for turn in range(4)] == [SENT_SCORES] * 4
        assert len(server.asked) == 4 and time.waits == []


def test_servers_take_turns(time):
    with serving() as one, serving() as other:
        both = servers(time, one.url, other.url)
        assert [both.ask(ITEMS, turn) for turn in range(4)] == [SENT_SCORES] * 4
        assert len(one.asked) == len(other.asked) == 2


def test_what_a_health_path_answers(time):
    with serving() as server:
        assert servers(time, server.url).probe(ITEMS[0]) == 10.0
        server.health = 404
        with pytest.raises(ServerError, match="answered 404 .*whose health is asked at http.*:[0-9]+/health"):
            servers(time, server.url).probe(ITEMS[0])
        assert servers(time, server.url, form="openrlhf").probe(ITEMS[0]) == 10.0  # which has none
        assert len(server.asked) == 2


def test_proxies_are_not_asked_for_this_machine(time, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    with serving() as server:
        assert servers(time, server.url).ask(ITEMS) == SENT_SCORES
    with serving() as proxy:  # a host that nobody knows is the proxy's to find
        monkeypatch.setenv("http_proxy", proxy.url.removesuffix("/score"))
        assert servers(time, "http://rewards.invalid/score").ask(ITEMS) == SENT_SCORES


@pytest.mark.parametrize(
    "value, expected",
    [
        (None, None),
        ("12", 12.0),
        ("soon", None),
        ("Wed, 21 Oct 2015 07:28:30 GMT", None),
    ],
)
def test_retry_after(value, expected):
    assert retry_after(value) == expected


def test_delays_double_up_to_half_a_minute_and_vary():
    for faults, longest in ((1, 0.5), (2, 1.0), (5, 8.0), (7, 30.0), (1000, 30.0)):
        delays = [delay(faults, None) for _ in range(50)]
        assert longest / 2 <= min(delays) and max(delays) <= longest and len(set(delays)) > 25


def test_what_json_cannot_say_is_told():
    item = Item("0", "", "", {"answer": float("nan")})
    with pytest.raises(ServerError, match="was not asked: a column of the data has a value that JSON lacks"):
        Servers(["http://127.0.0.1:1/"], "items", timeout=1, patience=1).ask([item])


def test_the_requests_as_documented(time):
    items = [Item("7.0", "What?", " w04", {"answer": "4"}), Item("8.0", "And?", "", {"answer": "é"}, False)]
    with serving() as server:
        for form in ("items", "openrlhf"):
            assert servers(time, server.url, form=form).ask(items) == [4.0, -1.0]
        assert server.asked == json.loads(
            """[{"items": [{"id": "7.0", "prompt": "What?", "response": " w04", "ended": true, "answer": "4"},
                           {"id": "8.0", "prompt": "And?", "response": "", "ended": false, "answer": "é"}]},
                {"query": ["What? w04", "And?"], "prompts": ["What?", "And?"], "labels": ["4", "é"]}]"""
        )


ONE_ITEM = [Item("7.0", "What is 2 + 2?", " 4", {})]


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """The URL of a server that answers one request with these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                while not connection.recv(65536).endswith(b"{}"):
                    pass
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/score"
        thread.join()


@pytest.mark.parametrize(
    "answer, kind, told",
    [
        (b"HTTP/1.1 500 \x1b[31mred\r\nContent-Length: 0\r\n\r\n", Fault, "answered 500 [31mred"),
        (
            b"HTTP/1.1 302 Found\r\nLocation: /a\x1b[2J\r\nContent-Length: 0\r\n\r\n",
            Mistake,
            "answered 302 Found, a redirect to /a [2J: give that URL",
        ),
        (b"HTTP/1.1 204 No\x1b]0;Content\r\n\r\n", Mistake, "answered 204 No ]0;Content without scores"),
        (b"\x1b[2Jno HTTP\r\n\r\n", Fault, "cannot be reached, or broke the connection (BadStatusLine: [2Jno HTTP)"),
    ],
)
def test_what_a_terminal_would_obey_is_left_out(answer, kind, told):
    with answering(answer) as url, pytest.raises(kind) as caught:
        exchange(url, b"{}", timeout=30.0, most_bytes=100)
    assert str(caught.value) == told


@pytest.mark.parametrize(
    "head, body",
    [
        ("404 Not Found", b"no POST /score?key=SECRET"),
        ("302 Found\r\nLocation: https://a/score?key=SECRET", b""),
        ("403 no SECRET", b"SECRET at /score?... is none"),
    ],
)
def test_a_key_that_a_server_says_again_is_left_out(head, body):
    answer = f"HTTP/1.1 {head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    with answering(answer) as url, pytest.raises(Mistake, match=r"/score\?\.\.\.") as caught:
        exchange(f"{url}?key=SECRET", b"{}", timeout=30.0, most_bytes=100)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [b'{"scores": [{"id": "7.0", "score": 1, "score": 2}]}', b'{"scores": [], "scores": [{"id": "7.0", "score": 1}]}'],
)
def test_a_score_that_is_given_twice_within_an_object_is_none(body):
    with pytest.raises(WrongAnswer, match="with the name .* 2 times"):
        decoded_scores("items", body, ONE_ITEM)
