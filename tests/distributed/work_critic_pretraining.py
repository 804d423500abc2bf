"""Run by ranks: the critic's pretraining with PPO steps behind it; again from checkpoints; and from its folder."""

from pathlib import Path

from tests.distributed.tiny_points import load_point, save_point
from tests.distributed.tiny_run import DIALECT, TinyPrompts, build_trainer, engine_spec, timeless
from tests.engine.zero.inspecting import masters
from training.critic_pretraining import CriticPretraining
from training.ppo_trainer import PPOTrainer
from training.runtime import model_folders

STEPS, TOTAL, SAVED_AT = 3, 2, -1  # pretraining, PPO, and after which a checkpoint is written


def all_runs(folder: str, output: str, runs: dict[str, dict]) -> dict[str, dict]:
    """`one_run` of each set of arguments, by the same names."""
    return {name: one_run(folder, Path(output) / f"critic_{name}", **how) for name, how in runs.items()}


def one_run(folder: str, output: Path, stage: int, config: str) -> dict:
    """What three starts of one run came to: uninterrupted, from the checkpoint within, from the folder of the
    critic."""
    found, trainer = {}, new_trainer(folder, stage, config)
    start = state(trainer)
    found["pretraining"] = []
    for report in CriticPretraining(trainer).fit(TinyPrompts(8)):
        found["pretraining"].append(report.metrics)
        found["learned"] = report.batch.returns, report.batch.value_mask, report.batch.processed_scores
        if report.step == SAVED_AT:
            save_point(output, trainer.models, trainer.state_dict())
    models = trainer.models
    model_folders.save_forms(models.critic, models.tokenizer, output, "critic_pretrained")
    found["actor stayed"] = state(trainer)["actor"], start["actor"]
    found["critic moved"] = state(trainer)["critic"], start["critic"]
    found["adam"] = {role: model.scalars()["adam_steps"] for role, model in models.trained.items()}
    found["whole"] = end_of(trainer)

    again = new_trainer(folder, stage, config)
    again.load_state_dict(load_point(output, again.models))
    found["pretraining again"] = [report.metrics for report in CriticPretraining(again).fit(TinyPrompts(8))]
    found["resumed"] = end_of(again)

    reused = new_trainer(folder, stage, config, str(output / "critic_pretrained"))
    found["reused"] = end_of(reused)
    return found


def new_trainer(folder: str, stage: int, config: str, critic: str | None = None) -> PPOTrainer:
    """A trainer before the first step; critic: of which folder it starts, in place of pretraining."""
    spec = engine_spec(folder, stage, config=config, reward_path=str(Path(folder) / "reward"))
    if critic is not None:
        spec = engine_spec(folder, stage, config=config, reward_path=spec.reward_path, critic_path=critic)
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
