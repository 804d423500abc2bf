"""Conversations on two ranks: advantages and metrics over both ranks' drawn tokens, and gradients that are those of
transformers' own pass with only drawn tokens counted.
"""

import pytest
import torch

from engine import distributed
from engine.algorithms import Algorithm
from engine.models.attention import Attention
from engine.zero.communication import init
from scripts.harness.models import PAD
from scripts.harness.ranks import run_ranks
from tests.distributed import plain
from tests.distributed.tiny_run import build_trainer, engine_spec
from tests.distributed.work_gradients import STILL, TEMPERATURE, one_step
from tests.training.test_conversations import DRAWN, conversations, dialect_of, drawn_mask, reward, step_of
from training.ppo_trainer import batch_to_learn
from training.reporting.metrics import Accumulator
from training.reporting.step_metrics import STEP_METRICS

DIALECTS = ("default", "reinforce_pp", "dapo")
STAGES = {"0": (0, "stage0.json", "padded"), "3_packed": (3, "stage3.json", "packed")}


def metrics_of(name: str, batch) -> dict[str, float]:
    """The step's metrics over all ranks."""
    metrics, algorithm = Accumulator(), Algorithm(dialect_of(name), pad_token_id=PAD, max_response_length=9)
    for add_to in STEP_METRICS:
        add_to(metrics, batch, algorithm)
    return metrics.reduce()


def work(folder: str) -> dict:
    """A step's batch and metrics in each dialect; what each stage learns from, and its gradients."""
    init()
    own = conversations(range(4)[distributed.rank_share(4)])
    found = {}
    for name in DIALECTS:
        batch = step_of(dialect_of(name), own)
        found[name] = batch, metrics_of(name, batch)
    for name, (stage, config, packing) in STAGES.items():
        spec = engine_spec(folder, stage, config=config, attention=Attention(packing=packing))
        trainer = build_trainer(spec, dialect=STILL, micro_batch_size=1, reward=reward())
        batch = batch_to_learn(trainer.algorithm, trainer.experience_maker.make_experience(own), kl_coef=0.1)
        found[name] = batch, one_step(trainer, batch)
    return found


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict]:
    return run_ranks("tests.distributed.test_conversations:work", folder=folder)


@pytest.mark.parametrize("name", DIALECTS)
def test_what_is_learned_is_that_of_one_rank(ranks, name):
    """One rank's numbers are compared with loops in tests/training/test_conversations.py."""
    init()
    alone = step_of(dialect_of(name))
    for column in ("rewards", "advantages", "returns"):
        both = torch.cat([getattr(rank[name][0], column) for rank in ranks])
        torch.testing.assert_close(both, getattr(alone, column), rtol=0, atol=1e-6)
    expected = metrics_of(name, alone)
    for rank in ranks:
        assert rank[name][1] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_those_of_drawn_tokens(ranks, folder, stage):
    assert torch.equal(torch.cat([rank[stage][0].policy_mask for rank in ranks]), drawn_mask())
    count = sum(map(len, DRAWN))
    actor, critic = plain.policy(folder), plain.critic(folder)
    losses = {"actor": torch.zeros(()), "critic": torch.zeros(())}
    for part in (rank[stage][0].select(slice(row, row + 1)) for rank in ranks for row in range(2)):
        drawn = part.rollout.action_mask
        new = plain.logprobs(actor, part.rollout, TEMPERATURE)[drawn]
        torch.testing.assert_close(new.float(), part.logprobs[drawn], rtol=0, atol=3e-6)
        ratio = (new - new.detach()).exp()
        losses["actor"] = losses["actor"] - (part.advantages[drawn] * ratio).sum() / count
        errors = plain.values(critic, part.rollout)[drawn] - part.returns[drawn]
        losses["critic"] = losses["critic"] + 0.5 * (errors**2).sum() / count
    for name, model in (("actor", actor), ("critic", critic)):
        expected = plain.gradients(model, losses[name])
        for rank in ranks:
            assert plain.relative_error(rank[stage][1][name], expected) < 1e-5
