"""Which rows make an optimizer step and a pass, and at which rate; seen by models that take notes."""

import contextlib
import dataclasses
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from engine import distributed
from engine.algorithms import get_dialect
from engine.distributed import ALONE
from engine.errors import RunStopped
from engine.experience import Rollout, TrainingBatch
from engine.rollout import SamplingConfig
from training.config.step3 import RLHFFlags
from training.learner import MixedPretraining, mini_batch_rows
from training.ppo_trainer import PPOConfig, PPOTrainer
from training.reporting.metrics import Accumulator

ROWS, EPOCHS = 8, 4
OPENAI = get_dialect("openai").override(truncate_token="", truncate_after=0, missing_end="none")


class NoteTaker:
    """In an engine's place: notes the rows of each pass, and for each optimizer step its rate and its passes."""

    scales_loss, grad_norm = False, 1.0

    def __init__(self, role: str):
        self.role, self.passes, self.steps, self.last = role, [], [], []

    def __call__(self, sequences, attention_mask, position_ids, response_length=None, **how):
        self.passes.append(sequences[:, 0].tolist())
        if response_length is None:
            return torch.zeros(sequences.shape, requires_grad=True)
        return torch.zeros(len(sequences), response_length, requires_grad=True), None

    def backward(self, loss, last):
        loss.backward()
        self.last.append(last)

    def overflowed(self):
        return False

    def weights_finite(self):
        return True

    @property
    def host(self):
        return self

    def accumulating(self, passes):
        return contextlib.nullcontext()

    def step_roles(self, lrs, overflow=False, skip=False):
        return self.step(lrs[self.role], overflow, skip)

    def step(self, lr, overflow=False, skip=False):
        assert self.last == [False] * (len(self.last) - 1) + [True]
        self.steps.append((lr, self.passes))
        self.passes, self.last, self.asked = [], [], (overflow, skip)
        return not skip


def batch() -> TrainingBatch:
    """Eight rows, told apart by their one prompt token, of three response tokens each."""
    ones, zeros = torch.ones(ROWS, 3, dtype=torch.bool), torch.zeros(ROWS, 3)
    sequences = torch.cat([torch.arange(ROWS).unsqueeze(1), torch.full((ROWS, 3), 50)], 1)
    rollout = Rollout(
        sequences,
        torch.ones_like(sequences),
        ones,
        torch.ones(ROWS, dtype=torch.bool),
        torch.arange(ROWS),
        torch.zeros(ROWS, dtype=torch.int64),
    )
    rewards = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))
    return TrainingBatch(
        rollout=rollout,
        logprobs=zeros,
        entropy=zeros,
        ref_logprobs=zeros,
        values=zeros,
        scores=zeros[:, 0],
        processed_scores=zeros[:, 0],
        kl=zeros,
        measured_kl=zeros[:, 0],
        kl_coef=0.1,
        rewards=rewards,
        advantages=zeros,
        returns=zeros,
        policy_mask=ones,
        value_mask=ones,
        state_mask=ones,
    )


def trainer_of(dialect, micro_batch_size: int, rollouts: int, critic: NoteTaker | None = None) -> PPOTrainer:
    """A trainer whose actor and critic take notes."""
    models = SimpleNamespace(
        actor=NoteTaker("actor"),
        critic=critic or NoteTaker("critic"),
        reference=None,
        rewards=[object()],
        trained={},
        ema=mock.Mock(),
        group=ALONE,
        tokenizer=SimpleNamespace(eos_token_id=2, decode=lambda ids: f"tokens {ids.tolist()}"),
    )
    return PPOTrainer(
        models=models,
        rollouts=None,
        dialect=dialect,
        config=PPOConfig(total_steps=rollouts, micro_batch_size=micro_batch_size),
        sampling=SamplingConfig(max_new_tokens=3, pad_token_id=0, stop_token_ids=()),
    )


def trained(dialect, micro_batch_size: int, rollouts: int) -> PPOTrainer:
    """The trainer after so many rollouts; its actor and critic have their notes."""
    trainer = trainer_of(dialect, micro_batch_size, rollouts)
    for _ in range(rollouts):
        trainer.train_actor_and_critic(batch(), 0.0, Accumulator())
        trainer.counters.steps_done += 1
    return trainer


def test_the_published_arithmetic():
    """batch_size 8, nminibatches 2, gradient_accumulation_steps 2: minibatches of 4, micro-batches of 2; see "The N
    Implementation Details of RLHF with PPO". Each epoch is shuffled anew."""
    args = RLHFFlags(
        output_dir="out",
        data_path=["d"],
        actor_model_name_or_path="a",
        critic_model_name_or_path="b",
        dialect="openai",
        per_device_generation_batch_size=8,
        per_device_training_batch_size=2,
        gradient_accumulation_steps=2,
    )
    assert (args.rows_per_rank, args.mini_batches) == (8, 2)
    trainer = trained(OPENAI.override(mini_batches=args.mini_batches), args.per_device_training_batch_size, rollouts=1)
    for model in (trainer.models.actor, trainer.models.critic):
        assert len(model.steps) == EPOCHS * 2
        assert all([len(rows) for rows in passes] == [2, 2] for _, passes in model.steps)
        epochs = [
            [row for _, passes in model.steps[start : start + 2] for rows in passes for row in rows]
            for start in range(0, EPOCHS * 2, 2)
        ]
        assert all(sorted(order) == list(range(ROWS)) for order in epochs)
        assert len({frozenset(order[:4]) for order in epochs}) > 1, "each epoch has the same minibatches"


@pytest.mark.parametrize(
    "per, expected",
    [
        ("step", [1, 1, 1, 1, 0.75, 0.75, 0.75, 0.75, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25]),
        ("optimizer_step", [1 - step / 16 for step in range(16)]),
    ],
)
def test_rates_fall_with_each_rollout_or_with_each_optimizer_step(per, expected):
    """Update u of 4, counted from 0, has the rate 1 - u / 4 in all of its epochs; or each optimizer step its own."""
    trainer = trained(OPENAI.override(lr_per=per, actor_lr=1e-5, critic_lr=2e-5), 8, rollouts=4)
    assert [lr for lr, _ in trainer.models.actor.steps] == pytest.approx([1e-5 * factor for factor in expected])
    assert [lr for lr, _ in trainer.models.critic.steps] == pytest.approx([2e-5 * factor for factor in expected])


def test_a_critic_with_passes_of_its_own_makes_them_first():
    """Two epochs of four mini-batches, then the actor's one of two; the rate falls by the steps of each model."""
    order = []

    class Ordered(NoteTaker):
        def step(self, lr, overflow=False, skip=False):
            order.append(self.role)
            return super().step(lr, overflow, skip)

    fields = {"ppo_epochs": 1, "mini_batches": 2, "critic_epochs": 2, "critic_mini_batches": 4}
    dialect = OPENAI.override(lr_per="optimizer_step", actor_lr=1e-5, critic_lr=2e-5, **fields)
    trainer = trainer_of(dialect, 8, 3, Ordered("critic"))
    trainer.models.actor = trainer.learner.models.actor = Ordered("actor")
    for _ in range(2):
        trainer.train_actor_and_critic(batch(), 0.0, Accumulator())
        trainer.counters.steps_done += 1
    assert order == (["critic"] * 8 + ["actor"] * 2) * 2 and trainer.counters.optimizer_steps == 4
    critic, actor = trainer.models.critic.steps, trainer.models.actor.steps
    assert [lr for lr, _ in critic] == pytest.approx([2e-5 * (1 - step / 24) for step in range(16)])
    assert [lr for lr, _ in actor] == pytest.approx([1e-5 * (1 - step / 6) for step in range(4)])
    for start in range(0, 16, 4):
        rows = [row for _, passes in critic[start : start + 4] for part in passes for row in part]
        assert sorted(rows) == list(range(ROWS)) and len(rows) == 4 * 2
    assert len({tuple(passes[0]) for _, passes in critic}) > 4, "each epoch has the same mini-batches"


def test_a_warm_critic_and_a_cold_one_have_the_same_passes():
    """In a step of warm-up the critic makes its own passes, and the actor none."""
    dialect = OPENAI.override(ppo_epochs=1, critic_epochs=3)
    trainer = trainer_of(dialect, 8, 2)
    trainer.config = dataclasses.replace(trainer.config, critic_warmup_steps=1)
    trainer.train_actor_and_critic(batch(), 0.0, Accumulator())
    assert (len(trainer.models.critic.steps), trainer.models.actor.steps) == (3, [])
    trainer.counters.steps_done += 1
    trainer.train_actor_and_critic(batch(), 0.0, metrics := Accumulator())
    assert (len(trainer.models.critic.steps), len(trainer.models.actor.steps)) == (6, 1)
    assert metrics.reduce()["policy/grad_norm"] == 1.0
    assert trainer.models.critic.steps[3][1] != trainer.models.actor.steps[0][1], "both shuffle alike"


def test_passes_that_are_the_actors_are_made_with_it():
    joint = trained(OPENAI.override(mini_batches=2), 8, rollouts=2)
    said = trained(OPENAI.override(mini_batches=2, critic_epochs=EPOCHS, critic_mini_batches=2), 8, rollouts=2)
    for role in ("actor", "critic"):
        assert getattr(said.models, role).steps == getattr(joint.models, role).steps
    dealt = [passes for _, passes in joint.models.actor.steps]
    assert dealt[:8] != dealt[8:], "both steps have the same mini-batches"


def test_all_ranks_means_end_epochs_and_leave_a_step_out(monkeypatch):
    """This rank's policy has not moved; in another's 24 tokens approxkl adds up to 24, and ratios to 96."""
    another = torch.tensor([96.0, 24.0, 24.0])
    monkeypatch.setattr(distributed, "data_parallel_sum", lambda own: own + another if own.shape == (3,) else own)
    trainer = trainer_of(OPENAI.override(early_stop_kl=0.4, ratio_limit=2.0), 8, 1)
    assert trainer.train_actor_and_critic(batch(), 0.0, Accumulator()) == (1, 1)
    assert trainer.models.actor.asked == (False, True) and trainer.counters.optimizer_steps == EPOCHS


def on_rank(monkeypatch, rank: int, world: int, rows: int, mini_batches: int, key: tuple) -> list[list[int]]:
    """What falls to this rank, as numbers of all ranks' rows."""
    monkeypatch.setattr(distributed, "rank", lambda: rank)
    monkeypatch.setattr(distributed, "world_size", lambda: world)
    return [[rank * rows + row for row in part.tolist()] for part in mini_batch_rows(rows, mini_batches, key)]


@pytest.mark.parametrize("rows, mini_batches", [(8, 1), (8, 2), (8, 4), (8, 8), (12, 3)])
def test_every_row_is_dealt_once_and_every_mini_batch_gets_as_many(monkeypatch, rows, mini_batches):
    for epoch in range(5):
        dealt = on_rank(monkeypatch, 0, 1, rows, mini_batches, (1, 0, epoch))
        assert [len(part) for part in dealt] == [rows // mini_batches] * mini_batches
        assert sorted(sum(dealt, [])) == list(range(rows))


def test_mini_batches_do_not_depend_on_the_number_of_ranks(monkeypatch):
    for epoch in range(5):
        key = (7, 3, epoch)
        alone = on_rank(monkeypatch, 0, 1, 16, 4, key)
        both = [on_rank(monkeypatch, rank, 2, 8, 4, key) for rank in (0, 1)]
        assert [set(part) for part in alone] == [set(one) | set(other) for one, other in zip(*both)]


def test_every_row_comes_into_every_mini_batch_and_order_is_drawn_too(monkeypatch):
    dealt = [on_rank(monkeypatch, 0, 1, 8, 2, (0, 0, epoch)) for epoch in range(40)]
    for row in range(8):
        first = sum(row in one for one, _ in dealt)
        assert 8 <= first <= 32  # 20 of 40 are to be expected, with a deviation of 3.2
    assert len({tuple(one) for one, _ in dealt}) > 30
    (one,), (other,) = (on_rank(monkeypatch, rank, 2, 8, 1, (0,)) for rank in (0, 1))
    assert other != [8 + row for row in one], "ranks shuffle alike"
    assert dealt == [on_rank(monkeypatch, 0, 1, 8, 2, (0, 0, epoch)) for epoch in range(40)]


def test_dummies_add_nothing_and_a_weight_of_0_is_none(monkeypatch):
    """A rank with fewer micro-batches than others repeats its first at weight 0 and without metrics, one without rows
    the batch's first row; a text whose weight is 0, as a coefficient may make it, still reports its metrics."""
    monkeypatch.setattr(distributed, "largest", lambda own: 3)
    monkeypatch.setattr(distributed, "data_parallel_sum", lambda own: 2 * own)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    trainer, metrics = trainer_of(OPENAI, micro_batch_size=4, rollouts=1), Accumulator()
    passes = trainer.learner._passes(batch(), torch.arange(8), metrics)
    assert trainer.algorithm.ranks == 2
    assert [(len(one.rows), one.metrics) for one in passes] == [(4, metrics), (4, metrics), (4, None)]
    assert passes[2].rows is passes[0].rows
    assert [one.policy_weight for one in passes] == [one.value_weight for one in passes] == [1 / 48, 1 / 48, 0.0]
    without = trainer.learner._passes(batch(), torch.arange(0), metrics)
    assert [(len(one.rows), one.policy_weight, one.metrics) for one in without] == [(1, 0.0, None)] * 3

    feed = SimpleNamespace(texts=lambda step: torch.ones(3, 5, dtype=torch.int64))
    losses, count = MixedPretraining(NoteTaker("actor"), feed, 0.0, micro_batch_size=2).losses(0, metrics)
    assert (count, [loss.item() for loss in losses]) == (3, [0.0, 0.0, 0.0])
    assert metrics._parts["policy/lm_loss"][1] == 3 * 4  # targets of both blocks, and none of the dummy's


def test_a_step_that_is_left_out_has_not_overflowed():
    """In fp16 an overflow lowers the loss scale; the mean ratio, 1, is over the limit."""
    trainer = trained(OPENAI.override(ratio_limit=0.5), 4, rollouts=1)
    assert trainer.models.actor.asked == trainer.models.critic.asked == (False, True)
    assert not trainer.models.ema.update.called
    trainer = trained(OPENAI.override(ratio_limit=1.5), 4, rollouts=1)
    assert trainer.models.actor.asked == trainer.models.critic.asked == (False, False)
    assert trainer.models.ema.update.call_count == EPOCHS


class BadOnRow(NoteTaker):
    """A critic whose loss is NaN where a pass holds this row."""

    def __init__(self, row: int):
        super().__init__("critic")
        self.row = row

    def __call__(self, sequences, *args, **how):
        values = super().__call__(sequences, *args, **how)
        return values + torch.where(sequences[:, :1] == self.row, torch.nan, 0.0)


@pytest.mark.parametrize("row", [0, 5])
def test_the_samples_of_an_error_are_those_of_the_pass_that_went_bad(row):
    """With passes of one row each, the message shows that row alone; before, always the first pass's."""
    critic = BadOnRow(row)
    trainer = trainer_of(OPENAI, micro_batch_size=1, rollouts=1, critic=critic)
    with pytest.raises(RunStopped) as stopped:
        trainer.train_actor_and_critic(batch(), 0.0, Accumulator())
    message = str(stopped.value)
    assert message.startswith("step 1: a number is NaN or infinite")
    assert "rank 0: not finite: value loss (nan)" in message
    assert [line for line in message.splitlines() if "prompt" in line and "response" in line] == [
        f"  score 0, prompt 'tokens [{row}]', response 'tokens [50, 50, 50]'"
    ]
    assert critic.steps == [] and trainer.models.actor.steps == []
