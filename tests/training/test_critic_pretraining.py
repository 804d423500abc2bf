"""One step of the critic's pretraining, by hand: what it learns from, and at which rate."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from engine.algorithms import Dialect
from engine.distributed import ALONE
from engine.rollout import SamplingConfig
from tests.engine.fake_models import Row, TableModels, rollout_of
from tests.training.given_rollouts import GivenRollouts
from tests.training.test_learner import NoteTaker
from training.critic_pretraining import CriticPretraining
from training.ppo_trainer import PPOConfig, PPOTrainer

# Prompts that end with 901 and 902, responses of three tokens and of one; scores 2 and -1.
TABLE = {901: Row([0] * 3, [0] * 3, [0.5, 1.0, 1.5], 2.0), 902: Row([0] * 3, [0] * 3, [-2.0, 7.0, 7.0], -1.0)}
DIALECT = Dialect(
    name="own",
    lam=0.5,
    gamma=0.5,
    length_adaptive_alpha=0.05,
    value_clip_range=0.1,
    critic_lr=1e-3,
    warmup_steps=0,
    critic_epochs=2,
)


class Critic(NoteTaker):
    """Values from the table; Adam's moments can be forgotten."""

    def __init__(self):
        super().__init__("critic")
        self.forgotten, self.values = 0, TableModels(TABLE).critic

    def __call__(self, *inputs):
        if torch.is_grad_enabled():
            self.values_asked = self.values(*inputs).nan_to_num().requires_grad_()
            return self.values_asked
        return self.values(*inputs)

    def inferring(self):
        return contextlib.nullcontext()

    def forget_moments(self):
        self.forgotten += 1


class NeverAsked:
    """The actor, or the reference."""

    scales_loss = False

    @property
    def host(self):
        return self


def pretraining_of(
    steps: int, rollouts: int, lr: float | None = None, policies: dict | None = None, **fields
) -> CriticPretraining:
    """Of the two responses, again and again. policies: actor and reference, where they are asked."""
    tokenizer = SimpleNamespace(eos_token_id=2, get_vocab=dict)
    critic, reward = Critic(), TableModels(TABLE).roles()["reward"]
    policies = policies or {"actor": NeverAsked(), "reference": None}
    models = SimpleNamespace(critic=critic, ema=None, tokenizer=tokenizer, **policies)
    models.rewards, models.group = [reward], ALONE
    trainer = PPOTrainer(
        models=models,
        rollouts=GivenRollouts(*[rollout_of([[901], [5, 902]], [[7, 8, 2], [2]], 0)] * rollouts),
        dialect=DIALECT.override(**fields),
        config=PPOConfig(total_steps=9, critic_pretrain_steps=steps),
        sampling=SamplingConfig(max_new_tokens=3, pad_token_id=0, stop_token_ids=(2,)),
    )
    return CriticPretraining(trainer, lr)


def prompts(step: int):
    return SimpleNamespace(to=lambda device: SimpleNamespace(repeat=lambda k: None))


def test_the_critic_alone_learns_what_followed_each_token():
    pretraining = pretraining_of(steps=4, rollouts=1)
    report = pretraining.step(prompts(0))
    assert (report.step, pretraining.steps_done, pretraining.trainer.steps_done) == (-3, 1, -3)
    # With gamma 1/2 and lambda 1 the score 2 at the end is worth 1/2, 1, 2 on the way; the dialect's lambdas, of the
    # response's length or 1/2, would leave the values in it.
    assert report.batch.returns.tolist() == [[0.5, 1.0, 2.0], [-1.0, 0.0, 0.0]]
    # Errors 0, 0, -1/2 and -1: (0.25 + 1) / 2 / 4, whatever value_clip_range is. Both epochs have the same, as the
    # stand-in does not learn.
    found = {name.removeprefix("critic_pretrain/"): value for name, value in report.metrics.items()}
    assert found["loss"] == pytest.approx(1.25 / 2 / 4)
    # Values 0.5, 1, 1.5, -2: mean 0.25, variance 1.8125; outcomes 0.5, 1, 2, -1: mean 0.625, variance 1.171875.
    # Errors (outcome less value) 0, 0, 0.5, 1: mean 0.375, squares 1.25 / 4, variance 0.171875. Products 0.25, 1, 3, 2.
    assert found["explained_variance"] == pytest.approx(1 - 0.171875 / 1.171875)
    assert found["slope"] == pytest.approx((6.25 / 4 - 0.25 * 0.625) / 1.8125)
    assert found["bias"] == pytest.approx(-0.375)
    assert (found["scores"], found["response_length"], found["mean"]) == pytest.approx((0.5, 2.0, 0.25))


def test_the_critic_learns_what_the_likelihood_adds():
    # Likelihoods -1 and -3: mean -2, deviation sqrt(2), 0.7071 of it each. Twice 0.5 (the cap) and twice -0.7071.
    table = {901: Row([-1.0] * 3, [-1.0] * 3, [], 0.0), 902: Row([-3.0] * 3, [-3.0] * 3, [], 0.0)}
    roles = TableModels(table).roles()
    policies = {name: roles[name] for name in ("actor", "reference")}
    policies["actor"].host = NeverAsked()
    pretraining = pretraining_of(2, 1, policies=policies, likelihood_coef=2.0, likelihood_cap=0.5)
    returns = pretraining.step(prompts(0)).batch.returns
    torch.testing.assert_close(returns, torch.tensor([[0.75, 1.5, 3.0], [-2.414214, 0, 0]]), atol=1e-5, rtol=0)
    kept = pretraining.trainer.algorithm.likelihood_scale
    assert kept.mean == -2.0, "the PPO steps go on with it"


@pytest.mark.parametrize(
    "per, rates", [("optimizer_step", [4e-3, 3e-3, 2e-3, 1e-3]), ("step", [4e-3, 4e-3, 2e-3, 2e-3])]
)
def test_the_last_step_is_numbered_0_and_leaves_adam_as_before_its_first(per, rates):
    pretraining = pretraining_of(steps=2, rollouts=2, lr=4e-3, lr_per=per)
    reports = list(pretraining.fit(SimpleNamespace(prompts=prompts)))
    critic = pretraining.trainer.models.critic
    assert [report.step for report in reports] == [-1, 0] and critic.forgotten == 1
    # Four optimizer steps: the dialect's schedule, a line to 0, goes by these alone.
    assert [lr for lr, _ in critic.steps] == pytest.approx(rates)
    assert pretraining.trainer.counters.optimizer_steps == 0 and pretraining.trainer.counters.samples == 0


def test_a_step_of_ppo_is_refused_before():
    trainer = pretraining_of(steps=2, rollouts=1).trainer
    with pytest.raises(AssertionError, match="the critic's pretraining comes first"):
        trainer.step(prompts(0))


def test_responses_are_drawn_with_other_numbers_than_those_of_the_steps():
    pretraining = pretraining_of(steps=2, rollouts=1)
    assert pretraining.sampling.seed != pretraining.trainer.sampling.seed
