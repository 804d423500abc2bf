"""Dynamic sampling on one rank: which groups are taken, against a straight-line version, and what is asked for."""

import math

import pytest
import torch

from engine.algorithms import Algorithm, Dialect, check_effect, get_dialect
from engine.errors import UserError
from engine.experience import PromptBatch, Rollout
from engine.experience_maker import ExperienceMaker
from engine.rollout import SamplingConfig
from engine.rollout.request import copied, joined
from tests.engine.fake_models import PrefixModels, rollout_of
from tests.training.given_rollouts import next_step, untrained
from training.group_sampling import GroupSampler, Sampled
from training.reporting.metrics import Accumulator
from training.reporting.step_metrics import StepLog
from training.runtime.start_report import dynamic_sampling_line

PAD, K, PER_BATCH = 0, 3, 4
RLOO = get_dialect("default").override(
    name="groups",
    advantage_estimator="rloo",
    critic_start="none",
    critic_lr=0.0,
    samples_per_prompt=K,
    whiten_advantages=False,
    old_logprobs="forward",
)


class Feed:
    """Batch b has the prompts 4 b .. 4 b + 3, prompt i of 1 + i % 3 tokens."""

    def prompts(self, batch: int) -> PromptBatch:
        indices = range(batch * PER_BATCH, (batch + 1) * PER_BATCH)
        asked = rollout_of([[5 + index] * (1 + index % 3) for index in indices], [[1]] * PER_BATCH, PAD)
        width = asked.prompt_length
        numbers = torch.tensor(indices)
        return PromptBatch(asked.prompts, asked.attention_mask[:, :width], numbers, 0 * numbers)


class Models(PrefixModels):
    """Draws responses of 1 to 4 tokens, and scores each from a table by prompt and sample; keeps what is called."""

    fallback = None

    def __init__(self, scores: dict[int, list[float]]):
        super().__init__()
        self.table, self.called = scores, []

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig) -> Rollout:
        self.called.append("generate")
        keys = list(zip(prompts.indices.tolist(), prompts.samples.tolist(), strict=True))
        rows = [row[mask.bool()].tolist() for row, mask in zip(prompts.input_ids, prompts.attention_mask, strict=True)]
        made = rollout_of(rows, [response_to(*key) for key in keys], PAD)
        return Rollout(
            made.sequences, made.attention_mask, made.response_mask, made.ended, prompts.indices, prompts.samples
        )

    def roles(self) -> dict:
        found = super().roles()
        found["reward"].weights = lambda: {"scores": 1.0}
        return found

    def counts(self) -> dict[str, float]:
        """Nothing is counted."""
        return {}

    def release_memory(self) -> None:
        """Nothing is held."""

    def actor(self, *args, **kwargs):
        self.called.append("actor")
        return super().actor(*args, **kwargs)

    def reward(self, rollout: Rollout) -> torch.Tensor:
        self.called.append("reward")
        keys = zip(rollout.indices.tolist(), rollout.samples.tolist(), strict=True)
        return torch.tensor([self.table[index][sample] for index, sample in keys])


def response_to(index: int, sample: int) -> list[int]:
    return [20 + index + sample] * (1 + (index + 2 * sample) % 4)


SAME, OTHER, ONES = [0.0] * K, [0.0, 1.0, 0.0], [1.0] * K
# Batches of four: two that differ, one, none, three.
TABLE = dict(
    enumerate([SAME, OTHER, ONES, [2.0, 1.0, 2.0], OTHER, SAME, SAME, ONES, *[SAME] * 4, OTHER, ONES, *[OTHER] * 2])
)


def sampler(models: Models, dialect: Dialect) -> GroupSampler:
    maker = ExperienceMaker(**models.roles(), algorithm=Algorithm(dialect, pad_token_id=PAD), micro_batch_size=2)
    return GroupSampler(maker, dialect, SamplingConfig(max_new_tokens=4, pad_token_id=PAD, stop_token_ids=()))


def sample(most: int, table: dict = TABLE, first_batch: int = 0) -> tuple[Sampled, Models, dict[str, float]]:
    models, log, metrics = Models(table), StepLog(), Accumulator()
    dialect = RLOO.override(dynamic_sampling=most)
    sampled = sampler(models, dialect).sample(models, Feed().prompts(first_batch), log, Feed(), first=first_batch + 1)
    assert set(log.seconds) == ({"generate", "make_experience"} if most > 1 else {"generate"})
    sampled.add_to(metrics, K)
    return sampled, models, metrics.reduce()


def straight_line(table: dict, most: int, first_batch: int = 0) -> tuple[list[int], int]:
    """The prompts that are taken, and how many batches are drawn: as verl's `fit` does it, with the deviation."""
    kept: list[int] = []
    others: list[int] = []
    for number in range(most):
        for index in range((first_batch + number) * PER_BATCH, (first_batch + number + 1) * PER_BATCH):
            scores = table[index]
            mean = sum(scores) / K
            deviation = math.sqrt(sum((score - mean) ** 2 for score in scores) / K)
            (kept if deviation > 0 else others).append(index)
        if len(kept) >= PER_BATCH:
            return kept[:PER_BATCH], number + 1
    return (kept + others)[:PER_BATCH], most  # where verl ends the run


@pytest.mark.parametrize(
    "most, taken, batches",
    [(2, [1, 3, 4, 0], 2), (3, [1, 3, 4, 0], 3), (4, [1, 3, 4, 12], 4), (9, [1, 3, 4, 12], 4)],
)
def test_the_groups_that_are_taken(most, taken, batches):
    assert straight_line(TABLE, most) == (taken, batches)
    sampled, models, metrics = sample(most)
    rows = list(zip(sampled.rollout.indices.tolist(), sampled.rollout.samples.tolist(), strict=True))
    assert rows == [(index, one) for index in taken for one in range(K)]
    for row, (index, one) in enumerate(rows):
        mask = sampled.rollout.response_mask[row]
        assert sampled.rollout.responses[row][mask].tolist() == response_to(index, one)
        real = sampled.rollout.attention_mask[row, : sampled.rollout.prompt_length].bool()
        assert sampled.rollout.prompts[row][real].tolist() == [5 + index] * (1 + index % 3)
    assert sampled.scores.scores.tolist() == [TABLE[index][one] for index, one in rows] and not sampled.scores.parts
    assert sampled.responses == batches * PER_BATCH * K
    learned = [TABLE[index][one] for index, one in rows]
    scores = [score for index in range(batches * PER_BATCH) for score in TABLE[index]]
    left_out = pytest.approx((sum(scores) - sum(learned)) / (len(scores) - len(learned)))
    assert metrics == {
        "objective/scores": left_out,
        "reward/scores": left_out,
        "objective/scores_learned": pytest.approx(sum(learned) / len(learned)),
        "rollout/groups_drawn": batches * PER_BATCH,
        "rollout/groups_left_out": (batches - 1) * PER_BATCH,
        "rollout/batches_drawn": batches,
    }
    assert models.called == (["generate"] + ["reward"] * (models.called.count("reward") // batches)) * batches


def test_a_full_first_batch_draws_no_other():
    table = dict.fromkeys(range(PER_BATCH), OTHER)
    sampled, models, _ = sample(5, table)
    assert sampled.rollout.indices.tolist() == [0] * K + [1] * K + [2] * K + [3] * K
    assert models.called.count("generate") == 1


def test_further_prompts_follow_those_of_the_step_and_what_is_not_finite_is_kept():
    table = TABLE | {12: SAME, 14: SAME, 16: [math.nan] * K, 17: SAME, 18: OTHER, 19: SAME}
    sampled, _, _ = sample(2, table, first_batch=3)
    assert sampled.rollout.indices[::K].tolist() == [15, 16, 18, 12]


def test_without_it_the_models_are_asked_as_before():
    sampled, models, metrics = sample(1)
    assert sampled.scores is None and models.called == ["generate"] and metrics == {}
    assert sampled.rollout is sampled.drawn[0] and sampled.responses == PER_BATCH * K
    trainer = untrained(models.roles(), RLOO, pad=PAD, micro_batch_size=2)
    trainer.rollouts, models.called = models, []
    report = trainer.step(Feed().prompts(0))
    assert models.called == ["generate", *["actor"] * 6, *["reward"] * 6]
    assert (report.samples, trainer.counters.prompt_batches) == (PER_BATCH * K, 1)
    assert dynamic_sampling_line(RLOO) == []
    (line,) = dynamic_sampling_line(RLOO.override(dynamic_sampling=3))
    assert line.startswith("dynamic sampling: a step draws up to 3 batches of prompts, until groups")


@pytest.mark.parametrize("critic", [False, True])
def test_a_step_learns_from_the_chosen_groups_as_if_they_alone_had_been_drawn(critic):
    dialect = RLOO.override(dynamic_sampling=4)
    if critic:
        dialect = dialect.override(advantage_estimator="gae", critic_start="reward_model", whiten_advantages=True)
    models = Models(TABLE)
    trainer = untrained(models.roles(), dialect, pad=PAD, micro_batch_size=2)
    trainer.rollouts = models
    report = trainer.step(Feed().prompts(0), Feed())
    batch = report.batch
    assert batch.rollout.indices[::K].tolist() == [1, 3, 4, 12]
    last_reward = len(models.called) - models.called[::-1].index("reward")
    assert "actor" not in models.called[:last_reward], "scores come first, and no score is asked for twice"
    assert models.called.count("reward") == 4 * 6
    assert (report.samples, trainer.counters.prompt_batches, trainer.steps_done) == (4 * PER_BATCH * K, 4, 1)
    assert trainer.state_dict()["prompt_batches"] == 4

    keys = [(index, one) for index in (1, 3, 4, 12) for one in range(K)]
    given = rollout_of([[5 + i] * (1 + i % 3) for i, _ in keys], [response_to(*key) for key in keys], PAD)
    numbers = [torch.tensor(column) for column in zip(*keys, strict=True)]
    given = Rollout(given.sequences, given.attention_mask, given.response_mask, given.ended, *numbers)
    plain = untrained(models.roles(), dialect.override(dynamic_sampling=1), given, pad=PAD, micro_batch_size=2)
    expected = next_step(plain)
    for name in ("logprobs", "ref_logprobs", "scores", "rewards", "values", "advantages", "returns", "policy_mask"):
        assert torch.equal(getattr(batch, name), getattr(expected.batch, name)), name
    assert torch.equal(batch.rollout.sequences, given.sequences)
    assert expected.samples == PER_BATCH * K and plain.counters.prompt_batches == 1
    assert report.metrics["rollout/groups_alike"] == expected.metrics["rollout/groups_alike"] == 0
    drawn = [score for index in range(16) for score in TABLE[index]]
    assert report.metrics["objective/scores"] == pytest.approx(sum(drawn) / len(drawn))
    assert report.metrics["objective/scores_learned"] == expected.metrics["objective/scores"]
    more = {"objective/scores_learned", "rollout/groups_drawn", "rollout/groups_left_out", "rollout/batches_drawn"}
    assert report.metrics.keys() - expected.metrics.keys() == more


def test_a_dialect_that_needs_further_prompts_says_so():
    trainer = untrained(Models(TABLE).roles(), RLOO.override(dynamic_sampling=2), pad=PAD)
    with pytest.raises(AssertionError, match="dynamic sampling draws further prompts, and no feed was given"):
        trainer.step(Feed().prompts(0))


def test_rollouts_are_joined_at_the_widths_of_the_longest():
    one, two = rollout_of([[5, 6]], [[7]], PAD, width=3), rollout_of([[8]], [[9, 10]], PAD, prompt_width=4)
    both = joined([one, two], PAD)
    assert both.sequences.tolist() == [[5, 6, 7, PAD], [PAD, 8, 9, 10]]
    assert both.attention_mask.tolist() == [[1, 1, 1, 0], [0, 1, 1, 1]]
    assert both.response_mask.tolist() == [[True, False], [True, True]] and both.logprobs is None


def test_a_copy_of_a_few_rows_takes_no_more_memory_than_they_do():
    rollout = rollout_of([[5, 6]] * 100, [[7, 8]] * 100, PAD)
    few = copied(rollout.select(slice(3, 5)), "cpu")
    assert few.sequences.tolist() == [[5, 6, 7, 8]] * 2 and few.indices.tolist() == [3, 4]
    assert few.sequences.untyped_storage().nbytes() == 2 * 4 * 8


# Group 0: 3, 1, 2 of which the second was cut off; group 1: 0, 0, 6, all with an end. No KL, no clip.
def test_what_was_cut_off_is_compared_with_and_not_learned():
    scores = {0: [3.0, 1.0, 2.0], 1: [0.0, 0.0, 6.0]}
    made = rollout_of([[5]] * K + [[6]] * K, [[20, 2], [21, 22], [23], [24], [25], [26, 2]], PAD)
    numbers = torch.arange(2 * K)
    ended = torch.tensor([True, False, True, True, True, True])
    given = Rollout(made.sequences, made.attention_mask, made.response_mask, ended, numbers // K, numbers % K)
    dialect = RLOO.override(mask_truncated=True, kl_coef=0.0).replaced(score_clip=None)
    report = next_step(untrained(Models(scores).roles(), dialect, given, pad=PAD))
    batch = report.batch
    assert batch.advantages[:, 0].tolist() == [1.5, -1.5, 0.0, -3.0, -3.0, 6.0]
    assert batch.policy_mask.int().tolist() == [[1, 1], [0, 0], [1, 0], [1, 0], [1, 0], [1, 1]]
    assert torch.equal(batch.value_mask, batch.policy_mask)
    assert report.metrics["rollout/degenerate"] == 0 and report.metrics["rollout/eos_rate"] == pytest.approx(5 / 6)
    learned = next_step(untrained(Models(scores).roles(), dialect.override(mask_truncated=False), given, pad=PAD)).batch
    assert torch.equal(learned.advantages, batch.advantages) and learned.policy_mask[1].all()


def test_long_responses_lose_score_behind_the_clip_and_before_groups_are_compared():
    # Of at most 9 tokens, with a buffer of 4.5: nothing up to 4.5, then 2 / 4.5 a token. A score of 2 is clipped.
    made = rollout_of([[5]] * K, [[20] * 4, [21] * 7, [22] * 9], PAD)
    numbers = torch.arange(K)
    given = Rollout(made.sequences, made.attention_mask, made.response_mask, made.ended, 0 * numbers, numbers)
    dialect = RLOO.override(overlong_buffer=0.5, overlong_penalty=2.0, kl_coef=0.0, score_clip=1.0)
    report = next_step(untrained(Models({0: [2.0, 0.5, 0.5]}).roles(), dialect, given, pad=PAD))
    lost = [0.0, -2 * 2.5 / 4.5, -2.0]
    expected = [1.0, 0.5 + lost[1], 0.5 + lost[2]]
    assert report.batch.processed_scores.tolist() == pytest.approx(expected, abs=1e-6)
    assert report.batch.scores.tolist() == [2.0, 0.5, 0.5]
    assert report.metrics["objective/overlong_penalty"] == pytest.approx(sum(lost) / 3)
    compared = [value - (sum(expected) - value) / 2 for value in expected]
    assert report.batch.advantages[:, 0].tolist() == pytest.approx(compared, abs=1e-5)
    assert (
        "objective/overlong_penalty"
        not in next_step(untrained(Models({0: [2.0, 0.5, 0.5]}).roles(), RLOO, given, pad=PAD)).metrics
    )


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"dynamic_sampling": 2}, "dynamic_sampling 2: .* samples_per_prompt is 1. Give 2 or more"),
        ({"dynamic_sampling": 0}, "dynamic_sampling 0: must be greater than 0"),
        ({"overlong_buffer": 1.5}, "overlong_buffer 1.5: must be at most 1"),
        ({"mask_truncated": True, "sampling": "without_eos"}, "mask_truncated True: .* no response has an end"),
    ],
)
def test_fields_that_cannot_be(fields, message):
    with pytest.raises(UserError, match=message):
        get_dialect("default").override(**fields)


def test_a_penalty_without_a_buffer_is_refused():
    with pytest.raises(UserError, match="overlong_penalty 0.5: it has no effect where overlong_buffer is 0"):
        check_effect(get_dialect("default").override(overlong_penalty=0.5), ["overlong_penalty"])
