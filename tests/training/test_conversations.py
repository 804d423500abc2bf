"""A step on conversations, in which only drawn tokens count: rewards, advantages, returns and metrics of each dialect
that takes conversations, against a straight loop over drawn tokens; log-probs, losses and gradients against
transformers' own pass over each row.
"""

import dataclasses
import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from engine.algorithms import DIALECTS, Algorithm, Dialect, check_conversations, get_dialect
from engine.errors import UserError
from engine.experience import Rollout, TrainingBatch
from engine.models.attention import Attention
from engine.models.loading import load_policy, load_scorer
from engine.reference import Reference
from engine.reward.base import CombinedReward, RewardSource
from scripts.harness.models import EOS, PAD, make_causal_lm, make_scorer, make_tokenizer
from tests.distributed import plain
from tests.engine.fake_models import PrefixModels, Resident, conversation_of, rollout_of
from tests.training.given_rollouts import batch_of, next_step, untrained
from training.critic_pretraining import CriticPretraining
from training.reporting.evaluation import sample_rows
from training.reporting.guards import stop_unless_at_reference, stop_unless_finite
from training.reporting.metrics import Accumulator
from training.reporting.step_metrics import STEP_METRICS, distributions

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12], [13, 14]]
TURNS = [  # drawn, inserted, drawn, and so on
    [[20, 21], [40], [22, EOS], [41, 42], [24, EOS]],
    [[25, EOS], [], [26, 27, EOS], [43], [28]],  # nothing is inserted between the first two turns
    [[29, 30, 31, EOS]],
    [[32], [44, 45, 46]],  # ends with what was inserted
]
DRAWN = [[0, 1, 3, 4, 7, 8], [0, 1, 2, 3, 4, 6], [0, 1, 2, 3], [0]]
REWARDS = [{1: 1.0, 4: 2.0, 8: 3.0}, {1: 1.0, 4: 2.0, 6: 3.0}, {3: 1.0}, {0: 1.0}]  # of the turns
STEPS = {(0, 2): 0.5, (0, 6): -2.0, (1, 3): 4.0, (3, 2): 7.0}  # of tokens, most of them inserted
MOVED = {(0, 1): 0.5, (0, 4): -2.0, (1, 3): 4.0, (3, 0): 7.0}  # the drawn tokens at which they count
SCORES, PENALTY = [1.5, -7.0, 3.0, 0.25], 0.01
ENDED = [True, False, True, True]
WIDTH, LONGEST = 9, 9

TAKEN = [name for name, dialect in DIALECTS.items() if dialect.length_rule == "sampled"]


def conversations(rows=range(4)) -> Rollout:
    made = conversation_of([PROMPTS[row] for row in rows], [TURNS[row] for row in rows], PAD, width=WIDTH)
    return dataclasses.replace(made, ended=torch.tensor([ENDED[row] for row in rows]), indices=torch.tensor(list(rows)))


class Given(RewardSource):
    """Numbers of whole responses or of their tokens, by the prompt's index."""

    def __init__(self, kind: str):
        self.kind = kind

    def score(self, rollout: Rollout) -> torch.Tensor:
        if self.kind == "turns":
            return rollout.turn_rewards
        if self.kind == "whole":
            return torch.tensor(SCORES)[rollout.indices]
        found = torch.zeros(len(rollout), WIDTH)
        for (index, place), number in STEPS.items():
            found[rollout.indices == index, place] = number
        return found[:, : rollout.response_length]


def reward() -> CombinedReward:
    sources = {kind: (Given(kind), 1.0) for kind in ("whole", "turns", "steps")}
    return CombinedReward(sources, length_penalty=PENALTY)


def dialect_of(name: str, **changed) -> Dialect:
    dialect = get_dialect(name).override(overlong_buffer=0.5 if name == "dapo" else None)
    if dialect.samples_per_prompt > 1:
        dialect = dialect.override(samples_per_prompt=2, dynamic_sampling=1)
    return dialect.replaced(**changed)


def step_of(dialect: Dialect, rollout: Rollout | None = None, micro_batch_size: int = 2) -> TrainingBatch:
    roles = PrefixModels().roles() | {"reward": reward()}
    rollout = conversations() if rollout is None else rollout
    return batch_of(roles, rollout, dialect, pad=PAD, micro_batch_size=micro_batch_size)


def looped_rewards(dialect: Dialect, given: dict, beta: float = 0.1) -> list[list[float]]:
    """The rewards of the drawn tokens of each row. given: what the models said, {name: (4, T)}."""
    found = []
    for row, places in enumerate(DRAWN):
        score = SCORES[row] - PENALTY * len(places)
        if dialect.score_clip is not None:
            score = max(-dialect.score_clip, min(dialect.score_clip, score))
        if dialect.missing_end == "replace" and not ENDED[row]:
            score = dialect.missing_end_value
        if dialect.overlong_buffer:
            buffer = dialect.overlong_buffer * LONGEST
            score += max(-1.0, min(0.0, (LONGEST - buffer - len(places)) / buffer))
        own = []
        for place in places:
            number = REWARDS[row].get(place, 0.0) + MOVED.get((row, place), 0.0)
            if dialect.kl_in == "reward":
                number -= beta * float(given["logprobs"][row, place] - given["ref_logprobs"][row, place])
            own.append(number)
        own[-1] += score
        found.append(own)
    return found


def looped_estimates(dialect: Dialect, rewards: list[list[float]], given: dict) -> tuple[list, list]:
    """Advantages before whitening and returns, of the drawn tokens of each row."""
    advantages, returns = [], []
    totals = [sum(own) for own in rewards]
    for row, own in enumerate(rewards):
        pair = totals[row // 2 * 2 : row // 2 * 2 + 2]
        mean, other = sum(pair) / 2, sum(pair) - totals[row]
        count, values = len(own), [float(given["values"][row, place]) for place in DRAWN[row]]
        to_go = [sum(own[t:]) for t in range(count)]  # gamma is 1 in every dialect
        if dialect.advantage_estimator == "gae":
            following, next_value, estimates = 0.0, 0.0, [0.0] * count
            for t in reversed(range(count)):
                following = own[t] + next_value - values[t] + dialect.lam * following
                estimates[t], next_value = following, values[t]
            advantages.append(estimates)
            returns.append([estimate + value for estimate, value in zip(estimates, values)])
        elif dialect.advantage_estimator.startswith("reinforce"):
            less = mean if dialect.advantage_estimator == "reinforce_baseline" else 0.0
            advantages.append([one - less for one in to_go])
            returns.append(to_go)
        else:
            estimate = totals[row] - (other if dialect.advantage_estimator == "rloo" else mean)
            if dialect.advantage_scale == "group":
                deviation = math.sqrt(sum((total - mean) ** 2 for total in pair))  # over n - 1 = 1
                estimate /= deviation + dialect.scale_eps
            advantages.append([estimate] * count)
            returns.append([totals[row]] * count)
    return advantages, returns


def whitened(rows: list[list[float]]) -> list[list[float]]:
    every = [one for row in rows for one in row]
    mean = sum(every) / len(every)
    deviation = math.sqrt(sum((one - mean) ** 2 for one in every) / len(every))
    return [[(one - mean) / deviation for one in row] for row in rows]


def at_drawn(column: torch.Tensor) -> list[float]:
    return [float(column[row, place]) for row, places in enumerate(DRAWN) for place in places]


def near(column: torch.Tensor, rows: list[list[float]], tolerance: float = 1e-5) -> None:
    assert at_drawn(column) == pytest.approx([one for row in rows for one in row], abs=tolerance)


def drawn_mask() -> torch.Tensor:
    mask = torch.zeros(4, WIDTH, dtype=torch.bool)
    for row, places in enumerate(DRAWN):
        mask[row, places] = True
    return mask


def said() -> dict[str, torch.Tensor]:
    """What the models say of each response token of the four rows."""
    rollout, models = conversations(), PrefixModels()
    inputs = rollout.sequences, rollout.attention_mask, rollout.position_ids
    start = rollout.prompt_length - 1
    return {
        "logprobs": models.logprobs(*inputs, WIDTH, 0.31),
        "ref_logprobs": models.logprobs(*inputs, WIDTH, 0.23),
        "values": models.critic(*inputs)[:, start:-1],
    }


@pytest.mark.parametrize("name", TAKEN)
def test_a_step_of_each_dialect_against_a_loop(name):
    dialect = dialect_of(name)
    made, given = step_of(dialect), said()
    drawn = drawn_mask()
    rewards = looped_rewards(dialect, given)
    near(made.rewards, rewards)
    advantages, returns = looped_estimates(dialect, rewards, given)
    near(made.advantages, whitened(advantages) if dialect.whiten_advantages else advantages, 2e-5)
    near(made.returns, returns, 2e-5)
    for column in (made.rewards, made.kl, made.values):
        assert not column[~drawn].any()
    for mask in (made.policy_mask, made.value_mask, made.state_mask):
        assert torch.equal(mask, drawn)
    kl = [[float(given["logprobs"][row, t] - given["ref_logprobs"][row, t]) for t in DRAWN[row]] for row in range(4)]
    assert made.measured_kl.tolist() == pytest.approx([sum(row) for row in kl], abs=1e-5)


@pytest.mark.parametrize("name", TAKEN)
def test_metrics_against_a_loop(name):
    dialect, given = dialect_of(name), said()
    made, metrics = step_of(dialect), Accumulator()
    algorithm = Algorithm(dialect, pad_token_id=PAD, max_response_length=LONGEST)
    for add_to in STEP_METRICS:
        add_to(metrics, made, algorithm)
    found = metrics.reduce()
    kl = at_drawn(given["logprobs"] - given["ref_logprobs"])
    assert found["objective/kl"] == pytest.approx(sum(kl) / 4, abs=1e-5)
    assert found["objective/kl_per_token"] == pytest.approx(sum(kl) / 17, abs=1e-5)
    entropy = [2 + math.cos(one) for one in at_drawn(given["logprobs"])]
    assert found["objective/entropy"] == pytest.approx(sum(entropy) / 17, abs=1e-5)
    assert found["rollout/response_length"] == 17 / 4 and found["rollout/degenerate"] == 0
    assert distributions(made)["rollout/length_histogram"].tolist() == [6, 6, 4, 1]
    rewards = looped_rewards(dialect, given)
    assert found["objective/rlhf_reward"] == pytest.approx(sum(map(sum, rewards)) / 4, abs=1e-5)
    advantages, returns = looped_estimates(dialect, rewards, given)
    every, targets = sum(advantages, []), sum(returns, [])
    if algorithm.estimator.per_response:
        every = [row[0] for row in advantages]
    elif not dialect.has_critic:  # those of a critic are measured before they are whitened
        every = sum(whitened(advantages), [])
    assert found["advantages/mean"] == pytest.approx(sum(every) / len(every), abs=2e-5)
    if dialect.overlong_buffer:
        assert found["objective/overlong_penalty"] == pytest.approx(2 * -1.5 / 4.5 / 4)
    if dialect.has_critic:
        values = at_drawn(given["values"])
        errors = [target - value for target, value in zip(targets, values)]

        def variance(numbers: list[float]) -> float:
            return sum((one - sum(numbers) / 17) ** 2 for one in numbers)

        explained = 1 - variance(errors) / variance(targets)
        assert found["value/explained_variance"] == pytest.approx(explained, abs=1e-4)
        outcomes = [sum(row[t:]) for row in rewards for t in range(len(row))]
        bias = sum(value - outcome for value, outcome in zip(values, outcomes)) / 17
        assert found["value/bias"] == pytest.approx(bias, abs=1e-4)


@pytest.mark.parametrize("alpha", [None, 0.5])
def test_rewards_are_discounted_by_drawn_tokens(alpha):
    """gamma, and lambdas of lengths, count the tokens of the policy alone; rewards are whitened over them."""
    changed = {"gamma": 0.9, "value_lam": 0.8, "length_adaptive_alpha": alpha, "whiten_rewards": True}
    dialect = dialect_of("default", whiten_advantages=False, **changed)
    made, given = step_of(dialect), said()
    rewards = looped_rewards(dialect, given)
    mean = sum(map(sum, rewards)) / 17
    white = [[one + mean for one in row] for row in whitened(rewards)]
    advantages, returns = [], []
    for row, own in enumerate(white):
        values = [float(given["values"][row, place]) for place in DRAWN[row]]
        lam = 0.95 if alpha is None else max(0.0, 1 - 1 / (alpha * len(own)))
        for kept, each, added in ((advantages, lam, 0.0), (returns, 0.8, 1.0)):
            following, next_value, estimates = 0.0, 0.0, []
            for number, value in zip(reversed(own), reversed(values)):
                following = number + 0.9 * next_value - value + 0.9 * each * following
                estimates.insert(0, following + added * value)
                next_value = value
            kept.append(estimates)
    near(made.advantages, advantages, 2e-5)
    near(made.returns, returns, 2e-5)


@pytest.mark.parametrize("at", ["mini_batch", "micro_batch"])
def test_advantages_estimated_anew_are_those_of_the_rows_alone(at):
    algorithm = Algorithm(dialect_of("default", advantages_at=at), pad_token_id=PAD)
    whole, again = step_of(dialect_of("default")), getattr(algorithm, f"for_{at}")
    rows = torch.tensor([3, 0])
    anew, alone = again(whole.select(rows)), step_of(dialect_of("default"), conversations([3, 0]))
    torch.testing.assert_close(anew.advantages, alone.advantages, rtol=0, atol=1e-6)
    assert not torch.allclose(anew.advantages, whole.advantages[rows], atol=1e-3)


@pytest.mark.parametrize("kind", ["token_truncate", "sequence_truncate"])
def test_corrections_count_drawn_tokens(kind):
    dialect = dialect_of("default", correction=kind, correction_max=100.0)
    given, gap = said(), 0.01 * torch.arange(1.0, 10.0).expand(4, 9)
    sampled = torch.where(drawn_mask(), given["logprobs"] - gap, 0.0)  # 0 where nothing was drawn
    roles = PrefixModels().roles() | {"reward": reward()}
    trainer = untrained(roles, dialect, pad=PAD, exact_sampler=False)
    experience = trainer.experience_maker.make_experience(dataclasses.replace(conversations(), logprobs=sampled))
    assert experience.log_ratios.tolist() == pytest.approx(at_drawn(gap), abs=1e-6)
    correction, _ = trainer.algorithm.correction(experience.logprobs, experience.rollout)
    gaps = [[0.01 * (place + 1) for place in places] for places in DRAWN]
    if kind == "sequence_truncate":
        gaps = [[sum(row)] * len(row) for row in gaps]
    near(correction, [[math.exp(one) for one in row] for row in gaps])


def test_log_probs_of_the_sampler_count_at_drawn_tokens():
    """They are 0 elsewhere, where the reference's are not."""
    sampled = {"logprobs": torch.where(drawn_mask(), said()["logprobs"], 0.0)}
    sampled["entropy"] = torch.where(drawn_mask(), 2 + torch.cos(sampled["logprobs"]), 0.0)
    made = step_of(dialect_of("default"), dataclasses.replace(conversations(), **sampled))
    assert torch.equal(made.logprobs, sampled["logprobs"])
    alone = step_of(dialect_of("default"))
    for name in ("kl", "rewards", "advantages", "returns"):
        assert torch.equal(getattr(made, name), getattr(alone, name)), name


def test_checks_look_at_drawn_tokens_only():
    rollout, given = conversations(), said()
    drawn = drawn_mask()
    bad = torch.where(drawn, given["logprobs"], -math.inf)  # of a token that the policy could not have drawn
    roles = PrefixModels().roles() | {"reward": reward()}
    trainer = untrained(roles, dialect_of("default"), pad=PAD)
    made = trainer.experience_maker.make_experience(rollout)
    far = dataclasses.replace(made, logprobs=bad, ref_logprobs=torch.where(drawn, bad - 0.1, 0.0))
    stop_unless_finite(1, far, None)
    stop_unless_at_reference(1, far, 0.11)
    with pytest.raises(Exception, match="differ by 0.1 nats a token"):
        stop_unless_at_reference(1, far, 0.09)
    judged = dataclasses.replace(made, scores=made.scores * math.nan, rewards={"judge": made.scores * math.nan})
    with pytest.raises(Exception, match=rf"not finite: score \({len(rollout)}\), reward/judge \({len(rollout)}\)"):
        stop_unless_finite(1, judged, SimpleNamespace(decode=str))


def test_a_critic_is_pretrained_on_drawn_tokens(monkeypatch):
    monkeypatch.setattr(CriticPretraining, "_train", lambda self, batch, metrics: None)
    roles = PrefixModels().roles() | {"reward": reward()}
    trainer = untrained(roles, dialect_of("default"), conversations(), pad=PAD)
    trainer.counters.steps_done = -5
    report = CriticPretraining(trainer).step(mock.Mock())
    rewards = looped_rewards(dialect_of("default"), said(), beta=0.0)
    near(report.batch.returns, [[sum(row[t:]) for t in range(len(row))] for row in rewards])
    assert report.metrics["critic_pretrain/response_length"] == 17 / 4


def test_tokens_that_were_drawn_are_counted():
    roles = PrefixModels().roles() | {"reward": reward()}
    trainer = untrained(roles, dialect_of("default"), conversations(), pad=PAD)
    seen = []
    trainer._metrics = lambda log, sampled, *rest: seen.append(sampled.tokens.item()) or {}
    next_step(trainer)
    assert seen == [17]
    made = step_of(dialect_of("default"))
    rows = sample_rows(made.rollout, made.scores, made.kl.sum(-1), make_tokenizer())
    assert [row["tokens"] for row in rows] == [6, 6, 4, 1]


@pytest.mark.parametrize("name", TAKEN)
def test_a_response_that_was_drawn_whole_is_as_without_a_mask(name):
    """To the last digit, in batch and metrics, also with an entropy and rewards of tokens."""
    prompts, responses = PROMPTS, [[20, 21, EOS], [22, 23, 24, 25, EOS], [26, EOS], [27, 28, 29, 30]]
    without = rollout_of(prompts, responses, PAD)
    without = dataclasses.replace(without, ended=torch.tensor(ENDED), turn_rewards=torch.rand(4, 5))
    dialect, found = dialect_of(name), []
    for mask in (None, without.response_mask):
        roles = PrefixModels().roles() | {
            "reward": CombinedReward({"turns": (Given("turns"), 0.5), "whole": (Given("whole"), 1.0)})
        }
        made = batch_of(roles, dataclasses.replace(without, action_mask=mask), dialect, pad=PAD, micro_batch_size=2)
        metrics = Accumulator()
        for add_to in STEP_METRICS:
            add_to(metrics, made, Algorithm(dialect, pad_token_id=PAD, max_response_length=LONGEST))
        found.append((made, metrics.reduce()))
    (one, said_of_one), (other, said_of_other) = found
    for field in dataclasses.fields(TrainingBatch):
        if field.name not in ("rollout", "kl_coef") and getattr(one, field.name) is not None:
            assert torch.equal(getattr(one, field.name), getattr(other, field.name)), field.name
    assert said_of_one == said_of_other


def test_a_dialect_that_takes_no_conversations_stops_the_step():
    with pytest.raises(UserError, match="the dialect deepspeed_chat has score_before_pad True, length_rule 'not_pad'"):
        step_of(get_dialect("deepspeed_chat"))
    for name in TAKEN:
        check_conversations(dialect_of(name))


class Bare(Resident):
    """A module in the place of an engine."""

    def __init__(self, module: torch.nn.Module):
        super().__init__(None)
        self.module = module

    def __call__(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@pytest.mark.parametrize("packing", ["padded", "packed"])
def test_log_probs_losses_and_gradients_are_those_of_transformers(packing, tmp_path):
    """transformers reads each row alone and without padding; its losses are summed over drawn tokens."""
    paths = [make_causal_lm(tmp_path / name, "llama", seed=seed) for seed, name in enumerate(("actor", "reference"))]
    critic_path = make_scorer(tmp_path / "reward", "llama", seed=2, offset=-0.3)
    attention = Attention("sdpa", packing)
    actor, reference = (load_policy(path, torch.float32, attention=attention) for path in paths)
    critic = load_scorer(critic_path, torch.float32, attention=attention)
    assert actor.packs == critic.packs == (packing == "packed")
    roles = {"actor": Bare(actor), "reference": Reference(Bare(reference)), "critic": Bare(critic), "reward": reward()}
    dialect = dialect_of("default", whiten_advantages=False)
    made = batch_of(roles, conversations(), dialect, pad=PAD, micro_batch_size=2)
    own_actor, own_critic = plain.policy(tmp_path), plain.critic(tmp_path)
    rows = [conversations([row]).select(slice(None)) for row in range(4)]
    for name, role in (("logprobs", "actor"), ("ref_logprobs", "reference")):
        model = plain.policy(tmp_path, role)
        with torch.no_grad():
            alone = [plain.logprobs(model, part, 1.0)[0, places].tolist() for part, places in zip(rows, DRAWN)]
        near(getattr(made, name), alone, 2e-6)  # float32 holds numbers up to 7 to 2.4e-7

    shift = 0.3 * torch.sin(torch.arange(4.0 * WIDTH)).view(4, WIDTH)  # so that some ratios and values are clipped
    losses = Algorithm(dialect, pad_token_id=PAD).losses
    rollout = made.rollout
    inputs = rollout.sequences, rollout.attention_mask, rollout.position_ids
    logprobs, _ = actor(*inputs, response_length=WIDTH, temperature=1.0, with_entropy=False)
    old = made.logprobs - shift
    policy = losses.policy_loss(logprobs, old, made.ref_logprobs, made.advantages, made.policy_mask, 0.1)
    values = critic(*inputs)[:, rollout.prompt_length - 1 : -1]
    value = losses.value_loss(values, made.values - shift, made.returns, made.value_mask)
    rewards = looped_rewards(dialect, {name: getattr(made, name) for name in ("logprobs", "ref_logprobs")})
    advantages, returns = looped_estimates(dialect, rewards, {"values": made.values})
    expected = {"policy": torch.zeros(()), "value": torch.zeros(())}
    for row, (part, places) in enumerate(zip(rows, DRAWN)):
        gain, target = torch.tensor(advantages[row]), torch.tensor(returns[row])
        new = plain.logprobs(own_actor, part, 1.0)[0, places]
        ratio = (new - new.detach() + shift[row, places]).exp()
        expected["policy"] = expected["policy"] - torch.min(gain * ratio, gain * ratio.clip(0.8, 1.2)).sum()
        new = plain.values(own_critic, part)[0, places]
        before = new.detach() - shift[row, places]
        clipped = before + (new - before).clip(-0.2, 0.2)
        expected["value"] = expected["value"] + 0.5 * torch.max((new - target) ** 2, (clipped - target) ** 2).sum()
    for ours, module, theirs, model in (
        (policy.loss, actor.model, expected["policy"], own_actor),
        (value.loss, critic.model, expected["value"], own_critic),
    ):
        assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
        assert plain.relative_error(plain.gradients(module, ours), plain.gradients(model, theirs)) < 1e-5
