"""Cards of saved models, and the Hub that they are uploaded to."""

import http.server
import json
import re
import shlex
import shutil
import threading

import huggingface_hub
import pytest
import yaml

from scripts.harness import free_port
from scripts.harness.programs import assert_one_message, command_line, run_caught, run_here
from training.runtime import output_folder
from training.tools import cards
from training.tools.cards import CARD, is_edited
from training.tools.export.__main__ import main as export

ID = "someone/tiny"


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers whoami by the token, and that the repository is not there, or public."""

    public, busy = False, False

    def do_GET(self):
        if self.busy:
            return self._answer(502, {"error": "try again later"})
        if self.path.endswith("/whoami-v2"):
            good = self.headers["Authorization"] == "Bearer hf_good"
            return self._answer(200 if good else 401, {"name": "someone"} if good else {"error": "bad token"})
        found = {"id": ID, "private": False, "siblings": [], "tags": [], "downloads": 0}
        return self._answer(200, found) if self.public else self._answer(404, {}, {"X-Error-Code": "RepoNotFound"})

    def _answer(self, code: int, body: dict, headers: dict | None = None):
        content = json.dumps(body).encode()
        self.send_response(code)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture(autouse=True)
def server(monkeypatch):
    """The Hub of this test, whose address and token the library has."""
    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("OneHub", (Hub,), {}))
    threading.Thread(target=found.serve_forever, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{found.server_port}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_good")
    monkeypatch.setattr("huggingface_hub.hf_api.get_token", lambda: "hf_good")
    monkeypatch.setattr("huggingface_hub.utils._headers.get_token", lambda: "hf_good")
    yield found
    found.shutdown()
    found.server_close()


@pytest.fixture
def uploads(monkeypatch):
    """The arguments of each upload; nothing is sent."""
    found = []
    monkeypatch.setattr(
        huggingface_hub.HfApi, "create_repo", lambda self, name, **how: found.append((name, how)) or "URL"
    )
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", lambda self, **how: found.append(how))
    info = type("Info", (), {"private": True})
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, name: info)
    return found


def flags(tiny, step, out, **changes) -> dict:
    return tiny.flags(step, output_dir=out, push_to_hub=True, hub_model_id=ID, **changes)


@pytest.mark.parametrize("step", [1, 3])
def test_the_models_own_files_are_uploaded_and_nothing_else(step, tiny, tmp_path, capfd, uploads):
    out = tmp_path / "out"
    result = run_here(step, flags(tiny, step, out), capfd)
    assert result.code == 0, result.stderr
    assert f"will be uploaded to {ID} by someone" in result.stdout
    assert "\nuploaded: URL\n" in result.stdout and result.stdout.endswith(f"done: saved in {out}\n")
    (name, made), sent = uploads
    assert name == ID and made == {"private": True, "exist_ok": True}
    assert sent["folder_path"] == (out / "actor" if step == 3 else out) and sent["repo_id"] == ID
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(sent["allow_patterns"])
    assert not {"run.json", "metrics.jsonl"} & set(sent["allow_patterns"])


def test_an_upload_that_fails_leaves_the_model_and_the_command(tiny, tmp_path, capfd, uploads, monkeypatch):
    def failing(self, **how):
        raise ConnectionError("no route to the Hub")

    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", failing)
    result = run_here(1, flags(tiny, 1, tmp_path / "out", hub_private="false"), capfd)
    assert result.code == 0 and (tmp_path / "out" / "model.safetensors").is_file()
    warning, again, _ = result.stdout.rstrip().splitlines()[-3:]
    assert warning == "WARNING: the model was not uploaded (no route to the Hub). To try again:"
    words = shlex.split(again)
    assert words[:6] == ["hf", "upload", ID, str(tmp_path / "out"), ".", "--no-private"]
    assert "README.md" in words and "run.json" not in words


def test_an_adapter_of_a_local_model_is_not_uploaded(tiny, tmp_path, capfd, uploads):
    changes = {"lora_dim": 2, "only_optimize_lora": True, "save_merged": "false"}
    result = run_here(1, flags(tiny, 1, tmp_path / "out", **changes), capfd)
    assert result.code == 0 and uploads == []
    assert "WARNING: the model was not uploaded (the adapter's model is a folder on this machine" in result.stdout


def test_what_the_hub_says_no_to_ends_the_run_before_it_begins(tiny, tmp_path, capfd, server, monkeypatch):
    server.RequestHandlerClass.public = True
    result = run_here(1, flags(tiny, 1, tmp_path / "out"), capfd)
    assert_one_message(result, [ID, "is there and public"])
    for place in ("huggingface_hub.hf_api.get_token", "huggingface_hub.utils._headers.get_token"):
        monkeypatch.setattr(place, lambda: "hf_bad")
    result = run_here(1, flags(tiny, 1, tmp_path / "out"), capfd)
    assert_one_message(result, [f"--push_to_hub to {ID}", "hf auth login"])
    for place in ("huggingface_hub.hf_api.get_token", "huggingface_hub.utils._headers.get_token"):
        monkeypatch.setattr(place, lambda: None)
    assert_one_message(run_here(1, flags(tiny, 1, tmp_path / "out"), capfd), ["no token", "hf auth login"])
    assert not (tmp_path / "out" / "config.json").exists()


def test_without_a_network_or_with_a_busy_hub_the_run_begins(monkeypatch, server, capsys):
    args = type("Args", (), {"push_to_hub": True, "hub_model_id": ID, "hub_private": True})
    cards.check_hub(args)
    assert capsys.readouterr().out == f"the trained model will be uploaded to {ID} by someone\n"
    server.RequestHandlerClass.busy = True
    cards.check_hub(args)
    assert "the Hub cannot be asked now" in capsys.readouterr().out
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(huggingface_hub.HfApi, "whoami", whoami_once)
    cards.check_hub(args)
    assert "the Hub cannot be asked now" in capsys.readouterr().out


def whoami_once(self):
    """The library's question, without its trying again."""
    import urllib.request

    return json.load(urllib.request.urlopen(f"{self.endpoint}/api/whoami-v2", timeout=5))


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"hub_model_id": None}, ["--push_to_hub needs --hub_model_id"]),
        ({"push_to_hub": None}, ["--hub_model_id someone/tiny needs --push_to_hub"]),
        ({"hub_model_id": "a b/c"}, ["--hub_model_id a b/c: not a name on the Hub"]),
        ({"hub_model_id": "alone"}, ["--hub_model_id alone: the owner is missing"]),
    ],
)
def test_names_and_flags_that_do_not_go_together(change, expected, tiny, tmp_path, capfd):
    assert_one_message(run_here(2, {**flags(tiny, 2, tmp_path / "out"), **change}, capfd), expected)


@pytest.fixture(scope="module")
def out(tiny, tmp_path_factory):
    """A run of step 3 with a checkpoint."""
    folder = tmp_path_factory.mktemp("cards") / "out"
    flags = tiny.flags(3, output_dir=folder, save_steps=1, enable_ema=True, eval_steps=1)
    result = run_caught(3, command_line(flags))
    assert result.code == 0, result.stderr
    return folder


def card(folder) -> str:
    return (folder / CARD).read_text()


def test_each_model_has_a_card_with_the_last_evaluation(out, tiny):
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    for name in ("actor", "actor_ema", "critic"):
        text = card(out / name)
        assert yaml.safe_load(text.split("---\n")[1])["library_name"] == "transformers"
        assert str(tiny.folder) not in text and not is_edited(out / name / CARD)
    score = re.search(r"\| score \| \S+ ± \S+ \| (\S+) ±", card(out / "actor"))
    assert float(score[1]) == pytest.approx(last["eval/score"], abs=5e-4)
    assert f"| {last['eval/ema_score']:.3f} ±" in card(out / "actor_ema")


def test_what_is_exported_has_the_card_of_its_step(out, tmp_path):
    point = out / "checkpoints" / "step_000001"
    assert export([str(point), str(tmp_path / "first"), "--ema"]) == 0
    assert "| steps | 1 |" in card(tmp_path / "first") and "moving average" in card(tmp_path / "first")
    shutil.copytree(point, tmp_path / "moved" / "checkpoints" / "step_000001")
    assert export([str(tmp_path / "moved"), str(tmp_path / "second")]) == 0
    assert not (tmp_path / "second" / CARD).exists()


@pytest.mark.parametrize("step", [1, 3])
def test_an_edited_card_is_kept(step, tiny, tmp_path, capfd, uploads):
    folder = tmp_path / "out"
    place = folder / ("actor" if step == 3 else ".")
    given = flags(tiny, step, folder, save_steps=1, num_train_epochs=1)
    assert run_here(step, given, capfd).code == 0
    mine = card(place) + "mine\n"
    (place / CARD).write_text(mine)
    assert run_here(step, {**given, "resume": folder}, capfd).code == 0
    assert card(place) == mine and CARD in uploads[-1]["allow_patterns"]


def test_a_card_that_fails_costs_no_model(tiny, tmp_path, capfd, monkeypatch):
    def broken(*_):
        raise KeyError("flags")

    monkeypatch.setattr(cards, "model_card", broken)
    result = run_here(1, tiny.flags(1, output_dir=tmp_path / "out"), capfd)
    assert (tmp_path / "out" / "model.safetensors").is_file() and not (tmp_path / "out" / CARD).exists()
    assert result.code == 1 and "README.md cannot be written" in result.stderr
    assert output_folder.COMPLETE not in {path.name for path in (tmp_path / "out").iterdir()}
