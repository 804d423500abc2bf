"""Run by ranks: whole runs of PPOTrainer whose results should not depend on how many ranks there are."""

from dataclasses import replace

from torch import Tensor

from engine import distributed
from engine.experience import PromptBatch, Rollout
from engine.rollout import RolloutBackend, SamplingConfig
from tests.distributed.tiny_run import DIALECT, SAMPLING, TinyPrompts, build_trainer, engine_spec, timeless
from tests.engine.zero.inspecting import weights

ROWS = 8  # responses of one forward pass over all ranks


def all_runs(folder: str, runs: dict[str, dict]) -> dict[str, dict]:
    """`one_run` of each set of arguments, by the same names."""
    return {name: one_run(folder, **arguments) for name, arguments in runs.items()}


class OffSampler(RolloutBackend):
    """Says of each token a log-prob that is off by up to 1.5 nats, by the token alone."""

    def __init__(self, rollouts: RolloutBackend):
        self.rollouts, self.release_memory = rollouts, rollouts.release_memory

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig) -> Rollout:
        """The rows of the backend itself."""
        rollout = self.rollouts.generate(prompts, sampling)
        assert rollout.logprobs is not None
        return replace(rollout, logprobs=rollout.logprobs + 1.5 * rollout.responses.sin() * rollout.response_mask)


def one_run(
    folder: str,
    stage: int,
    config: str,
    prompts: int,
    mini_batches: int,
    samples_per_prompt: int,
    ppo_epochs: int,
    correction: str = "none",
    **others,
) -> dict:
    """Three steps; the metrics of each, and the actor's and critic's weights at the end; others: the dialect's."""
    sizes = {"ppo_epochs": ppo_epochs, "mini_batches": mini_batches, "samples_per_prompt": samples_per_prompt}
    dialect = DIALECT.override(**sizes, correction=correction, **others)
    trainer = build_trainer(
        engine_spec(folder, stage, config=config),
        dialect=dialect,
        micro_batch_size=ROWS // distributed.world_size(),
        seed=5,
        sampling=replace(SAMPLING, logprob_temperature=None if correction == "none" else 1.0),
    )
    if correction != "none":
        trainer.rollouts = OffSampler(trainer.rollouts)
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
