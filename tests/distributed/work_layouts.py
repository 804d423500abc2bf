"""Run by ranks: whole runs of PPOTrainer whose results should not depend on how many ranks there are."""

from torch import Tensor

from engine import distributed
from tests.distributed.tiny_run import DIALECT, TinyPrompts, build_trainer, engine_spec, timeless
from tests.engine.zero.inspecting import weights

ROWS = 8  # responses of one forward pass over all ranks


def all_runs(folder: str, runs: dict[str, dict]) -> dict[str, dict]:
    """`one_run` of each set of arguments, by the same names."""
    return {name: one_run(folder, **arguments) for name, arguments in runs.items()}


def one_run(
    folder: str, stage: int, config: str, prompts: int, mini_batches: int, samples_per_prompt: int, ppo_epochs: int
) -> dict:
    """Three steps; the metrics of each, and the actor's and critic's weights at the end."""
    dialect = DIALECT.override(ppo_epochs=ppo_epochs, mini_batches=mini_batches, samples_per_prompt=samples_per_prompt)
    trainer = build_trainer(
        engine_spec(folder, stage, config=config),
        dialect=dialect,
        micro_batch_size=ROWS // distributed.world_size(),
        seed=5,
    )
    reports = list(trainer.fit(TinyPrompts(prompts)))
    engine = trainer.models
    return {
        "metrics": [timeless(report.metrics) for report in reports],
        "samples": reports[-1].samples,
        "tokens": [_responses(report.batch.rollout) for report in reports],
        "weights": weights(engine.actor) | {f"critic {name}": w for name, w in weights(engine.critic).items()},
    }


def _responses(rollout) -> dict[tuple[int, int], list[int]]:
    """Each response's tokens by its prompt's index and its sample's number."""

    def tokens(row: int) -> Tensor:
        return rollout.responses[row][rollout.response_mask[row]]

    return {(int(rollout.indices[row]), int(rollout.samples[row])): tokens(row).tolist() for row in range(len(rollout))}
