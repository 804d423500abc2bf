"""The commands into which the pages docs/from_*.md turn scripts of other systems, run with tiny models.

Paths, lengths and the number of steps are changed, and nothing else.
"""

import pytest

from scripts.harness.programs import command_line, metric_lines, run_words
from tests.test_docs_flags import commands

PAGES = ("from_trl", "from_openrlhf", "from_trlx", "from_verl", "from_ms_swift")
COMMANDS = [(page, number) for page in PAGES for number in range(len(commands(page)[1]))]


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
