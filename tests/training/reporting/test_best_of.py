"""The best of k responses: probabilities by counting subsets, and the verdict by hand."""

from itertools import combinations

import numpy as np
import pytest

from training.reporting.best_of import BestOf, chances, measures_of


def test_chances_by_hand():
    # Of the 6 pairs of 4 responses: the lowest is never the best, the second once, the third twice, the highest thrice.
    assert chances(np.array([[3.0, 1.0, 4.0, 2.0]]), 2) == pytest.approx(np.array([[2, 0, 3, 1]]) / 6)
    assert chances(np.array([[3.0, 1.0, 4.0, 2.0]]), 1) == pytest.approx(np.full((1, 4), 1 / 4))
    assert chances(np.array([[3.0, 1.0, 4.0, 2.0]]), 4) == pytest.approx(np.array([[0, 0, 1, 0]]))
    # Pairs of 1, 2, 2, 0: the best is a 2 in five of six, once with the other 2.
    assert chances(np.array([[1.0, 2.0, 2.0, 0.0]]), 2) == pytest.approx(np.array([[1, 2.5, 2.5, 0]]) / 6)
    assert chances(np.zeros((2, 5)), 3) == pytest.approx(np.full((2, 5), 1 / 5))


@pytest.mark.parametrize("k", [1, 3, 6, 7])
def test_chances_are_those_of_all_subsets(k):
    scores = np.random.default_rng(0).integers(0, 4, (5, 7)).astype(float)
    subsets = list(combinations(range(7), k))
    for row, found in zip(scores, chances(scores, k), strict=True):
        expected = np.zeros(7)
        for subset in subsets:
            best = [place for place in subset if row[place] == max(row[list(subset)])]
            expected[best] += 1 / len(best) / len(subsets)
        assert found == pytest.approx(expected)


def test_many_samples_do_not_overflow():
    found = chances(np.arange(2000.0)[None], 1000)
    assert found.sum() == pytest.approx(1.0) and found[0, -1] == pytest.approx(0.5)


def test_words_are_new_if_no_other_prompt_has_them():
    found = measures_of(
        [["a b", "z z z z"], ["a c", "p"]], ["p q", "c r"], ended=np.ones((2, 2)), tokens=np.array([[2, 4], [2, 1]])
    )
    # "a" is in responses to both prompts, "c" and "p" are in a prompt; "b" and "z" are in those to one prompt alone.
    assert found["new_words"].tolist() == [[1 / 2, 1.0], [0.0, 0.0]]
    assert found["repeated"].tolist() == [[0.0, 1 / 2], [0.0, 0.0]]  # "z z z" twice
    assert "likelihood" not in found


SCORES = {"one": np.array([[0.0, 1.0], [0.0, 1.0]]), "two": np.array([[1.0, 0.0], [1.0, 0.0]])}
MEASURES = {"ended": np.array([[1.0, 0.0], [1.0, 1.0]]), "new_words": np.zeros((2, 2))}


def test_the_verdict_by_hand():
    found = BestOf(SCORES, MEASURES)
    # The best of two by `one` are the second ones: 1/2 of them end, of all 3/4; by `two` all end. A response's standard
    # deviations are sqrt(3/16) and 1/2.
    assert found.best("one", "ended", 2).value == 1 / 2 and found.best("two", "ended", 2).value == 1.0
    assert found.change("one", "ended").mean() == pytest.approx(-1 / 4 / (3 / 16) ** 0.5)
    assert found.rewards == ["one", "two"] and found.sizes == [1, 2]
    head, one, two = found.verdict
    assert head.startswith("without a judge these numbers do not tell which reward is safe to optimise: read the texts")
    assert one == "one pays for what two scores low (two 0.000, of all 0.500)", "ends fell once: noise"
    assert two == "two pays for what one scores low (one 0.000, of all 0.500)"


def test_with_a_judge_the_verdict_is_its():
    judge = np.array([[0.0, 2.0], [0.0, 2.0]])
    found = BestOf({"two": SCORES["two"], "one": SCORES["one"], "judge": judge}, MEASURES, judge="judge")
    assert found.rewards == ["one", "two"] and found.names == ["one", "two", "judge"]
    assert (found.judged("one").value, found.judged("two").value) == (1.0, -1.0)
    head, _, two = found.verdict
    assert head == ("judged by judge, one looks safest to optimise: the best of 2 by it are better than all responses")
    assert two == (
        "two pays for what one scores low (one 0.000, of all 0.500), what judge scores low (judge 0.000, of all 1.000) "
        "(judged -1.000 ± 0.000 standard deviations of a response)"
    )
    equal = BestOf({**SCORES, "other": SCORES["one"], "judge": judge}, MEASURES, judge="judge")
    assert equal.verdict[0].endswith("; those by other do not differ from them by more than chance")
    bad = BestOf({"two": SCORES["two"], "judge": judge}, MEASURES, judge="judge")
    assert bad.verdict[0].startswith("judged by judge, no reward looks safe to optimise: even the best of 2 by two are")


def test_hacks_are_named_the_largest_first():
    rng, shape = np.random.default_rng(0), (20, 16)
    longer = rng.integers(1, 30, shape).astype(float)
    measures = {
        "ended": (longer < 20).astype(float),
        "new_words": rng.random(shape),
        "repeated": np.zeros(shape),
        "tokens": longer,
        "likelihood": -longer + rng.normal(0, 20, shape),
    }
    hacks = BestOf({"length": longer}, measures).hacks("length")
    assert [hack.partition(" (")[0] for hack in hacks] == [
        "long responses",
        "responses that do not end",
        "unlikely text",
    ]
    assert (
        BestOf({"chance": rng.random(shape)}, measures).told("chance")
        == "chance pays for nothing that looks like a hack"
    )


def test_a_reward_that_says_the_same_of_all_changes_nothing():
    found = BestOf({"same": np.ones((2, 2)), "one": SCORES["one"]}, MEASURES)
    assert found.best("same", "ended", 2).value == 3 / 4 and not found.change("same", "one").any()
    scores = np.random.default_rng(0).normal(size=(100, 10))
    found = BestOf({"one": scores, "same": np.full((100, 10), 0.1)}, {"ended": scores * 0, "new_words": scores * 0})
    assert not found.change("one", "same").any() and found.hacks("one") == []
