"""--push_to_hub: what is looked at before a run, what is uploaded, and that a failure costs nothing. No test asks the
real Hub: a server on this machine stands for it, or functions do."""

import http.server
import json
import shlex
import threading

import huggingface_hub
import pytest

from scripts.harness import free_port
from scripts.harness.programs import assert_one_message, run_here
from training.runtime import hub

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
    assert result.stdout.rstrip().splitlines()[-1] == "uploaded: URL"
    (name, made), sent = uploads
    assert name == ID and made == {"private": True, "exist_ok": True}
    assert sent["folder_path"] == (out / "actor" if step == 3 else out) and sent["repo_id"] == ID
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(sent["allow_patterns"])
    assert not {"run.json", "metrics.jsonl", "written.json"} & set(sent["allow_patterns"])


def test_an_upload_that_fails_leaves_the_model_and_the_command(tiny, tmp_path, capfd, uploads, monkeypatch):
    def failing(self, **how):
        raise ConnectionError("no route to the Hub")

    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", failing)
    result = run_here(1, flags(tiny, 1, tmp_path / "out", hub_private="false"), capfd)
    assert result.code == 0 and (tmp_path / "out" / "model.safetensors").is_file()
    warning, again = result.stdout.rstrip().splitlines()[-2:]
    assert warning.startswith("WARNING: the model was not uploaded (no route to the Hub). It is saved in ")
    words = shlex.split(again)
    assert words[:6] == ["hf", "upload", ID, str(tmp_path / "out"), ".", "--no-private"]
    assert "README.md" in words and "run.json" not in words


@pytest.mark.parametrize("text", ["damaged", '{"files": [], "models": {}}'])
def test_without_a_list_of_the_models_files_nothing_is_uploaded(text, tmp_path, capsys, uploads):
    (tmp_path / "written.json").write_text(text)
    args = type("Args", (), {"push_to_hub": True, "hub_model_id": ID, "hub_private": True, "output_dir": str(tmp_path)})
    hub.push(args, {".": tmp_path})
    said = capsys.readouterr().out
    assert uploads == [] and said.startswith(f"WARNING: the model was not uploaded ({tmp_path}/written.json")
    assert said.endswith(f"It is saved in {tmp_path}.\n")


def test_an_adapter_of_a_local_model_is_not_uploaded(tiny, tmp_path, capfd, uploads):
    changes = {"lora_dim": 2, "only_optimize_lora": True, "save_merged": "false"}
    result = run_here(1, flags(tiny, 1, tmp_path / "out", **changes), capfd)
    assert result.code == 0 and uploads == []
    assert "WARNING: the model was not uploaded (the adapter's model is a folder on this machine" in result.stdout


def test_what_the_hub_says_no_to_ends_the_run_before_it_begins(tiny, tmp_path, capfd, server, monkeypatch):
    server.RequestHandlerClass.public = True
    result = run_here(1, flags(tiny, 1, tmp_path / "out"), capfd)
    assert_one_message(result, [f"--push_to_hub to {ID}", "is there and public"])
    for place in ("huggingface_hub.hf_api.get_token", "huggingface_hub.utils._headers.get_token"):
        monkeypatch.setattr(place, lambda: "hf_bad")
    result = run_here(1, flags(tiny, 1, tmp_path / "out"), capfd)
    assert_one_message(result, [f"--push_to_hub to {ID}", "the Hub does not take the token"])
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert_one_message(run_here(1, flags(tiny, 1, tmp_path / "out"), capfd), ["no token", "hf auth login"])
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert_one_message(run_here(1, flags(tiny, 1, tmp_path / "out"), capfd), ["HF_HUB_OFFLINE is set"])
    assert not (tmp_path / "out" / "config.json").exists()


def test_without_a_network_the_run_begins(monkeypatch, capsys):
    args = type("Args", (), {"push_to_hub": True, "dry_run": False, "hub_model_id": ID, "hub_private": True})
    hub.check_hub(args)
    assert capsys.readouterr().out == f"the trained model will be uploaded to {ID} by someone\n"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(huggingface_hub.HfApi, "whoami", whoami_once)
    hub.check_hub(args)
    assert "the Hub cannot be asked now" in capsys.readouterr().out


def test_a_hub_that_is_busy_refuses_no_token(server, capsys):
    server.RequestHandlerClass.busy = True
    args = type("Args", (), {"push_to_hub": True, "dry_run": False, "hub_model_id": ID, "hub_private": True})
    hub.check_hub(args)
    assert "the Hub cannot be asked now" in capsys.readouterr().out


def whoami_once(self):
    """The library's question, without its trying again."""
    import urllib.request

    return json.load(urllib.request.urlopen(f"{self.endpoint}/api/whoami-v2", timeout=5))


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"hub_model_id": None}, ["--push_to_hub and --hub_model_id OWNER/NAME go together"]),
        ({"push_to_hub": None}, ["--push_to_hub and --hub_model_id OWNER/NAME go together"]),
        ({"hub_model_id": "a b/c"}, ["--hub_model_id a b/c: no name of the Hub"]),
        ({"hub_model_id": "alone"}, ["--hub_model_id alone: whose it is to be"]),
    ],
)
def test_names_and_flags_that_do_not_go_together(change, expected, tiny, tmp_path, capfd):
    assert_one_message(run_here(2, {**flags(tiny, 2, tmp_path / "out"), **change}, capfd), expected)
