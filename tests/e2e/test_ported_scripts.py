"""The commands into which the pages docs/from_*.md turn scripts of other systems, run with tiny models.

Paths, lengths and the number of steps are changed, and nothing else.
"""

import json
import re
import runpy

import pytest

from scripts.harness.programs import command_line, metric_lines, run_words
from tests.test_docs_flags import DOCS, commands
from training.data.sources import open_source

PAGES = ("from_trl", "from_openrlhf", "from_trlx", "from_verl", "from_ms_swift")
COMMANDS = [(page, number) for page in PAGES for number in range(len(commands(page)[1]))]
COMMANDS += [("port_trl_ppo", 0)]


@pytest.fixture
def prompts(tiny):
    """A file with enough prompts for a step of these scripts, beside the held-out ones."""
    return tiny.write("many_prompts", [{"prompt": f"w{i % 60 + 4:02d} w{i % 7 + 4:02d}"} for i in range(300)])


@pytest.mark.parametrize("page, number", COMMANDS)
def test_a_ported_command_trains(page, number, tiny, prompts, tmp_path, monkeypatch):
    (tmp_path / "sentiments.py").write_text("def positive(prompts, responses):\n    return [1.0 for _ in responses]\n")
    (tmp_path / "rules.py").write_text("def score(prompts, responses, rows):\n    return [1.0 for _ in responses]\n")
    monkeypatch.chdir(tmp_path)
    words = commands(page)[1][number]
    here = {"data_path": prompts, "output_dir": tmp_path / "out", "actor_model_name_or_path": tiny.folder / "sft"}
    here |= {"critic_model_name_or_path": tiny.folder / "reward"} if "--critic_model_name_or_path" in words else {}
    here |= {"eval_data_path": tiny.folder / "prompts.jsonl"} if "--eval_data_path" in words else {}
    sizes = {"max_steps": 1, "max_prompt_seq_len": 6, "max_answer_seq_len": 8, "dtype": "fp32"}
    assert run_words(3, words + command_line(here | sizes)) == 0
    assert [line["step"] for line in metric_lines(tmp_path / "out")] == [0, 1]


def test_ms_swifts_data_script_writes_messages_that_step_3_reads(tmp_path, monkeypatch):
    """docs/from_ms_swift.md: its script, on a data set of alpaca's form in a folder."""
    page = (DOCS / "from_ms_swift.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hub").mkdir()
    lines = [{"instruction": f"w{i}", "input": "" if i % 2 else "w99", "output": "w04"} for i in range(40)]
    (tmp_path / "hub" / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "prompts.py").write_text(text.replace('"vicgalle/alpaca-gpt4"', '"hub"').replace("20000", "40"))
    runpy.run_path("prompts.py")
    found = [record for part in open_source("prompts.jsonl").training for _, record in part]
    asked = sorted(message["content"] for record in found for message in record["prompt"])
    assert asked == sorted(f"w{i}" if i % 2 else f"w{i}\nw99" for i in range(40))


def test_a_ported_data_script_and_reward_object_are_those_of_the_run(tiny, tmp_path, monkeypatch):
    """docs/port_trl_ppo.md: its two files and its last command, on tiny models."""
    page = (DOCS / "port_trl_ppo.md").read_text(encoding="utf-8")
    files = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, flags=re.DOTALL))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hub").mkdir()
    lines = [{"prompt": f" w{i + 10} w{i + 11}\n", "completion": "w04"} for i in range(40)]
    (tmp_path / "hub" / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    changes = {
        '"trl-internal-testing/descriptiveness-sentiment-trl-style"': '"hub"',
        '"descriptiveness"': '"train"',
        '["bright", "cold", "narrow", "silent"]': '["w05", "w06", "w07"]',
    }
    for name, text in files.items():
        for theirs, ours in changes.items():
            text = text.replace(theirs, ours)
        (tmp_path / name).write_text(text)
    runpy.run_path("prompts.py")
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert prompts == [line["prompt"].strip() for line in lines]
    here = {"actor_model_name_or_path": tiny.folder / "sft", "num_eval_prompts": 8, "max_steps": 1}
    here |= {"max_prompt_seq_len": 6, "max_answer_seq_len": 8, "dtype": "fp32"}
    here |= {"per_device_generation_batch_size": 8, "per_device_training_batch_size": 8}
    assert run_words(3, commands("port_trl_ppo")[1][1] + command_line(here)) == 0
    samples = [json.loads(line) for line in (tmp_path / "out/ppo/samples/after.jsonl").read_text().splitlines()]
    assert len(samples) == 8
    assert all(row["score"] == sum(row["response"].split().count(w) for w in ("w05", "w06", "w07")) for row in samples)
