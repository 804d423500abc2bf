"""The critic-free dialects through PPOTrainer on one and on two ranks: gradients are those of straight-line versions.

The versions are those of tests/engine/algorithms/group_sources.py, lengths and scores of the test beside it: ragged, in
groups of three, one with equal scores, and one of which a single response counts where short ones do not.
"""

from functools import partial

import pytest
import torch

from engine.algorithms import get_dialect
from scripts.harness.ranks import run_ranks
from tests.distributed import plain
from tests.distributed.test_systems import CLOSE, WORLDS, Models, dealt, rollout_of
from tests.distributed.tiny_run import SAMPLING
from tests.distributed.work_systems import MICRO_BATCH
from tests.engine.algorithms import group_sources as sources
from tests.engine.algorithms.group_sources import Row
from tests.engine.algorithms.test_group_systems import CUT_OFF, EOS, LENGTHS, SCORES, K

ALL_LENGTHS, ALL_SCORES = sum(LENGTHS, []), sum(SCORES, [])
CUT = [6 * rank + row for rank, row in CUT_OFF]
ROWS = [[5 + (7 * i + 3 * t) % 50 for t in range(length)] for i, length in enumerate(ALL_LENGTHS)]
for number, row in enumerate(ROWS):
    if number not in CUT:
        row[-1] = EOS
PROMPTS = [[11 + i // K] * (1 + i // K) for i in range(len(ROWS))]
GROUPS = {"samples_per_prompt": K}
TRL = {"kl_coef": 0.04, "clip_range": 0.05}
CASES = {  # name: (dialect, fields changed, version)
    "grpo": ("grpo", {"min_response_tokens": 3, "clip_range": 0.2}, sources.deepseek_math),
    "grpo_trl": (
        "grpo_trl",
        {"loss_scope": "response", "dual_clip": 1.1, **TRL},
        partial(sources.trl_grpo, loss_type="grpo", epsilon=0.05, delta=1.1, beta=0.04),
    ),
    "grpo_trl, bnpo": (
        "grpo_trl",
        {"advantage_scale": "batch", "loss_scope": "micro_batch", **TRL},
        partial(sources.trl_grpo, scale="batch", loss_type="bnpo", epsilon=0.05, beta=0.04),
    ),
    "dr_grpo": (
        "dr_grpo",
        {"mini_batches": 2},
        partial(sources.oat_dr_grpo, generate_max_length=SAMPLING.max_new_tokens),
    ),
    "dapo": ("dapo", {"mini_batches": 3, "dynamic_sampling": 1, "overlong_buffer": 0.0}, sources.verl_dapo),
    "gspo": (
        "gspo",
        {"mini_batches": 2},
        partial(sources.trl_grpo, level="sequence", loss_type="grpo", epsilon=3e-4, epsilon_high=4e-4),
    ),
    "cispo": (
        "cispo",
        {"clip_range_high": 0.05, "mini_batches": 2},
        partial(sources.trl_grpo, loss_type="cispo", epsilon_high=1.05),
    ),
    "sapo": ("sapo", {"mini_batches": 2}, partial(sources.trl_grpo, loss_type="sapo")),
    "reinforce_pp": ("reinforce_pp", {"mini_batches": 2}, partial(sources.openrlhf, baseline=False, kl_coef=0.01)),
    "reinforce_pp_baseline": (
        "reinforce_pp_baseline",
        {"kl_coef": 0.3},
        partial(sources.openrlhf, baseline=True, kl_coef=0.3),
    ),
    "rloo": ("rloo", {"min_response_tokens": 3, "mini_batches": 2}, sources.trl_rloo),
}


def case_dialect(name: str):
    dialect, changed, _ = CASES[name]
    return get_dialect(dialect).override(**({} if dialect == "reinforce_pp" else GROUPS), **changed)


@pytest.fixture(scope="module", params=WORLDS)
def world(request) -> int:
    return request.param


@pytest.fixture(scope="module")
def found(folder, world) -> list[dict]:
    rollouts = [rollout_of(ROWS, rows, PROMPTS) for rows in dealt(world, len(ROWS))]
    cases = {name: (case_dialect(name), rollouts) for name in CASES}
    target = "tests.distributed.work_systems:gradients_of_all"
    return run_ranks(target, world=world, folder=folder, cases=cases, scores=ALL_SCORES)


@pytest.fixture(scope="module")
def models(folder) -> Models:
    return Models(folder, ROWS, ROWS, 1.0, PROMPTS)


def rows_of(models: Models, shortest: int) -> list[Row]:
    """All rows, with what the models say of them."""
    rows = []
    for i, (length, score) in enumerate(zip(ALL_LENGTHS, ALL_SCORES)):
        old, ref, new = (getattr(models, name)[i, :length] for name in ("old", "ref", "new"))
        counts = length >= shortest
        rows.append(Row(score, i not in CUT, old.detach(), ref.detach(), new, counts, counts))
    return rows


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_a_whole_step(found, models, world, name):
    dialect, version = case_dialect(name), CASES[name][2]
    rows = rows_of(models, max(dialect.min_response_tokens, 1))
    steps = [rank[name] for rank in found]
    assert {len(own) for own in steps} == {dialect.mini_batches}
    named = dict(models.policy.named_parameters())
    for number in range(dialect.mini_batches):
        parts = []
        for own, of_rank in zip(dealt(world, len(ROWS)), steps):
            numbers = [own[i] for i in of_rank[number]["rows"]]
            parts += [numbers[start : start + MICRO_BATCH] for start in range(0, len(numbers), MICRO_BATCH)]
        if not dialect.micro_batches_matter:
            parts = [[i for part in parts for i in part]]
        _, loss = version(rows, K, parts)
        expected = dict(zip(named, torch.autograd.grad(loss, list(named.values()), retain_graph=True)))
        assert plain.norm(expected) > 1e-2
        for of_rank in steps:
            assert plain.relative_error(of_rank[number]["actor"], expected) < CLOSE
            assert "critic" not in of_rank[number]
