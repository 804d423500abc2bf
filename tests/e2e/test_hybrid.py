"""A composite model with linear attention goes through steps 1, 2 and 3 on two ranks, ZeRO-3, and step 3 is resumed."""

import itertools
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

from engine.models.loading import load_policy, load_scorer
from scripts.harness.models import save_random
from scripts.harness.programs import MACHINE, forked, metric_lines
from tests.engine.models.test_composite import ROWS, whole_config


@pytest.mark.slow
def test_a_composite_hybrid_goes_through_all_steps(tiny, tmp_path):
    whole = AutoModelForImageTextToText.from_config(whole_config("qwen3_5"), dtype=torch.float32)
    base = save_random(whole, tmp_path / "base")

    def run(name: str, step: int, **flags) -> str:
        # A character is a token of this family.
        long = {"max_prompt_seq_len": 20} if step > 1 else {}
        long |= {"max_seq_len": 48} if step < 3 else {}
        result = forked(step, tiny.flags(step, output_dir=tmp_path / name, **long, **flags))
        assert result.code == 0, result.stdout + result.stderr
        return result.stdout

    supervised = {"zero_stage": 3, "learning_rate": 1e-3, "max_steps": 3}
    run("sft", 1, model_name_or_path=base, **supervised)
    run("reward", 2, model_name_or_path=tmp_path / "sft", **supervised)
    ppo = {
        "actor_model_name_or_path": tmp_path / "sft",
        "critic_model_name_or_path": tmp_path / "reward",
        "actor_zero_stage": 3,
        "critic_zero_stage": 3,
        "max_steps": 4,
        "save_steps": 2,
        "kl_coef": 0.1,
        "old_logprobs": "forward",
        "actor_learning_rate": 1e-3,
        "critic_learning_rate": 1e-3,
        "num_warmup_steps": 0,
    }
    said = run("ppo", 3, **ppo)
    assert "padded rows (layers that keep a state would carry it from row to row)" in said
    assert "decoding plain: layers keep a state" in said

    lines = metric_lines(tmp_path / "ppo")
    assert lines[1]["objective/kl"] == 0.0 < lines[-1]["objective/kl"]
    assert all(line["rollout/logprob_gap"] < 1e-5 for line in lines[1:]), lines

    shutil.copytree(tmp_path / "ppo", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/checkpoints/step_000004")
    for name in ("actor", "critic"):
        shutil.rmtree(tmp_path / "resumed" / name)
    run("resumed", 3, **ppo, resume=tmp_path / "resumed")
    for one, other in itertools.zip_longest(lines, metric_lines(tmp_path / "resumed")):
        assert {k: v for k, v in one.items() if not k.startswith(MACHINE)} == {
            k: v for k, v in other.items() if not k.startswith(MACHINE)
        }
    for name in ("actor", "critic"):
        first, again = (tmp_path / run / name / "model.safetensors" for run in ("ppo", "resumed"))
        assert first.read_bytes() == again.read_bytes()

    for name, kind, load in (
        ("actor", AutoModelForCausalLM, load_policy),
        ("critic", AutoModelForSequenceClassification, load_scorer),
    ):
        path = tmp_path / "ppo" / name
        model, info = kind.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        with torch.no_grad():
            theirs = model.eval()(input_ids=ROWS)[0]
            ours = load(str(path), torch.float32).model.eval()(input_ids=ROWS)[0]
        assert torch.equal(ours, theirs)
