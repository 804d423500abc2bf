"""Recordings of single steps: which are made, what is marked meanwhile, and that nothing stays marked.

What stands in a recording of a real run is looked at in tests/e2e/test_programs.py.
"""

import gzip
import json
from types import SimpleNamespace

import pytest
import torch

from engine.errors import UserError
from training.program.plan import check_profile_steps
from training.reporting.profiling import Profiler, set_aside_newer


class FakeModel(torch.nn.Module):
    """Stands for a language model, for an engine and for what holds it."""

    def forward(self):
        return torch.ones(3).sum()

    backward = step = score = ref_logprobs = update = forward

    @property
    def engine(self):
        return self

    @property
    def module(self):
        return SimpleNamespace(model=self)


@pytest.fixture
def trainer():
    models = {role: FakeModel() for role in ("actor", "critic", "reference", "ema")}
    return SimpleNamespace(models=SimpleNamespace(**models), experience_maker=SimpleNamespace(reward=FakeModel()))


def test_only_the_steps_asked_for_are_recorded(trainer, tmp_path):
    told = []
    profiler = Profiler([2, 4], trainer, tmp_path, say=told.append)
    plain = FakeModel.forward, {role: dict(vars(model)) for role, model in vars(trainer.models).items()}
    for step in (1, 2, 3, 4):
        with profiler.record(step):
            now = FakeModel.forward, {role: dict(vars(model)) for role, model in vars(trainer.models).items()}
            assert (now == plain) == (step in (1, 3)), f"step {step}: other code runs than without --profile_steps"
            trainer.models.critic.backward()
            trainer.experience_maker.reward.score()
    assert (FakeModel.forward, {role: vars(model) for role, model in vars(trainer.models).items()}) == plain
    files = sorted((tmp_path / "profile").iterdir())
    assert [file.name for file in files] == ["step_000002_rank0.json.gz", "step_000004_rank0.json.gz"]
    assert len(told) == 2 and told[0].startswith(f"step 2 recorded: {tmp_path}/profile/step_000002_rank*.json.gz")
    for file in files:
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
        assert names == ["critic backward", "reward model"]


def test_a_step_that_raises_leaves_no_recording_and_no_marks(trainer, tmp_path):
    plain = FakeModel.forward, dict(vars(trainer.models.actor))
    with pytest.raises(ZeroDivisionError), Profiler([1], trainer, tmp_path, say=pytest.fail).record(1):
        raise ZeroDivisionError
    assert (FakeModel.forward, vars(trainer.models.actor)) == plain
    assert list(tmp_path.iterdir()) == []


def test_recordings_after_the_restart_point_are_set_aside(tmp_path):
    set_aside_newer(tmp_path, 2)  # of a run that recorded nothing
    names = [f"step_{step:06d}_rank{rank}.json.gz" for step in (2, 3, 1000000) for rank in (0, 1)] + ["step_notes.txt"]
    (tmp_path / "profile").mkdir()
    for name in names:
        (tmp_path / "profile" / name).write_text(name)
    set_aside_newer(tmp_path, 2)
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
