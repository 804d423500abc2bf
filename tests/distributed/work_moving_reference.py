"""Run by ranks: references that follow the actor, what they said of each step's responses, and a restart."""

from engine.models.lora import LoraSpec
from engine.rlhf_engine import RLHFEngine
from tests.distributed.tiny_points import load_point, save_point
from tests.distributed.tiny_run import DIALECT, TinyPrompts, build_trainer, engine_spec, timeless
from tests.engine.zero.inspecting import masters
from training.ppo_trainer import PPOTrainer

STEPS, SAVED_AFTER = 4, 3
EXACT = 1e-3  # of the KL where actor and reference are one model


def all_runs(folder: str, output: str, runs: dict[str, dict]) -> dict[str, dict]:
    """`one_run` of each set of arguments, by the same names."""
    return {name: one_run(folder, f"{output}/{name}", **arguments) for name, arguments in runs.items()}


def one_run(folder: str, output: str, stage: int, lora: dict | None = None, layers: int = 0, **reference) -> dict:
    """Four steps of two optimizer steps each, with a checkpoint after the third; the last once more, from there."""

    def new_trainer() -> PPOTrainer:
        adapters = {"actor_lora": LoraSpec(only=True, **lora)} if lora else {}
        spec = engine_spec(
            folder, stage, config=f"stage{stage}.json", reference=None, hydra_layers=layers, **adapters, **reference
        )
        dialect = DIALECT.override(ppo_epochs=2)
        return build_trainer(spec, dialect=dialect, total_steps=STEPS, first_kl_bound=EXACT)

    trainer = new_trainer()
    engine, feed = trainer.models, TinyPrompts(8)
    found = {
        "roles": [model.role for model in engine.engines],
        "start": masters(engine.actor),
        "updates": [],
        "batches": [],
        "metrics": [],
    }
    update = trainer.learner.update

    def watched(*args, **kwargs):
        result = update(*args, **kwargs)
        found["updates"].append(masters(engine.actor))
        return result

    trainer.learner.update = watched
    for report in trainer.fit(feed):
        found["batches"].append(report.batch)
        found["metrics"].append(timeless(report.metrics))
        if report.step == SAVED_AFTER:
            save_point(output, engine, trainer.state_dict())
    if engine.ema is not None:
        with engine.ema.swapped(), engine.reference.on_device():
            found["average and reference"] = judged(engine, report.batch.rollout)
    found["end"] = masters(engine.actor), kept(engine)
    resumed = new_trainer()
    resumed.load_state_dict(load_point(output, resumed.models))
    found["resumed metrics"] = [timeless(report.metrics) for report in resumed.fit(feed)]
    found["resumed end"] = masters(resumed.models.actor), kept(resumed.models)
    return found


def kept(engine: RLHFEngine) -> list:
    """This rank's shards of the reference's weights."""
    return [shard.clone() for shard in engine.reference.average.means]


def judged(engine: RLHFEngine, rollout) -> tuple:
    """Log-probs by the actor's engine and by the reference, one within the other."""
    inputs = rollout.sequences, rollout.attention_mask, rollout.position_ids
    own, _ = engine.actor(*inputs, response_length=rollout.response_length, temperature=1.0)
    return own.detach(), engine.reference.ref_logprobs(rollout, 1.0)
