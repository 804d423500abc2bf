"""What is measured of models and pairs, by hand, and how often chance looks like more."""

import numpy as np
import pytest

from training.reporting.variety import repetition
from training.tools.compare.measures import (
    Sample,
    by_prompt,
    change,
    histogram,
    interval,
    of_model,
    of_pair,
)


def sample(score: float, response: str = "", kl: float = 0.0, tokens: int = 2, ended: bool = True) -> Sample:
    """A sample whose response is its own, unless given."""
    return Sample(response or f"said {score}", {"reward": score}, kl, tokens, ended)


def samples(*scores: float) -> list[Sample]:
    """One for each score."""
    return [sample(score) for score in scores]


def test_a_tie_counts_half():
    pair = of_pair(samples(3, 1, 1, 5), samples(2, 1, 2, 1), "reward", each=1)
    assert (pair.wins, pair.ties, pair.losses) == (2, 1, 1)
    assert pair.win_rate.value == 2.5 / 4 and pair.difference.value == (1 + 0 - 1 + 4) / 4
    assert not pair.win_rate.differs


def test_samples_of_a_prompt_stay_together():
    # Two prompts: one won three times, one lost three times. Six samples would be six coins; they are two.
    ours, theirs = samples(1, 1, 1, 0, 0, 0), samples(0, 0, 0, 1, 1, 1)
    pair = of_pair(ours, theirs, "reward", each=3)
    # The standard error is sqrt(0.5 / 2) = 0.5; a win rate is between 0 and 1.
    assert (pair.win_rate.low, pair.win_rate.value, pair.win_rate.high) == (0.0, 0.5, 1.0)
    assert by_prompt([1, 2, 6, 0, 0, 3], 3).tolist() == [3.0, 1.0]


def test_a_model_beside_itself_is_exactly_even():
    ours = samples(*range(30))
    pair = of_pair(ours, list(ours), "reward", each=2)
    assert (pair.wins, pair.ties, pair.losses) == (0, 30, 0)
    for found, even in ((pair.win_rate, 0.5), (pair.difference, 0.0)):
        assert (found.value, found.low, found.high, found.differs) == (even, even, even, False)


def test_the_same_response_ties_whatever_rounding_made_of_its_score():
    assert change(sample(1.0000001, "a b"), sample(1.0, "a b"), "reward") == 0.0
    assert change(sample(1.5, "a b", tokens=3), sample(1.0, "a b"), "reward") == 0.5  # other tokens
    assert change(sample(1.5, "a b", ended=False), sample(1.0, "a b"), "reward") == 0.5


def test_of_a_model():
    found = of_model(
        [
            sample(1.0, "a b a b", kl=0.5, tokens=4),
            sample(3.0, "c", kl=1.5, tokens=1, ended=False),
            sample(2.0, "a b", kl=1.0, tokens=3),
            sample(6.0, "d", kl=3.0, tokens=2),
        ],
        each=2,
    )
    # By prompt: scores 2 and 4, KL 1 and 2, tokens 2.5 and 2.5, ended 1/2 and 1.
    assert (found.scores["reward"].value, found.scores["reward"].error) == (3.0, pytest.approx(1.0))
    assert (found.kl.value, found.kl.error) == (1.5, pytest.approx(0.5))
    assert (found.kl_per_token.value, found.kl_per_token.error) == (pytest.approx(6 / 10), pytest.approx(0.5 / 2.5))
    assert (found.tokens.value, found.tokens.error) == (2.5, 0.0)
    assert found.ended.value == 0.75
    assert found.bigrams == 2 / 10  # "a b" and "b a", of ten tokens
    assert found.repetition == 0.0  # the three-word pieces of the first are "a b a" and "b a b"


def test_repetition_counts_within_a_text():
    assert repetition(["a b c a b c"]) == 1 - 3 / 4  # abc, bca, cab, and abc again
    assert repetition(["a b c", "a b c"]) == 0.0 and repetition(["a", ""]) == 0.0
    assert repetition(["a a a a", "b c d"]) == pytest.approx(1 - 2 / 3)
    assert repetition(["a a a"], n=2) == 0.5


def test_histograms_of_all_models_have_the_same_bins():
    edges, counts = histogram([[0.0, 1.0, 4.0], [2.0, 2.5]], bins=4)
    assert edges == [0.0, 1.0, 2.0, 3.0, 4.0] and counts == [[1, 1, 0, 1], [0, 0, 2, 0]]


def test_an_interval_by_hand():
    # Mean 2, standard error sqrt(2 / (6 - 1) / 6) = 0.258.
    found = interval(np.array([3.0, 1.0, 2.0, 2.0, 2.0, 2.0]), 0.0)
    assert (found.value, found.low, found.high) == (
        2.0,
        pytest.approx(1.4836, abs=1e-4),
        pytest.approx(2.5164, abs=1e-4),
    )
    assert found.differs and not interval(np.array([3.0, 1.0, 2.0, 2.0, 2.0, 2.0]), 2.4).differs


def test_ties_and_few_prompts_are_no_significance():
    ties = interval(np.full(40, 0.5), 0.5)
    assert (ties.value, ties.low, ties.high, ties.differs) == (0.5, 0.5, 0.5, False)
    all_won = interval(np.ones(4), 0.5)  # without a standard error, and yet only 4 coins that fell alike
    assert (all_won.value, all_won.low, all_won.high) == (1.0, 0.5, 1.0) and not all_won.differs
    assert interval(np.ones(9), 0.5).differs
    # 4 wins among 196 ties: the sum of differences is 2, and two standard deviations of it are 2 * sqrt(4 / 4) = 2.
    few = interval(np.array([1.0] * 4 + [0.5] * 196), 0.5)
    assert few.low == 0.5 and not few.differs


@pytest.mark.slow
@pytest.mark.parametrize("prompts, samples", [(8, 1), (40, 2)])
def test_two_samplings_of_one_model_differ_in_one_of_twenty_seeds_at_most(prompts, samples):
    seen = {"wins": 0, "scores": 0}
    for seed in range(200):
        rng = np.random.default_rng(seed)
        means = rng.normal(0, 2, (prompts, 1))
        one, other = (means + rng.exponential(1.0, (prompts, samples)) for _ in range(2))
        tied = rng.random((prompts, samples)) < 0.3
        differences = np.where(tied, 0.0, one - other)
        wins = (np.sign(differences) + 1) / 2
        seen["wins"] += interval(wins.mean(1), 0.5).differs
        seen["scores"] += interval(differences.mean(1), 0.0).differs
    # Of 200 at 5 %: 10 expected, and more than 19 come once in 300 times.
    assert all(count <= 19 for count in seen.values()), seen
    assert prompts == 8 or sum(seen.values()) > 2, f"an interval that never leaves anything out tells nothing: {seen}"


@pytest.mark.slow
def test_an_interval_holds_the_true_mean_in_nineteen_of_twenty_seeds():
    held = 0
    for seed in range(200):
        values = (np.random.default_rng(seed).random(60) < 0.7).astype(float)
        found = interval(values, 0.5)
        held += found.low <= 0.7 <= found.high
    assert 180 <= held <= 198, held


def test_a_better_model_is_found():
    rng = np.random.default_rng(0)
    assert sum(interval((rng.random(80) < 0.75).astype(float), 0.5).differs for _ in range(20)) >= 19
