"""Which rows a step reads of several data sets: its part, what is held out, also where some will be dropped for their
length, and how often each is seen.
"""

import gzip
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from engine.errors import UserError
from tests.training.data.tiny_tokenizers import word_tokenizer
from training.data.examples import SFTExamples, sft_fit
from training.data.record_forms import PAIRS, PROMPTS, SFT, TEXTS
from training.data.row_selection import load_rows, parse_split, split_held_out, split_part


@pytest.fixture
def data(tmp_path):
    def write(name: str, count: int, start: int = 0) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"text": f"t{n}"}) + "\n" for n in range(start, start + count)))
        return str(path)

    return write


def load(*paths, phase=1, seed=7, **options):
    """(numbers of the training rows, numbers of the held-out rows)."""
    both = load_rows(list(paths), SFT, word_tokenizer(), phase=phase, seed=seed, **options)
    return tuple([int(row["text"][1:]) for row in rows] for rows in both)


def test_parts_of_the_steps_are_disjoint_and_cover_everything(data):
    path = data("a.jsonl", 103)
    parts = {phase: load(path, phase=phase, split="2,4,4")[0] for phase in (1, 2, 3)}
    assert [len(part) for part in parts.values()] == [21, 41, 41]  # 20.6 | 61.8 | 103, rounded, are the borders
    assert sorted(parts[1] + parts[2] + parts[3]) == list(range(103))
    assert all(part == sorted(part) for part in parts.values()) and parts[1] != list(range(21))
    assert load(path, split="2,4,4")[0] == parts[1] == load(path, split="20,40,40")[0]
    assert load(path, split="2,4,4", seed=8)[0] != parts[1]


@pytest.mark.parametrize(
    "size, shares", [(1, "1,1,1"), (2, "6,2,2"), (10, "1,0,0"), (999, "0.1,0.2,0.7"), (7, "0,0,5")]
)
def test_no_row_is_lost_in_rounding(size, shares):
    parts = [split_part(size, parse_split(shares), phase, seed=1) for phase in (1, 2, 3)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(size))


@pytest.mark.parametrize(
    "split", ["", "1", "2,4", "2,4,4,1", "a,b,c", "2,4,", "-1,4,4", "0,0,0", "nan,1,1", "inf,1,1", "2;4;4"]
)
def test_strings_that_are_no_split(split):
    with pytest.raises(UserError, match=f"--data_split {split!r}: give the shares of steps 1, 2 and 3 as three"):
        parse_split(split)


def test_a_step_without_a_share_is_told(data):
    with pytest.raises(UserError, match=r"--data_split 1,0,0: of the 5 rows of .*a.jsonl, none is left for step 2"):
        load(data("a.jsonl", 5), split="1,0,0", phase=2)


def test_weights_say_how_often_a_data_set_is_seen(data):
    paths = [data("a.jsonl", 10), data("b.jsonl", 10, 100), data("c.jsonl", 10, 200)]
    rows = load(*paths, weights=[1, 0.5, 2.3])[0]
    seen = Counter(rows)
    assert sorted(n for n in seen if n < 100) == list(range(10)) and all(seen[n] == 1 for n in range(10))
    assert len([n for n in seen if 100 <= n < 200]) == 5
    assert Counter(seen[n] for n in range(200, 210)) == {2: 7, 3: 3}
    assert load(*paths, weights=[1, 0.5, 2.3])[0] == rows != load(*paths, weights=[1, 0.5, 2.3], seed=8)[0]
    assert load(*paths, weights=[])[0] == [*range(10), *range(100, 110), *range(200, 210)]


@pytest.mark.parametrize(
    "weights, message",
    [
        ([1], r"--data_weights 1: 1 weights for 2 data sets of --data_path\. Give one for each"),
        ([1, 0.01], r"--data_weights 0.01: of the 4 rows of .*b.jsonl none is left"),
    ],
)
def test_weights_that_cannot_work(data, weights, message):
    with pytest.raises(UserError, match=message):
        load(data("a.jsonl", 4), data("b.jsonl", 4, 100), weights=weights)


def test_records_are_not_given_twice(data):
    one, copy, other = data("a.jsonl", 9), data("copy.jsonl", 9), data("b.jsonl", 9, 100)
    with pytest.raises(UserError, match=r"--data_path: .*copy.jsonl holds the same records as .*a.jsonl"):
        load(one, copy)
    with pytest.raises(UserError, match=r"copy.jsonl: its held-out records are trained on, by --data_path"):
        load(one, other, eval_data_path=[copy])
    folder = data("set/train.jsonl", 9), data("set/test.jsonl", 9)
    with pytest.raises(UserError, match=r"set: its held-out records are trained on"):
        load(str(Path(folder[0]).parent), held_out=3)
    assert len(load(one, eval_data_path=[other])[1]) == 9


def test_held_out_rows_are_in_no_training_row_however_often_they_are_seen(data):
    paths = [data("a.jsonl", 20), data("b.jsonl", 20, 100)]
    training, held_out = load(*paths, weights=[2, 1], held_out=0.25)
    assert len(held_out) == len(set(held_out)) == 10 and not set(training) & set(held_out)
    assert sorted(set(training) | set(held_out)) == [*range(20), *range(100, 120)]
    assert set(Counter(n for n in training if n < 100).values()) == {2}


def test_the_held_out_rows_of_a_part_are_of_that_part(data):
    path = data("a.jsonl", 100)
    part = set(load(path, phase=2, split="1,1,2")[0])
    training, held_out = load(path, phase=2, split="1,1,2", held_out=5)
    assert len(held_out) == 5 and set(training) | set(held_out) == part


def test_a_held_out_split_of_its_own_is_used(data, tmp_path):
    data("set/train.jsonl", 10)
    data("set/test.jsonl", 8, 50)
    folder, other = str(tmp_path / "set"), data("b.jsonl", 10, 100)
    assert load(folder, held_out=0.5) == (list(range(10)), list(range(50, 58)))
    training, held_out = load(folder, other, held_out=3)
    assert [n for n in held_out if n < 100] == list(range(50, 58)) and len(held_out) == 11
    assert sorted(training + held_out) == [*range(10), *range(50, 58), *range(100, 110)]
    parts = [load(folder, phase=phase, split="1,1,2", held_out=0.5)[1] for phase in (1, 2, 3)]
    assert [len(part) for part in parts] == [2, 2, 4] and sorted(sum(parts, [])) == list(range(50, 58))
    assert load(folder)[1] == []  # none are asked for


def test_eval_data_path_goes_before_all(data, tmp_path):
    data("set/train.jsonl", 10)
    data("set/test.jsonl", 8, 50)
    folder, other = str(tmp_path / "set"), data("b.jsonl", 6, 100)
    options = {"held_out": 0.5, "split": "1,1,2"}
    assert load(folder, eval_data_path=[other], **options)[1] == list(range(100, 106))
    assert load(other, eval_data_path=folder, **options)[1] == list(range(50, 58))


def test_a_limit_of_held_out_rows(data):
    training, held_out = load(data("a.jsonl", 10), eval_data_path=data("b.jsonl", 100, 100), eval_limit=5)
    assert len(training) == 10 and len(set(held_out)) == 5 and held_out == sorted(held_out)
    assert held_out != list(range(100, 105))
    assert load(data("a.jsonl", 10), eval_data_path=data("b.jsonl", 5, 100), eval_limit=5)[1] == list(range(100, 105))


def test_too_few_rows_to_hold_any_out(data):
    with pytest.raises(UserError, match=r"--data_path .*a.jsonl, --num_eval_prompts: cannot hold out 3 of 3 rows"):
        load(data("a.jsonl", 3), held_out=3, held_out_flag="--num_eval_prompts")


def test_rows_are_checked_when_they_are_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "answer": 1}\n\n{"prompt": 2}\n')
    rows, _ = load_rows(str(path), PROMPTS, word_tokenizer(), phase=3, seed=0)
    assert len(rows) == 2 and rows[0] == {"prompt": "a", "answer": 1} and len(rows[:1]) == 1
    with pytest.raises(UserError, match=r"a.jsonl, line 3, column prompt: found a number"):
        list(rows)


def test_sets_that_are_not_divided(data, tmp_path):
    for name, start in (("divided", 0), ("undivided", 100)):
        data(f"{name}/train.jsonl", 10, start)
        data(f"{name}/test.jsonl", 4, start + 50)
    training, held_out = load(
        str(tmp_path / "divided"), undivided=[str(tmp_path / "undivided")], split="1,0,1", held_out=0.5
    )
    assert len(training) == 15 and training[5:] == list(range(100, 110))
    assert len(held_out) == 6 and held_out[2:] == list(range(150, 154))


def test_fingerprints_are_of_the_rows(data):
    def fingerprint(path, form=SFT, **options):
        return load_rows(path, form, word_tokenizer(), phase=1, seed=7, **options)[0].fingerprint

    one, copy, other = data("a.jsonl", 9), data("copy.jsonl", 9), data("b.jsonl", 9, 1)
    assert fingerprint(one) == fingerprint(copy)
    different = [
        fingerprint(one),
        fingerprint(other),
        fingerprint(one, PROMPTS),
        fingerprint(one, split="1,1,1"),
        fingerprint(one, weights=[2]),
        fingerprint(one, held_out=2),
        fingerprint([one, other]),
    ]
    assert len(set(different)) == len(different)


@pytest.mark.parametrize(
    "held_out, count",
    [(0.2, 4), (0.999, None), (3, 3), (19, 19), (3.0, 3), (20, None), (0, None), (0.01, None), (1.5, None), (-1, None)],
)
def test_split_sizes(held_out, count):
    if count is None:
        with pytest.raises(UserError, match=rf"cannot hold out {held_out} of 20 rows: both parts need"):
            split_held_out(20, held_out, seed=0)
    else:
        assert split_held_out(20, held_out, seed=0).tolist().count(True) == 20 - count


PINNED = {  # of the training rows and the held-out ones, by form
    "text": (
        "61e5f1767caa425be516ff4ef6e92b061939776aa71a65722ac0396b97d30d99",
        "1dbac80a115522d4ec04da000dd6f0309d3f7b7af5daffb6139b2cc03d6efa60",
    ),
    "pair": (
        "ba8a25b4d6eb754c666c7be32e51d372ef144ba739bea6f4b4b9218f568b0e66",
        "80902c211b16f47a62762d79658da08cdcb54f0a3e90e9d740df0396ea0a84d3",
    ),
    "prompt": (
        "eb69b6c72a8fddad1ee83b9ba5b8ceae5e7611fd3419785a5cac80c480e14faf",
        "67b3d6b0e87c26ab22be6f0c920328bcce41707f5e3137a6d529d9be06e94287",
    ),
    "pretraining text": (
        "f9e5f176a82ada177eb8f886b3bcb12b7f5953899f7815df9efff9b51b61e2b2",
        "b64efd9f836e1eef90f6c28b9c9cc6365c5bba65b49e249c176bac3860c47985",
    ),
}


def test_order_and_fingerprints_stay_what_they_were(data):
    """Checkpoints compare fingerprints: the same data, seed and flags have to give the same ones for ever."""
    paths = [data("a.jsonl", 12), data("b.jsonl", 7, 100)]
    options = {"phase": 3, "seed": 7, "weights": [1.5, 2], "split": "1,1,2", "held_out": 3}
    assert load(*paths, **options) == ([2, 3, 4, 5, 9, 2, 4, 104, 104], [1, 105, 106])
    found = {
        form.name: tuple(rows.fingerprint for rows in load_rows(paths, form, word_tokenizer(), **options))
        for form in (SFT, PAIRS, PROMPTS, TEXTS)
    }
    assert found == PINNED


@pytest.mark.parametrize("copy", ["train.jsonl.gz", "train-2.jsonl"])
def test_a_folder_holds_no_records_twice(data, tmp_path, copy):
    (tmp_path / "set").mkdir()
    content = Path(data("set/train.jsonl", 9)).read_bytes()
    (tmp_path / "set" / copy).write_bytes(gzip.compress(content) if copy.endswith("gz") else content)
    with pytest.raises(
        UserError, match=r"set holds the same records twice, from .*, line 1 and from .*, line 1 on"
    ) as told:
        load(str(tmp_path / "set"))
    assert "set/train.jsonl, line 1" in str(told.value) and f"set/{copy}, line 1" in str(told.value)
    (tmp_path / "set" / copy).write_bytes(gzip.compress(b"") if copy.endswith("gz") else b"")
    (tmp_path / "set" / "train-3.jsonl").write_bytes(b"")  # nothing, twice
    assert len(load(str(tmp_path / "set"))[0]) == 9


SEED = 7
LONG = "a b c d e f g h"  # 9 tokens with EOS


@pytest.fixture
def short_and_long(tmp_path):
    """Writes rows, of which each third one is short, into a file; returns its path."""

    def write(name: str, count: int) -> str:
        rows = [{"text": "a b" if number % 3 == 0 else LONG, "number": number} for number in range(count)]
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def load_short(path: str, asked: list | None = None, **options):
    """(training rows, held-out rows), counted without those of more than 5 tokens."""
    fit = sft_fit(word_tokenizer(), 5, overlong="drop")

    def keeps(row: dict) -> bool:
        if asked is not None:
            asked.append(row)
        return not fit(row).reason

    return load_rows(path, SFT, word_tokenizer(), phase=1, seed=SEED, keeps=keeps, **options)


def lines(rows) -> list[int]:
    """The numbers of the rows' records."""
    return rows.places[:, 1].tolist()


def examples(rows) -> SFTExamples:
    return SFTExamples(rows, word_tokenizer(), 5, overlong="drop")


@pytest.mark.parametrize("held_out, count", [(4, 4), (9, 9)])
def test_held_out_rows_are_counted_without_those_that_are_dropped(short_and_long, held_out, count):
    path = short_and_long("rows.jsonl", 30)
    training, apart = load_short(path, held_out=held_out)
    assert len(apart) == count == len(examples(apart)) and examples(apart).dropped == 0
    assert sorted(lines(training) + lines(apart)) == list(range(30))
    drawn = [number for number in np.random.default_rng(SEED).permutation(30).tolist() if number % 3 == 0]
    assert lines(apart) == sorted(drawn[:count])
    kept = examples(training)
    assert (len(kept), kept.dropped) == (10 - count, 20)
    again = load_short(path, held_out=held_out)
    assert [rows.fingerprint for rows in again] == [training.fingerprint, apart.fingerprint]


@pytest.mark.parametrize("held_out", [0.02, 0.15, 0.2, 0.5, 0.9])
def test_a_fraction_is_one_of_those_that_stay(short_and_long, held_out):
    training, apart = load_short(short_and_long("rows.jsonl", 300), held_out=held_out)
    order = np.random.default_rng(SEED).permutation(300).tolist()
    stay = [number for number in order[: round(300 * held_out)] if number % 3 == 0]
    assert lines(apart) == sorted(stay) and abs(len(apart) / 100 - held_out) < 0.05
    assert sorted(lines(training) + lines(apart)) == list(range(300))


def test_a_fraction_of_few_that_stay_is_at_least_one(short_and_long, tmp_path):
    path, order = tmp_path / "few.jsonl", np.random.default_rng(SEED).permutation(40).tolist()
    for short in (order[-2:], order[1:3], order[-1:]):
        path.write_text("".join(json.dumps({"text": "a" if n in short else LONG}) + "\n" for n in range(40)))
        if len(short) == 2:
            assert lines(load_short(str(path), held_out=0.05)[1]) == short[:1]
        else:  # it would be held out, and nothing left
            with pytest.raises(UserError, match="cannot hold out 0.05 of 1 rows, which are all that are not left out,"):
                load_short(str(path), held_out=0.05)


def test_rows_are_asked_for_only_until_there_are_enough(short_and_long):
    path, asked = short_and_long("rows.jsonl", 300), []
    load_short(path, asked, held_out=4)
    order = np.random.default_rng(SEED).permutation(300).tolist()
    # Up to the fifth that stays, for one has to be left to train on.
    assert len(asked) == [number for number, row in enumerate(order, start=1) if row % 3 == 0][4]


def test_without_lengths_the_same_rows_are_held_out_as_ever(short_and_long):
    path = short_and_long("rows.jsonl", 30)
    usual = load_rows(path, SFT, word_tokenizer(), phase=1, seed=SEED, held_out=4)
    all_kept = load_rows(path, SFT, word_tokenizer(), phase=1, seed=SEED, held_out=4, keeps=lambda row: True)
    assert [rows.fingerprint for rows in usual] == [rows.fingerprint for rows in all_kept]
    assert lines(usual[1]) == sorted(np.random.default_rng(SEED).permutation(30)[:4].tolist())


def test_too_few_that_stay_are_told(short_and_long):
    with pytest.raises(UserError, match=r"cannot hold out 10 of 10 rows, which are all that are not left out, .*of 30"):
        load_short(short_and_long("rows.jsonl", 30), held_out=10)
    assert len(load_short(short_and_long("rows.jsonl", 30), held_out=9)[1]) == 9


@pytest.mark.parametrize("limit, count", [(None, 21), (4, 4), (7, 7), (20, 7), (30, 7)])
def test_of_a_test_split_under_a_limit_those_that_stay_are_counted(short_and_long, tmp_path, limit, count):
    short_and_long("set/train.jsonl", 30), short_and_long("set/test.jsonl", 21)
    training, apart = load_short(str(tmp_path / "set"), held_out=5, eval_limit=limit)
    assert len(training) == 30 and len(apart) == count
    assert limit is None or examples(apart).dropped == 0
    assert lines(apart) == sorted(set(lines(apart)))


def test_what_is_wrong_with_all_records_is_told_of_the_first(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a"}\n' * 40)
    with pytest.raises(UserError, match="rows.jsonl, line 1: found the columns: question"):
        load_rows(str(path), SFT, word_tokenizer(), phase=1, seed=SEED, held_out=4, keeps=lambda row: True)
