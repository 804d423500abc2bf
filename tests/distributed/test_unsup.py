"""Mixed pretraining on two ranks: (PPO's gradient + coefficient x the language model's) / 2, as one process has it."""

import pytest
import torch
import torch.nn.functional as F

from engine import distributed
from engine.experience import TrainingBatch
from engine.rlhf_engine import RLHFEngine
from engine.rollout import build_rollouts
from scripts.harness.models import VOCABULARY
from scripts.harness.ranks import run_ranks
from tests.distributed import plain, test_gradients
from tests.distributed.test_gradients import CLOSE, losses
from tests.distributed.tiny_run import SAMPLING, engine_spec
from tests.distributed.work_gradients import MICRO_BATCH, ROWS, STILL, one_step
from training.ppo_trainer import PPOConfig, PPOTrainer

COEFFICIENT = 0.8
BLOCKS = ((0, 5), (5, 6))  # the blocks of each rank: with MICRO_BATCH 2, three micro-batches and one


class Texts:
    """This rank's share of the same blocks, whichever optimizer step they are for; `asked` says which."""

    def __init__(self, blocks: torch.Tensor):
        self.blocks, self.asked = blocks, []

    def texts(self, optimizer_step: int) -> torch.Tensor:
        """(5 or 1, L) int64."""
        self.asked.append(optimizer_step)
        return self.blocks[slice(*BLOCKS[distributed.rank()])]


def all_stages(folder: str, batch: TrainingBatch, blocks: torch.Tensor, stages: dict[str, tuple[int, str]]) -> dict:
    """`one_stage` of each (stage, name of the DeepSpeed JSON), by the same names."""
    return {name: one_stage(folder, batch, blocks, stage, config) for name, (stage, config) in stages.items()}


def one_stage(folder: str, batch: TrainingBatch, blocks: torch.Tensor, stage: int, config: str) -> dict:
    """Two optimizer steps without movement: gradients and metrics of the second, and what texts were asked for."""
    engine, feed = RLHFEngine.from_pretrained(engine_spec(folder, stage, config=config)), Texts(blocks)
    trainer = PPOTrainer(
        models=engine,
        rollouts=build_rollouts("replica", engine.actor, engine.tokenizer),
        dialect=STILL,
        sampling=SAMPLING,
        unsupervised=feed,
        config=PPOConfig(total_steps=3, micro_batch_size=MICRO_BATCH, unsup_coef=COEFFICIENT),
    )
    own = batch.select(slice(*ROWS[distributed.rank()]))
    one_step(trainer, own)
    trainer.counters.optimizer_steps += 1
    return one_step(trainer, own) | {"asked": feed.asked}


STAGES = {name: test_gradients.STAGES[name] for name in ("0", "1", "2", "3")}


@pytest.fixture(scope="module")
def blocks() -> torch.Tensor:
    """Six blocks of ten tokens."""
    return torch.randint(0, VOCABULARY, (6, 10), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def ranks(folder, batch, blocks) -> list[dict]:
    """What both ranks found, by the names in STAGES."""
    return run_ranks(
        "tests.distributed.test_unsup:all_stages", folder=folder, batch=batch, blocks=blocks, stages=STAGES
    )


def lm_losses(model, blocks: torch.Tensor) -> torch.Tensor:
    """(B, L - 1) float64, cross-entropy of each token but the first."""
    logits = model(input_ids=blocks).logits.double()[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten(), reduction="none").view(len(blocks), -1)


@pytest.fixture(scope="module")
def apart(folder, batch, blocks) -> dict[str, dict]:
    """Gradients of one process: PPO's, the language model's, and that of a mean of the ranks' means."""
    model = plain.policy(folder)
    each, counted = losses("actor", model, batch)
    found = {"ppo": plain.gradients(model, each.sum() / counted.sum())}
    found["lm"] = plain.gradients(model, lm_losses(model, blocks).mean())
    means = [lm_losses(model, blocks[slice(*own)]).mean() for own in BLOCKS]
    found["mean_of_means"] = plain.gradients(model, torch.stack(means).mean())
    return found


def mixed(apart: dict, coefficient: float, half: float = 0.5, lm: str = "lm") -> dict[str, torch.Tensor]:
    return {name: half * (apart["ppo"][name] + coefficient * apart[lm][name]) for name in apart["ppo"]}


@pytest.mark.parametrize("stage", STAGES)
def test_the_gradient_is_half_of_ppos_and_the_weighted_language_models(ranks, apart, stage):
    for rank in ranks:
        assert plain.relative_error(rank[stage]["actor"], mixed(apart, COEFFICIENT)) < CLOSE


@pytest.mark.parametrize(
    "wrong",
    [
        {"coefficient": 1.01 * COEFFICIENT},
        {"coefficient": 0.0},
        {"coefficient": COEFFICIENT, "half": 1.0},
        {"coefficient": COEFFICIENT, "lm": "mean_of_means"},
    ],
)
@pytest.mark.parametrize("stage", STAGES)
def test_a_wrong_mixture_is_told_from_the_right_one(ranks, apart, stage, wrong):
    for rank in ranks:
        assert plain.relative_error(rank[stage]["actor"], mixed(apart, **wrong)) > 1e-3


@pytest.mark.parametrize("stage", STAGES)
def test_the_critic_learns_from_ppo_alone(ranks, folder, batch, stage):
    model = plain.critic(folder)
    each, counted = losses("critic", model, batch)
    expected = plain.gradients(model, each.sum() / counted.sum())
    for rank in ranks:
        assert plain.relative_error(rank[stage]["critic"], expected) < CLOSE


@pytest.mark.parametrize("stage", STAGES)
def test_metrics(ranks, apart, folder, batch, blocks, stage):
    """Both losses are reported as they are; the norm is the mixture's."""
    model = plain.policy(folder)
    with torch.no_grad():
        language, (each, counted) = lm_losses(model, blocks).mean(), losses("actor", model, batch)
    for rank in ranks:
        metrics = rank[stage]["metrics"]
        assert metrics["policy/lm_loss"] == pytest.approx(language.item(), rel=CLOSE)
        assert metrics["policy/loss"] == pytest.approx((each.sum() / counted.sum()).item(), rel=CLOSE)
        assert metrics["policy/grad_norm"] == pytest.approx(plain.norm(mixed(apart, COEFFICIENT)), rel=CLOSE)


@pytest.mark.parametrize("stage", STAGES)
def test_texts_are_asked_for_by_the_optimizer_step(ranks, stage):
    assert [rank[stage]["asked"] for rank in ranks] == [[0, 1], [0, 1]]
