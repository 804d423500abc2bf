"""Requests to real reward servers on this machine: what is asked again, for how long, and what is refused."""

import json

import pytest

from engine.reward.server import Item, ServerError, Servers, delay, is_this_machine, retry_after
from scripts.harness import free_port
from tests.reward_server import serving

ITEMS = [Item(f"{number}.0", f"p{number}", f" w{number}0", {}) for number in range(1, 4)]
SCORES = [10.0, 20.0, 30.0]


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
        assert servers(time, server.url, form=form).ask(ITEMS) == SCORES
    assert time.waits == []


def test_reordered_answers_are_put_in_order(time):
    with serving({1: "reversed"}) as server:
        assert servers(time, server.url).ask(ITEMS) == SCORES


@pytest.mark.parametrize("fault", ["500", "503", "busy 0", "cut"])
def test_passing_faults_are_asked_again_after_growing_waits(time, capfd, fault):
    with serving({1: fault, 2: fault, 3: fault}) as server:
        assert servers(time, server.url).ask(ITEMS) == SCORES
        assert len(server.asked) == 4 and all(asked == server.asked[0] for asked in server.asked)
    assert [0.5 * low <= wait <= low for low, wait in zip((0.5, 1.0, 2.0), time.waits, strict=True)] == [True] * 3
    told = capfd.readouterr().out.splitlines()
    assert len(told) == 2 and "a request is made again for up to 60 s" in told[0] and "answers again" in told[1]


def test_a_server_says_when_to_be_asked_again_within_reason(time):
    with serving({1: "busy 7", 2: "busy 100000"}) as server:
        assert servers(time, server.url, patience=1000.0).ask(ITEMS) == SCORES
    assert time.waits == [7.0, 120.0]


def test_a_server_that_is_too_slow(time):
    with serving({1: "slow 1"}) as server:
        assert servers(time, server.url, timeout=0.2).ask(ITEMS) == SCORES
    assert len(time.waits) == 1


def test_a_server_that_comes_back(time):
    port, back = free_port(), []

    def come_back() -> None:
        if time.now > 20 and not back:
            context = serving(port=port)
            back.append((context, context.__enter__()))

    time.meanwhile = come_back
    try:
        assert servers(time, f"http://127.0.0.1:{port}/score").ask(ITEMS) == SCORES
    finally:
        back[0][0].__exit__(None, None, None)
    assert 20 < time.now < 60


def test_a_server_that_stays_away(time):
    asked = servers(time, f"http://127.0.0.1:{free_port()}/score?key=SECRET", patience=50.0)
    with pytest.raises(
        ServerError, match=r"/score cannot be reached, or broke off \(ConnectionRefusedError: .*"
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
    "redirect": "answered 302 Found .*would have it asked at /elsewhere: give that URL",
    "short": "answered 2 scores for 3 responses; the first id without one is '3.0'",
    "double": "answered 2 scores for the id '1.0'",
    "unknown": "answered a score for the id 'another', which it was not asked for",
    "nan": "answered nan for response 0 of 3, which is not finite",
    "infinite": "answered inf for response 0 of 3, which is not finite",
    "text": "answered '1.0' for response 0 of 3, which is no number",
    "truth": "answered True for response 0 of 3, which is no number",
    "null": "answered None for response 0 of 3, which is no number",
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


@pytest.mark.parametrize("url, told", [(f"http://{'a' * 64}/", "has a host that can be none"), ("https://{}/", "TLS")])
def test_addresses_at_which_there_can_be_no_scores(time, url, told):
    with serving() as server, pytest.raises(ServerError, match=told):
        servers(time, url.format(server.http.server_address[0] + f":{server.http.server_port}")).ask(ITEMS)
    assert time.waits == []


def test_one_that_is_away_is_left_out_while_another_answers(time):
    with serving() as server:
        both = servers(time, f"http://127.0.0.1:{free_port()}/score", server.url)
        assert [both.ask(ITEMS, turn) for turn in range(4)] == [SCORES] * 4
        assert len(server.asked) == 4 and time.waits == []


def test_servers_take_turns(time):
    with serving() as one, serving() as other:
        both = servers(time, one.url, other.url)
        assert [both.ask(ITEMS, turn) for turn in range(4)] == [SCORES] * 4
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
        assert servers(time, server.url).ask(ITEMS) == SCORES
    with serving() as proxy:  # a host that nobody knows is the proxy's to find
        monkeypatch.setenv("http_proxy", proxy.url.removesuffix("/score"))
        assert servers(time, "http://rewards.invalid/score").ask(ITEMS) == SCORES


@pytest.mark.parametrize(
    "url, expected",
    [
        ("http://localhost:1/", True),
        ("http://a.localhost/", True),
        ("http://127.3.2.1/", True),
        ("http://[::1]:80/", True),
        ("http://0.0.0.0/", True),
        ("http://10.0.0.1/", False),
        ("http://localhost.example/", False),
    ],
)
def test_addresses_of_this_machine(url, expected):
    assert is_this_machine(url) == expected


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
    with pytest.raises(ServerError, match="was not asked: a column of the data holds what JSON cannot say"):
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
