"""From the models' answers to the gradient of the policy's loss, for each critic-free system and TRL's variants of its
own, against straight-line versions (group_sources.py); two ranks hold ragged rows, in groups of three.

One group's scores are equal; where short responses do not count, one group has a single one that does.
"""

from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch

from engine.algorithms import Algorithm, get_dialect
from engine.experience import Masks
from tests.engine.algorithms import group_sources as sources
from tests.engine.algorithms.group_sources import Row

EOS, PAD, T, K = 2, 9, 7, 3
LENGTHS = [[4, 7, 2, 5, 1, 3], [6, 2, 1, 7, 7, 4]]
SCORES = [[1.5, -2.0, 0.5, 0.7, 0.7, 0.7], [3.0, 1.0, 2.0, 12.0, -1.0, 4.0]]
CUT_OFF = {(0, 1), (1, 3)}  # rank and row of those without an end
MICRO_BATCHES = [[0, 1, 2], [3, 4, 5]]


@dataclass
class Case:
    """A dialect with these fields changed, and the straight-line version of it.

    masked: rank and row of what is not learned, though it counts. shortest: fewer tokens, and a row does not count.
    """

    dialect: str
    version: object
    changed: dict = field(default_factory=dict)
    masked: frozenset = frozenset()
    shortest: int = 0


TRL = {"kl_coef": 0.04}
MASKED = frozenset({(0, 1), (1, 4)})
CASES = {
    "grpo": Case("grpo", sources.deepseek_math),
    "grpo, one of a group": Case("grpo", sources.deepseek_math, shortest=3),
    "grpo_trl": Case("grpo_trl", sources.trl_grpo, masked=MASKED),
    "grpo_trl, grpo": Case(
        "grpo_trl",
        partial(sources.trl_grpo, loss_type="grpo", delta=1.3, beta=0.04),
        {"loss_scope": "response", "dual_clip": 1.3, **TRL},
        MASKED,
    ),
    "grpo_trl, bnpo": Case(
        "grpo_trl",
        partial(sources.trl_grpo, scale="batch", loss_type="bnpo", epsilon_high=0.4, beta=0.04),
        {"advantage_scale": "batch", "loss_scope": "micro_batch", "clip_range_high": 0.4, **TRL},
        MASKED,
    ),
    "grpo_trl, dr_grpo": Case(
        "grpo_trl",
        partial(sources.trl_grpo, scale="none", loss_type="dr_grpo", beta=0.04, max_length=T),
        {"advantage_scale": "none", "loss_scope": "fixed_length", **TRL},
        MASKED,
    ),
    "dr_grpo": Case("dr_grpo", partial(sources.oat_dr_grpo, generate_max_length=T)),
    "dapo": Case("dapo", sources.verl_dapo, {"overlong_buffer": 0.0}),
    "gspo": Case(
        "gspo",
        partial(sources.trl_grpo, level="sequence", loss_type="grpo", epsilon=3e-4, epsilon_high=4e-4),
        masked=MASKED,
    ),
    "gspo, wide and with a penalty": Case(
        "gspo",
        partial(sources.trl_grpo, level="sequence", loss_type="grpo", epsilon=0.1, epsilon_high=0.15, beta=0.04),
        {"clip_range": 0.1, "clip_range_high": 0.15, **TRL},
        MASKED,
    ),
    "cispo": Case("cispo", partial(sources.trl_grpo, loss_type="cispo", epsilon_high=5.0), masked=MASKED),
    "cispo, narrow and with a penalty": Case(
        "cispo",
        partial(sources.trl_grpo, loss_type="cispo", epsilon_high=1.1, beta=0.04),
        {"clip_range_high": 0.1, **TRL},
        MASKED,
    ),
    "sapo": Case("sapo", partial(sources.trl_grpo, loss_type="sapo"), masked=MASKED),
    "sapo, other temperatures": Case(
        "sapo",
        partial(sources.trl_grpo, loss_type="sapo", temperatures=(0.5, 3.0), beta=0.04),
        {"gate_temperatures": (0.5, 3.0), **TRL},
        MASKED,
    ),
    "reinforce_pp": Case("reinforce_pp", partial(sources.openrlhf, baseline=False, kl_coef=0.01)),
    "reinforce_pp_baseline": Case(
        "reinforce_pp_baseline", partial(sources.openrlhf, baseline=True, kl_coef=0.3), {"kl_coef": 0.3}
    ),
    "rloo": Case("rloo", sources.trl_rloo),
    "rloo, one of a group": Case("rloo", sources.trl_rloo, shortest=3),
}


def rows_of(case: Case, rank: int) -> list[Row]:
    """This rank's responses, the same in each case."""
    generator = torch.Generator().manual_seed(rank)

    def noise(length, scale):
        return scale * torch.randn(length, generator=generator, dtype=torch.float64)

    rows = []
    for i, (length, score) in enumerate(zip(LENGTHS[rank], SCORES[rank])):
        old = noise(length, 0.5) - 2
        ref, new = old + noise(length, 0.5), (old + noise(length, 0.3)).requires_grad_()
        counts, cut_off = length >= case.shortest, (rank, i) in CUT_OFF
        rows.append(Row(score, not cut_off, old, ref, new, counts and (rank, i) not in case.masked, counts))
    return rows


def dialect_of(case: Case):
    groups = {} if case.dialect == "reinforce_pp" else {"samples_per_prompt": K}
    shortest = {"min_response_tokens": case.shortest} if case.shortest else {}
    return get_dialect(case.dialect).override(**groups, **shortest, **case.changed)


def padded(tensors: list[torch.Tensor]) -> torch.Tensor:
    """(B, T) float32; what stands behind the end is not to be read."""
    width = max(map(len, tensors))
    return torch.stack([torch.cat([one, torch.full((width - len(one),), 50.0)]).float() for one in tensors]).detach()


def ours(case: Case, rows: list[Row], reduce, ranks: int) -> tuple:
    """What the project computes for one rank, in float32: advantages, and for each micro-batch its loss and count."""
    dialect = dialect_of(case)
    algorithm = Algorithm(
        dialect, pad_token_id=PAD, end_token_id=EOS, reduce=reduce, ranks=ranks, max_response_length=T
    )
    old, ref, new = (padded([getattr(row, name) for row in rows]) for name in ("old", "ref", "new"))
    mask = torch.tensor([[t < len(row.new) for t in range(old.shape[1])] for row in rows])
    responses = torch.where(mask, 4, PAD)
    for row, tokens in zip(rows, responses):
        tokens[len(row.new) - 1] = EOS if row.ended else 4
    ended = torch.tensor([row.ended for row in rows])
    positions = algorithm.positions(responses, mask)
    policy = positions.masks.policy & torch.tensor([row.learned for row in rows]).unsqueeze(-1)
    positions = replace(positions, masks=Masks(policy, positions.masks.value, positions.masks.state))
    scores = algorithm.process_scores(torch.tensor([row.score for row in rows]), ended)
    rewards = algorithm.compute_rewards(old, ref, scores, positions, dialect.kl_coef)
    values = algorithm.kept_values(None, positions)
    advantages, _ = algorithm.compute_advantages(rewards, values, positions.masks)
    new.requires_grad_()
    parts = []
    for part in MICRO_BATCHES:
        sums = algorithm.losses.policy_loss(
            new[part], old[part], ref[part], advantages[part], policy[part], dialect.kl_coef
        )
        parts.append((sums.loss, algorithm.losses.policy_count(policy[part]).item()))
    return algorithm, advantages, parts, new


@pytest.mark.parametrize("ranks", [[0], [0, 1]])
@pytest.mark.parametrize("name", CASES)
def test_advantages_losses_and_gradients(name, ranks):
    case = CASES[name]
    rows = {rank: rows_of(case, rank) for rank in ranks}
    everything = sum(rows.values(), [])
    step = [[6 * place + i for i in part] for place in range(len(ranks)) for part in MICRO_BATCHES]
    want_advantages, want_loss = case.version(everything, K, step)
    want_loss.backward()

    sent = {}
    for rank in ranks:  # what each rank would send, then the sum that each would get
        ours(case, rows[rank], lambda totals: sent.setdefault(rank, totals), len(ranks))
    found = {rank: ours(case, rows[rank], lambda totals: sum(sent.values()), len(ranks)) for rank in ranks}
    total = sum(count for *_, parts, _ in found.values() for _, count in parts)
    loss = 0.0
    for place, rank in enumerate(ranks):
        algorithm, advantages, parts, new = found[rank]
        weights = algorithm.losses.weights([count for _, count in parts], total, 2 * len(ranks), len(ranks))
        own = sum(weight * part for weight, (part, _) in zip(weights, parts))
        own.backward()
        loss += own.item()
        for i, row in enumerate(rows[rank]):
            length = len(row.new)
            if row.counts:
                close(advantages[i, :length], want_advantages[6 * place + i])
            assert not new.grad[i, length:].any()
            close(new.grad[i, :length], row.new.grad if row.learned else torch.zeros(length))
        assert new.grad.abs().max() > 1e-2
    assert loss == pytest.approx(want_loss.item(), abs=1e-5)


def close(tensor: torch.Tensor, expected) -> None:
    torch.testing.assert_close(tensor.double(), torch.as_tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-5)


def test_the_rows_reach_every_side():
    """Ratios beyond their clips on both sides, and over delta; equal scores; a group of which one response counts."""
    rows = [row for rank in (0, 1) for row in rows_of(CASES["grpo, one of a group"], rank)]
    ratios = torch.cat([(row.new - row.old).exp().detach() for row in rows])
    assert (ratios < 0.8).sum() > 3 and (ratios > 1.3).sum() > 3
    assert [sum(row.counts for row in rows[start : start + K]) for start in (0, 3, 6, 9)] == [2, 2, 1, 3]
    a_of_equals = sources.compared([row.score for row in rows], rows, K, 1e-6)[3:6]
    assert a_of_equals == pytest.approx([0.0] * 3, abs=1e-9)
