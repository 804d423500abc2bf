"""Recordings of single steps: which are made, what is named in them, and that other steps name nothing.

What stands in a recording of a real run is looked at in tests/e2e/test_recordings.py.
"""

import contextlib
import gzip
import json

import pytest
import torch

from engine.errors import UserError
from engine.trace import traced
from training.reporting.step_metrics import Profiler, set_aside_newer_traces
from training.runtime.plan import check_profile_steps


class FakeModel:
    """Stands for a model: its methods are ranges of a trace, as those of the engine's models are."""

    role = "critic"

    @traced("{0.role} backward")
    def backward(self, rows: int = 3) -> torch.Tensor:
        return torch.ones(rows).sum()

    @traced("reward model")
    def score(self) -> torch.Tensor:
        return torch.ones(3).sum()


def test_only_the_steps_asked_for_are_recorded(tmp_path):
    lines, model = [], FakeModel()
    profiler = Profiler([2, 4], tmp_path, say=lines.append)
    for step in (1, 2, 3, 4):
        with profiler.record(step):
            assert model.backward(rows=5) == 5
            model.score()
    files = sorted((tmp_path / "profile").iterdir())
    assert [file.name for file in files] == ["step_000002_rank0.json.gz", "step_000004_rank0.json.gz"]
    assert len(lines) == 2 and lines[0].startswith(f"step 2 recorded: {tmp_path}/profile/step_000002_rank*.json.gz")
    for file in files:
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
        assert names == ["critic backward", "reward model"]


def test_nothing_is_named_while_no_step_is_recorded(tmp_path, monkeypatch):
    named = []
    monkeypatch.setattr("engine.trace.record_function", lambda name: named.append(name) or contextlib.nullcontext())
    profiler, model = Profiler([2], tmp_path, say=str), FakeModel()
    for step in (1, 2, 3):
        with profiler.record(step):
            model.backward()
            model.score()
    assert named == ["critic backward", "reward model"]


def test_a_link_in_the_place_of_a_recording_is_not_written_through(tmp_path):
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "step_000001_rank0.json.gz").symlink_to(tmp_path / "theirs")
    with Profiler([1], tmp_path, say=str).record(1):
        FakeModel().score()
    assert (tmp_path / "theirs").read_text() == "theirs"


def test_a_step_that_raises_leaves_no_recording(tmp_path):
    profiler = Profiler([1], tmp_path, say=pytest.fail)
    with pytest.raises(ZeroDivisionError), profiler.record(1):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with Profiler([1], tmp_path, say=str).record(1):  # the profiler has been stopped: it can be started again
        FakeModel().score()


def test_recordings_after_the_restart_point_are_set_aside(tmp_path):
    set_aside_newer_traces(tmp_path, 2)  # of a run that recorded nothing
    names = [f"step_{step:06d}_rank{rank}.json.gz" for step in (2, 3, 1000000) for rank in (0, 1)] + ["step_notes.txt"]
    (tmp_path / "profile").mkdir()
    for name in names:
        (tmp_path / "profile" / name).write_text(name)
    set_aside_newer_traces(tmp_path, 2)
    newer = {"step_000003_rank0.json.gz", "step_1000000_rank0.json.gz"}  # those of rank 1 are rank 1's to rename
    assert {path.name: path.read_text() for path in (tmp_path / "profile").iterdir()} == {
        f"{name}.abandoned" if name in newer else name: name for name in names
    }


@pytest.mark.parametrize(
    "steps, first, last, told",
    [
        ([4], 1, 3, "--profile_steps 4: this run trains steps 1 to 3. Name some of these."),
        ([9, 5, 6, 4], 5, 8, "--profile_steps 9 4: this run trains steps 5 to 8. Name some of these."),
        ([3], 4, 3, "--profile_steps 3: this run ends with step 3, which is done. Leave the flag out."),
    ],
)
def test_steps_that_the_run_does_not_train(steps, first, last, told):
    with pytest.raises(UserError) as caught:
        check_profile_steps(steps, first, last)
    assert str(caught.value) == told


def test_steps_that_the_run_trains():
    check_profile_steps([], 4, 3)
    check_profile_steps([3, 1, 3], 1, 3)
