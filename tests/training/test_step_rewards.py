"""Scores of tokens beside scores of whole responses: rewards, advantages and losses against a straight-line loop."""

import math

import pytest
import torch

from engine.algo.losses import clipped_surrogate, clipped_value_loss
from engine.algorithms import DIALECTS, Dialect, get_dialect
from engine.experience import Rollout
from engine.reward.base import CombinedReward, RewardSource
from tests.engine.fake_models import TableModels, rollout_of
from tests.training.given_rollouts import batch_of
from tests.training.test_ppo_trainer import BATCH, EOS, PAD, batch, near, step_metrics

LENGTHS = {901: 2, 902: 3}
TOKENS = {901: [1.0, 4.0], 902: [6.0, 0.0, -2.0]}  # what each token of the response gets
WEIGHT = 0.5


class OfTokens(RewardSource):
    """(B, T), with NaN where no token of the response is."""

    def __init__(self, table: dict[int, list[float]]):
        self.table = table

    def score(self, rollout: Rollout) -> torch.Tensor:
        found = torch.full(rollout.response_mask.shape, math.nan)
        for row, tokens in enumerate(rollout.prompts.tolist()):
            numbers = self.table[tokens[-1]]
            found[row, : len(numbers)] = torch.tensor(numbers)
        return found


def made_with(reward: RewardSource, dialect: Dialect, micro_batch_size: int = 8):
    roles = TableModels(BATCH).roles() | {"reward": reward}
    return batch_of(roles, batch(), dialect, pad=PAD, micro_batch_size=micro_batch_size)


def both() -> CombinedReward:
    """The tokens' numbers at half weight, and the model's score of the whole."""
    whole = TableModels(BATCH).roles()["reward"]
    return CombinedReward({"steps": (OfTokens(TOKENS), WEIGHT), "model": (whole, 1.0)})


def looped(past: int, clip: float, lam: float = 0.5, beta: float = 0.1) -> tuple[list, list]:
    """Rewards and advantages of the two rows, one number after the other. past: positions behind the response's last
    token at which the whole's score falls, where there is room, and up to which values are kept."""
    rewards, advantages = [], []
    for mark, length in LENGTHS.items():
        row = BATCH[mark]
        last = min(length - 1 + past, 2)
        own = [0.0] * 3
        for t in range(length):
            own[t] = -beta * (row.logprobs[t] - row.ref_logprobs[t]) + WEIGHT * TOKENS[mark][t]
        own[last] += max(-clip, min(clip, row.score))
        values = [row.values[t] if t <= last else 0.0 for t in range(3)] + [0.0]
        following, estimates = 0.0, [0.0] * 3
        for t in (2, 1, 0):
            following = own[t] + values[t + 1] - values[t] + lam * following
            estimates[t] = following
        rewards.append(own)
        advantages.append(estimates)
    return rewards, advantages


DIALECT_RULES = {"default": (0, 5.0, 0), "trl_ppo": (1, math.inf, 1)}  # past, clip, what the variance's divisor lacks


def dialect_of(system: str) -> Dialect:
    return get_dialect(system).override(lam=0.5, kl_coef=0.1, sampling="until_eos", old_logprobs="forward")


@pytest.mark.parametrize("micro_batch_size", [1, 2])
@pytest.mark.parametrize("system", list(DIALECT_RULES))
def test_rewards_advantages_and_losses_against_a_loop(system, micro_batch_size):
    past, clip, lacking = DIALECT_RULES[system]
    dialect = dialect_of(system)
    made = made_with(both(), dialect, micro_batch_size)
    rewards, advantages = looped(past, clip)
    near(made.rewards, rewards)
    learned = [advantages[row][t] for row, length in enumerate(LENGTHS.values()) for t in range(length)]
    mean = sum(learned) / 5
    deviation = math.sqrt(sum((one - mean) ** 2 for one in learned) / (5 - lacking))
    white = [(one - mean) / deviation for one in learned]
    assert made.advantages[made.policy_mask].tolist() == pytest.approx(white, abs=1e-5)
    ratios = [1.1, 1.3, 0.7, 1.25, 1.0]
    loss = sum(max(-a * r, -a * max(0.8, min(1.2, r))) for a, r in zip(white, ratios))
    drawn = torch.ones(2, 3)
    drawn[made.policy_mask] = torch.tensor(ratios)
    sums = clipped_surrogate(made.logprobs + drawn.log(), made.logprobs, made.advantages, made.policy_mask, 0.2)
    assert sums.loss.item() == pytest.approx(loss, abs=1e-5)
    returns = [advantages[row][t] + BATCH[mark].values[t] for row, mark in enumerate(LENGTHS) for t in range(3)]
    values = [value for mark in LENGTHS for value in BATCH[mark].values]
    counted = made.value_mask.flatten().tolist()
    loss = sum((v - r) ** 2 for v, r, each in zip(values, returns, counted) if each) / 2
    sums = clipped_value_loss(made.values, made.values, made.returns, made.value_mask, 0.2)
    assert sums.loss.item() == pytest.approx(loss, rel=1e-5)


def test_what_is_measured_and_what_is_clipped():
    """Only the model's 8 is clipped, to 5. Sums of the tokens at half weight: 2.5 and 2."""
    made = made_with(both(), dialect_of("default"))
    assert made.scores.tolist() == [4.5, 10.0] and made.whole_scores.tolist() == [2.0, 8.0]
    assert made.processed_scores.tolist() == [4.5, 7.0]
    metrics = step_metrics(made, dialect_of("default"))
    assert metrics["objective/scores"] == 7.25 and metrics["objective/clipped"] == 0.5
    assert metrics["objective/non_score_reward"] == pytest.approx((-0.15 - 0.2) / 2, abs=1e-6)  # -beta KL


def test_one_without_an_end_keeps_its_tokens_scores():
    dialect = get_dialect("default").override(missing_end="replace", missing_end_value=-1.0, score_scaling="running")
    rollout = rollout_of([[901]], [[11, EOS]], PAD)
    ended = Rollout(
        rollout.sequences, rollout.attention_mask, rollout.response_mask, rollout.indices < 0, *2 * [rollout.indices]
    )
    roles = TableModels(BATCH).roles() | {"reward": OfTokens(TOKENS)}
    near(batch_of(roles, ended, dialect, pad=PAD).rewards, [[-0.05 + 1, -0.1 + 4 - 1]])


def test_grpo_compares_the_sums():
    dialect = get_dialect("grpo_trl").override(samples_per_prompt=2)
    made = made_with(both(), dialect)
    deviation = 2.75 * math.sqrt(2) + 1e-4  # of 4.5 and 10, whose mean is 7.25
    near(made.advantages, [[-2.75 / deviation] * 3, [2.75 / deviation] * 3])


AT_THE_LAST = [  # the score falls on the last token, not on the last position of the row
    name for name in DIALECTS if get_dialect(name).score_position == "last" and get_dialect(name).length_rule != "row"
]


@pytest.mark.parametrize("system", AT_THE_LAST)
def test_a_reward_on_the_last_token_alone_is_a_score(system):
    """To the last digit, where the dialect leaves the score as it is."""
    dialect = get_dialect(system).override(sampling="until_eos", old_logprobs="forward", missing_end="none")
    if dialect.samples_per_prompt > 1:
        dialect = dialect.override(samples_per_prompt=2, dynamic_sampling=1)
    dialect = dialect.replaced(score_clip=None, score_scaling="none")
    whole = made_with(TableModels(BATCH).roles()["reward"], dialect)
    last = {mark: [0.0] * (length - 1) + [BATCH[mark].score] for mark, length in LENGTHS.items()}
    tokens = made_with(OfTokens(last), dialect)
    for name in ("scores", "processed_scores", "rewards", "advantages", "returns"):
        assert torch.equal(getattr(whole, name), getattr(tokens, name)), name
