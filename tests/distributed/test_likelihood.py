"""The likelihood as a part of the score, and cut responses that are closed: runs of one rank and of two, against
transformers alone; resumed on both.
"""

import statistics
from pathlib import Path

import pytest
import torch

from engine.models.attention import Attention
from tests.distributed import plain
from tests.distributed.test_reward_models import by_transformers
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
from tests.engine.zero.inspecting import weights
from training.ppo_trainer import PPOTrainer

COEF, CAP, CLIP, EOS = 3.0, 0.75, 5.0, 2
RUNS = {"whole": {"stage": 0}, "split": {"stage": 3, "together": 2}}


def one_run(folder: str, output: str, stage: int, together: int = 1, start: str | None = None) -> dict:
    """Three steps, with a checkpoint after the first one; the last two once more, from it or from the one in `start`.
    together: how many ranks compute rows together."""

    def new_trainer() -> PPOTrainer:
        attention = Attention(packing="packed", ranks=together)
        return build_trainer(
            engine_spec(folder, stage, config=f"stage{stage}.json", attention=attention),
            dialect=DIALECT.override(likelihood_coef=COEF, likelihood_cap=CAP, cut_responses="closed"),
            padded=False,
        )

    trainer, feed = new_trainer(), TinyPrompts(16)
    found = {"batches": [], "metrics": []}
    for report in trainer.fit(feed):
        found["batches"].append(report.batch)
        found["metrics"].append(timeless(report.metrics))
        if report.step == 1:
            write_checkpoint(output, trainer.models, trainer.state_dict())
    found["weights"] = weights(trainer.models.actor)
    resumed = new_trainer()
    resumed.load_state_dict(read_checkpoint(start or output, resumed.models))
    found["resumed"] = [timeless(report.metrics) for report in resumed.fit(feed)]
    found["resumed weights"] = weights(resumed.models.actor)
    return found


def of_ranks(world: int, **given) -> list[dict]:
    """What `one_run` found on each rank, by the names in RUNS; two ranks make both."""
    runs = RUNS if world == 2 else {"whole": RUNS["whole"]}
    return of_each("tests.distributed.test_likelihood:one_run", runs, world=world, **given)


@pytest.fixture(scope="module")
def two_ranks(folder, output) -> list[dict]:
    return of_ranks(2, folder=folder, output=f"{output}/two")


@pytest.fixture(scope="module")
def one_rank(folder, output, two_ranks) -> list[dict]:
    """It goes on from the checkpoint of two ranks."""
    return of_ranks(1, folder=folder, output=f"{output}/one", start=f"{output}/two/whole")


@pytest.mark.slow
@pytest.mark.parametrize("world, run", [(1, "whole"), (2, "whole"), (2, "split")])
def test_scores_and_likelihoods_are_those_of_transformers_alone(folder, one_rank, two_ranks, world, run):
    ranks, policy = one_rank if world == 1 else two_ranks, plain.policy(folder)
    mean = deviation = None
    for step in range(3):
        batches = [rank[run]["batches"][step] for rank in ranks]
        likelihoods, scores, cut = [], [], 0
        for batch in batches:
            rollout = batch.rollout
            with torch.no_grad():
                logprobs = plain.logprobs(policy, rollout, 1.0)
            drawn = rollout.response_mask
            likelihoods += [own[mask].mean().item() for own, mask in zip(logprobs, drawn, strict=True)]
            texts = []
            for row, ended in enumerate(rollout.ended.tolist()):
                real = rollout.attention_mask[row, : rollout.prompt_length].bool()
                response = rollout.responses[row][drawn[row]].tolist()
                texts.append((rollout.prompts[row][real].tolist(), response + [EOS] * (not ended)))
                cut += not ended
            scores += by_transformers(str(Path(folder) / "reward"), texts, -0.3)
        assert 0 < cut < len(scores) == 16
        if step == 0:
            mean, deviation = statistics.mean(likelihoods), statistics.stdev(likelihoods)
        parts = [max(COEF * min((one - mean) / deviation, CAP), -CLIP) for one in likelihoods]
        assert max(parts) == COEF * CAP > min(parts), "the cap holds some"
        processed = [min(max(score, -CLIP), CLIP) + part for score, part in zip(scores, parts, strict=True)]
        found = [score for batch in batches for score in batch.scores.tolist()]
        assert found == pytest.approx(scores, abs=2e-5)
        found = [score for batch in batches for score in batch.processed_scores.tolist()]
        assert found == pytest.approx(processed, abs=2e-4)
        for rank in ranks:
            metrics = rank[run]["metrics"][step]
            assert metrics["objective/likelihood"] == pytest.approx(statistics.mean(likelihoods), abs=1e-5)
            assert metrics["objective/likelihood_part"] == pytest.approx(statistics.mean(parts), abs=2e-4)
            assert metrics["objective/scores"] == pytest.approx(statistics.mean(scores), abs=2e-5)


@pytest.mark.slow
def test_a_run_goes_on_bit_by_bit_and_on_another_number_of_ranks(one_rank, two_ranks):
    for rank in two_ranks:
        for run in RUNS:
            assert rank[run]["resumed"] == rank[run]["metrics"][1:]
            for name, weight in rank[run]["weights"].items():
                assert torch.equal(weight, rank[run]["resumed weights"][name]), name
    resumed, expected = one_rank[0]["whole"]["resumed"], two_ranks[0]["whole"]["metrics"][1:]
    for name in ("objective/likelihood", "objective/likelihood_part", "objective/rlhf_reward"):
        assert [row[name] for row in resumed] == pytest.approx([row[name] for row in expected], abs=1e-4), name
