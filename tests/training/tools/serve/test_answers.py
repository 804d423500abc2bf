"""The service by plain HTTP: PUT /, scores, health, the page; and how mistakes are answered."""

import http.client
import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.algo.sampling import keyed_uniforms
from engine.experience import position_ids
from engine.models.loading import load_scorer
from engine.reward.server import Servers, ServerSettings, probe
from scripts.harness.models import EOS
from tests.training.foreign_models import FILM, foreign_model, scores_alone
from tests.training.tools.serve.conftest import flags, serving
from training.tools.serve.models import load_models

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
    status, found = service.request("PUT", "/", body)
    assert status == 200 and list(found) == ["prompt", "seed", "models"] and found["prompt"] == PROMPT
    assert list(found["models"]) == ["one", "two"]
    for name, answer in found["models"].items():
        tokens = greedy(models[name], PROMPT, 12)
        words = [f"w{token:02d}" for token in tokens if token > 3]
        assert answer["response"].split() == words and answer["tokens"] == len(tokens)
        assert answer["finish_reason"] == ("stop" if tokens[-1] == EOS else "length")
        assert answer["score"] == pytest.approx(score_of(scorer, ids_of(PROMPT) + tokens), abs=1e-5)
    assert found["models"]["one"]["response"] != found["models"]["two"]["response"]


def test_tokens_are_drawn_from_the_models_distribution_by_their_own_keys(service, models):
    """Against a loop without a cache: probabilities in float64, the first token over the uniform number."""
    model = AutoModelForCausalLM.from_pretrained(models["one"], dtype=torch.float32)
    body = {"prompt": PROMPT, "seed": 7, "temperature": 0.7, "max_tokens": 20, "models": ["one"]}
    answer = service.request("PUT", "/", body)[1]["models"]["one"]
    ids, zero = ids_of(PROMPT), torch.zeros(1, dtype=torch.int64)
    for place in range(answer["tokens"]):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].double() / 0.7
        target = keyed_uniforms(7, zero, zero, place).item()
        ids.append(int((torch.softmax(logits, -1).cumsum(-1) <= target).sum()))
    words = [f"w{token:02d}" for token in ids[3:] if token > 3]
    assert answer["response"].split() == words and (answer["tokens"] == 20 or ids[-1] == EOS)


def test_a_chat_goes_through_the_models_template(service, models):
    """The template of the model `two` puts w60 behind the messages; `one` has none."""
    chat = {"messages": [{"role": "user", "content": "w05 w09"}], "temperature": 0, "max_tokens": 12}
    status, found = service.request("PUT", "/", {**chat, "models": ["two"]})
    tokens = greedy(models["two"], "w05 w09 w60", 12)
    assert status == 200 and list(found) == ["messages", "seed", "models"] and found["messages"] == chat["messages"]
    assert found["models"]["two"]["response"].split() == [f"w{token:02d}" for token in tokens if token > 3]


def test_a_seed_gives_the_same_responses_again_and_is_told(service):
    _, first = service.request("PUT", "/", {"prompt": PROMPT})
    _, again = service.request("PUT", "/", {"prompt": PROMPT, "seed": first["seed"]})
    _, other = service.request("PUT", "/", {"prompt": PROMPT, "seed": first["seed"] + 1, "models": ["one"]})
    assert first == again
    assert list(other["models"]) == ["one"]
    assert other["models"]["one"]["response"] != first["models"]["one"]["response"]


def test_a_stream_has_pieces_of_each_text_by_turns_then_the_same_answer(service):
    body = {"prompt": PROMPT, "seed": 3, "max_tokens": 9}
    whole = service.request("PUT", "/", body)[1]["models"]
    events = service.events(body)
    assert events[0] == {"seed": 3} and [event["model"] for event in events[1:5]] == ["one", "two"] * 2
    for name in ("one", "two"):
        texts = [event["text"] for event in events if event.get("model") == name and "text" in event]
        (end,) = [event for event in events if event.get("model") == name and "score" in event]
        assert "".join(texts) == whole[name]["response"] and len(texts) > 3
        assert end == {"model": name, **whole[name]}


def test_scores_are_the_reward_models(service, scorer):
    pairs = [("w05 w09", "w33 w07"), ("w60", "w61 w62 w63 w04 w05"), ("w07 w08 w09", "w10")]
    items = [{"id": f"{n}.0", "prompt": p, "response": r, "answer": "x"} for n, (p, r) in enumerate(pairs)]
    items.append({"id": 9, "prompt": "w60", "response": "w61", "ended": False})
    status, found = service.request("POST", "/v1/scores", {"items": items})
    assert status == 200 and [score["id"] for score in found["scores"]] == ["0.0", "1.0", "2.0", 9]
    for score, (prompt, response) in zip(found["scores"], pairs):
        assert score["score"] == pytest.approx(score_of(scorer, [*ids_of(f"{prompt} {response}"), EOS]), abs=1e-5)
    assert found["scores"][-1]["score"] == pytest.approx(score_of(scorer, [60, 61]), abs=1e-5)


def test_a_training_run_takes_its_scores_from_here(service, scorer):
    settings = ServerSettings(urls=[f"http://127.0.0.1:{service.port}/v1/scores"])
    ended, cut_off = score_of(scorer, [5, 6, EOS]), score_of(scorer, [5, 6])
    assert probe(settings, "w05", {}).keys() == set(settings.urls), "its health, and the score of one text"
    items = [settings.item("1.0", "w05", "w06", None), settings.item("2.0", "w05", "w06", None, ended=False)]
    found = Servers(settings.urls, settings.form, timeout=60.0, patience=60.0).ask(items)
    assert found == pytest.approx([ended, cut_off], abs=1e-5) and abs(ended - cut_off) > 1e-3


def test_health_says_which_models_there_are(service):
    told = {"status": "ok", "models": ["one", "two"], "chat_models": ["two"], "reward_model": True}
    assert service.request("GET", "/health") == (200, told)


def test_a_stop_text_ends_a_response_as_in_a_run(service):
    body = {"prompt": "w05 w09", "seed": 8, "max_tokens": 30, "models": ["one"]}
    words = service.request("PUT", "/", body)[1]["models"]["one"]["response"].split()
    fourth = words[3]
    assert fourth not in words[:3]
    for stop in (fourth, ["never", fourth]):
        found = service.request("PUT", "/", {**body, "stop": stop})[1]["models"]["one"]
        assert (found["response"].split(), found["finish_reason"], found["tokens"]) == (words[:4], "stop", 4)


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


DEEP = '{"prompt": ' + "[" * 50_000
CHAT = [{"role": "user", "content": "w05 " * 64}]
MISTAKES = [  # method, path, body, status, what the message says, param
    ("PUT", "/", '{"prompt": ', 400, "not JSON", None),
    ("PUT", "/", DEEP, 400, "not JSON", None),
    ("PUT", "/", "[1]", 400, "the body: give an object", None),
    ("PUT", "/", b'{"prompt": "\xff"}', 400, "not JSON: 'utf-8'", None),
    ("PUT", "/", '{"prompt": "\\ud800"}', 400, "prompt: the text is not valid Unicode", "prompt"),
    ("PUT", "/", '{"prompt": "w05", "temperature": NaN}', 400, "NaN is not a number", None),
    ("PUT", "/", '{"prompt": "w05", "temperature": 1e999}', 400, "give 0, or", "temperature"),
    ("PUT", "/", '{"prompt": "w05", "seed": ' + "1" * 5000 + "}", 400, "not JSON", None),
    ("PUT", "/", {"temperature": 0}, 400, "^give either prompt", None),
    ("PUT", "/", {"prompt": "w05", "messages": [{"role": "user", "content": "w05"}]}, 400, "^give either prompt", None),
    ("PUT", "/", {"prompt": "w05", "models": ["three"]}, 404, "There is: one, two", "models"),
    ("PUT", "/", {"prompt": ""}, 400, "prompt: it is empty", "prompt"),
    ("PUT", "/", {"prompt": {"a": 1}}, 400, "^prompt: give a text", "prompt"),
    ("PUT", "/", {"prompt": "w05", "max_tokens": "2"}, 400, "give a whole number", "max_tokens"),
    ("PUT", "/", {"prompt": "w05", "max_tokens": True}, 400, "give a whole number", "max_tokens"),
    ("PUT", "/", {"prompt": "w05 " * 64}, 400, "64 tokens", "prompt"),
    ("PUT", "/", {"prompt": "w05 " * 9000}, 400, "too many for 64 tokens", "prompt"),
    ("PUT", "/", {"prompt": "w05", "max_tokens": 41}, 400, "40 tokens at", "max_tokens"),
    ("PUT", "/", {"prompt": "w05 " * 60, "max_tokens": 5}, 400, "4 tokens", "max_tokens"),
    ("PUT", "/", {"prompt": "w05", "max_tokens": 0}, 400, "at least 1", "max_tokens"),
    ("PUT", "/", {"prompt": "w05", "temperature": 1e-6}, 400, "give 0, or 0.01 to 2", "temperature"),
    ("PUT", "/", {"prompt": "w05", "seed": 2**63}, 400, "seed", "seed"),
    ("PUT", "/", {"prompt": "w05", "stop": [""]}, 400, "stop: give", "stop"),
    ("PUT", "/", {"prompt": "w05", "stop": [1]}, 400, "stop.0.: give a text", "stop"),
    ("PUT", "/", {"prompt": "w05", "n": 2}, 400, "n is not supported", "n"),
    ("PUT", "/", {"messages": [{"role": "user", "content": "w05"}]}, 400, "one has no chat template", "messages"),
    ("PUT", "/", {"messages": [], "models": ["two"]}, 400, "messages", "messages"),
    ("PUT", "/", {"messages": [{"role": "user", "content": ["a"]}], "models": ["two"]}, 400, "a text", "messages"),
    ("PUT", "/", {"messages": CHAT, "models": ["two"]}, 400, "65 tok", "messages"),
    ("POST", "/v1/scores", {}, 400, "items: it is missing", "items"),
    ("POST", "/v1/scores", {"items": [{"id": 1, "prompt": "w05"}]}, 400, "items.0..response: it is missing", "items"),
    ("POST", "/v1/scores", {"items": [{}] * 1001}, 400, "at most 1000 items", "items"),
    ("POST", "/v1/scores", {"items": [{"id": 1, "prompt": "w05", "response": "w06 " * 70}]}, 400, "has 72", "items"),
    ("GET", "/nowhere", None, 404, "there is no /nowhere", None),
    ("GET", f"/{'a' * 1000}", None, 404, "there is no /a{199} here", None),
    ("POST", "/health", None, 405, "/health has no POST", None),
    ("DELETE", "/health", None, 501, "DELETE", None),
]


@pytest.mark.parametrize("method, path, body, status, message, param", MISTAKES)
def test_a_mistake_is_answered_by_name_and_costs_one_line(service, capfd, method, path, body, status, message, param):
    found, answer = service.request(method, path, body)
    assert found == status and list(answer) == ["error"]
    assert re.search(message, answer["error"]["message"]) and answer["error"]["param"] == param
    assert set(answer["error"]) == {"message", "param"}
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"{status} {method} {path}"[:200])


@pytest.mark.parametrize("body", [{"models": ["z" * 50_000], "prompt": "w05"}, {"prompt": "w05", "z" * 50_000: 1}])
def test_of_a_long_name_the_beginning_is_told(service, body):
    _, answer = service.request("PUT", "/", body)
    assert "zzzz" in answer["error"]["message"] and len(json.dumps(answer)) < 3000


def test_a_body_that_a_page_of_any_origin_may_send_is_not_read(service):
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        status, answer = service.request("POST", "/v1/scores", {"items": []}, {"Content-Type": kind})
        assert status == 400 and "Content-Type: application/json" in answer["error"]["message"]


def test_a_reward_model_of_another_family_reads_texts_and_messages(models, tmp_path):
    """By its own tokenizer and template, in transformers alone: responses of a served model, and items of requests."""
    path = foreign_model(tmp_path / "film", FILM, pad_is_eos=True)
    own, args = AutoTokenizer.from_pretrained(path), flags(f"two={models['two']}", reward_model_name_or_path=path)
    messages = [{"role": "user", "content": "w05 w09"}]

    def chat(response: str) -> list[int]:
        return own.apply_chat_template([*messages, {"role": "assistant", "content": response}], return_dict=False)

    items = [
        {"id": 0, "prompt": "not read", "messages": messages, "response": " great"},
        {"id": 1, "prompt": "Review", "response": " great", "ended": False},
        {"id": 2, "prompt": "Review" + " great" * 90, "response": " great"},  # the served model has 64 positions
    ]
    with serving(args, load_models(args)) as running:
        drawn = running.request("PUT", "/", {"messages": messages, "temperature": 0, "max_tokens": 12})[1]
        scored = running.request("POST", "/v1/scores", {"items": items})[1]["scores"]
        spelling = "a<|im_end|>"
        for item in ({"prompt": spelling}, {"prompt": "", "messages": [{"role": "user", "content": spelling}]}):
            status, answer = running.request("POST", "/v1/scores", {"items": [{"id": 0, "response": "a", **item}]})
            assert (status, answer["error"]["param"]) == (400, "items")
            assert answer["error"]["message"].startswith("items[0]: it spells '<|im_end|>', a control token")
        status, answer = running.request("PUT", "/", {"prompt": spelling})
        assert (status, answer["error"]["param"]) == (400, "prompt")
    tokens = [token for token in greedy(models["two"], "w05 w09 w60", 12) if token != EOS]
    spelt = AutoTokenizer.from_pretrained(models["two"]).decode(tokens)  # with special tokens, as a run spells them
    rows = [chat(spelt), chat(" great")]
    rows += [[*own("Review" + " great" * count).input_ids, own.eos_token_id] for count in (1, 91)]
    found = [drawn["models"]["two"]["score"], *(item["score"] for item in scored)]
    assert found == pytest.approx(scores_alone(path, rows), abs=1e-5)
