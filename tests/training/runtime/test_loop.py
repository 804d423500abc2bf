"""What a run does around the steps of the critic's pretraining, seen by stand-ins that take notes; and responses that
vLLM cannot draw, refused before data are read and models loaded.
"""

import json
import re
from types import SimpleNamespace

import pytest
from transformers import MiniMaxConfig

from engine.errors import EndedEarly, UserError
from engine.models.checking import PRETRAINING_RECORD
from scripts.harness.models import make_causal_lm
from tests import fake_vllm
from tests.training.config.command_lines import parse, step3
from training.config.step3 import RLHFFlags
from training.critic_pretraining import pretrain
from training.runtime import model_folders, stopping
from training.runtime.loop import Run
from training.runtime.plan import check_files, check_rollouts


class Notes(Run):
    """A run whose trainer, writer and checkpoints are itself, and note what they are asked."""

    def __init__(self, folder, steps: int, done: int = 0):
        self.said, self.steps, self.prompts_drawn = [], steps, done
        self.counters = SimpleNamespace(steps_done=done - steps, samples=0)
        self.plan = SimpleNamespace(last_step=9, dialect=step3().resolved.dialect)
        self.args = step3(critic_pretrain_steps=steps)
        self.models, self.output_dir = SimpleNamespace(critic="critic", saved_tokenizer=None), folder
        self.writer, self.checkpoints, self.view = self, self, SimpleNamespace(bar={"kl": "objective/kl"})
        self.evaluations = SimpleNamespace(due=lambda step: step == 0)
        self.unlogged, self.newest, self.callbacks = None, None, ()

    def count(self, total, **how):
        self.said.append(f"count {total} from {how.get('first_step', 0)}, below {how.get('below', 0)}")

    def take_metrics(self):
        return {}

    def log(self, step, samples, metrics):
        self.said.append(f"log {step} {samples} {metrics}")

    def save_if_due(self, step, score=None):
        self.said.append(f"point {step}")

    def write(self, text):
        self.said.append(text.split(":")[0])

    def end_early(self, reason, report):
        raise EndedEarly(f"{reason} after {report.step}, unlogged {self.unlogged}")


class Pretraining:
    """The pretraining of a run that takes notes; also its feed."""

    def __init__(self, run: Notes):
        self.run, self.steps = run, run.steps

    @property
    def steps_done(self):
        return self.steps + self.run.counters.steps_done

    def prompts(self, step):
        return step

    def step(self, prompts):
        self.run.counters.steps_done += 1
        self.run.said.append(f"step on prompts {prompts}")
        return SimpleNamespace(step=self.run.counters.steps_done, samples=0, metrics={"critic_pretrain/loss": 0.5})


@pytest.fixture
def asked(monkeypatch, tmp_path) -> list:
    """Reasons to end that the borders see, one after the other; then none."""
    reasons = []
    monkeypatch.setattr(stopping, "agreed", lambda: reasons.pop(0) if reasons else None)
    monkeypatch.setattr(model_folders, "merged_wanted", lambda choice, models, folder: True)
    saved = {"critic_pretrained": tmp_path / "critic_pretrained"}
    monkeypatch.setattr(model_folders, "save_forms", lambda *given, **_: saved[given[3]].mkdir() or saved)
    return reasons


def run(notes: Notes) -> list[str]:
    """What it was asked."""
    pretraining = Pretraining(notes)
    pretrain(notes, pretraining, pretraining)
    return notes.said


def test_each_step_has_its_line_and_the_last_ones_waits_for_the_held_out_scores(asked, tmp_path):
    notes = Notes(tmp_path, steps=3)
    line = {"critic_pretrain/loss": 0.5}
    assert run(notes) == [
        "count 3 from 0, below 3",
        *("step on prompts 0", f"log -2 0 {line}", "point -2"),
        *("step on prompts 1", f"log -1 0 {line}", "point -1"),
        *("step on prompts 2", "critic pretrained in 3 steps"),
        "count 9 from 0, below 0",
    ]
    assert notes.unlogged == line
    record = json.loads((tmp_path / "critic_pretrained" / PRETRAINING_RECORD).read_text())
    assert (record["steps"], record["gamma"], record["learning_rate"]) == (3, 1.0, 1e-5)


def test_a_link_in_the_place_of_the_record_is_not_written_through(asked, tmp_path, monkeypatch):
    (tmp_path / "theirs").write_text("theirs")
    folder = tmp_path / "critic_pretrained"
    folder.mkdir()
    (folder / PRETRAINING_RECORD).symlink_to(tmp_path / "theirs")
    monkeypatch.setattr(model_folders, "save_forms", lambda *given, **_: {folder.name: folder})
    run(Notes(tmp_path, steps=1))
    assert json.loads((folder / PRETRAINING_RECORD).read_text())["steps"] == 1
    assert (tmp_path / "theirs").read_text() == "theirs"


def test_a_run_that_goes_on_makes_the_steps_that_are_left(asked, tmp_path):
    assert run(Notes(tmp_path, steps=3, done=2))[:2] == ["count 3 from 2, below 3", "step on prompts 2"]


@pytest.mark.parametrize("borders, step", [([stopping.Reason.SIGTERM], -1), ([None, stopping.Reason.SIGTERM], 0)])
def test_a_request_to_end_is_followed_at_each_border(asked, tmp_path, borders, step):
    asked += borders
    with pytest.raises(EndedEarly, match=f"after {step}, unlogged {{'critic_pretrain/loss': 0.5}}"):
        run(Notes(tmp_path, steps=2))
    assert (tmp_path / "critic_pretrained").exists() == (step == 0)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    """A model with 4 attention heads of 8 numbers."""
    return make_causal_lm(tmp_path_factory.mktemp("model"), "llama")


def with_vllm(path: str, *words: str) -> RLHFFlags:
    return parse("--actor_model_name_or_path", path, "--rollout_backend", "vllm", *words, flags_class=RLHFFlags)


def test_a_missing_vllm_is_told_with_the_files(path, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.rollout.vllm_rollouts.metadata.version", fake_vllm.version(None))
    args = with_vllm(path, "--output_dir", str(tmp_path / "out"), "--data_path", "no.jsonl", "--dtype", "fp32")
    with pytest.raises(UserError, match="vLLM is not installed here"):
        check_files(args, None)


def test_heads_that_it_cannot_compute_or_divide_are_told(path, monkeypatch):
    monkeypatch.setattr("engine.rollout.vllm_rollouts.metadata.version", fake_vllm.version("0.32.1"))
    with pytest.raises(UserError, match=f"{re.escape(path)} has attention heads of size 8; on CPUs"):
        check_rollouts(with_vllm(path))
    with pytest.raises(UserError, match="--vllm_tensor_parallel_size 3: the 4 attention heads of .* divides 4"):
        check_rollouts(with_vllm(path, "--vllm_tensor_parallel_size", "3"))
    check_rollouts(with_vllm(path, "--dry_run"))  # for other machines, it may be


def test_only_the_own_sampler_needs_states_in_its_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.rollout.vllm_rollouts.metadata.version", fake_vllm.version("0.32.1"))
    MiniMaxConfig().save_pretrained(tmp_path)
    check_rollouts(with_vllm(str(tmp_path), "--dry_run"))
    with pytest.raises(UserError, match="is a minimax model.* --rollout_backend vllm"):
        check_rollouts(with_vllm(str(tmp_path), "--rollout_backend", "auto"))
