"""The environments of examples/ and of docs/environments.md in step 3: what the tables show is played again by hand."""

import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.rollout import Reply
from scripts.harness.programs import Tiny, metric_lines, run_here
from training.tools.toy import model

ROOT = Path(__file__).parents[2]
HELD_OUT = 64  # prompts
PAGE = ROOT / "docs" / "environments.md"

# Messages as the toy models of characters can write them: the call `[add a17b25]`, the result `T42`.
CHAT = """{% for m in messages %}{% if m.role == "assistant" %}A{{ m.content }}{% for c in m.tool_calls or [] %}\
[{{ c.function.name }} {% for k, v in c.function.arguments.items() %}{{ k }}{{ v }}{% endfor %}]{% endfor %}</s>
{% else %}{{ {"user": "Q", "tool": "T"}[m.role] }}{{ m.content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}A{% endif %}"""
CALLS = {
    "defaults": {"role": "assistant"},
    "start_anchor": "\nA",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\[(?P<name>\w+) ",
            "close": "]",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"(?P<key>[a-z]+)(?P<value>\d+)"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": "</s>"},
    },
}


def module(file: Path, name: str):
    spec = importlib.util.spec_from_file_location(name, file)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def run(step: int, capfd, **flags) -> None:
    result = run_here(step, {name: value for name, value in flags.items() if value is not None}, capfd)
    assert result.code == 0, result.stderr


def learned(folder: Path, records: list[dict], epochs: int, capfd) -> Path:
    """A model of characters that step 1 has shown these records."""
    (folder / "sft.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    data = folder / "sft.jsonl"
    assert model.main(["--characters", "--data", str(data), "--output_dir", str(folder / "base")]) == 0
    learning = {"learning_rate": 5e-3, "lr_scheduler_type": "cosine", "num_warmup_steps": 20, "dtype": "fp32"}
    sizes = {"max_seq_len": 48, "per_device_train_batch_size": 64, "num_train_epochs": epochs, "held_out": 32}
    run(1, capfd, model_name_or_path=folder / "base", data_path=data, output_dir=folder / "sft", **learning, **sizes)
    return folder / "sft"


def rows_of(output: Path) -> list[dict]:
    """The held-out rows before and after step 3."""
    return [
        json.loads(line) for file in sorted(output.glob("samples/*.jsonl")) for line in file.read_text().splitlines()
    ]


def sums(folder: Path, actor: Path, **flags) -> dict:
    """Flags of two steps of 64 responses."""
    return {
        "actor_model_name_or_path": actor,
        "output_dir": folder / "out",
        "max_prompt_seq_len": 16,
        "per_device_generation_batch_size": 64,
        "per_device_training_batch_size": 64,
        "num_eval_prompts": HELD_OUT,
        "max_steps": 2,
        "dtype": "fp32",
        **flags,
    }


def played(environment, turns: list[dict]) -> list[dict]:
    """What the row shows, if the environment answers these turns of the policy."""
    shown = []
    for number, text in enumerate(turn["text"] for turn in turns if turn["by"] == "policy"):
        reply = environment.step(SimpleNamespace(text=text, number=number))
        reply = Reply(reply) if isinstance(reply, str) else reply
        shown.append({"by": "policy", "text": text} | ({"reward": pytest.approx(reply.reward)} if reply.reward else {}))
        if not reply.done and len(shown) < len(turns):
            shown.append({"by": "environment", "text": reply.text})
    return shown


@pytest.mark.parametrize(
    ("name", "kind", "stop", "turns", "epochs"),
    [("calculator", "Calculator", "]", 2, 10), ("guessing_game", "Game", "?", 4, 3)],
)
def test_an_example_runs(name, kind, stop, turns, epochs, tmp_path, capfd):
    example = module(ROOT / "examples" / f"{name}.py", name)
    example.make_data(tmp_path / "data")
    records = [json.loads(line) for line in (tmp_path / "data" / "sft.jsonl").read_text().splitlines()]
    actor = learned(tmp_path, records, epochs, capfd)
    data = {"data_path": tmp_path / "data/prompts.jsonl", "eval_data_path": tmp_path / "data/eval_prompts.jsonl"}
    spoken = {"environment": f"{ROOT}/examples/{name}.py:{kind}", "stop": stop, "max_turns": turns}
    run(3, capfd, **sums(tmp_path, actor, max_answer_seq_len=16, **data, **spoken))
    asked = [json.loads(line) for line in data["eval_data_path"].read_text().splitlines()]
    rows = rows_of(tmp_path / "out")
    assert len(rows) == 2 * HELD_OUT and max(len(row["turns"]) for row in rows) > 1
    for row in rows:
        records = [record for record in asked if record["prompt"] == row["prompt"]]  # one of the sum, all of the game
        again = [played(getattr(example, kind)(record), row["turns"]) for record in records]
        assert row["turns"] in again
        assert row["score"] == pytest.approx(sum(turn.get("reward", 0.0) for turn in row["turns"]))
    assert len({row["score"] for row in rows}) > 1


def test_the_calculator_as_a_class_of_trl_s(tmp_path, capfd):
    """Tools by a chat template and a response template; the page shows the class as it is."""
    file = ROOT / "examples" / "calculator.py"
    example = module(file, "calculator_of_trl")
    (source,) = [block for block in blocks() if "def reset" in block]
    assert source in file.read_text(encoding="utf-8")
    (tmp_path / "chat.jinja").write_text(CHAT)
    (tmp_path / "calls.json").write_text(json.dumps(CALLS))
    pairs = [(first, second) for first in range(10, 30) for second in range(10, 30)]
    steps = [{"prompt": "abcdefghijklmnopqrstuvwxyz-", "response": "1"}]  # the tokenizer knows these
    for a, b in pairs:
        first, call = f"Q{a}+{b}\nA", f"[add a{a}b{b}]"
        second = f"{first}{call}</s>\nT{a + b}\nA"
        steps += [{"prompt": first, "response": call}, {"prompt": second, "response": f"[submit number{a + b}]"}]
    actor = learned(tmp_path, steps, 10, capfd)
    prompts = [{"prompt": [{"role": "user", "content": f"{a}+{b}"}], "answer": a + b} for a, b in pairs]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    spoken = {"chat_template": tmp_path / "chat.jinja", "response_template": tmp_path / "calls.json", "max_turns": 3}
    environment = {"environment": f"{file}:CalculatorTools", **spoken}
    run(3, capfd, **sums(tmp_path, actor, data_path=tmp_path / "prompts.jsonl", max_answer_seq_len=48, **environment))
    called = 0
    for row in rows_of(tmp_path / "out"):
        tools, results = example.CalculatorTools(), []
        a, b = map(int, re.findall(r"\d+", row["prompt"]))
        tools.reset(answer=a + b)
        for turn in row["turns"]:
            if turn["by"] == "environment":
                assert turn["text"] == f"\nT{results.pop()}\nA"
            elif call := re.search(r"\[add a(\d+)b(\d+)\]", turn["text"]):
                results.append(tools.add(int(call[1]), int(call[2])))
            elif call := re.search(r"\[submit number(\d+)\]", turn["text"]):
                results.append(tools.submit(int(call[1])))
        called += tools.get_reward()
        assert row["score"] == pytest.approx(tools.get_reward())
    assert called > 0


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_page_s_smallest_environment(tiny: Tiny, tmp_path, capfd):
    (source,) = [block for block in blocks() if "class Retry" in block]
    (tmp_path / "retry.py").write_text(source.replace(" No. Try again:", " w05 w06"))
    prompts = tiny.write("questions", [{"prompt": "w04 w05 w06 w07", "answer": f"w0{i % 10}"} for i in range(40)])
    given = tiny.flags(3, data_path=prompts, critic_model_name_or_path=None, max_answer_seq_len=32, dtype="fp32")
    spoken = {"environment": f"{tmp_path}/retry.py:Retry", "max_turns": 4, "max_turn_tokens": 6}
    run(3, capfd, **given, **spoken, output_dir=tmp_path / "out")
    for row in rows_of(tmp_path / "out"):
        assert row["score"] in (0.0, *(pytest.approx(1.0 - 0.2 * number) for number in range(4)))
    assert metric_lines(tmp_path / "out")
