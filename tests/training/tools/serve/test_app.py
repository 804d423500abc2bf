"""The service by plain HTTP: PUT /, scores, OpenRLHF's queries, health, the page; and how mistakes are answered."""

import http.client
import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.experience import position_ids
from engine.models.loading import load_scorer
from engine.reward.server import Servers, ServerSettings, probe
from scripts.harness.models import BOS, EOS, PAD

pytestmark = pytest.mark.slow
PROMPT = "w05 w09 w33"


@pytest.fixture(scope="module")
def scorer(models):
    return load_scorer(models["reward"], torch.float32).eval()


def score_of(scorer, ids: list[int]) -> float:
    sequences = torch.tensor([ids])
    mask = torch.ones_like(sequences)
    with torch.no_grad():
        return scorer.sequence_scores(scorer(sequences, mask, position_ids(mask)), sequences, mask).item()


def greedy(model: str, prompt: str, count: int) -> list[int]:
    """The tokens of transformers' own greedy response."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).generate(
        ids, do_sample=False, max_new_tokens=count
    )
    return found[0, ids.shape[1] :].tolist()


def ids_of(text: str) -> list[int]:
    return [int(word.removeprefix("w")) for word in text.split()]


def test_put_answers_with_every_models_continuation_and_its_score(service, models, scorer):
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12}
    status, found, _ = service.request("PUT", "/", body)
    assert status == 200 and list(found) == ["prompt", "seed", "one", "two"] and found["prompt"] == PROMPT
    for name in ("one", "two"):
        tokens = greedy(models[name], PROMPT, 12)
        words = [f"w{token:02d}" for token in tokens if token > 3]
        assert found[name]["response"].split() == words and found[name]["tokens"] == len(tokens)
        assert found[name]["finish_reason"] == ("stop" if tokens[-1] == EOS else "length")
        assert found[name]["score"] == pytest.approx(score_of(scorer, ids_of(PROMPT) + tokens), abs=1e-5)
    assert found["one"]["response"] != found["two"]["response"]


def test_put_asks_chat_models_by_their_template_and_says_whether_it_did(service, models):
    """The template of the model `two` puts w60 behind the messages; `one` has none."""
    chat = {"messages": [{"role": "user", "content": "w05 w09"}], "temperature": 0, "max_tokens": 12}
    status, found, _ = service.request("PUT", "/", {**chat, "models": ["two"]})
    tokens = greedy(models["two"], "w05 w09 w60", 12)
    assert status == 200 and list(found) == ["messages", "seed", "two"] and found["messages"] == chat["messages"]
    assert found["two"]["response"].split() == [f"w{token:02d}" for token in tokens if token > 3]
    assert found["two"]["chat_template"] == "applied"
    _, plain, _ = service.request("PUT", "/", {"prompt": "w05 w09 w60", "temperature": 0, "max_tokens": 12})
    assert plain["two"] == {**found["two"], "chat_template": "not applied", "score": plain["two"]["score"]}
    assert "chat_template" not in plain["one"]
    status, refused, _ = service.request("PUT", "/", chat)
    assert status == 400 and "the tokenizer of one has no chat template" in refused["error"]["message"]


def test_put_takes_a_bare_text_and_a_json_text(service):
    for body, kind in ((PROMPT, "application/x-www-form-urlencoded"), (json.dumps(PROMPT), "application/json")):
        status, found, _ = service.request("PUT", "/", body, {"Content-Type": kind})
        assert (status, found["prompt"]) == (200, PROMPT) and {"one", "two"} < set(found)


def test_a_seed_gives_the_same_responses_again_and_is_told(service):
    _, first, _ = service.request("PUT", "/", {"prompt": PROMPT})
    _, again, _ = service.request("PUT", "/", {"prompt": PROMPT, "seed": first["seed"]})
    _, other, _ = service.request("PUT", "/", {"prompt": PROMPT, "seed": first["seed"] + 1, "models": ["one"]})
    assert first == again
    assert "two" not in other and other["one"]["response"] != first["one"]["response"]


def test_put_streams_pieces_of_each_models_text_then_scores(service):
    body = {"prompt": PROMPT, "seed": 3, "max_tokens": 9}
    _, whole, _ = service.request("PUT", "/", body)
    connection = service.open_stream("/", {**body, "stream": True})
    lines = [line for line in connection.getresponse().read().decode().split("\n\n") if line]
    connection.close()
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert events[0] == {"seed": 3}
    told = {"one": (), "two": ("chat_template",)}
    for name in told:
        texts = [event["text"] for event in events if event.get("model") == name and "text" in event]
        (end,) = [event for event in events if event.get("model") == name and "score" in event]
        assert "".join(texts) == whole[name]["response"] and len(texts) > 3
        assert end == {
            "model": name,
            **{key: whole[name][key] for key in ("score", "tokens", "finish_reason", *told[name])},
        }


def test_scores_are_the_reward_models(service, scorer):
    pairs = [("w05 w09", "w33 w07"), ("w60", "w61 w62 w63 w04 w05"), ("w07 w08 w09", "w10")]
    items = [{"id": f"{n}.0", "prompt": p, "response": r, "answer": "x"} for n, (p, r) in enumerate(pairs)]
    items.append({"id": 9, "prompt": "w60", "response": "w61", "ended": False})
    status, found, _ = service.request("POST", "/v1/scores", {"items": items})
    assert status == 200 and [score["id"] for score in found["scores"]] == ["0.0", "1.0", "2.0", 9]
    for score, (prompt, response) in zip(found["scores"], pairs):
        assert score["score"] == pytest.approx(score_of(scorer, [*ids_of(f"{prompt} {response}"), EOS]), abs=1e-5)
    assert found["scores"][-1]["score"] == pytest.approx(score_of(scorer, [60, 61]), abs=1e-5)


def test_get_reward_reads_queries_as_openrlhfs_server_does(service, scorer):
    """Special tokens spelt out; one EOS behind, whether or not there was one."""
    query = ["<s> w05 w09 w33 </s>", "<s> w05 w09 w33", "w05 w09 <pad> </s> </s>"]
    body = {"query": query, "prompts": ["", "", ""], "labels": ["", "", ""]}
    status, found, _ = service.request("POST", "/get_reward", body)
    expected = [score_of(scorer, ids) for ids in ([BOS, 5, 9, 33, EOS], [BOS, 5, 9, 33, EOS], [5, 9, EOS])]
    assert status == 200 and found["rewards"] == pytest.approx(expected, abs=1e-5)
    assert found["scores"] == found["rewards"] and isinstance(found["extra_logs"], dict)
    assert expected[0] != pytest.approx(score_of(scorer, [BOS, 5, 9, 33, EOS, PAD]), abs=1e-3)


def test_a_training_run_takes_its_scores_from_here(service, scorer):
    settings = ServerSettings(urls=[f"http://127.0.0.1:{service.port}/v1/scores"])
    ended, cut_off = score_of(scorer, [5, 6, EOS]), score_of(scorer, [5, 6])
    assert probe(settings, "w05", {}).keys() == set(settings.urls), "its health, and the score of one text"
    items = [settings.item("1.0", "w05", "w06", None), settings.item("2.0", "w05", "w06", None, ended=False)]
    found = Servers(settings.urls, settings.form, timeout=60.0, patience=60.0).ask(items)
    assert found == pytest.approx([ended, cut_off], abs=1e-5) and abs(ended - cut_off) > 1e-3


def test_health_says_which_models_there_are_and_what_is_asked_of_them(service):
    health = service.request("GET", "/health")[1]
    assert (health["status"], health["models"], health["reward_model"]) == ("ok", ["one", "two"], True)
    assert (health["asked_for"], health["decoding"], health["chat_models"]) == (0, 0, ["two"])


def test_a_stop_string_ends_a_response_and_is_no_part_of_it(service):
    body = {"prompt": "w05 w09", "seed": 8, "max_tokens": 30, "models": ["one"]}
    words = service.request("PUT", "/", body)[1]["one"]["response"].split()
    fourth = words[3]
    assert fourth not in words[:3]
    for stop in (fourth, ["never", fourth]):
        found = service.request("PUT", "/", {**body, "stop": stop})[1]["one"]
        assert (found["response"].split(), found["finish_reason"], found["tokens"]) == (words[:3], "stop", 4)
        connection = service.open_stream("/", {**body, "stop": stop, "stream": True})
        lines = [line for line in connection.getresponse().read().decode().split("\n\n") if line]
        connection.close()
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        assert "".join(event.get("text", "") for event in events) == found["response"]


def test_the_page_asks_nobody_else_and_runs_its_own_script_alone(service):
    connection = http.client.HTTPConnection("127.0.0.1", service.port)
    connection.request("GET", "/")
    answer = connection.getresponse()
    page, policy = answer.read().decode(), answer.getheader("Content-Security-Policy")
    connection.close()
    assert answer.status == 200 and "default-src 'none'" in policy and "unsafe" not in policy
    assert "connect-src 'self'" in policy and "script-src 'sha256-" in policy
    assert re.findall(r"https?://|\ssrc=|innerHTML|insertAdjacentHTML|\son\w+=", page) == []
    assert '$("prompt").focus();' in page
    assert 'aria-live="polite"' in page and re.findall(r"<(?:textarea|input|select) id=\"(\w+)\"", page) == re.findall(
        r"label for=\"(\w+)\"", page
    )


MISTAKES = [  # method, path, body, status, what the message says, param
    ("PUT", "/", '{"prompt": ', 400, "no JSON", None),
    ("PUT", "/", "[" * 50_000, 400, "JSON|body", None),
    ("PUT", "/", "[1]", 400, "no JSON object", None),
    ("PUT", "/", {"temperature": 0}, 400, "^give either prompt", None),
    ("PUT", "/", {"prompt": "w05", "messages": [{"role": "user", "content": "w05"}]}, 400, "^give either prompt", None),
    ("PUT", "/", {"prompt": "w05", "models": ["three"]}, 404, "There is: one, two", "models"),
    ("PUT", "/", {"prompt": ""}, 400, "prompt", "prompt"),
    ("PUT", "/", {"prompt": {"a": 1}}, 400, "^prompt: Input", "prompt"),
    ("PUT", "/", {"prompt": "w05", "max_tokens": "2"}, 400, "valid integer", "max_tokens"),
    ("PUT", "/", '{"prompt": "\\ud800"}', 400, "no JSON: .* hex escape", None),
    ("PUT", "/", {"prompt": "w05 " * 64}, 400, "64 tokens", "prompt"),
    ("PUT", "/", {"prompt": "w05 " * 9000}, 400, "64 tokens have", "prompt"),
    ("PUT", "/", {"prompt": "w05", "max_tokens": 41}, 400, "40 tokens at", "max_tokens"),
    ("PUT", "/", {"prompt": "w05 " * 60, "max_tokens": 5}, 400, "4 tokens", "max_tokens"),
    ("PUT", "/", {"prompt": "w05", "max_tokens": 0}, 400, "max_tokens", "max_tokens"),
    ("PUT", "/", {"prompt": "w05", "temperature": 3}, 400, "less", "temperature"),
    ("PUT", "/", '{"prompt": "w05", "top_p": NaN}', 400, "top_p", "top_p"),
    ("PUT", "/", {"prompt": "w05", "seed": 2**63}, 400, "seed", "seed"),
    ("PUT", "/", {"prompt": "w05", "stop": [""]}, 400, "stop: give", "stop"),
    ("PUT", "/", {"prompt": "w05", "n": 2}, 400, "n is not supported", "n"),
    ("PUT", "/", '"w05", "max_tokens": 1', 400, "no JSON", None),
    ("PUT", "/", {"messages": [{"role": "user", "content": "w05"}]}, 400, "one has no chat template", "messages"),
    ("PUT", "/", {"messages": [], "models": ["two"]}, 400, "messages", "messages"),
    ("PUT", "/", {"messages": [{"role": "user", "content": ["a"]}], "models": ["two"]}, 400, "string", "messages"),
    (
        "PUT",
        "/",
        {"messages": [{"role": "user", "content": "w05 " * 64}], "models": ["two"]},
        400,
        "65 tok",
        "messages",
    ),
    ("POST", "/v1/scores", {"items": [{"id": 1, "prompt": "w05"}]}, 400, "items.0.response", "items"),
    ("POST", "/v1/scores", {"items": [{"id": 1, "prompt": "w05", "response": "w06"}] * 151}, 400, "151 resp", None),
    (
        "POST",
        "/v1/scores",
        {"items": [{"id": 1, "prompt": "w05", "response": "w06 " * 70}]},
        400,
        "items.0. has 72",
        "items",
    ),
    (
        "POST",
        "/v1/scores",
        {"items": [{"id": 1, "prompt": "w05 " * 9000, "response": ""}]},
        400,
        "items.0.: it has 36000 characters; 64 tokens have",
        "items",
    ),
    (
        "POST",
        "/v1/scores",
        '{"items": [{"id": "1", "prompt": "\\ud800", "response": "z"}]}',
        400,
        "no JSON: .* hex",
        None,
    ),
    ("POST", "/get_reward", {"query": "w05"}, 400, "query", "query"),
    ("POST", "/get_reward", {"query": ["w05 " * 9000]}, 400, "query.0.: it has 36000 characters", "query"),
    ("GET", "/nowhere", None, 404, "there is no /nowhere", None),
    ("GET", "/openapi.json", None, 404, "there is no /openapi.json", None),
    ("DELETE", "/health", None, 405, "has no DELETE", None),
]


@pytest.mark.parametrize("method, path, body, status, message, param", MISTAKES)
def test_a_mistake_is_answered_by_name_and_costs_one_line(service, method, path, body, status, message, param):
    before = service.log.read_text()
    found, answer, _ = service.request(method, path, body)
    assert found == status and list(answer) == ["error"]
    assert re.search(message, answer["error"]["message"]) and answer["error"]["param"] == param
    assert set(answer["error"]) == {"message", "param"}
    lines = service.log.read_text().removeprefix(before).splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"{status} {method} {path}: ")


def test_of_a_long_path_the_beginning_is_told(service):
    status, answer, _ = service.request("GET", f"/{'a' * 1000}")
    assert status == 404 and answer["error"]["message"] == f"there is no /{'a' * 199} here"


@pytest.mark.parametrize("body", [{"models": ["z" * 50_000], "prompt": "w05"}, {"prompt": "w05", "z" * 50_000: 1}])
def test_of_a_long_name_the_beginning_is_told(service, body):
    _, answer, _ = service.request("PUT", "/", body)
    assert "zzzz" in answer["error"]["message"] and len(json.dumps(answer)) < 3000


def test_a_body_that_a_page_of_any_origin_may_send_is_not_read_as_json(service):
    status, answer, _ = service.request("POST", "/v1/scores", {"items": []}, {"Content-Type": "text/plain"})
    assert status == 400 and "Content-Type: application/json" in answer["error"]["message"]


@pytest.mark.parametrize("kind, is_prompt", [("application/x-www-form-urlencoded", False), ("text/plain", True)])
def test_curls_json_is_read_unless_it_is_sent_as_plain_text(service, kind, is_prompt):
    body = '{"prompt": "w05", "max_tokens": 2}'
    _, found, _ = service.request("PUT", "/", body, {"Content-Type": kind})
    assert found["prompt"] == (body if is_prompt else "w05")
