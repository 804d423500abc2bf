"""The line of planned and measured memory: of plans written down by hand."""

import pytest
import torch

from engine.errors import UserError
from engine.memory import Cluster, MemoryPlan, Moment
from engine.memory.zero_memory import Bytes
from engine.rollout import ROLLOUT_BACKENDS
from tests.training.config.command_lines import step3
from training.reporting.step_metrics import PhaseMemory
from training.runtime import first_lines
from training.runtime.first_lines import comparison, memory_compared

MEASURED = {"generate": 2_000_000_000, "make_experience": 2_500_000_000, "train": 4_100_000_000}


def moment(phase: str, name: str, gb: float) -> Moment:
    return Moment(phase, name, Bytes().add("actor", "weights", gb * 1e9), Bytes(), Bytes())


PLANNED = MemoryPlan(
    moments=(
        moment("load", "actor is loaded", 1),
        moment("generate", "responses are drawn", 3),
        moment("experience", "actor computes", 3.5),
        moment("train", "actor's backward pass", 4),
        moment("train", "actor's optimizer step", 3.75),
    ),
    cluster=Cluster(),
    copies="",
    adam=1_000_000_000,
)


@pytest.mark.parametrize("resumed, generate, experience", [(False, "2.00", "2.50"), (True, "3.00", "3.50")])
def test_a_gpus_peaks_stand_beside_the_plans(resumed, generate, experience):
    """Before a new run trains, Adam's 1 GB is not there; of a resumed one it is."""
    assert comparison(step3(), MEASURED, lambda: PLANNED, resumed) == (
        "memory, planned / measured GB of rank 0 at each phase's peak: "
        f"generate {generate} / 2.00, experience {experience} / 2.50, train 4.00 / 4.10"
    )


def test_what_cannot_be_planned_is_said_and_ends_nothing(monkeypatch):
    def wrong():
        raise UserError("config.json\nis not there")

    figures = "measured GB of rank 0 at each phase's peak: generate 2.00, experience 2.50, train 4.10; not planned: "
    assert comparison(step3(), MEASURED, wrong, False) == f"memory, {figures}config.json is not there"
    monkeypatch.setitem(ROLLOUT_BACKENDS, "mine", lambda *_: None)
    own = comparison(step3(rollout_backend="mine"), MEASURED, lambda: PLANNED, False)
    assert own == f"memory, {figures}--rollout_backend mine is your own"
    rewarded = comparison(step3(reward_function="m:f"), MEASURED, lambda: PLANNED, False)
    assert "train 4.00 / 4.10; --reward_function's own" in rewarded


class Counted(PhaseMemory):
    """Phases that take a GB each."""

    def begin(self) -> None:
        pass

    def end(self) -> int:
        return 10**9


class Setting:
    def planned(self) -> MemoryPlan:
        torch.rand(3)
        return PLANNED


@pytest.mark.parametrize("gpu", (True, False))
def test_a_gpus_first_step_is_counted_and_draws_are_those_without(monkeypatch, gpu):
    """On a CPU nothing is counted, planned or said."""
    memory, said = Counted(), []
    monkeypatch.setattr(first_lines, "phase_memory", memory)
    monkeypatch.setattr(first_lines, "on_gpu", lambda: gpu)
    monkeypatch.setattr(first_lines, "setting_here", lambda *_: Setting())
    state = torch.get_rng_state()
    with memory_compared(step3(), None, resumed=False, say=said.append):
        assert memory.counting == gpu
        with memory.phase("train"):
            pass
    assert not memory.counting and torch.equal(torch.get_rng_state(), state)
    assert [line.partition("peak: ")[2] for line in said] == ["train 4.00 / 1.00"] * gpu
    with pytest.raises(ValueError), memory_compared(step3(), None, resumed=False, say=said.append):
        raise ValueError
    assert len(said) == gpu and not memory.counting
