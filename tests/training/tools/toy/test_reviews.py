"""The grammar's two uses agree: the judge accepts what the generator writes, and little else."""

import json
import random

import pytest

from engine.errors import UserError
from training.reporting.variety import distinct_bigrams
from training.tools.toy import reviews as builtin_reviews
from training.tools.toy.reviews import (
    Verdict,
    generate_review,
    generate_reviews,
    judge,
    make_corpus,
    summarize_responses,
)

PROMPT = "Review : we watched this thriller"
POSITIVE, NEGATIVE = Verdict(True, True, False), Verdict(True, False, True)
MIXED, NO_OPINION = Verdict(True, False, False), Verdict(False, False, False)


@pytest.mark.parametrize(
    "response, expected",
    [
        (" with friends , and the film was fresh .", POSITIVE),
        (" with friends , and the film was never dull .", POSITIVE),
        (" in oslo , and the script by anna lee had no filler .", POSITIVE),
        (" at home , and the second half rarely bored us so nobody should skip it .", POSITIVE),
        (" last week , and it was less noisy than usual and moved me .", POSITIVE),
        (" with friends , and the film was dull .", NEGATIVE),
        (" with friends , and the film was never fresh .", NEGATIVE),
        (" in oslo , and the script by anna lee had little charm .", NEGATIVE),
        (" at home , and the second half hardly moved us so nobody should see it .", NEGATIVE),
        (" last week , and it was less fresh than usual and bored me .", NEGATIVE),
        (" with friends , and the film was fresh and bored us .", MIXED),
        (" with friends , and the film was fresh so everyone should skip it .", MIXED),
        (" with friends , and the film was never dull while the music was never fresh .", MIXED),
    ],
)
def test_reviews_written_by_hand(response, expected):
    assert judge(PROMPT, response) == expected


@pytest.mark.parametrize(
    "response, expected",
    [
        (" the film was fresh", Verdict(False, True, False)),  # no scene, no end
        (" was was fresh , and seemed never dull .", Verdict(False, True, False)),
        (" hardly moved us , and and .", Verdict(False, False, True)),
        (" so fresh , never dull .", NO_OPINION),  # words without a predicate
        (" was freshly , unmoved us .", NO_OPINION),  # whole words only
        ("", NO_OPINION),
    ],
)
def test_opinions_are_found_in_what_is_not_grammatical(response, expected):
    assert judge(PROMPT, response) == expected


def test_the_prompt_and_the_space_belong_to_the_whole():
    response = " with friends , and the film was fresh ."
    assert judge(PROMPT, response) == POSITIVE
    assert not judge(PROMPT + " thriller", response).grammatical
    assert not judge(PROMPT, response.lstrip()).grammatical
    assert not judge(PROMPT, response.replace(" , ", "  , ")).grammatical
    assert judge("Review : we watched this fresh thriller", " with friends .") == NO_OPINION


@pytest.mark.parametrize("positive", [True, False])
def test_every_generated_review_is_accepted_with_its_sentiment(positive):
    rng = random.Random(0)
    for _ in range(2000):
        review = generate_review(rng, positive)
        assert judge(review.prompt, review.response) == (POSITIVE if positive else NEGATIVE), review
        assert review.prompt.startswith("Review : ") and review.response.startswith(" ")
        assert review.response.endswith(" .") and len(review.response.split()) < 30


def test_most_corruptions_are_rejected():
    rng = random.Random(1)
    accepted = {"dropped": 0, "doubled": 0, "swapped": 0}
    for review in generate_reviews(500, seed=2):
        words = review.response.split()
        i = rng.randrange(len(words) - 1)
        broken = {
            "dropped": words[:i] + words[i + 1 :],
            "doubled": words[: i + 1] + words[i:],
            "swapped": words[:i] + [words[i + 1], words[i]] + words[i + 2 :],
        }
        for name, changed in broken.items():
            accepted[name] += judge(review.prompt, " " + " ".join(changed)).grammatical
    assert accepted["doubled"] == accepted["swapped"] == 0
    assert accepted["dropped"] < 50, accepted  # "was quite fresh" may lose "quite" and still be grammatical


def test_prompts_say_nothing_about_sentiment():
    positive = {generate_review(random.Random(seed), True).prompt for seed in range(300)}
    assert positive == {generate_review(random.Random(seed), False).prompt for seed in range(300)}


def test_generate_reviews_counts_and_repeats():
    reviews = generate_reviews(100, seed=3, positive_fraction=0.25)
    assert sum(review.positive for review in reviews) == 25
    assert reviews == generate_reviews(100, seed=3, positive_fraction=0.25)
    assert reviews != generate_reviews(100, seed=4, positive_fraction=0.25)
    assert [r.positive for r in reviews] != sorted((r.positive for r in reviews), reverse=True)


def test_positive_reviews_are_nearly_as_varied_as_balanced_ones():
    for seed in range(5):
        positive, balanced = (
            distinct_bigrams(review.response for review in generate_reviews(256, seed + offset, fraction))
            for offset, fraction in ((0, 1.0), (100, 0.5))
        )
        assert positive >= 0.85 * balanced, (seed, positive, balanced)


def test_no_word_tells_the_sentiment():
    counts = {True: {}, False: {}}
    for review in generate_reviews(4000, seed=5):
        for word in set(review.response.split()):
            counts[review.positive][word] = counts[review.positive].get(word, 0) + 1
    for word in counts[True].keys() | counts[False].keys():
        advantage = abs(counts[True].get(word, 0) - counts[False].get(word, 0)) / 4000  # over guessing, if it decided
        assert advantage < 0.03, word


def test_summary_by_hand():
    responses = [" at home , and it was fresh .", " at home , and it was dull .", " at home it was dull .", " at home"]
    assert summarize_responses([PROMPT] * 4, responses) == {
        "positive": 0.25,
        "negative": 0.5,
        "grammatical": 0.5,
        # at home | home , | , and | and it | it was | was fresh | fresh . | was dull | dull . | home it
        "distinct_bigrams": 10,
    }


def test_corpus_files():
    files = make_corpus(seed=0, sft=40, pairs=30, prompts=20, eval_prompts=10)
    assert {name: len(rows) for name, rows in files.items()} == {
        "sft.jsonl": 40,
        "pairs.jsonl": 30,
        "prompts.jsonl": 20,
        "eval_prompts.jsonl": 10,
    }
    for row in files["pairs.jsonl"]:
        assert judge(row["prompt"], row["chosen"]) == POSITIVE and not judge(row["prompt"], row["rejected"]).positive
    assert files["prompts.jsonl"][:10] != files["eval_prompts.jsonl"]
    assert files == make_corpus(seed=0, sft=40, pairs=30, prompts=20, eval_prompts=10)


def make(folder, *flags):
    return builtin_reviews.main(["make", "--output_dir", str(folder), "--sft", "5", "--pairs", "5", *flags])


def test_make_refuses_a_folder_that_is_not_empty(tmp_path, capsys):
    (tmp_path / "mine").write_text("mine")
    assert make(tmp_path) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and str(tmp_path) in message and "--overwrite" in message
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert make(tmp_path, "--overwrite") == 0
    assert len((tmp_path / "sft.jsonl").read_text().splitlines()) == 5 and (tmp_path / "mine").read_text() == "mine"


def write(path, responses):
    path.write_text("".join(json.dumps({"prompt": PROMPT, "response": text}) + "\n" for text in responses))
    return str(path)


def test_judge_compares_equal_numbers_of_responses(tmp_path, capsys):
    before = write(tmp_path / "before.jsonl", [" a b c d e", " f g"])  # 4 pairs in the first response
    after = write(tmp_path / "after.jsonl", [" a b c"])  # 2
    assert builtin_reviews.main(["judge", before, after]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["before.jsonl", "after.jsonl"]
    assert ["distinct_bigrams", "5", "2"] in [line.split() for line in lines]
    assert lines[-1] == "distinct bigrams of the first 1 responses, second file to first: 0.500"


def test_judge_takes_empty_responses_and_names_the_line_without_one(tmp_path, capsys):
    assert builtin_reviews.main(["judge", write(tmp_path / "empty.jsonl", ["", " a b"])]) == 0
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps({"prompt": PROMPT, "response": ""}) + "\n" + json.dumps({"prompt": PROMPT}) + "\n")
    assert builtin_reviews.main(["judge", str(bad)]) == 2
    assert "bad.jsonl, line 2: " in capsys.readouterr().err
    with pytest.raises(UserError, match=r"bad.jsonl, line 2: found the columns: prompt; needed: prompt \+ response"):
        builtin_reviews.read_samples(bad)
