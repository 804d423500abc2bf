"""Scores of rollouts from a reward server: which responses are sent, when, in how many requests; and the probe."""

import json
import re
import threading
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from engine.errors import RunStopped, UserError
from engine.reward.base import CombinedReward
from engine.reward.server import Item, ServerReward, ServerSettings, decoded_scores, encoded_request, probe
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
    page = (Path(__file__).parents[2] / "docs" / "reward_server.md").read_text(encoding="utf-8")
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
