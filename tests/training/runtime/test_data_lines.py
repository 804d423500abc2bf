"""What a run says of its data: how much was cut and dropped, what to do about it, and what the model is shown."""

import json

import pytest

from scripts.harness.models import POSITIONS, make_causal_lm
from tests.training.data.tiny_tokenizers import word_tokenizer
from training.config.supervised import RewardFlags, SFTFlags
from training.data.examples import PairExamples, Prompts, SFTExamples
from training.runtime import dry_run
from training.runtime.first_lines import counted, shown_rows, supervised_lines, too_long
from training.step2_reward import first_lines

WORDS = "Human: Assistant:"
TOKENIZER = word_tokenizer("<s>", words=WORDS)
ROW = {"prompt": "\n\nHuman: a b\n\nAssistant: c\n\nHuman: d\n\nAssistant:", "response": " e f"}
TURNS = "Human: a b Assistant: c Human: d Assistant:"
SHORT, LONG = {"prompt": "a", "response": " b"}, {"prompt": "a", "response": " b c d e f g h i j k l m"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of POSITIONS positions."""
    return make_causal_lm(tmp_path_factory.mktemp("models") / "model")


def sft(rows, limit=8, **options) -> SFTExamples:
    return SFTExamples(rows, TOKENIZER, limit, **options)


def test_what_is_cut_and_dropped_is_counted_in_words():
    assert sft([SHORT] * 40).told("texts") == "40 texts (0 cut, 0 dropped)"
    assert sft([SHORT] * 1999 + [ROW]).told("texts") == "2,000 texts (1 cut: 0.1 %, 0 dropped)"
    assert sft([SHORT] * 7 + [ROW], overlong="drop").told("texts") == "7 of 8 texts (0 cut, 1 dropped: 12.5 %)"
    pair = {"prompt": "a", "chosen": " b", "rejected": " c"}
    rows = [pair, pair, {**pair, "rejected": " b"}, {"prompt": "a", "chosen": " b" * 9, "rejected": " b" * 9 + " c"}]
    pairs = PairExamples(rows, TOKENIZER, 8)
    assert pairs.told("pairs") == (
        "2 of 4 pairs (0 cut, 1 dropped: 25.0 %, 1 left out as chosen and rejected are the same: 25.0 %)"
    )


def test_held_out_rows_that_are_too_few_are_told():
    training, held_out = sft([SHORT] * 40), sft([SHORT] * 3)
    assert counted(training, "texts", held_out, asked=3) == "40 texts (0 cut, 0 dropped), 3 held out"
    assert counted(training, "texts", held_out, asked=4).endswith(
        ", 3 held out (fewer than the 4 asked for: the held-out data have no more that fit)"
    )
    assert counted(training, "texts", held_out).endswith(", 3 held out")
    assert counted(training, "texts", None).endswith(", 0 held out")
    assert counted(training, "texts", sft([SHORT, ROW])).endswith(", 2 held out (1 cut: 50.0 %, 0 dropped)")


@pytest.mark.parametrize(
    "long, overlong, line",
    [
        (5, "cut_prompt", None),  # 95 of 100 fit
        (
            6,
            "cut_prompt",
            "warning: 6.0 % of these 100 rows are longer than --max_seq_len 8, and were cut; 95 % of them fit into 12. "
            "Give --max_seq_len 12, if the model and memory allow.",
        ),
        (
            6,
            "drop",
            "warning: 6.0 % of these 100 rows are longer than --max_seq_len 8, and were dropped; 95 % of them fit into "
            "12. Give --max_seq_len 12, if the model and memory allow, or give --overlong cut_prompt, "
            "which keeps answers.",
        ),
    ],
)
def test_above_5_percent_there_is_a_warning_with_the_length_that_holds_95(long, overlong, line):
    # 12 tokens each: BOS, 8 of the turns, 3 of the answer; of one row more.
    longer = {**ROW, "response": " e f g h"}
    rows = [SHORT] * (100 - long) + [ROW] * (long - 1) + [longer]
    assert sft(rows, overlong=overlong).warnings("--max_seq_len", 8, overlong) == ([line] if line else [])


def test_of_equal_pairs_the_length_is_not_warned_of():
    pair, equal = ({"prompt": "a", "chosen": " b", "rejected": rejected} for rejected in (" c", " b"))
    long, prompt = {**pair, "prompt": ROW["prompt"]}, {**equal, "prompt": ROW["prompt"]}
    pairs = PairExamples([pair] * 60 + [prompt] * 40, TOKENIZER, 8)  # those of 11 tokens are all equal
    assert (pairs.cut, pairs.dropped, pairs.equal, pairs.needed) == (0, 0, 40, 4)
    assert pairs.warnings("--max_seq_len", 8, "cut_prompt") == []
    # 4 of 64 that differ are longer, but 4 of all 104.
    assert PairExamples([pair] * 60 + [prompt] * 40 + [long] * 4, TOKENIZER, 8).warnings("--f", 8, "cut_prompt") == []
    (line,) = PairExamples([pair] * 50 + [prompt] * 40 + [long] * 10, TOKENIZER, 8).warnings("--f", 8, "cut_prompt")
    assert line.startswith(
        "warning: 10.0 % of these 100 rows are longer than --f 8, and were cut; 95 % of them fit into 11."
    )


def test_a_text_is_shown_with_its_cut_and_where_learning_begins():
    assert shown_rows(sft([SHORT, ROW], 9), TOKENIZER, 3) == [
        "whole, row 1: 4 tokens",
        "  '<s> a' -> ' b </s>'",
        "cut, row 2: 7 of 12 tokens",
        "  '<s>' [5 tokens cut] ' Human: d Assistant:' -> ' e f </s>'",
    ]
    assert shown_rows(sft([ROW], 9, loss_on="all"), TOKENIZER, 3)[1] == (
        "  '<s>' [5 tokens cut] -> ' Human: d Assistant: e f </s>'"
    )
    assert shown_rows(sft([SHORT, LONG], 8, overlong="cut_answer"), TOKENIZER, 1, ["cut"]) == [
        "cut, row 2: 8 of 15 tokens",
        "  '<s> a' -> ' b c d e f g' [7 tokens cut]",
    ]
    assert shown_rows(sft([SHORT, ROW], 9, overlong="drop"), TOKENIZER, 3, ["dropped"]) == [
        "dropped, row 2: 12 tokens, more than 9",
        f"  '<s> {TURNS}' -> ' e f </s>'",
    ]


def test_pairs_and_prompts_are_shown():
    rows = [{"prompt": ROW["prompt"], "chosen": " e f", "rejected": " g"}, {**SHORT, "chosen": " b", "rejected": " b"}]
    assert shown_rows(PairExamples(rows + rows[:1], TOKENIZER, 9), TOKENIZER, 1) == [
        "cut, row 1: 7 of 12 tokens",
        "  prompt: '<s>' [5 tokens cut] ' Human: d Assistant:'",
        "  chosen: -> ' e f </s>'",
        "  rejected: -> ' g </s>'",
        "equal, row 2: chosen and rejected are the same",
        "  prompt: '<s> a'",
        "  chosen: -> ' b </s>'",
        "  rejected: -> ' b </s>'",
    ]
    assert shown_rows(Prompts([ROW], TOKENIZER, 5), TOKENIZER, 1) == [
        "cut, row 1: 4 of 9 tokens",
        "  '<s>' [5 tokens cut] ' Human: d Assistant:' ->",
    ]


def test_long_texts_lose_their_middle():
    (_, line) = shown_rows(sft([{"text": "a b c d e " * 40}], 300), TOKENIZER, 1)
    # Behind <s> 80 characters from the start, and 80 to the end.
    start, end = " a b c d e" * 8, "c d e" + " a b c d e" * 7 + " </s>"
    assert line == f"  '<s>' -> {start!r} ... {end!r}"


def test_the_recommended_length_is_one_that_the_model_has_positions_for():
    def advice(most: int, overlong="cut_prompt") -> str:
        (line,) = sft([SHORT] * 9 + [ROW], overlong=overlong).warnings("--max_seq_len", 8, overlong, lambda: most)
        return line.partition("95 % of them fit into 12. ")[2]

    assert advice(12) == advice(13) == "Give --max_seq_len 12, if memory allows."
    assert advice(11) == (
        "The model's positions allow --max_seq_len 11 at most: give that, if memory allows, or another model, or "
        "shorter rows."
    )
    assert advice(8) == "The model has no positions for more: give another model, or shorter rows."
    assert advice(8, "drop") == (
        "The model has no positions for more: give another model, or shorter rows, or give --overlong cut_prompt, "
        "which keeps answers."
    )


def flags(kind, model, **options):
    return kind(**{"output_dir": "o", "data_path": ["d"], "model_name_or_path": str(model), **options})


def test_at_the_start_of_a_run_one_row_of_each_kind_that_does_not_fit_is_shown(model):
    args = flags(SFTFlags, model, max_seq_len=9)
    lines = too_long(sft([SHORT, ROW, ROW], 9), "texts", "--max_seq_len", args, TOKENIZER, [model])
    assert lines[0].startswith("warning: 66.7 % of these 3 rows") and lines[1:] == [
        "what the model is shown of the texts (at -> what is learned begins):",
        "  cut, row 2: 7 of 12 tokens",
        "    '<s>' [5 tokens cut] ' Human: d Assistant:' -> ' e f </s>'",
    ]
    assert too_long(sft([SHORT]), "texts", "--max_seq_len", args, TOKENIZER, [model]) == []


def test_step_2_tells_of_the_prompts_that_it_normalises_on_too(model):
    args = flags(RewardFlags, model, max_seq_len=20, max_prompt_seq_len=5, max_answer_seq_len=POSITIONS - 6)
    args.overlong = "drop"
    pairs = PairExamples([{"prompt": "a", "chosen": " b", "rejected": " c"}] * 16, TOKENIZER, 20)
    prompts = Prompts([ROW, SHORT, SHORT, SHORT], TOKENIZER, 5, "drop")
    assert first_lines(args, TOKENIZER, pairs, pairs, prompts) == [
        "16 pairs (0 cut, 0 dropped), 16 held out; 1 steps on 1 rank",
        "the run: 1 step, 1 epoch; 2 evaluations; no restart points: a run that dies begins anew "
        "(--save_steps, --save_minutes)",
        "3 of 4 prompts (0 cut, 1 dropped: 25.0 %) to normalise scores on",
        "warning: 25.0 % of these 4 rows are longer than --max_prompt_seq_len 5, and were dropped; 95 % of them fit "
        "into 9. The model's positions allow --max_prompt_seq_len 6 at most: give that, if memory allows, or "
        "another model, or shorter rows, or give --overlong cut_prompt, which keeps answers.",
    ]
    fitting = Prompts([SHORT], TOKENIZER, 5)
    assert len(first_lines(args, TOKENIZER, pairs, pairs, fitting)) == len(
        first_lines(args, TOKENIZER, pairs, pairs, None)
    )


def test_held_out_rows_that_held_out_does_not_number_are_not_held_against_it(model):
    args = flags(SFTFlags, model, eval_data_path=["e"], max_seq_len=8, held_out=100)
    line = supervised_lines(args, "texts", sft([SHORT] * 16), sft([SHORT] * 3), TOKENIZER)[0]
    assert line == "16 texts (0 cut, 0 dropped), 3 held out; 1 steps on 1 rank"


def test_a_dry_run_shows_three_rows_of_each_kind(tmp_path, capsys, monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.setenv(name, "1")
    data = tmp_path / "rows.jsonl"
    row = {"prompt": "\n\nHuman: w10 w11\n\nAssistant: w12\n\nHuman: w13\n\nAssistant:", "response": " w14"}
    short = {"prompt": "\n\nHuman: w20\n\nAssistant:", "response": " w21"}
    data.write_text("".join(json.dumps(record) + "\n" for record in [row, short] * 40))
    words = (
        f"deepspeed training/step1_sft.py --model_name_or_path {make_causal_lm(tmp_path / 'model')} --data_path {data}"
    )
    words += f" --output_dir {tmp_path / 'out'} --held_out 10 --max_seq_len 6"
    assert dry_run.main(words.split()) == 0
    printed = capsys.readouterr().out
    assert "70 texts (" in printed and " dropped), 10 held out" in printed
    assert printed.count("  whole, ") == printed.count("  cut, ") == 3
    assert f"\n  cut, {data}, line " in printed and ": 5 of 10 tokens\n" in printed
    assert "\n    [5 tokens cut] '<unk> w13 <unk>' -> ' w14 </s>'\n" in printed
    assert dry_run.main([*words.split(), "--overlong", "drop"]) == 0
    printed = capsys.readouterr().out
    assert "30 of 70 texts (0 cut, 40 dropped: 57.1 %), 10 held out" in printed and printed.count("  dropped, ") == 3
    assert not (tmp_path / "out").exists()
