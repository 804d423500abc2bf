"""The plan of memory against the tensors of whole steps: bytes of storages, counted at every operation."""

from pathlib import Path

import pytest

from scripts.harness.ranks import run_ranks
from tests.distributed.memory_cases import CASES

PHASES = ("load", "generate", "experience", "train", "save")
MOST_OFF = 0.1


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_plan_says_what_tensors_take(case, folder):
    actor, critic = case.models(folder)
    counted = run_ranks(
        "tests.distributed.work_memory:counted",
        world=case.world,
        timeout=1200,
        case=case,
        actor=actor,
        critic=critic,
    )
    planned = case.planned(actor, critic)
    main = counted[0]
    off = {phase: round(_of_main_rank(planned, phase) / main[phase] - 1, 3) for phase in PHASES}
    assert all(abs(difference) <= MOST_OFF for difference in off.values()), (off, main)


def _of_main_rank(planned, phase: str) -> int:
    """The most bytes of all tensors of the main rank in a phase, wherever they are: what a CPU's memory holds."""
    moments = [moment for moment in planned.moments if moment.phase == phase]
    return max(moment.device.total + moment.host.total + moment.host_once.total for moment in moments)
