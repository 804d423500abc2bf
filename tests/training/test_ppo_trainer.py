"""A step of PPO, from the models' answers to rewards, advantages and losses: the reference's worked case, and a ragged
batch of two by hand.
"""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine.algo.losses import clipped_surrogate, clipped_value_loss
from engine.algorithms import Algorithm, Dialect, get_dialect
from engine.errors import RunStopped, UserError
from engine.experience import Rollout, TrainingBatch
from engine.reward.base import CombinedReward, Standardisation
from scripts.harness.models import make_causal_lm, make_scorer
from tests.distributed.tiny_run import build_trainer, engine_spec
from tests.engine.fake_models import Row, TableModels, conversation_of, rollout_of
from tests.training.given_rollouts import batch_of, next_step, untrained
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


@pytest.mark.parametrize("micro_batch_size, others, sizes", [(1, 1, [1, 1]), (2, 1, [2]), (2, 2, [1, 1])])
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_ragged_batch_by_hand(system, micro_batch_size, others, sizes, monkeypatch):
    """others: the passes that another rank needs."""
    monkeypatch.setattr("engine.packing.distributed", SimpleNamespace(largest=lambda own: max(own, others)))
    models = TableModels(BATCH)
    made = make(models, batch(), get_dialect(system).override(lam=0.5), micro_batch_size=micro_batch_size)
    assert models.sizes == sizes
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


def test_where_models_pack_real_tokens_fill_a_pass():
    """Three rows of 4 tokens, 6 wide; a pass takes 12 tokens."""
    table = {mark: Row([-1.0] * 3, [-1.0] * 3, [0.0] * 3, 1.0) for mark in (901, 902, 903)}
    rollout = rollout_of([[901], [5, 5, 902], [903]], [[11, 12, 13], [11], [11, 12, 13]], PAD)
    for padded, sizes in ((True, [2, 1]), (False, [3])):
        models = TableModels(table)
        trainer = untrained(models.roles(), get_dialect("default"), rollout, pad=PAD, micro_batch_size=2)
        trainer.experience_maker.padded = trainer.learner.padded = padded
        made = next_step(trainer).batch
        parts = trainer.learner._micro_batches(made, torch.arange(3))
        assert models.sizes == [len(part) for part in parts] == sizes


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
    sums = clipped_surrogate(made.logprobs + ratios.log(), made.logprobs, made.advantages, made.policy_mask, 0.2)
    assert sums.loss.item() == pytest.approx(policy, abs=1e-5)
    assert sums.clipped.item() == policy_clipped
    assert sums.ratio.item() == pytest.approx(5.35, abs=1e-5) and sums.ratio_max.item() == pytest.approx(1.3, abs=1e-6)
    new_values = torch.tensor([[1.1, 2.5, 99.0], [0.5, 0.1, 2.5]])
    sums = clipped_value_loss(new_values, made.values, made.returns, made.value_mask, 0.2)
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


@pytest.mark.parametrize(
    "system, pad, hidden", [("deepspeed_chat", EOS, 0.2), ("deepspeed_chat", PAD, 0.0), ("default", EOS, None)]
)
def test_tokens_that_only_the_sampler_saw_are_counted(system, pad, hidden):
    """EOS is BOS, too: 2 of 10 tokens. The EOS at the end counts for nothing, since no token follows it."""
    rollout = rollout_of([[EOS, 901], [EOS, 5, 902]], [[11, EOS], [11, 12, 13]], pad)
    trainer = untrained(TableModels(BATCH).roles(), get_dialect(system), rollout, pad=pad)
    assert next_step(trainer).metrics.get("rollout/hidden_tokens") == hidden


@pytest.mark.parametrize(
    "system, truncate_token, ended, after",
    [("trl_ppo", "", 0.5, 0.25), ("trl_ppo", "eos", 0.5, None), ("deepspeed_chat_2023", "", None, None)],
)
def test_tokens_after_eos_are_counted_where_the_dialect_draws_on(system, truncate_token, ended, after):
    row = Row([-1.0] * 4, [-1.5] * 4, [1.0, 2, 3, 4], 2.0)
    rollout = rollout_of([[901], [902]], [[11, EOS, 12, 13], [11, 12, 13, 14]], PAD)
    dialect = get_dialect(system).override(truncate_token=truncate_token, old_logprobs="forward")
    metrics = next_step(untrained(TableModels({901: row, 902: row}).roles(), dialect, rollout, pad=PAD)).metrics
    assert (metrics.get("rollout/eos_rate"), metrics.get("rollout/after_eos")) == (ended, after)


# The worked case: delta = 0.1 .. 0.6, V = 1 .. 6, beta 0.1, s = 2, gamma 1, lambda 0.95, no whitening.
WORKED = Row(
    logprobs=[-1.0] * 6, ref_logprobs=[-1.1, -1.2, -1.3, -1.4, -1.5, -1.6], values=[1.0, 2, 3, 4, 5, 6], score=2.0
)
RESPONSES = {"A": ([11, 12, 13, EOS], PAD), "B": ([11, 12, 13, EOS], EOS), "C": ([11, 12, 13, 14, 15, 16], PAD)}
# B under deepspeed_chat: EOS is the first pad, L = 3, so slot 3 has KL, score and value but is not learned:
#   A_3 = 1.96 - 4 = -2.04; A_2 = (-0.03 + 4 - 3) - 0.95 x 2.04 = -0.968; A_1 = 0.98 - 0.9196 = 0.0604;
#   A_0 = 0.99 + 0.05738 = 1.04738: the numbers of default's A, one token fewer learned.
# C: L fills the row under both, so both give the reference's row with the score in the last column.
LAST_COLUMN = ([-0.01, -0.02, -0.03, -0.04, -0.05, 1.94], [1.2517, 0.2755, -0.7416, -1.8017, -2.907, -4.06])
FOUR_SLOTS = ([-0.01, -0.02, -0.03, 1.96, 0, 0], [1.0474, 0.0604, -0.968, -2.04, 0, 0])
AFTER_LAST = ([-0.01, -0.02, -0.03, -0.04, 2, 0], [1.1760, 0.1958, -0.8255, -1.89, -3, 0])
# B under summarize: L = 3, the score alone on slot 3, V up to there: A_3 = 2 - 4 = -2; A_2 = 0.97 - 1.9 = -0.93;
#   A_1 = 0.98 - 0.8835 = 0.0965; A_0 = 0.99 + 0.091675. Under trlx slots 0..3 have KL, slot 4 the score, V up to there:
#   the numbers of summarize's A.
# C without its end: the score becomes -1. A_5 = -1.06 - 6 = -7.06; A_4 = 0.95 - 6.707 = -5.757; A_3 = 0.96 - 5.46915;
#   A_2 = 0.97 - 4.2836925; A_1 = 0.98 - 3.148007875; A_0 = 0.99 - 2.0596074813
SHORT = ([-0.01, -0.02, -0.03, 2, 0, 0], [1.081675, 0.0965, -0.93, -2, 0, 0])
ENDLESS = ([-0.01, -0.02, -0.03, -0.04, -0.05, -1.06], [-1.0696075, -2.1680079, -3.3136925, -4.50915, -5.757, -7.06])
EXPECTED = {  # rewards, advantages, number of learned slots
    ("default", "A"): (*FOUR_SLOTS, 4),
    ("default", "B"): (*FOUR_SLOTS, 4),
    ("default", "C"): (*LAST_COLUMN, 6),
    ("deepspeed_chat", "A"): ([-0.01, -0.02, -0.03, -0.04, 1.95, 0], [1.1353, 0.1529, -0.8706, -1.9375, -3.05, 0], 4),
    ("deepspeed_chat", "B"): (*FOUR_SLOTS, 3),
    ("deepspeed_chat", "C"): (*LAST_COLUMN, 6),
    ("deepspeed_chat_2023", "A"): (
        [-0.01, -0.02, -0.03, 1.96, -0.05, -0.06],
        [1.4189, 0.4515, -0.5563, -1.6066, -4.807, -6.06],
        4,
    ),
    ("deepspeed_chat_2023", "C"): (*LAST_COLUMN, 6),
    ("openai", "A"): (*LAST_COLUMN, 6),
    ("openai", "B"): (*LAST_COLUMN, 6),
    ("openai", "C"): (*ENDLESS, 6),
    ("summarize", "A"): (*AFTER_LAST, 4),
    ("summarize", "B"): (*SHORT, 3),
    ("summarize", "C"): (*ENDLESS, 6),
    ("trlx", "A"): ([-0.01, -0.02, -0.03, -0.04, -0.05, 2], [1.2982, 0.3244, -0.6901, -1.7475, -2.85, -4], 4),
    ("trlx", "B"): (*AFTER_LAST, 3),
    ("trlx", "C"): (*LAST_COLUMN, 6),
    ("trl_ppo", "A"): (*AFTER_LAST, 4),
    ("trl_ppo", "B"): (*SHORT, 3),
    ("trl_ppo", "C"): (*LAST_COLUMN, 6),
}
SAMPLED_ON = {"A": [14, 15], "B": [14, 15], "C": []}  # what is drawn after EOS where that does not stop


def plain_of(system: str) -> Dialect:
    """The dialect without whitening, at the case's log-probs; EOS is the token that fixed lengths are cut at."""
    cut = system in ("openai", "summarize", "trl_ppo", "trl_rloo")
    return (
        get_dialect(system)
        .override(
            whiten_advantages=False,
            whiten_rewards=False,
            old_logprobs="forward",
            **({"truncate_token": "eos"} if cut else {}),
        )
        .override(truncate_after=0)
    )


@pytest.mark.parametrize("system, case", list(EXPECTED))
def test_worked_cases(system, case):
    response, pad = RESPONSES[case]
    rewards, advantages, learned = EXPECTED[system, case]
    dialect = plain_of(system)
    sampled, reported = response, len(response)
    if dialect.sampling == "fixed":
        sampled, reported = response + SAMPLED_ON[case], 6 if system == "openai" else len(response)
    elif dialect.sampling == "without_eos" and case == "A":  # the pads of the table can only be drawn there
        sampled, reported = [11, 12, 13, 14, pad, pad], 6
    made = make(TableModels({901: WORKED}), rollout_of([[901]], [sampled], pad, width=6), dialect, pad)
    near(made.rewards, [rewards], 1e-6)
    near(made.advantages, [advantages], 6e-5)
    assert made.policy_mask.int().tolist() == [[1] * learned + [0] * (6 - learned)]
    valued = min(6, learned + (system in ("summarize", "trl_ppo")))
    assert made.value_mask.int().tolist() == [[1] * valued + [0] * (6 - valued)]
    near(made.returns[:, :learned], [[a + v for a, v in zip(advantages[:learned], WORKED.values)]], 6e-5)
    near(made.kl, [[0.1, 0.2, 0.3, 0.4, 0.5, 0.6][:reported] + [0.0] * (6 - reported)], 1e-6)


def test_rloo_compares_whole_responses_without_a_critic():
    # delta 0.1 0.2 0.3 0.4 | ... 0.6 and no end; scores 2 and 1, beta 0.1: 2 - 0.1 = 1.9 and 1 - 0.21 = 0.79
    other = Row(WORKED.logprobs, WORKED.ref_logprobs, WORKED.values, 1.0)
    rollout = rollout_of([[901], [902]], [[11, 12, 13, EOS, 14, 15], [11, 12, 13, 14, 15, 16]], PAD)
    made = make(TableModels({901: WORKED, 902: other}), rollout, plain_of("trl_rloo"))
    near(made.advantages, [[1.11] * 6, [-1.11] * 6])
    near(made.returns, [[1.9] * 6, [0.79] * 6])
    assert made.policy_mask.sum(-1).tolist() == [4, 6] and not made.values.any()
    assert made.rollout.ended.tolist() == [True, False]


class ReadTexts(TableModels):
    """Keeps what the reward model is given."""

    def reward(self, rollout):
        self.read = rollout
        return super().reward(rollout)


def test_the_scored_text_is_cut_and_what_openai_learns_is_not():
    models = ReadTexts({901: WORKED})
    sampled = [11, 7, 12, 7, 13, 14]
    dialect = plain_of("openai").override(truncate_token="w07", truncate_after=2)
    made = make(models, rollout_of([[901]], [sampled], PAD), dialect)
    assert models.read.responses.tolist() == [[11, 7, 12, 7]]  # the first at or after slot 2
    assert made.rollout.responses.tolist() == [sampled] and made.rollout.ended.tolist() == [True]
    assert made.policy_mask.all() and made.processed_scores.tolist() == [2.0]
    at_token_7 = plain_of("summarize").override(truncate_token="w07")
    summarize = make(models, rollout_of([[901]], [sampled], PAD), at_token_7)
    assert models.read.responses.tolist() == [[11, 7]]
    assert summarize.rollout.responses.tolist() == [[11, 7, PAD, PAD, PAD, PAD]]  # as wide as it was


def test_scores_are_scaled_by_all_that_were_seen():
    # 1 and 3 have the deviation sqrt(2); with -4 and 4 behind them, mean 1 and squares 42 - 4 over 3
    table = {
        mark: Row([-1.0], [-1.0], [0.0], score) for mark, score in ((901, 1.0), (902, 3.0), (903, -4.0), (904, 4.0))
    }
    dialect = get_dialect("default").override(score_scaling="running", whiten_advantages=False)
    rollouts = [rollout_of([[one], [other]], [[11]] * 2, PAD) for one, other in ((901, 902), (903, 904))]
    trainer = untrained(TableModels(table).roles(), dialect, *rollouts, pad=PAD)
    first = next_step(trainer).batch
    near(first.processed_scores, [1 / math.sqrt(2), 3 / math.sqrt(2)])
    second = next_step(trainer).batch
    near(second.processed_scores, [-4 / math.sqrt(38 / 3), 4 / math.sqrt(38 / 3)])
    near(second.rewards, [[-4 / math.sqrt(38 / 3)], [4 / math.sqrt(38 / 3)]])
    assert second.scores.tolist() == [-4, 4]


def test_the_likelihood_is_a_part_of_the_rewards_apart_from_the_score():
    # -1.75 and -2: mean -1.875, deviation 0.25 / sqrt(2), so 0.7071 and -0.7071 of it; half of 0.5 and of -0.7071
    dialect = get_dialect("default").override(likelihood_coef=0.5, likelihood_cap=0.5)
    report = next_step(untrained(TableModels(BATCH).roles(), dialect, batch(), pad=PAD))
    near(report.batch.rewards, [[-0.05, 1.9 + 0.25, 0.0], [0.1, -0.1, 4.8 - 0.353553]])
    assert report.batch.scores.tolist() == [2.0, 8.0]
    metrics = {name.removeprefix("objective/"): value for name, value in report.metrics.items()}
    assert metrics["likelihood"] == pytest.approx(-1.875) and metrics["scores"] == 5.0 and metrics["clipped"] == 0.5
    assert metrics["likelihood_part"] == pytest.approx((0.25 - 0.353553) / 2, abs=1e-6)
    assert metrics["non_score_reward"] == pytest.approx((-0.15 - 0.2) / 2, abs=1e-6), "the KL penalty alone"
    off = next_step(untrained(TableModels(BATCH).roles(), get_dialect("default"), batch(), pad=PAD))
    assert report.metrics.keys() - off.metrics.keys() == {"objective/likelihood", "objective/likelihood_part"}


def test_the_likelihood_of_a_conversation_is_that_of_what_the_policy_drew():
    # -1 and -3 over what was drawn, -4 of the other: mean -3, deviation sqrt(2), 0.7071 of it each; no score, no KL
    table = {
        901: Row([-1.0, -50.0, -50.0, -3.0], [-1.0, -50.0, -50.0, -3.0], [0.0] * 4, 0.0),
        902: Row([-4.0] * 4, [-4.0] * 4, [0.0] * 4, 0.0),
    }
    rollout = conversation_of([[901], [902]], [[[11], [20, 21], [EOS]], [[EOS]]], PAD)
    dialect = get_dialect("default").override(likelihood_coef=1.0)
    near(make(TableModels(table), rollout, dialect).rewards, [[0, 0, 0, 0.707107], [-0.707107, 0, 0, 0]])


def test_a_likelihood_goes_on_with_the_numbers_of_its_checkpoint():
    dialect = get_dialect("default").override(likelihood_coef=0.5)
    rollouts = [batch(), batch().select(torch.tensor([1, 1]))]
    one, other = (untrained(TableModels(BATCH).roles(), dialect, *rollouts, pad=PAD) for _ in range(2))
    next_step(one)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    other.rollouts.rollouts.pop(0)
    first, second = next_step(one).batch, next_step(other).batch
    assert torch.equal(first.rewards, second.rewards) and first.rewards[0, 2] != 4.8
    assert "likelihood_scale" not in untrained(TableModels(BATCH).roles(), Dialect(), pad=PAD).state_dict()


def test_old_logprobs_are_the_samplers_where_the_rollout_has_them_and_they_are_all_that_counts():
    drawn, entropy = torch.tensor([[-0.75, -0.5, 0.0], [-2.5, -1.25, -1.5]]), torch.full((2, 3), 0.25)
    recorded = replace(batch(), logprobs=drawn, entropy=entropy)
    forward = torch.tensor([[-1.0, -1.0, 0.0], [-2.0, -1.0, -1.0]])
    models = TableModels(BATCH)
    trainer = untrained(models.roles(), get_dialect("default"), recorded, recorded, pad=PAD, micro_batch_size=1)
    log_ratios = trainer.experience_maker.make_experience(recorded.select([0, 0, 1])).log_ratios
    made = next_step(trainer).batch
    assert torch.equal(made.logprobs, drawn) and torch.equal(made.entropy, entropy) and trainer.rollouts.released == 1
    near(log_ratios, [0.5, 0.25, 0.5])  # of the longest row
    assert torch.equal(make(models, batch(), get_dialect("default")).logprobs * batch().response_mask, forward)
    # deepspeed_chat counts the slot behind the end too, for which nothing was drawn
    past = get_dialect("deepspeed_chat").override(old_logprobs="auto")
    assert torch.equal(make(models, recorded, past).logprobs * recorded.response_mask, forward)
    with pytest.raises(AssertionError, match="no log-probs of the sampler"):
        make(models, batch(), get_dialect("default").override(old_logprobs="sampler"))


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_another_sampler_is_compared_on_all_tokens_and_its_log_probs_are_not_the_actors(micro_batch_size):
    # Log-probs of the actor, -1 -1 | -2 -1 -1, minus the sampler's.
    drawn = torch.tensor([[-0.75, -0.5, 0.0], [-2.5, -1.25, -1.5]])
    recorded = replace(batch(), logprobs=drawn)
    trainer = untrained(
        TableModels(BATCH).roles(),
        get_dialect("default"),
        recorded,
        pad=PAD,
        micro_batch_size=micro_batch_size,
        exact_sampler=False,
    )
    near(trainer.experience_maker.make_experience(recorded).log_ratios, [-0.25, -0.5, 0.5, 0.25, 0.5])
    report = next_step(trainer)
    assert report.batch.logprobs[recorded.response_mask].tolist() == [-1, -1, -2, -1, -1]
    assert report.metrics["rollout/logprob_gap"] == pytest.approx(2.0 / 5)
    assert report.metrics["rollout/sampler_kl"] == pytest.approx(-0.5 / 5)
    assert report.metrics["rollout/ratio_min"] == pytest.approx(math.exp(-0.5))


# Ratios of the actor to the sampler, e^ -0.25 -0.5 | 0.5 0.25 0.5, and of whole responses e^ -0.75 | 1.25.
@pytest.mark.parametrize(
    "correction, expected, cut",
    [
        ("token_truncate", [[0.7788, 0.6065, 1], [1.5, 1.2840, 1.5]], [[0, 0, 0], [1, 0, 1]]),
        ("token_mask", [[0.7788, 0.6065, 1], [0, 1.2840, 0]], [[0, 0, 0], [1, 0, 1]]),
        ("sequence_truncate", [[0.5] * 3, [1.5] * 3], [[1] * 3, [1] * 3]),
        ("sequence_mask", [[0.0] * 3, [0.0] * 3], [[1] * 3, [1] * 3]),
    ],
)
@pytest.mark.parametrize("exact_sampler", [True, False])
def test_a_sampler_that_is_off_is_corrected(correction, expected, cut, exact_sampler):
    drawn = torch.tensor([[-0.75, -0.5, 0.0], [-2.5, -1.25, -1.5]])
    recorded, models = replace(batch(), logprobs=drawn, entropy=torch.zeros(2, 3)), TableModels(BATCH)
    dialect = get_dialect("default").override(correction=correction, correction_min=0.5, correction_max=1.5)
    report = next_step(untrained(models.roles(), dialect, recorded, pad=PAD, exact_sampler=exact_sampler))
    made, plain = report.batch, make(models, batch(), get_dialect("default"))
    near(made.correction, expected, 1e-4)
    assert made.cut.int().tolist() == cut
    assert torch.equal(made.logprobs, plain.logprobs) and torch.equal(made.advantages, plain.advantages)
    learned = [value for row, mask in zip(expected, plain.policy_mask.tolist()) for value, on in zip(row, mask) if on]
    assert report.metrics["policy/correction"] == pytest.approx(sum(learned) / 5, abs=1e-4)
    assert report.metrics["policy/correction_cut"] == pytest.approx(0.4 if "token" in correction else 1.0)
    part = made.select(slice(0, 1))  # without the last slot, where only the second row has a token
    near(part.correction, [expected[0][:2]], 1e-4)


def test_without_the_samplers_log_probs_there_is_nothing_to_correct_by():
    with pytest.raises(RunStopped, match="correction 'token_mask' compares .* rollout backend notes none"):
        make(TableModels(BATCH), batch(), get_dialect("default").override(correction="token_mask"))
    assert make(TableModels(BATCH), batch(), get_dialect("default")).correction is None


class WholeTexts(TableModels):
    """Log-probs of prompts too: -1 and -1.5 of every token, where all but the first are asked for."""

    def actor(self, sequences, *args, response_length, **kwargs):
        logprobs = torch.full((len(sequences), response_length), -1.0)
        return logprobs, 0 * logprobs

    def reference(self, rollout, temperature):
        return torch.full((len(rollout), rollout.response_length), -1.5)


def test_trlx_steers_by_the_kl_of_prompts_too():
    # delta 0.5 everywhere. Row 0: 3 prompt tokens, of which 2 are predicted, and slots 0..2 of two tokens (EOS and the
    # slot behind it); row 1: one prompt token, slots 0..2 of three. exp(0.5) - 1 - 0.5 each.
    rollout = rollout_of([[5, 6, 901], [902]], [[11, EOS], [11, 12, 13]], PAD)
    dialect = get_dialect("trlx").override(kl_controller="adaptive", whiten_advantages=False)
    for micro_batch_size in (1, 2):
        made = make(WholeTexts(BATCH), rollout, dialect, micro_batch_size=micro_batch_size)
        near(made.measured_kl, [5 * (math.exp(0.5) - 1.5), 3 * (math.exp(0.5) - 1.5)])
        near(made.kl, [[0.5, 0.5, 0], [0.5] * 3])
    near(make(WholeTexts(BATCH), rollout, dialect.override(kl_measure="k1")).measured_kl, [1.0, 1.5])


def test_checkpoints_of_a_trainer(tmp_path):
    """Later ones are set aside where training went on from an earlier one; what does not fit is refused."""
    make_causal_lm(tmp_path / "actor")
    make_scorer(tmp_path / "reward")
    trainer, out = build_trainer(engine_spec(str(tmp_path), 0)), tmp_path / "out"
    for trainer.counters.steps_done in (1, 2, 3):
        saved = trainer.save_checkpoint(out)
    assert trainer.load_checkpoint(out) == saved == out / "checkpoints" / "step_000003"
    assert trainer.load_checkpoint(saved.with_name("step_000001")).name == "step_000001" and trainer.steps_done == 1
    trainer.counters.steps_done = 2
    trainer.save_checkpoint(out)
    names = ["step_000001", "step_000002", "step_000002.abandoned", "step_000003.abandoned"]
    assert sorted(path.name for path in saved.parent.iterdir()) == names
    trainer.algorithm.dialect = trainer.algorithm.dialect.override(samples_per_prompt=2)
    with pytest.raises(UserError, match="samples_per_prompt was 1 when it was written and is 2 now"):
        trainer.load_checkpoint(out)
    (tmp_path / "file").touch()
    with pytest.raises(
        RunStopped, match=r"the checkpoint of step 2 cannot be written into .*/file: rank 0: .*Errno 20"
    ):
        trainer.save_checkpoint(tmp_path / "file")


def test_the_first_batch_of_scores_stays_in_a_checkpoint():
    trainers = [untrained(TableModels(BATCH).roles(), get_dialect("default"), batch(), pad=PAD) for _ in range(2)]
    for trainer in trainers:
        source = trainer.experience_maker.reward
        standardised = {"a": Standardisation("the judge")}
        trainer.experience_maker.reward = CombinedReward({"a": (source, 1.0)}, standardised=standardised)
    one, other = trainers
    next_step(one)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    kept = other.experience_maker.reward.standardised["a"].totals
    assert kept is not None and torch.equal(kept, one.experience_maker.reward.standardised["a"].totals)
