"""The table of docs/scaling.md: what fits is planned, what doubling loses is told, published settings are theirs."""

from types import SimpleNamespace

import pytest

from engine.errors import UserError
from engine.memory import Cluster, MemoryPlan
from engine.memory.copies import Copies
from engine.speed import settings
from engine.speed.part import Part
from engine.speed.published import DEEPSPEED_CHAT, OPENRLHF, ROWS_OF_DEEPSPEED_CHAT, Placement, placed_seconds
from engine.speed.scaling import Point, sheet_of, table, why
from engine.speed.settings import ROLES, Task, fitting
from tests.engine.memory.configurations import llama

TASK = Task(actor="opt-350m", scorer="opt-350m", prompt=64, response=64, rows=32)


def point(gpus: int, rows: int, tokens: float, train: float, latency: float = 0.0, transfer: float = 0.0) -> Point:
    return Point(
        gpus,
        rows,
        SimpleNamespace(words="as it is"),
        {"tokens": Part(tokens), "train actor": Part(train, latency, transfer, overlaps=True)},
    )


@pytest.fixture
def planned(monkeypatch):
    """The planner, replaced: a function says whether (rows decoded, rows of a pass, engines on the host) fit, and
    whether the actor has a copy; gives what was asked."""
    asked = []

    def use(fits, copies=lambda offloaded: True):
        def plan(spec, load, cluster):
            offloaded = sum(config.offload for config in spec.engine_configs)
            asked.append((load.generated, load.micro_batch, offloaded))
            placed = Copies((0, 2) if copies(offloaded) else (), "", between_steps="free", divided=(1,), ranks=4)
            placed = placed if copies(offloaded) else Copies((), "")
            return SimpleNamespace(fits=fits(*asked[-1]), placed=placed, engines={})

        monkeypatch.setattr(settings, "plan", plan)
        return asked

    return use


def test_the_first_setting_that_fits_is_taken(planned):
    planned(lambda generated, micro, offloaded: offloaded >= 2 and generated <= 16 and micro <= 2)
    found = fitting(TASK, Cluster(gpus=8))
    step = found.step
    assert (step.decoded, step.micro_batch, step.offloaded) == (16, 2, {"reference", "reward"})
    assert step.whole == {"actor", "reference"} and step.divided == {"critic"} and step.group == 4 and not step.stays
    assert found.words == "16/2 rows, copies: actor, reference and copies of critic by 4, frozen on host"


def test_what_has_no_copy_is_taken_last(planned):
    planned(lambda *asked: True, copies=lambda offloaded: offloaded == 4)
    assert fitting(TASK, Cluster(gpus=8)).step.offloaded == set(ROLES)
    planned(lambda *asked: True, copies=lambda offloaded: False)
    found = fitting(TASK, Cluster(gpus=8))
    assert not found.step.offloaded and found.words == "32/8 rows, partitions"


def test_where_the_smallest_does_not_fit_nothing_larger_is_planned(planned):
    asked = planned(lambda *asked: False)
    assert fitting(TASK, Cluster(gpus=8)) is None
    assert asked == [(8, 1, 0), (8, 1, 2), (8, 1, 4)]


def test_the_planner_says_what_fits(monkeypatch, tmp_path):
    monkeypatch.setattr(settings, "_folder", lambda name: llama(tmp_path))
    found = fitting(TASK, Cluster(gpus=2, gpu=85_000_000_000, host=10**12))
    assert isinstance(found.planned, MemoryPlan) and found.planned.fits
    assert found.step.whole == set(ROLES) and found.step.decoded == 32 and found.step.micro_batch == 8
    assert fitting(TASK, Cluster(gpus=2, gpu=1_500_000_000, host=10**12)) is None  # CUDA and NCCL alone take it


def test_the_phase_that_loses_most_is_told():
    before = point(8, 16, tokens=4.0, train=8.0)
    assert (
        why(before, point(16, 8, tokens=3.9, train=4.1)) == "tokens: weights are read for each token, whatever the rows"
    )
    assert why(before, point(16, 8, 2.0, train=4.0, latency=8.0)) == "train: steps of rings, as many as ranks"
    assert why(before, point(16, 8, 2.0, train=4.0, transfer=8.0)).startswith("train: bytes, the same on each rank")


def test_a_row_tells_speed_and_what_was_lost():
    points = [(4, None), (8, point(8, 16, 4.0, 8.0)), (16, point(16, 8, 4.0, 8.0)), (32, point(32, 4, 3.0, 8.0))]
    _, _, none, first, second, third = table(points).splitlines()
    assert none.startswith("| 4 | | does not fit |")
    # 128 responses in 12 s, then again; then in 11 s: 11 a second of 42.7 with four times the GPUs.
    assert "| 12.0 | 11 | 1.00 |  |" in first
    assert "| 12.0 | 11 | 0.50 | 50%, **stops here**, train:" in second
    assert "| 11.0 | 12 | 0.27 | 45%, train:" in third  # it has stopped before
    slower = table([(8, point(8, 16, 4.0, 8.0)), (16, point(16, 8, 8.0, 8.0))]).splitlines()[-1]
    assert "slower than half as many, tokens" in slower
    assert {line.count("|") for line in table(points).splitlines()} == {14}


def test_gpus_have_data_sheets_by_the_planners_names():
    assert sheet_of("a100-80g").bandwidth == 2039e9 and sheet_of("a100-40g").bandwidth == 1555e9
    assert sheet_of("v100-32g").flops == 125e12
    with pytest.raises(UserError, match="--gpu rtx-4090: no data sheet"):
        sheet_of("rtx-4090")


def test_published_settings_are_those_of_their_sources():
    # 264,292 prompts of 256 tokens and as many answers are the 135,317,504 tokens that are stated.
    assert ROWS_OF_DEEPSPEED_CHAT * 512 == 135_317_504
    assert [(gpus, hours) for _, gpus, hours in DEEPSPEED_CHAT] == [(8, 9.0), (64, 1.25), (64, 7.5)]
    assert [sum(getattr(placed, role) for role in Placement.__slots__) for _, placed, _, _ in OPENRLHF] == [16, 32]


def test_gpus_of_other_models_wait_while_one_draws():
    small = placed_seconds("llama-2-7b", Placement(2, 2, 4, 4, 4), 1)
    more = placed_seconds("llama-2-7b", Placement(2, 2, 4, 4, 8), 1)
    trained = placed_seconds("llama-2-7b", Placement(2, 2, 8, 8, 4), 1)
    assert more < small and trained < small
    assert placed_seconds("llama-2-7b", Placement(2, 4, 4, 4, 4), 1) == small  # the reference takes as long as before
