"""The critic's pretraining on two ranks: who learns, checkpoints, and the folder that another run starts from."""

from pathlib import Path

import pytest
import torch

from tests.distributed.tiny_run import (
    DIALECT,
    TinyPrompts,
    build_trainer,
    engine_spec,
    of_each,
    read_checkpoint,
    timeless,
    write_checkpoint,
)
from tests.engine.zero.inspecting import masters
from training.critic_pretraining import CriticPretraining
from training.ppo_trainer import PPOTrainer
from training.runtime import model_folders

STEPS, TOTAL, SAVED_AT = 3, 2, -1  # pretraining, PPO, and after which a checkpoint is written


def one_run(folder: str, output: str, stage: int, config: str) -> dict:
    """What three starts of one run came to: uninterrupted, from the checkpoint within, from the folder of the
    critic."""
    found, trainer = {}, new_trainer(folder, stage, config)
    start = state(trainer)
    found["pretraining"] = []
    for report in CriticPretraining(trainer).fit(TinyPrompts(8)):
        found["pretraining"].append(report.metrics)
        found["learned"] = report.batch.returns, report.batch.value_mask, report.batch.processed_scores
        if report.step == SAVED_AT:
            write_checkpoint(output, trainer.models, trainer.state_dict())
    models = trainer.models
    model_folders.save_forms(models.critic, models.tokenizer, Path(output), "critic_pretrained")
    found["actor stayed"] = state(trainer)["actor"], start["actor"]
    found["critic moved"] = state(trainer)["critic"], start["critic"]
    found["adam"] = {role: model.scalars()["adam_steps"] for role, model in models.trained.items()}
    found["whole"] = end_of(trainer)

    again = new_trainer(folder, stage, config)
    again.load_state_dict(read_checkpoint(output, again.models))
    found["pretraining again"] = [report.metrics for report in CriticPretraining(again).fit(TinyPrompts(8))]
    found["resumed"] = end_of(again)

    reused = new_trainer(folder, stage, config, f"{output}/critic_pretrained")
    found["reused"] = end_of(reused)
    return found


def new_trainer(folder: str, stage: int, config: str, critic: str | None = None) -> PPOTrainer:
    """A trainer before the first step; critic: of which folder it starts, in place of pretraining."""
    spec = engine_spec(folder, stage, config=config, reward_paths=(str(Path(folder) / "reward"),))
    if critic is not None:
        spec = engine_spec(folder, stage, config=config, reward_paths=spec.reward_paths, critic_path=critic)
    dialect = DIALECT.override(critic_epochs=2, mini_batches=2, value_lam=1.0)
    return build_trainer(
        spec, dialect=dialect, total_steps=TOTAL, critic_pretrain_steps=0 if critic is not None else STEPS
    )


def end_of(trainer: PPOTrainer) -> dict:
    """The metrics of each PPO step, and the weights after them."""
    metrics = [timeless(report.metrics) for report in trainer.fit(TinyPrompts(8))]
    return {"metrics": metrics, "state": state(trainer)}


def state(trainer: PPOTrainer) -> dict:
    """The weights of actor and critic."""
    return {
        role: {name: tensor.clone() for name, tensor in masters(model).items()}
        for role, model in trainer.models.trained.items()
    }


RUNS = {"2": {"stage": 2, "config": "stage2.json"}, "3": {"stage": 3, "config": "stage3.json"}}


@pytest.fixture(scope="module")
def ranks(folder, output) -> list[dict]:
    return of_each("tests.distributed.test_critic_pretraining:one_run", RUNS, folder=folder, output=output)


def same(one: dict, other: dict) -> bool:
    assert one.keys() == other.keys() and one
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("run", RUNS)
def test_the_critic_alone_has_learned(ranks, run):
    for rank in ranks:
        found = rank[run]
        assert same(*found["actor stayed"]) and not same(*found["critic moved"])
        assert found["adam"] == {"actor": 0, "critic": 0}, "Adam is as before its first step"
        assert len(found["pretraining"]) == 3
        for metrics in found["pretraining"]:
            assert metrics["critic_pretrain/grad_norm"] > 0 and metrics["critic_pretrain/loss"] > 0
            assert all(name.startswith("critic_pretrain/") for name in metrics)
        returns, mask, scores = found["learned"]  # without discount all of a response is worth its score, and no KL
        expected = torch.where(mask, scores.unsqueeze(-1), torch.zeros_like(returns))
        assert scores.std() > 0.1
        torch.testing.assert_close(returns * mask, expected, rtol=0, atol=1e-6)
    assert ranks[0][run]["pretraining"] == ranks[1][run]["pretraining"]


@pytest.mark.parametrize("run", RUNS)
def test_a_run_that_goes_on_from_within_is_the_uninterrupted_one(ranks, run):
    for rank in ranks:
        found = rank[run]
        assert found["pretraining again"] == [pytest.approx(found["pretraining"][-1], rel=1e-6, abs=1e-9)]
        for role, weights in found["whole"]["state"].items():
            assert same(found["resumed"]["state"][role], weights), role


@pytest.mark.parametrize("run", RUNS)
def test_a_run_that_starts_from_its_folder_takes_the_same_course(ranks, run):
    for rank in ranks:
        whole, reused = rank[run]["whole"], rank[run]["reused"]
        for got, metrics in zip(reused["metrics"], whole["metrics"], strict=True):
            assert got == pytest.approx(metrics, rel=1e-6, abs=1e-9)
        for role, weights in whole["state"].items():
            assert same(reused["state"][role], weights), role
