"""What is measured of models and pairs, by hand."""

import pytest

from training.tools.compare.measures import Sample, by_prompt, change, histogram, of_model, of_pair, repetition


def sample(score: float, response: str = "", kl: float = 0.0, tokens: int = 2, ended: bool = True) -> Sample:
    """A sample whose response is its own, unless given."""
    return Sample(response or f"said {score}", {"reward": score}, kl, tokens, ended)


def samples(*scores: float) -> list[Sample]:
    """One for each score."""
    return [sample(score) for score in scores]


def test_a_tie_counts_half():
    pair = of_pair(samples(3, 1, 1, 5), samples(2, 1, 2, 1), "reward", each=1, seed=0)
    assert (pair.wins, pair.ties, pair.losses) == (2, 1, 1)
    assert pair.win_rate.value == 2.5 / 4 and pair.difference.value == (1 + 0 - 1 + 4) / 4
    assert not pair.win_rate.differs


def test_samples_of_a_prompt_stay_together():
    # Two prompts: one won three times, one lost three times. Six samples would be six coins; they are two.
    ours, theirs = samples(1, 1, 1, 0, 0, 0), samples(0, 0, 0, 1, 1, 1)
    pair = of_pair(ours, theirs, "reward", each=3, seed=0)
    assert (pair.win_rate.low, pair.win_rate.value, pair.win_rate.high) == (0.0, 0.5, 1.0)
    assert by_prompt([1, 2, 6, 0, 0, 3], 3).tolist() == [3.0, 1.0]


def test_a_model_beside_itself_is_exactly_even():
    ours = samples(*range(30))
    pair = of_pair(ours, list(ours), "reward", each=2, seed=0)
    assert (pair.wins, pair.ties, pair.losses) == (0, 30, 0)
    for found, even in ((pair.win_rate, 0.5), (pair.difference, 0.0)):
        assert (found.value, found.low, found.high, found.p, found.differs) == (even, even, even, 1.0, False)


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
