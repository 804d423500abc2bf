"""Run by ranks: four training steps with a checkpoint after the second, and the last two once more from there."""

from dataclasses import replace
from pathlib import Path

from engine.models.lora import LoraSpec
from tests.distributed.tiny_points import load_point, save_point
from tests.distributed.tiny_run import DIALECT, TinyPrompts, build_trainer, engine_spec, timeless
from tests.engine.zero.inspecting import masters, pretend_cpus_have_fp16, weights
from training.ppo_trainer import PPOTrainer
from training.runtime import model_folders

STEPS, SAVED_AFTER = 4, 2


def uninterrupted(folder: str, output: str, runs: dict[str, dict]) -> dict[str, dict]:
    """Each run to its end, with a checkpoint in `output`/name on the way."""
    found = {}
    for name, arguments in runs.items():
        trainer = new_trainer(folder, **arguments)
        metrics = []
        for report in trainer.fit(TinyPrompts(8)):
            metrics.append(timeless(report.metrics))
            if report.step == SAVED_AFTER:
                save_point(Path(output) / name, trainer.models, trainer.state_dict())
                save_models(trainer, Path(output) / name / "saved")
                saved = state(trainer)
        found[name] = {"metrics": metrics, "saved": saved, "end": state(trainer)}
    return found


def resumed(folder: str, output: str, runs: dict[str, dict]) -> dict[str, dict]:
    """Each run from its checkpoint to its end, in new engines."""
    found = {}
    for name, arguments in runs.items():
        trainer = new_trainer(folder, **arguments)
        fresh = state(trainer)
        trainer.load_state_dict(load_point(Path(output) / name, trainer.models))
        loaded = state(trainer)
        metrics = [timeless(report.metrics) for report in trainer.fit(TinyPrompts(8))]
        found[name] = {"metrics": metrics, "fresh": fresh, "loaded": loaded, "end": state(trainer)}
    return found


def save_models(trainer: PPOTrainer, folder: Path) -> None:
    """What a run saves that ends here."""
    models = trainer.models
    for role, model in models.trained.items():
        model_folders.save_forms(model, models.tokenizer, folder, role)
    with models.ema.swapped():
        model_folders.save_forms(models.actor, models.tokenizer, folder, "actor_ema")


def new_trainer(
    folder: str, stage: int, config: str, dtype: str, changed: dict | None = None, lora: dict | None = None
) -> PPOTrainer:
    """Two epochs of two mini-batches a step, with an EMA; `changed`: fields of the dialect; `lora`: of the adapters of
    actor and critic, which play reference and reward model too."""
    pretend_cpus_have_fp16()
    dialect = DIALECT.override(**{"ppo_epochs": 2, "mini_batches": 2, **(changed or {})})
    spec = engine_spec(folder, stage, config=config, dtype=dtype, ema_decay=0.9)
    if not dialect.has_critic:
        spec = replace(spec, with_critic=False, critic_path=None, reward_path=spec.critic_path)
    if lora is not None:
        adapters = LoraSpec(only=True, **lora)
        spec = replace(spec, actor_lora=adapters, critic_lora=adapters, reference=None, reward=None)
    return build_trainer(spec, dialect=dialect, total_steps=STEPS)


def state(trainer: PPOTrainer) -> dict:
    """The weights of actor and critic, the EMA, the loss scales and the counters."""
    engine = trainer.models
    tensors = {"ema": dict(enumerate(shard.clone() for shard in engine.ema.means))}
    for name, model in engine.trained.items():
        tensors |= {f"{name} weights": weights(model), f"{name} masters": masters(model)}
    counters = {
        "trainer": trainer.state_dict(),
        "loss scales": tuple(model.loss_scale for model in engine.trained.values()),
    }
    return {"tensors": tensors, "counters": counters}
