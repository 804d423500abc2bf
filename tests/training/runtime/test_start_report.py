"""What a run says before it starts: its steps, evaluations and checkpoints; its data, how much was cut and dropped, and
what the model is shown; its dialect, its score, and settings of a config.json that it takes otherwise.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.algorithms import DIALECTS, NOTES, get_dialect
from engine.models.loading import load_policy
from scripts.harness.models import POSITIONS, make_causal_lm, make_config
from tests.training.config.command_lines import parse
from tests.training.data.tiny_tokenizers import word_tokenizer
from training.checkpoints.files import Schedule
from training.config.step3 import RLHFFlags
from training.config.supervised import RewardFlags, SFTFlags
from training.data.examples import PairExamples, Prompts, SFTExamples
from training.runtime.models import HARMLESS, model_notes
from training.runtime.start_report import (
    RunSchedule,
    counted,
    dialect_lines,
    score_lines,
    shown_rows,
    too_long,
)
from training.step2_reward import first_lines
from training.supervised import supervised_lines
from training.tools import dry_run


def said_of_course(count: int, epochs: float = 1.0, evaluates=None, **schedule) -> list[str]:
    return RunSchedule(count, epochs, Schedule(**schedule), evaluates).lines()


def test_steps_evaluations_and_points_are_counted():
    told = said_of_course(59, 0.9904, lambda step: step % 20 == 0 or step == 59, steps=10)
    # Before the first step, after 20, 40 and 59; points after 10, 20, 30, 40 and 50.
    assert told == ["the run: 59 steps, 0.99 epochs; 4 evaluations; 5 checkpoints before the end, every 10 steps"]


def test_a_point_of_the_last_step_is_none_before_the_end():
    assert RunSchedule(40, 2, Schedule(steps=20)).points == 1
    assert RunSchedule(40, 2, Schedule(steps=40)).points == 0
    assert RunSchedule(41, 2, Schedule(steps=20)).points == 2


def test_points_that_are_asked_for_and_never_come_are_warned_of():
    _, warning = said_of_course(59, steps=100)
    assert warning == (
        "warning: no checkpoint before the last step (--save_steps 100, and the run has 59): a run that dies begins "
        "anew. Give --save_steps 14, or --save_minutes."
    )
    assert RunSchedule(59, 1, Schedule(steps=14)).points == 4


def test_a_run_without_points_says_so_in_its_line():
    (line,) = said_of_course(59)
    assert line.endswith("; no checkpoints: a run that dies begins anew (--save_steps, --save_minutes)")


@pytest.mark.parametrize(
    "schedule, said",
    [
        ({"minutes": 30.0}, "a checkpoint every 30 minutes"),
        ({"keep": 1, "keep_best": True}, "one wherever an evaluation finds a better score"),
        ({"steps": 9, "minutes": 0.5}, "1 checkpoint before the end, every 9 steps and a checkpoint every 0.5"),
    ],
)
def test_points_by_the_clock_or_by_scores_are_told(schedule, said):
    (line,) = said_of_course(10, 1, **schedule)
    assert said in line


def test_one_is_not_a_number_of_many():
    told = said_of_course(1, 1, lambda step: step == 1, steps=1)
    assert told[0] == "the run: 1 step, 1 epoch; 2 evaluations; no checkpoints before the end, every step"
    assert told[1].endswith("Give --save_minutes.")
    assert "no evaluations" in said_of_course(3)[0]


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


def plan_of(examples, held_out, prompts=None):
    return SimpleNamespace(tokenizer=TOKENIZER, examples=examples, held_out=held_out, prompts=prompts, resume=None)


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
    args.dtype = "bf16"
    args.overlong = "drop"
    pairs = PairExamples([{"prompt": "a", "chosen": " b", "rejected": " c"}] * 16, TOKENIZER, 20)
    prompts = Prompts([ROW, SHORT, SHORT, SHORT], TOKENIZER, 5, "drop")
    assert first_lines(args, plan_of(pairs, pairs, prompts)) == [
        "16 pairs (0 cut, 0 dropped), 16 held out; 1 step on 1 rank",
        "the run: 1 step, 1 epoch; 2 evaluations; no checkpoints: a run that dies begins anew "
        "(--save_steps, --save_minutes)",
        "ZeRO stage 0; bf16",
        "3 of 4 prompts (0 cut, 1 dropped: 25.0 %) to normalise scores on",
        "warning: 25.0 % of these 4 rows are longer than --max_prompt_seq_len 5, and were dropped; 95 % of them fit "
        "into 9. The model's positions allow --max_prompt_seq_len 6 at most: give that, if memory allows, or "
        "another model, or shorter rows, or give --overlong cut_prompt, which keeps answers.",
    ]
    fitting = Prompts([SHORT], TOKENIZER, 5)
    assert len(first_lines(args, plan_of(pairs, pairs, fitting))) == len(first_lines(args, plan_of(pairs, pairs)))


def test_held_out_rows_that_held_out_does_not_number_are_not_held_against_it(model):
    args = flags(SFTFlags, model, eval_data_path=["e"], max_seq_len=8, held_out=100)
    line = supervised_lines(args, "texts", plan_of(sft([SHORT] * 16), sft([SHORT] * 3)))[0]
    assert line == "16 texts (0 cut, 0 dropped), 3 held out; 1 step on 1 rank"


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


@pytest.mark.parametrize("name", DIALECTS)
def test_a_system_is_told_from_what_is_otherwise_here(name):
    lines = dialect_lines(get_dialect(name), {}).splitlines()
    assert lines[0] == f"dialect {name}" and len(lines) == (2 if name in NOTES else 1)
    one_trunk = "value head on the policy's trunk" in lines[-1] and "actor and critic are two engines" in lines[-1]
    assert one_trunk == (name in ("openai", "trlx"))
    assert ("two layers, drawn at random" in lines[-1]) == (name == "trlx")
    assert ("its learning rate falls to a tenth" in lines[-1]) == name.startswith("reinforce_pp")


def test_what_flags_have_changed_stands_behind_it():
    lines = dialect_lines(get_dialect("openai"), {"kl_coef": (0.15, 0.2)}).splitlines()
    assert lines[-1] == "  kl_coef = 0.2 (given; the dialect's is 0.15)" and len(lines) == 3


REWARD = ("--reward_model_name_or_path", "reward")
SCALED = ("score_scaling=running", "score_order=clip_scale", "missing_end=replace", "missing_end_value=-1")


def said_of_score(*words: str) -> list[str]:
    args = parse(*words, flags_class=RLHFFlags)
    return score_lines(args, args.resolved.dialect)


@pytest.mark.parametrize(
    "words, formula",
    [
        ((), "reward model, clipped at 5"),
        (("--reward_model_weight", "2", "--dialect", "grpo"), "2 reward model"),
        (
            (*REWARD, "--reward_model_weight", "0.5", "--reward_function", "rules.py:has_number")
            + ("--reward_weights", "0.5", "--length_penalty", "0.01"),
            "0.5 reward model + 0.5 has_number - 0.01 a token, clipped at 5",
        ),
        (
            (*REWARD, "--reward_function", "a.py:f", "b.py:f", "--reward_weights", "1", "-0.2"),
            "1 reward model + 1 f - 0.2 f_2 (b.py:f), clipped at 5",
        ),
        (
            (*REWARD, "--reward_url", "http://judge:80/a?key=secret", "http://b/?key=c")
            + ("--missing_eos_penalty", "1"),
            "1 reward model + 1 reward server judge:80 and b, less 1 where a response has no end, clipped at 5",
        ),
        (
            ("--set", *SCALED, "overlong_buffer=0.25", "--max_answer_seq_len", "64"),
            "reward model, clipped at 5, divided by the standard deviation of all scores so far, replaced by -1 "
            "where a response has no end, less up to 1 in the last 25% of 64 tokens",
        ),
    ],
)
def test_the_score_is_told_as_a_formula(words, formula):
    assert said_of_score(*words) == [f"score = {formula}"]


def test_a_reward_model_that_only_the_critic_starts_from_is_told():
    formula, warning = said_of_score("--reward_function", "rules.py:right", "--reward_weights", "2")
    assert formula == "score = 2 right, clipped at 5"
    assert warning.startswith("WARNING: the score does not use the reward model reward, from which the critic starts.")
    assert warning.endswith("--reward_model_name_or_path reward --reward_model_weight 0.5 --reward_weights 0.5")


def test_a_pretrained_critic_could_not_score(tmp_path):
    (tmp_path / "critic_pretraining.json").write_text("{}")
    given = ("--critic_model_name_or_path", str(tmp_path), "--reward_function", "rules.py:right")
    assert said_of_score(*given) == ["score = right, clipped at 5"]


def test_the_flags_that_are_told_mix_half_and_half():
    words = ("--reward_function", "rules.py:right", "format")
    told = said_of_score(*words)[-1].partition("give ")[2].split()
    assert said_of_score(*words, *told) == ["score = 0.5 reward model + 0.25 right + 0.25 format, clipped at 5"]
    assert parse(*words, *told, flags_class=RLHFFlags).spec.reward_paths == ("reward",)


def test_one_line_for_each_setting_names_the_flags(tmp_path):
    scores = {"mean": 0.5, "std": 2.0, "normalize_reward": False}
    for name, settings in (("actor", {}), ("critic", scores), ("reward", scores | {"normalize_reward": True})):
        make_config("llama").save_pretrained(tmp_path / name)
        path = tmp_path / name / "config.json"
        routed = {"output_router_logits": name != "reward"}
        path.write_text(json.dumps(json.loads(path.read_text()) | routed | settings))
    paths = {name: str(tmp_path / name) for name in ("actor", "critic", "reward")}
    args = SimpleNamespace(looks_at=lambda path: True, trust_remote_code=False)
    assert model_notes(args, paths.items()) == [
        "--actor, --critic: no balancing loss is trained with, which config.json asks for (output_router_logits)",
        "--critic: scores stay without mean and std of config.json (OpenRLHF's normalize_reward is false)",
        "--reward: scores are (score - mean) / std of config.json (OpenRLHF's normalize_reward is true)",
    ]
    args.looks_at = lambda path: False
    assert model_notes(args, paths.items()) == []


@pytest.mark.parametrize("longest, factors", [(40, "short"), (41, "long")])
def test_the_factors_of_longrope_are_told(tmp_path, longest, factors):
    path = Path(make_causal_lm(tmp_path))
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 40}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    (path / "config.json").write_text(
        json.dumps(json.loads((path / "config.json").read_text()) | {"rope_parameters": rope})
    )
    given = ("--model_name_or_path", str(path), "--data_path", "x", "--max_seq_len", str(longest))
    (told,) = model_notes(parse(*given, flags_class=SFTFlags), [("model_name_or_path", str(path))])
    assert told.startswith(
        f"--model_name_or_path: longrope's {factors} factors in all rows, since rows may have {longest}"
    )


@pytest.mark.parametrize(
    "settings, kept",
    [
        ({"max_new_tokens": 9, "temperature": 1.0, "num_beams": 1, "eos_token_id": 2}, ""),
        ({"repetition_penalty": 1.2, "suppress_tokens": [3]}, "repetition_penalty 1.2, suppress_tokens [3]"),
        ({"do_sample": True, "top_k": 1}, "top_k 1, do_sample True (transformers saves no temperature, "),
        ({"temperature": 0.6}, "temperature 0.6, do_sample turned on (transformers saves no temperature, "),
    ],
)
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])  # of the model, if it has no other
def test_settings_of_generate_that_a_saved_model_keeps_are_told(tmp_path, file, settings, kept):
    path = Path(make_causal_lm(tmp_path / "model"))
    if file == "config.json":
        (path / "generation_config.json").unlink()
    known = json.loads((path / file).read_text())
    (path / file).write_text(json.dumps(known | settings))
    args = parse("--model_name_or_path", str(path), "--data_path", "x", flags_class=SFTFlags)
    told = "\n".join(model_notes(args, [("model_name_or_path", str(path))]))
    start = "--model_name_or_path: saved models keep settings of generate() that nothing here draws with: "
    assert told.startswith(start + kept) if kept else told == ""
    load_policy(str(path), torch.float32).model.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved/generation_config.json").read_text())
    assert saved.get("do_sample", False) == ("do_sample" in kept)
    assert all(f"{name} {value}" in kept or name in HARMLESS or value == 1 for name, value in settings.items())
