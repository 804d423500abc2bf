"""Training on a function's scores without a reward model, at stage 0 in one process and under ZeRO-3 on two ranks."""

import statistics
import zlib

import pytest
import torch
from safetensors.torch import load_file

from engine import distributed
from engine.errors import RunStopped
from engine.experience import TrainingBatch
from engine.reward.base import CombinedReward
from engine.reward.function import FunctionReward
from engine.rlhf_engine import EngineSpec, RLHFEngine
from engine.rollout import build_rollouts
from engine.zero.communication import init
from engine.zero.config import EngineConfig
from scripts.harness.models import BOS, EOS, PAD, UNK
from scripts.harness.ranks import run_ranks
from tests.distributed.tiny_run import DIALECT, SAMPLING, TinyPrompts, prompt_tokens
from tests.engine.zero.inspecting import weights
from training.ppo_trainer import PPOConfig, PPOTrainer
from training.reporting.evaluation import Evaluator

PER_STEP = 8
TRAINING, HELD_OUT = 2 * PER_STEP, 5
ROWS = [{"bonus": 10 * index} for index in range(TRAINING)] + [{"bonus": -10 * index} for index in range(HELD_OUT)]
PENALTY, A_TOKEN = 0.5, 0.25  # of a response without an end, which the dialect subtracts, and for each token
UNCLIPPED = DIALECT.replaced(score_clip=None, missing_end="subtract", missing_end_value=PENALTY)


def words_and_bonus(prompts: list[str], responses: list[str], rows: list[dict]) -> list[float]:
    """Words of the response, and what the prompt's row adds."""
    return [len(response.split()) + row["bonus"] for response, row in zip(responses, rows, strict=True)]


def bonus_alone(prompts: list[str], responses: list[str], bonus: list[int]) -> list[float]:
    """What the column of the prompts' rows says."""
    return [float(each) for each in bonus]


def run(actor: str, stage: int) -> dict:
    """The critic as it starts; two steps, weights after each; held-out rows; what comes of a function that fails."""
    choices = {role: EngineConfig(role, stage) for role in ("actor", "critic")}
    engine = RLHFEngine.from_pretrained(EngineSpec(actor_path=actor, critic_path=None, reward_paths=(), **choices))
    function = FunctionReward(words_and_bonus, engine.tokenizer, ROWS)
    column = FunctionReward(bonus_alone, engine.tokenizer, ROWS)
    rollouts = build_rollouts("replica", engine.actor, engine.tokenizer)
    trainer = PPOTrainer(
        models=engine,
        rollouts=rollouts,
        dialect=UNCLIPPED,
        sampling=SAMPLING,
        config=PPOConfig(total_steps=2, micro_batch_size=3),
        reward=CombinedReward({"function": (function, 1.0), "bonus": (column, 0.0)}, length_penalty=A_TOKEN),
    )
    result = {"reward_engines": engine.rewards, "critic": [weights(engine.critic)], "steps": []}
    evaluator = Evaluator(
        [prompt_tokens(1000 + index) for index in range(HELD_OUT)],
        rollouts=rollouts,
        experience_maker=trainer.experience_maker,
        sampling=SAMPLING,
        tokenizer=engine.tokenizer,
        first_index=TRAINING,
    )
    result["eval_before"] = evaluator.run(step=0)
    for report in trainer.fit(TinyPrompts(PER_STEP)):
        result["critic"].append(weights(engine.critic))
        result["steps"].append({"batch": report.batch, "metrics": report.metrics})
    result["eval_metrics"], result["eval_rows"] = evaluator.run(step=1)
    if distributed.rank() == distributed.world_size() - 1:
        function.function = lambda prompts, responses, rows: rows[0]["no such column"]
    try:
        trainer.step(TinyPrompts(PER_STEP).prompts(0))
    except RunStopped as stop:
        result["stop"] = str(stop)
    return result | {"steps_done": trainer.steps_done}


KINDS = ("stage 0", "stage 3")


@pytest.fixture(scope="module")
def runs(folder) -> dict[str, list[dict]]:
    """What each rank found."""
    init()
    actor = f"{folder}/actor"
    return {
        "stage 0": [run(actor, 0)],
        "stage 3": run_ranks("tests.distributed.test_own_reward:run", actor=actor, stage=3),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_the_critic_starts_as_the_language_models_trunk_with_a_head_of_zeros(runs, folder, kind):
    stored = load_file(f"{folder}/actor/model.safetensors")
    for rank in runs[kind]:
        assert rank["reward_engines"] == []
        start = dict(rank["critic"][0])
        assert torch.equal(start.pop("score.weight"), torch.zeros(1, 32))
        assert start.keys() == stored.keys() - {"lm_head.weight"}
        assert all(torch.equal(tensor, stored[name]) for name, tensor in start.items())
        assert not rank["steps"][0]["batch"].values.any()


@pytest.mark.parametrize("kind", KINDS)
def test_the_head_moves_first_and_then_the_trunk(runs, kind):
    """The head's zeros keep the gradient from the trunk in the first update."""
    for rank in runs[kind]:
        start, one, two = rank["critic"]
        assert [name for name in start if not torch.equal(start[name], one[name])] == ["score.weight"]
        assert all(not torch.equal(one[name], two[name]) for name in start)


def expected_parts(batch: TrainingBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Words (tokens that are not special) and ten times the prompt's index; what tokens cost; what no end costs."""
    rollout = batch.rollout
    special = torch.isin(rollout.responses, torch.tensor([PAD, BOS, EOS, UNK]))
    words = (rollout.response_mask & ~special).sum(-1)
    tokens = rollout.response_mask.sum(-1)
    return words + 10.0 * rollout.indices, -A_TOKEN * tokens, -PENALTY * (~rollout.ended)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_and_their_parts(runs, kind):
    for step in range(2):
        batches = [rank["steps"][step]["batch"] for rank in runs[kind]]
        parts = [expected_parts(batch) for batch in batches]
        for batch, (function, tokens, penalty) in zip(batches, parts):
            assert torch.equal(batch.scores, function + tokens)
            assert torch.equal(batch.processed_scores, function + tokens + penalty)
        function, tokens, penalty = (torch.cat(column) for column in zip(*parts))
        assert len(function) == PER_STEP and penalty.any() and not penalty.all()
        for rank in runs[kind]:
            metrics = rank["steps"][step]["metrics"]
            assert metrics["objective/scores_function"] == pytest.approx(function.mean().item())
            assert metrics["objective/length_penalty"] == pytest.approx(tokens.mean().item())
            assert metrics["objective/scores"] == pytest.approx((function + tokens).mean().item())


@pytest.mark.parametrize("kind", KINDS)
def test_columns_are_given_by_name_in_the_prompts_order_and_measured_without_a_weight(runs, kind):
    for rank in runs[kind]:
        for step in range(2):
            indices = torch.cat([each["steps"][step]["batch"].rollout.indices for each in runs[kind]])
            metrics = rank["steps"][step]["metrics"]
            assert metrics["reward/bonus"] == pytest.approx(10 * indices.double().mean().item())
            assert metrics["objective/scores_bonus"] == 0
            assert metrics["reward/function"] == metrics["objective/scores_function"]
        assert [row["reward_bonus"] for row in rank["eval_rows"]] == [-10 * index for index in range(HELD_OUT)]
        assert rank["eval_metrics"]["eval/reward_bonus"] == pytest.approx(-10 * (HELD_OUT - 1) / 2)


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_prompts_are_given_their_own_rows(runs, kind):
    for rank in runs[kind]:
        rows, metrics = rank["eval_rows"], rank["eval_metrics"]
        assert [row["scores_function"] for row in rows] == [
            len(row["response"].split()) - 10 * index for index, row in enumerate(rows)
        ]
        assert [row["score"] for row in rows] == [row["scores_function"] + row["length_penalty"] for row in rows]
        assert metrics["eval/scores_function"] == pytest.approx(sum(row["scores_function"] for row in rows) / HELD_OUT)


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_errors_count_each_prompt_once_and_pair_it_with_itself(runs, kind):
    """Two ranks answer six, since five do not divide: the sixth is a repeat."""
    for rank in runs[kind]:
        (metrics_before, before), metrics, after = rank["eval_before"], rank["eval_metrics"], rank["eval_rows"]
        assert metrics_before["eval/score_change"] == metrics_before["eval/score_change_se"] == 0.0
        for metric, column in {"eval/score": "score", "eval/kl": "kl", "eval/response_length": "tokens"}.items():
            values = [row[column] for row in after]
            changes = [row[column] - old[column] for row, old in zip(after, before, strict=True)]
            assert metrics[f"{metric}_se"] == pytest.approx(statistics.stdev(values) / HELD_OUT**0.5)
            assert metrics[f"{metric}_change"] == pytest.approx(statistics.fmean(changes), abs=1e-9)
            assert metrics[f"{metric}_change_se"] == pytest.approx(statistics.stdev(changes) / HELD_OUT**0.5)
        assert metrics["eval/kl_change_se"] > 0 and metrics["eval/score_se"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_held_out_responses_hold_is_told_of_all_ranks_together(runs, kind):
    for rank in runs[kind]:
        _, before = rank["eval_before"]
        for metrics, rows in (rank["eval_before"], (rank["eval_metrics"], rank["eval_rows"])):
            responses = [row["response"] for row in rows]
            compressed = zlib.compress("\n".join(responses).encode(), 9)
            assert metrics["eval/compressed_bytes"] == len(compressed) / sum(row["tokens"] for row in rows)
            shares = []
            for place, response in enumerate(responses):
                known = {word for row in rows for word in row["prompt"].split()}
                known |= {word for i, row in enumerate(before) if i != place for word in row["response"].split()}
                words = response.split()
                shares.append(sum(word not in known for word in words) / max(len(words), 1))
            assert metrics["eval/new_words"] == pytest.approx(statistics.fmean(shares))
        assert rank["eval_metrics"]["eval/new_words"] > 0


def test_the_stages_give_the_same_held_out_rows(runs):
    """Prompts, samples and scores; both have been trained alike by then."""
    (one,), two = runs["stage 0"], runs["stage 3"]
    for rank in two:
        assert [(row["response"], row["score"]) for row in rank["eval_rows"]] == [
            (row["response"], row["score"]) for row in one["eval_rows"]
        ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_function_that_fails_on_one_rank_stops_all(runs, kind):
    for rank in runs[kind]:
        assert "words_and_bonus raised KeyError: 'no such column'" in rank["stop"]
        assert "test_own_reward.py, line" in rank["stop"] and rank["steps_done"] == 2
