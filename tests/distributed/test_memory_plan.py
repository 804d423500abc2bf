"""The plan of memory against the tensors of whole steps: bytes of storages, counted at every operation.

scripts/measure_memory.py compares all of CASES.
"""

import pytest
import torch

from scripts.benchmark_models import make_models
from tests.distributed.harness import run_ranks
from tests.distributed.memory_cases import CASES, TESTED

PHASES = ("load", "generate", "experience", "train", "save")
MOST_OFF = 0.1


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[str, str]:
    return make_models(tmp_path_factory.mktemp("models") / "34m", "34m", "34m", torch.float32)


@pytest.mark.parametrize("case", [case for case in CASES if case.name in TESTED], ids=lambda case: case.name)
def test_a_plan_says_what_tensors_take(case, models):
    counted = run_ranks(
        "tests.distributed.work_memory:counted",
        world=case.world,
        timeout=1200,
        case=case,
        actor=models[0],
        critic=models[1],
    )
    planned = case.planned(*models)
    main = counted[0]
    off = {phase: round(planned.of_main_rank(phase) / main[phase] - 1, 3) for phase in PHASES}
    assert all(abs(difference) <= MOST_OFF for difference in off.values()), (off, main)
    # The walk over all objects that a real run on CPUs makes finds what was counted at every operation.
    assert all(rank["walk"] == rank["rest"] for rank in counted)
