"""A ragged batch of two by hand: rewards, advantages, losses of a step, and rows that are too short."""

import math

import pytest
import torch

from engine.algo.losses import policy_loss, value_loss
from engine.algorithms import Algorithm, Dialect, get_dialect
from engine.experience import Rollout, TrainingBatch
from tests.engine.fake_models import Row, TableModels, rollout_of
from tests.training.given_rollouts import batch_of
from training.reporting.metrics import Accumulator
from training.reporting.step_metrics import STEP_METRICS

EOS, PAD = 2, 9
SYSTEMS = ["default", "deepspeed_chat"]


def make(
    models: TableModels, rollout: Rollout, dialect: Dialect, pad: int = PAD, micro_batch_size: int = 8, kl_coef=0.1
) -> TrainingBatch:
    return batch_of(models.roles(), rollout, dialect, pad=pad, micro_batch_size=micro_batch_size, kl_coef=kl_coef)


def step_metrics(batch: TrainingBatch, dialect: Dialect) -> dict[str, float]:
    metrics, algorithm = Accumulator(), Algorithm(dialect, pad_token_id=PAD)
    for add_to in STEP_METRICS:
        add_to(metrics, batch, algorithm)
    return metrics.reduce()


def near(tensor: torch.Tensor, expected: list, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(tensor, torch.tensor(expected, dtype=tensor.dtype), rtol=0, atol=tolerance)


# A ragged batch of two, beta 0.1, gamma 1, lambda 0.5, pad not EOS. Row 0 ends, row 1 never; its score is clipped.
#   row 0: delta 0.5 1 2, V 1 2 3, s 2          row 1: delta -1 1 2, V 1 0 2, s 8 -> 5
BATCH = {
    901: Row([-1.0, -1.0, -1.0], [-1.5, -2.0, -3.0], [1.0, 2.0, 3.0], 2.0),
    902: Row([-2.0, -1.0, -1.0], [-1.0, -2.0, -3.0], [1.0, 0.0, 2.0], 8.0),
}


def batch() -> Rollout:
    return rollout_of([[901], [5, 902]], [[11, EOS], [11, 12, 13]], PAD)


# default, row 0 (L 2, score on slot 1): r -0.05 1.9 0, V 1 2 0; A_1 = 1.9 - 2 = -0.1;
#     A_0 = (-0.05 + 2 - 1) + 0.5 x -0.1 = 0.9; R 1.9 1.9
#   row 1 (L 3, score on slot 2): r 0.1 -0.1 4.8; A_2 = 2.8; A_1 = (-0.1 + 2 - 0) + 1.4 = 3.3;
#     A_0 = (0.1 + 0 - 1) + 1.65 = 0.75; R 1.75 3.3 4.8
# whitened: mean of 0.9 -0.1 0.75 3.3 2.8 is 1.53; squared distances 0.3969 2.6569 0.6084 3.1329 1.6129, variance 1.6816
# deepspeed_chat, row 0 (L 2, score on slot 2, the pad): r -0.05 -0.1 1.8, V 1 2 3; A_2 = 1.8 - 3 = -1.2;
#     A_1 = (-0.1 + 3 - 2) - 0.6 = 0.3; A_0 = 0.95 + 0.15 = 1.1; R 2.1 2.3
#   row 1: L fills the row, so as above
DEVIATION = math.sqrt(1.6816)
BY_HAND = {
    "default": {
        "rewards": [[-0.05, 1.9, 0.0], [0.1, -0.1, 4.8]],
        "values": [[1.0, 2, 0], [1, 0, 2]],
        "returns": [[1.9, 1.9, 0], [1.75, 3.3, 4.8]],
        "advantages": [
            [-0.63 / DEVIATION, -1.63 / DEVIATION, 0],
            [-0.78 / DEVIATION, 1.77 / DEVIATION, 1.27 / DEVIATION],
        ],
    },
    "deepspeed_chat": {
        "rewards": [[-0.05, -0.1, 1.8], [0.1, -0.1, 4.8]],
        "values": [[1.0, 2, 3], [1, 0, 2]],
        "returns": [[2.1, 2.3, 1.8], [1.75, 3.3, 4.8]],
        "advantages": [[1.1, 0.3, -1.2], [0.75, 3.3, 2.8]],
    },
}


@pytest.mark.parametrize("micro_batch_size", [1, 2])
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_ragged_batch_by_hand(system, micro_batch_size):
    models = TableModels(BATCH)
    made = make(models, batch(), get_dialect(system).override(lam=0.5), micro_batch_size=micro_batch_size)
    assert models.sizes == {1: [1, 1], 2: [2]}[micro_batch_size]
    for name, expected in BY_HAND[system].items():
        near(getattr(made, name), expected)
    assert made.policy_mask.int().tolist() == made.value_mask.int().tolist() == [[1, 1, 0], [1, 1, 1]]
    assert made.scores.tolist() == [2.0, 8.0]  # as the model gave them, not clipped
    near(made.kl, [[0.5, 1.0, 0.0], [-1.0, 1.0, 2.0]])
    sampled = batch().response_mask
    assert made.logprobs[sampled].tolist() == [-1, -1, -2, -1, -1]
    assert made.ref_logprobs[sampled].tolist() == [-1.5, -2, -1, -2, -3]
    assert made.entropy[sampled].tolist() == [1, 2, 1, 2, 3]
    metrics = step_metrics(made, get_dialect(system))
    assert metrics["objective/entropy"] == pytest.approx(9 / 5)  # not of the position behind row 0's end, which has 3
    assert metrics["objective/kl"] == pytest.approx((1.5 + 2.0) / 2)


# The actor's new ratios 1.1 1.3 | 0.7 1.25 1; the critic's new values 1.1 2.5 | 0.5 0.1 2.5; both clips 0.2.
# default, with the distances from the mean in the place of A, all over DEVIATION, max(-A rho, -A clip(rho)):
#   0.63 x 1.1 = 0.693; 1.63 x 1.3 = 2.119 (over 1.63 x 1.2); 0.78 x 0.8 = 0.624 (clipped, over 0.78 x 0.7);
#   -1.77 x 1.2 = -2.124 (clipped, over -1.77 x 1.25); -1.27; sum 0.042
# deepspeed_chat: -1.1 x 1.1 = -1.21; -0.3 x 1.2 = -0.36 (clipped); -0.75 x 0.7 = -0.525; -3.3 x 1.2 = -3.96 (clipped);
#   -2.8; sum -8.855
# Values, the larger of (V - R)^2 and (near - R)^2: row 1 under both 1.25^2 = 1.5625 (near 0.8: 0.9025);
#   3.2^2 = 10.24; near 2.2: 2.6^2 = 6.76 (clipped, over 2.3^2 = 5.29). Row 0 of default: 0.8^2 = 0.64;
#   0.6^2 = 0.36 (near 2.2: 0.09); of deepspeed_chat: 1; 0.2^2 = 0.04 (near 2.2: 0.01).
@pytest.mark.parametrize(
    "system, policy, policy_clipped, value",
    [("default", 0.042 / DEVIATION, 2, 19.5625 / 2), ("deepspeed_chat", -8.855, 2, 19.6025 / 2)],
)
def test_rewards_to_losses_by_hand(system, policy, policy_clipped, value):
    made = make(TableModels(BATCH), batch(), get_dialect(system).override(lam=0.5))
    ratios = torch.tensor([[1.1, 1.3, 50.0], [0.7, 1.25, 1.0]])  # 50 on a slot that is not learned
    sums = policy_loss(made.logprobs + ratios.log(), made.logprobs, made.advantages, made.policy_mask, 0.2)
    assert sums.loss.item() == pytest.approx(policy, abs=1e-5)
    assert sums.clipped.item() == policy_clipped
    assert sums.ratio.item() == pytest.approx(5.35, abs=1e-5) and sums.ratio_max.item() == pytest.approx(1.3, abs=1e-6)
    new_values = torch.tensor([[1.1, 2.5, 99.0], [0.5, 0.1, 2.5]])
    sums = value_loss(new_values, made.values, made.returns, made.value_mask, 0.2)
    assert sums.loss.item() == pytest.approx(value, abs=1e-5)
    assert sums.clipped.item() == 1 and sums.value.item() == pytest.approx(6.7, abs=1e-5)


@pytest.mark.parametrize(
    "estimator, row",
    [
        # delta 0.5 and 1: k2 0.125, 0.5; k3 e^-0.5 - 0.5 = 0.1065307, e^-1 = 0.3678794; score 2 on the last
        ("k2", [-0.0125, 1.95]),
        ("k3", [-0.01065307, 1.96321206]),
    ],
)
def test_the_estimator_in_the_reward(estimator, row):
    rollout = rollout_of([[901]], [[11, EOS]], PAD)
    made = make(TableModels(BATCH), rollout, get_dialect("default").override(kl_estimator=estimator))
    near(made.rewards, [row], 1e-6)


def test_the_coefficient_is_the_callers_and_the_clip_works_on_both_sides():
    table = {mark: Row([-1.0], [-1.5], [0.0], score) for mark, score in ((901, 7.0), (902, -7.0), (903, 3.0))}
    rollout = rollout_of([[901], [902], [903]], [[11]] * 3, PAD)
    dialect = get_dialect("default").override(score_clip=4.0)
    near(make(TableModels(table), rollout, dialect, kl_coef=0.5).rewards, [[3.75], [-4.25], [2.75]], 1e-6)
    unclipped = Dialect(score_clip=None)
    near(make(TableModels(table), rollout, unclipped, kl_coef=0.0).rewards, [[7.0], [-7.0], [3.0]], 1e-6)


@pytest.mark.parametrize("system, expected", [("default", 0.7), ("deepspeed_chat", 1.0)])
def test_actor_and_reference_are_asked_at_the_same_temperature(system, expected):
    models = TableModels(BATCH)
    make(models, batch(), get_dialect(system).override(temperature=0.7), micro_batch_size=1)
    assert models.temperatures == [expected] * 4


@pytest.mark.parametrize(
    "system, pad, learned",
    [
        ("deepspeed_chat", EOS, [0, 0, 2]),  # tokens before the first pad, EOS not among them: 0, 1, 2
        ("deepspeed_chat", PAD, [0, 2, 3]),  # 1, 2, 3
        ("default", EOS, [1, 2, 3]),
        ("default", PAD, [1, 2, 3]),
    ],
)
def test_degenerate_rows_are_masked_and_counted(system, pad, learned):
    row = Row([-1.0] * 4, [-1.5] * 4, [1.0, 2, 3, 4], 2.0)
    responses = [[EOS], [11, EOS], [11, 12, EOS]]
    table = {901: row, 902: row, 903: row}
    dialect = get_dialect(system).override(whiten_advantages=False)
    made = make(TableModels(table), rollout_of([[901], [902], [903]], responses, pad), dialect, pad)
    assert made.policy_mask.sum(-1).tolist() == made.value_mask.sum(-1).tolist() == learned
    assert step_metrics(made, dialect)["rollout/degenerate"] == learned.count(0)
    alone = make(TableModels(table), rollout_of([[903]], [responses[2]], pad), dialect, pad)
    assert torch.equal(made.advantages[2], alone.advantages[0])  # and touch nobody else
    assert torch.equal(made.returns[2], alone.returns[0])
