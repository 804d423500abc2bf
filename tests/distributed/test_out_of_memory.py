"""Where one of two ranks runs out of memory with a copy of a model, both go on with less, to the same responses."""

import contextlib
import gc
import pkgutil
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import pytest
import torch

from engine import distributed
from engine.memory.passes import LiveBytes
from engine.models.loading import empty_like
from engine.rlhf_engine import RLHFEngine
from engine.rollout import build_rollouts
from engine.zero.gathering import copy_weights, try_bucket, whole_weights
from scripts.harness.ranks import run_ranks
from tests.distributed.tiny_run import DIALECT, SAMPLING, TinyPrompts, engine_spec
from tests.distributed.work_rollouts import _by_key
from training.ppo_trainer import PPOConfig, PPOTrainer

NAMES = ("logprobs", "ref_logprobs", "values", "scores")


@dataclass(frozen=True)
class Case:
    """What fails on rank 1, by where it is looked up, and how often; with which backend, and copies of which kind."""

    target: str = ""
    times: int = 1
    backend: str = "auto"
    shared: bool = True
    away: bool = False
    divided: bool = True
    """Whether copies that ranks hold together fit."""


def without_failures_and_with(folder: str, cases: dict[str, Case]) -> dict[str, dict]:
    """What is drawn and judged without failures, "", and in each case; what is drawn in a step with the last one's
    failures, "step"; and `_bytes`."""
    models = RLHFEngine.from_pretrained(engine_spec(folder, 3, config="stage3.json"))
    found: dict[str, dict] = {"bytes": _bytes(models.actor.module)}
    found |= {"": _answers(models, Case())} | {name: _answers(models, case) for name, case in cases.items()}
    case = list(cases.values())[-1]
    trainer = _trainer(models, case)
    with _failing(case):
        report = trainer.step(TinyPrompts(8).prompts(0))
    return found | {"step": {"number": report.step, "answers": dict(_by_key(report.batch.rollout))}}


def _bytes(actor) -> dict[str, tuple[int, int]]:
    """What is asked for before a copy is filled, and the most that filling takes; of both ways to gather weights."""
    copy = empty_like(actor, torch.device("cpu"))

    def taken(act: Callable[[], object]) -> int:
        with LiveBytes() as live:
            act()
        return live.peak.total()

    return {
        "filled": (taken(lambda: try_bucket(actor)), taken(lambda: copy_weights(actor, copy))),
        "made": (taken(lambda: try_bucket(actor, whole=True)), taken(lambda: deque(whole_weights(actor), 0))),
    }


def _trainer(models: RLHFEngine, case: Case) -> PPOTrainer:
    for model in models.engines:
        model.copies = None
    with mock.patch("engine.zero.accelerator.free_memory", lambda: 10**12):  # enough for copies of their own
        rollouts = build_rollouts(
            case.backend, models.actor, models.tokenizer, others=models.engines, rows_at_once=4, row_length=30
        )
    rollouts.copies.shared, rollouts.copies._away = case.shared, case.away
    config = PPOConfig(total_steps=2, micro_batch_size=4)
    return PPOTrainer(models=models, rollouts=rollouts, dialect=DIALECT, sampling=SAMPLING, config=config)


def _answers(models: RLHFEngine, case: Case) -> dict:
    trainer = _trainer(models, case)
    rollouts = trainer.rollouts
    prompts, made = TinyPrompts(8).prompts(0), []
    with _failing(case), _whole_copies(made), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        rollout = rollouts.generate(prompts, SAMPLING)
        experience = trainer.experience_maker.make_experience(rollout)
        again = rollouts.generate(prompts, SAMPLING)
    gc.collect()
    return {
        "answers": [dict(_by_key(each)) for each in (rollout, again)],
        "experience": {name: getattr(experience, name) for name in NAMES},
        "told": [str(one.message) for one in told if "fit" in str(one.message)],
        "alive": [any(weight() is not None for weight in weights) for weights in made],
        "actor": getattr(rollouts.copies.group_of(models.actor), "size", 1) if rollouts.copied else "partitions",
    }


@contextlib.contextmanager
def _failing(case: Case) -> Iterator[None]:
    """Within this context the case's function has no memory the first times that rank 1 calls it."""
    with contextlib.ExitStack() as stack:
        if case.target:
            stack.enter_context(_without_memory(case.target, case.times))
        if not case.divided:
            stack.enter_context(_without_memory("engine.copies._Part", 1))
        yield


def _without_memory(target: str, times: int):
    original, calls = pkgutil.resolve_name(target), []

    def call(*args, **kwargs):
        calls.append(None)
        if distributed.rank() == 1 and len(calls) <= times:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return original(*args, **kwargs)

    return mock.patch(target, call)


@contextlib.contextmanager
def _whole_copies(made: list) -> Iterator[None]:
    """Within this context the list grows by references to the weights of each whole copy that is made."""

    def counted(make: Callable) -> Callable:
        def call(*args):
            module = make(*args)
            made.append([weakref.ref(weight) for weight in module.parameters()])
            return module

        return call

    with mock.patch("engine.copies.empty_like", counted(pkgutil.resolve_name("engine.copies.empty_like"))):
        yield


MADE, FILLED = "engine.copies.empty_like", "engine.copies.try_bucket"
DRAWN, JUDGED = "engine.rollout.decode.Draws.draw", "engine.copies._inferred"
SHARED = "models of one shape take turns in one"
DIVIDED = "2 ranks hold one together"
PARTITIONS = "it computes through its partitions"
# Three times: four rows at once, two, and one, before the copy is given up.
CASES = {
    "own, moved back": Case("engine.copies.WholeCopies._move", shared=False, away=True),
    "own, filled twice": Case(FILLED, 2, shared=False),
    "made": Case(MADE),
    "filled": Case(FILLED, divided=False),
    "drawn": Case(DRAWN, 3),
    "drawn, as asked": Case(DRAWN, 3, backend="replica"),
    "judged": Case(JUDGED),
    "judged, as asked": Case(JUDGED, backend="replica"),
}
# What is told, in order (with which copies, when); how the actor's responses are drawn at last, by how many ranks.
MAKING, DRAWING = "it was made", "responses were drawn with it"
JUDGING = "experience was made with it"
EXPECTED = {
    "own, moved back": ([(MAKING, SHARED)], 1),
    "own, filled twice": ([(MAKING, SHARED), (MAKING, DIVIDED)], 2),
    "made": ([(MAKING, DIVIDED)], 2),
    "filled": ([(MAKING, DIVIDED), (MAKING, PARTITIONS)], "partitions"),
    "drawn": ([(DRAWING, DIVIDED)], 2),
    "drawn, as asked": ([(DRAWING, PARTITIONS)], "partitions"),
    "judged": ([(JUDGING, DIVIDED)], 2),
    "judged, as asked": ([(JUDGING, PARTITIONS)], "partitions"),
}


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict]:
    return run_ranks(
        "tests.distributed.test_out_of_memory:without_failures_and_with", world=2, folder=folder, cases=CASES
    )


@pytest.mark.parametrize("case", CASES)
def test_the_step_goes_on_to_the_same_responses_and_experience(ranks, case):
    for rank in ranks:
        found, expected = rank[case], rank[""]
        assert found["answers"] == expected["answers"]
        for name, column in found["experience"].items():
            assert torch.allclose(column, expected["experience"][name], atol=5e-5), name


def test_a_step_is_finished(ranks):
    for rank in ranks:
        assert rank["step"] == {"number": 1, "answers": rank[""]["answers"][0]}


@pytest.mark.parametrize("case", CASES)
def test_one_warning_says_what_happened_and_what_comes_next(ranks, case):
    told = [
        f"a copy of the actor does not fit (CUDA out of memory on rank 1, when {doing}): {then} from now on"
        for doing, then in EXPECTED[case][0]
    ]
    first, second = (rank[case]["told"] for rank in ranks)
    assert first == told
    rows = [
        f"{n} responses decoded side by side do not fit on rank 1 (CUDA out of memory): "
        f"from now on {n // 2} are decoded"
        for n in (4, 2)
    ]
    assert second == (rows if case.startswith("drawn") else [])
    assert [rank[case]["actor"] for rank in ranks] == [EXPECTED[case][1]] * 2


@pytest.mark.parametrize("case", CASES)
def test_nothing_of_a_copy_that_was_given_up_stays(ranks, case):
    """Left are the two modules that were made last: the reference's, in which the actor takes its turns where it still
    has a copy, and that of critic and reward model."""
    for rank in ranks:
        assert rank[case]["alive"] == [False] * (len(rank[case]["alive"]) - 2) + [True] * 2
    assert len(ranks[0][case]["alive"]) > 2


def test_what_filling_takes_is_asked_for_before_it(ranks):
    for rank in ranks:
        for asked, taken in rank["bytes"].values():
            assert 0 < taken <= asked <= 1.05 * taken
