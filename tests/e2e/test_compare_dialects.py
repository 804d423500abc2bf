"""What scripts/compare_dialects.py reads and writes."""

import json

import pytest

from engine.algorithms import DIALECTS, get_dialect, parse_settings
from engine.errors import UserError
from scripts.compare_dialects import (
    BEGIN,
    DOCS,
    END,
    SETTINGS,
    Setting,
    between_markers,
    is_complete,
    read_result,
    step3_words,
    table,
)
from training.flags.parsing import parse_flags
from training.flags.rlhf_arguments import RLHFFlags

BEFORE = {
    "step": 0,
    "samples": 0,
    "eval/score": -0.25,
    "eval/kl": 0.0,
    "eval/response_length": 20.0,
    "eval/distinct_bigrams": 800.0,
}
AFTER = {
    "step": 2,
    "samples": 256,
    "time/step": 1.5,
    "eval/score": 1.5,
    "eval/kl": 2.5,
    "eval/response_length": 24.5,
    "eval/distinct_bigrams": 600.0,
}
FIRST = {"step": 1, "samples": 128, "time/step": 2.25}
WORDS = ["training/step3_rlhf.py", "--dialect", "default", "--set", "truncate_token= ."]


def a_run(folder, *rows, command):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.json").write_text(json.dumps({"starts": [{"command": command}]}))
    return folder


def test_a_run_is_kept_if_it_is_the_same_and_came_to_its_end(tmp_path):
    command = "deepspeed --num_nodes 1 --num_gpus 2 training/step3_rlhf.py --dialect default --set 'truncate_token= .'"
    done = a_run(tmp_path / "done", BEFORE, FIRST, AFTER, command=command)
    assert is_complete(done, WORDS, steps=2)
    assert not is_complete(done, [*WORDS[:-1], "truncate_token="], steps=2)
    assert not is_complete(a_run(tmp_path / "stopped", BEFORE, FIRST, command=command), WORDS, steps=2)
    assert not is_complete(tmp_path / "never", WORDS, steps=2)


def test_the_table_exactly(tmp_path):
    result = read_result(a_run(tmp_path / "run", BEFORE, FIRST, AFTER, command=""))
    setting = SETTINGS["trl_rloo"]
    assert table({"trl_rloo": result}).splitlines()[2] == (
        f"| `trl_rloo` | {setting.actor_lr:g}, - | 256 | -0.25 | 1.50 | +1.75 | 2.50 | 800 | 600 | 4 |"
    )
    assert {line.count("|") for line in table({"trl_rloo": result}).splitlines()} == {11}


def test_only_what_stands_between_the_markers_is_replaced():
    assert between_markers(f"a\n{BEGIN}\nold\n{END}\nb\n", "new\nlines") == f"a\n{BEGIN}\nnew\nlines\n{END}\nb\n"
    assert between_markers(DOCS.read_text(), "new").count("new\n" + END) == 1
    for text in ("a", f"{END}\n{BEGIN}", f"{BEGIN}\n{BEGIN}\n{END}"):
        with pytest.raises(UserError, match="Put them back"):
            between_markers(text, "new")


@pytest.mark.parametrize("name", DIALECTS)
def test_a_dialect_keeps_its_choices(name, tmp_path):
    words = step3_words(name, SETTINGS[name], tmp_path, tmp_path / name, ranks=2)
    args = parse_flags(RLHFFlags, words[1:], "")
    dialect, _ = args.resolved_dialect()
    texts = {"query_start", "query_end", "truncate_token", "truncate_after", "pad_token"}
    assert set(get_dialect(name).differences(dialect)) <= {"actor_lr", "critic_lr", *texts}
    assert set(parse_settings(SETTINGS[name].texts)) <= texts
    assert args.per_device_generation_batch_size * 2 == SETTINGS[name].prompts


def test_sizes_are_shared_by_the_ranks(tmp_path):
    words = step3_words("trl_rloo", Setting(3, 64, 20, 1e-3, None), tmp_path, tmp_path / "out", ranks=4)
    assert words[words.index("--per_device_generation_batch_size") + 1] == "16"
    assert words[words.index("--per_device_training_batch_size") + 1] == "32"  # two responses a prompt
