"""Scores of tokens on two ranks: what is whitened over both, what they exchange, and a function that mixes the two."""

import pytest
import torch

from engine import distributed
from engine.errors import RunStopped
from engine.experience import PromptBatch, Rollout
from engine.reward.base import RewardSource
from engine.reward.function import FunctionReward
from engine.zero.communication import init
from scripts.harness.models import make_tokenizer
from scripts.harness.ranks import run_ranks
from tests.engine.fake_models import TableModels, rollout_of
from tests.training.given_rollouts import batch_of, untrained
from tests.training.test_group_sampling import PAD, RLOO, Feed, Models
from tests.training.test_ppo_trainer import BATCH, batch
from tests.training.test_step_rewards import PAD as BATCH_PAD
from tests.training.test_step_rewards import both, dialect_of


class OwnFeed:
    """Every other batch of the feed."""

    def prompts(self, number: int) -> PromptBatch:
        return Feed().prompts(2 * number + distributed.rank())


class ByToken(RewardSource):
    """A token's own number, in prompts with an even index; 0 in the others, whose groups are left out."""

    def score(self, rollout: Rollout) -> torch.Tensor:
        return (rollout.responses * (rollout.indices % 2 == 0).unsqueeze(-1)).float()


def work() -> dict:
    """The whitened advantages of this rank's row; responses and rewards after an exchange; what stops a mix."""
    init()
    rank = distributed.rank()
    found = {}
    roles = TableModels(BATCH).roles() | {"reward": both()}
    found["white"] = batch_of(roles, batch().select(slice(rank, rank + 1), None), dialect_of("default"), pad=BATCH_PAD)
    models = Models({})
    dialect = RLOO.override(dynamic_sampling=3, kl_coef=0.0)
    trainer = untrained(models.roles() | {"reward": ByToken()}, dialect, pad=PAD, micro_batch_size=2)
    trainer.rollouts = models
    learned = trainer.step(OwnFeed().prompts(0), OwnFeed())
    found["exchanged"], found["metrics"] = learned.batch, learned.metrics
    answers = [[], [], []] if rank else [1.0, 2.0, 3.0]
    reward = FunctionReward(lambda prompts, responses: answers, make_tokenizer(), name="mine:f")
    with pytest.raises(RunStopped) as stop:
        reward.score(rollout_of([[5], [6], [7]], [[20], [21], [22]], PAD))
    found["stop"] = str(stop.value)
    return found


def test_two_ranks():
    init()
    ranks = run_ranks("tests.distributed.test_step_rewards:work")
    roles = TableModels(BATCH).roles() | {"reward": both()}
    alone = batch_of(roles, batch(), dialect_of("default"), pad=BATCH_PAD)
    white = torch.cat([rank["white"].advantages for rank in ranks])
    torch.testing.assert_close(white, alone.advantages, rtol=0, atol=1e-6)
    assert [len(rank["exchanged"]) for rank in ranks] == [12, 12]
    chosen = [rank["exchanged"].rollout.indices.unique().tolist() for rank in ranks]
    for rank in ranks:
        learned = rank["exchanged"]
        rollout = learned.rollout
        assert torch.equal(learned.rewards, (rollout.responses * rollout.response_mask).float())
        assert learned.scores.tolist() == learned.rewards.sum(-1).tolist()
        assert not learned.whole_scores.any()
        assert rank["metrics"]["objective/non_score_reward"] == 0.0
    assert chosen == [[0, 2, 4, 6], [8, 10, 12, 14]]
    assert {rank["stop"] for rank in ranks} == {
        "the reward function mine:f returned one number for some responses, and numbers of steps or tokens for others. "
        "Have it return the same for all: a response without steps has an empty list, or zeros."
    }
