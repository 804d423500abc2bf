"""The function of docs/step_rewards.md in step 3, and its process reward model in steps 2 and 3."""

import importlib.util
import json
import re
import runpy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

from scripts.harness.programs import Tiny, metric_lines, run_here
from training.tools.toy.model import main as model_main

PAGE = Path(__file__).parents[2] / "docs" / "step_rewards.md"


def test_the_page_s_function_trains(tiny: Tiny, tmp_path, capfd):
    source = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
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


@pytest.fixture(scope="module")
def chains(tmp_path_factory) -> Path:
    """Data of the page's example, fewer of each kind, and its base model."""
    folder = tmp_path_factory.mktemp("chains")
    sizes = [f"--{name}={count}" for name, count in (("sft", 40), ("steps", 64), ("prompts", 40), ("eval_prompts", 8))]
    example = runpy.run_path(str(PAGE.parents[1] / "examples" / "chains.py"))
    example["main"](["--output_dir", str(folder / "data"), *sizes])
    words = ["--characters", "--data", str(folder / "data" / "sft.jsonl"), "--output_dir", str(folder / "base")]
    assert model_main([*words, "--num_layers", "2"]) == 0
    return folder


@torch.no_grad()
def sum_of_steps(prm: Path, prompt: str, response: str) -> float:
    """The probabilities of label 1 at the line ends and at EOS, added up, by transformers alone."""
    tokenizer, model = AutoTokenizer.from_pretrained(prm), AutoModelForTokenClassification.from_pretrained(prm)
    text, begins = prompt + response, len(prompt)  # a character is a token
    shares = model(torch.tensor([tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]])).logits[0].softmax(-1)[:, 1]
    lines = response.split("\n")
    ends = [begins + len("\n".join(lines[: place + 1])) for place, line in enumerate(lines) if line.strip()]
    return float(shares[ends].sum())


@pytest.mark.parametrize("lora", [None, 4])
def test_a_process_reward_model_is_trained_and_scores_steps(chains, tiny: Tiny, tmp_path, capfd, lora):
    prm, out = tmp_path / "prm", tmp_path / "ppo"
    flags = {"model_name_or_path": chains / "base", "data_path": chains / "data" / "steps.jsonl", "step_end": "\\n"}
    flags |= {"max_seq_len": 72, "output_dir": prm, "dtype": "fp32", "held_out": 8, "learning_rate": 1e-2}
    flags |= {"max_steps": 3} if lora is None else {"max_steps": 3, "lora_dim": lora, "only_optimize_lora": True}
    result = run_here(2, flags, capfd)
    assert result.code == 0, result.stderr
    assert "held-out step accuracy" in result.stdout
    flags = {"actor_model_name_or_path": chains / "base", "data_path": chains / "data" / "prompts.jsonl"}
    flags |= {"reward_model_name_or_path": prm / "adapter" if lora else prm, "output_dir": out, "dtype": "fp32"}
    flags |= {"max_prompt_seq_len": 12, "max_answer_seq_len": 24, "num_eval_prompts": 8, "max_steps": 2}
    flags |= {"per_device_generation_batch_size": 8, "per_device_training_batch_size": 8, "length_penalty": 0.001}
    result = run_here(3, flags, capfd)
    assert result.code == 0, result.stderr
    assert "a number for each step, which ends with '\\n'" in result.stdout
    rows = [json.loads(line) for path in sorted((out / "samples").glob("*.jsonl")) for line in path.open()]
    ended = [row for row in rows if row["tokens"] == len(row["response"]) + 1]  # a character is a token, then EOS
    assert ended
    for row in ended:
        assert row["scores_model"] == pytest.approx(sum_of_steps(prm, row["prompt"], row["response"]), abs=1e-5)
    assert (out / "critic" / "config.json").is_file()  # it began as the process reward model
    assert "ForSequenceClassification" in (out / "critic" / "config.json").read_text() or lora
