"""The function of docs/step_rewards.md in step 3."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from scripts.harness.programs import Tiny, metric_lines, run_here

PAGE = Path(__file__).parents[2] / "docs" / "step_rewards.md"


def test_the_page_s_function_trains(tiny: Tiny, tmp_path, capfd):
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    file = tmp_path / "steps.py"
    file.write_text(source)
    flags = {"reward_function": f"{file}:new_words", "output_dir": tmp_path / "out", "overlap_rewards": True}
    given = tiny.flags(3, **flags, dtype="fp32", critic_model_name_or_path=None)
    result = run_here(3, {name: value for name, value in given.items() if value is not None}, capfd)
    assert result.code == 0, result.stderr
    spec = importlib.util.spec_from_file_location("steps_of_the_page", file)
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    rows = [
        json.loads(line)
        for path in sorted((tmp_path / "out" / "samples").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    assert len(rows) >= 16 and len({row["score"] for row in rows}) > 1
    for row in rows:
        assert row["score"] == pytest.approx(sum(number for _, number in page.steps(row["response"])), abs=1e-6)
    first = next(line for line in metric_lines(tmp_path / "out") if "objective/scores" in line)
    assert first["objective/non_score_reward"] == pytest.approx(0.0, abs=1e-6)  # the actor is the reference
    assert first["objective/rlhf_reward"] == pytest.approx(first["objective/scores"], abs=1e-6) != 0
