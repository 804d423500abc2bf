"""Step 3 with an environment: two ranks at ZeRO-3, errors and time-outs, every dialect, kill and resume."""

import json
import signal

import pytest

from engine.algorithms import DIALECTS
from scripts.harness.programs import Tiny, differences, forked, metric_lines, run_here

# Three turns; the reward of the last one is the row's own number. One row raises, another one hangs. It kills its rank
# in the step after a checkpoint, if a file asks for that.
TALK = """
import os, signal, time
from pathlib import Path
from engine.rollout import Reply

HERE = Path(__file__).parent

class Talk:
    def __init__(self, row):
        self.row = row

    def step(self, turn):
        kill = HERE / "kill"
        if kill.exists() and (HERE / "killed/checkpoints/step_000002/manifest.json").exists() and turn.number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if turn.number == 1 and self.row["does"] == "raise":
            raise RuntimeError("nothing is said in this row")
        if turn.number == 1 and self.row["does"] == "hang":
            time.sleep(8)
        if turn.number == 2:
            return Reply(reward=self.row["number"], done=True)
        return Reply(" w05 w06", reward=0.25)
"""
ENDS = [f"w{number:02d}" for number in range(4, 64, 2)]  # half of the words end a turn: 4 tokens hold one mostly


@pytest.fixture
def talk(tiny: Tiny, tmp_path) -> dict:
    """Flags of a run with this environment, and rows of which one raises and one hangs."""
    (tmp_path / "talk.py").write_text(TALK)
    rows = [json.loads(line) for line in (tiny.folder / "prompts.jsonl").read_text().splitlines()]
    for place, row in enumerate(rows):
        row |= {"number": place / 8, "does": {3: "raise", 5: "hang"}.get(place, "talk")}
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = {"stop": ENDS, "max_answer_seq_len": 24, "max_turn_tokens": 6, "environment_timeout": 2}
    return tiny.flags(3, **words, data_path=data, environment=f"{tmp_path}/talk.py:Talk", dtype="fp32") | {
        "critic_model_name_or_path": None
    }


def told(flags: dict) -> dict[str, float]:
    """{prompt: the number of its row}."""
    rows = [json.loads(line) for line in flags["data_path"].read_text().splitlines()]
    return {row["prompt"]: row["number"] for row in rows}


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_last_bit(talk, tmp_path):
    more = {"actor_zero_stage": 3, "critic_zero_stage": 3, "save_steps": 2, "max_steps": 4, "critic_pretrain_steps": 1}
    more |= {"set": ["dynamic_sampling=2", "samples_per_prompt=2"], "num_eval_prompts": 8, "eval_steps": 2}
    whole = forked(3, talk | more | {"output_dir": tmp_path / "whole"})
    assert whole.code == 0, whole.stderr
    (tmp_path / "kill").touch()
    killed = talk | more | {"output_dir": tmp_path / "killed"}
    assert forked(3, killed).code == -signal.SIGKILL
    (tmp_path / "kill").unlink()
    resumed = forked(3, killed | {"resume": "auto"})
    assert resumed.code == 0, resumed.stderr
    assert differences(tmp_path / "whole", tmp_path / "killed") == []

    numbers = told(talk)
    samples = [json.loads(line) for line in (tmp_path / "whole/samples/before.jsonl").read_text().splitlines()]
    full = [row for row in samples if sum(turn["by"] == "policy" for turn in row["turns"]) == 3]
    assert len(full) > len(samples) / 2
    for row in full:  # held-out rows come after the training rows: each has its own
        assert row["score"] == pytest.approx(0.5 + numbers[row["prompt"]])
    lines = metric_lines(tmp_path / "whole")
    assert all(2 < line["rollout/turns"] < 3 for line in lines[1:])
    assert lines[0]["eval/turns"] > 2 and lines[0]["critic_pretrain/turns"] > 2
    assert sum(line["rollout/environment_errors"] for line in lines[1:]) > 0
    assert "RuntimeError: nothing is said in this row" in whole.stdout and "no answer within 2 s" in whole.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, dialect in DIALECTS.items() if dialect.length_rule == "sampled"])
def test_a_step_of_each_dialect(talk, tmp_path, capfd, name):
    sizes = {
        "num_eval_prompts": 0,
        "max_steps": 1,
        "output_dir": tmp_path / "out",
        "dialect": name,
        "set": "mini_batches=1",
    }
    result = run_here(3, talk | sizes, capfd)
    assert result.code == 0, result.stderr
    (line,) = (line for line in metric_lines(tmp_path / "out") if "rollout/turns" in line)
    assert line["rollout/turns"] > 2 and line["policy/grad_norm"] > 0
