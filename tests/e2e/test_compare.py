"""The comparison program from its command line: its numbers beside a straight-line computation, and its messages."""

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from engine.experience_maker import ExperienceMaker
from scripts.harness.models import make_adapter, make_causal_lm
from scripts.harness.programs import Result, assert_one_message, command_line, forked_program, run_here, snapshot
from tests.distributed import plain
from training.runtime.launch import run
from training.tools.compare import __main__ as compare


@pytest.fixture(scope="module")
def models(tiny, tmp_path_factory) -> Path:
    """A folder with near/ (of the SFT model's architecture), same/ (a copy of it), other/ (a Llama), adapter, and
    run/ (of two steps, with a checkpoint)."""
    folder, generator = tmp_path_factory.mktemp("models"), torch.Generator().manual_seed(3)
    for name, size in (("near", 0.1), ("same", 0.0)):
        shutil.copytree(tiny.folder / "sft", folder / name)
        state = load_file(folder / name / "model.safetensors")
        moved = {key: value + size * torch.randn(value.shape, generator=generator) for key, value in state.items()}
        save_file(moved, folder / name / "model.safetensors", {"format": "pt"})
    make_causal_lm(folder / "other", "llama", seed=5)
    make_adapter(folder / "lora", str(tiny.folder / "sft"))
    return folder


def flags_of(tiny, models: list, **changes) -> dict:
    """Flags of a short comparison, with these changes."""
    return {
        "models": models,
        "data_path": tiny.folder / "prompts.jsonl",
        "reward_model_name_or_path": tiny.folder / "reward",
        "num_eval_prompts": 9,
        "max_prompt_seq_len": 6,
        "max_answer_seq_len": 8,
        "per_device_eval_batch_size": 4,
        **changes,
    }


def compared(flags: dict, capfd) -> Result:
    """Run the program in this process."""
    capfd.readouterr()
    with mock.patch("engine.distributed.shutdown"):
        code = run(compare.main, compare.CompareFlags, compare.__doc__, command_line(flags))
    return Result(code, *capfd.readouterr())


def found_in(out: Path) -> dict:
    """What was written."""
    return json.loads((out / "comparison.json").read_text())


def test_kl_is_that_of_plain_models_and_scores_are_those_of_responses(tiny, models, tmp_path, capfd):
    make, seen = ExperienceMaker.make_experience, []

    def noted(self, *args, **kwargs):
        seen.append(make(self, *args, **kwargs))
        return seen[-1]

    folders = {"sft": tiny.folder / "sft", "near": models / "near", "other": models / "other"}
    given = [f"{name}={folder}" for name, folder in folders.items()]
    with mock.patch.object(ExperienceMaker, "make_experience", noted):
        flags = flags_of(tiny, given, output_dir=tmp_path / "out", temperature=0.8, num_samples_per_prompt=2)
        result = compared(flags, capfd)
    assert result.code == 0, result.stderr
    found = found_in(tmp_path / "out")
    assert (tmp_path / "out" / "comparison.html").read_text().startswith("<!DOCTYPE html>")
    first = plain.policy(tiny.folder, "sft")
    for model, experience in zip(found["models"], seen, strict=True):
        rollout, own = experience.rollout, plain.policy(folders[model["name"]].parent, folders[model["name"]].name)
        assert len(rollout) == 18, "nine prompts, two samples each"
        with torch.no_grad():
            apart = plain.logprobs(own, rollout, 0.8) - plain.logprobs(first, rollout, 0.8)
        kl = (apart * rollout.response_mask).sum(-1)
        assert model["kl"]["value"] == pytest.approx(kl.mean().item(), abs=1e-4)
        tokens = rollout.response_mask.sum()
        assert model["kl_per_token"]["value"] == pytest.approx((kl.sum() / tokens).item(), abs=1e-4)
        assert model["tokens"]["value"] == pytest.approx(tokens.item() / 18)
        assert model["ended"]["value"] == pytest.approx(rollout.ended.float().mean().item())
        assert model["scores"]["reward"]["value"] == pytest.approx(experience.scores.mean().item(), abs=1e-5)
    kls = {model["name"]: model["kl"]["value"] for model in found["models"]}
    assert kls["sft"] == 0.0 and kls["near"] > 0.5 and kls["other"] > 1.0
    scores = [sample["responses"]["near"]["scores"]["reward"] for sample in found["samples"]]
    base = [sample["responses"]["sft"]["scores"]["reward"] for sample in found["samples"]]
    pair = next(pair for pair in found["pairs"] if pair["model"] == "near")
    wins = sum(one > two for one, two in zip(scores, base, strict=True))
    assert (pair["wins"], pair["ties"]) == (wins, 18 - wins - pair["losses"])
    assert pair["win_rate"]["value"] == pytest.approx((pair["wins"] + pair["ties"] / 2) / 18)
    assert pair["difference"]["value"] == pytest.approx(sum(scores) / 18 - sum(base) / 18, abs=1e-6)


def test_identical_models_are_even_and_rewards_stand_side_by_side(tiny, models, tmp_path, capfd):
    (tmp_path / "rules.py").write_text("def words(prompts, responses): return [len(r.split()) for r in responses]\n")
    given = [f"sft={tiny.folder / 'sft'}", f"near={models / 'near'}", f"same={models / 'same'}"]
    flags = flags_of(tiny, given, output_dir=tmp_path / "out", reward_function=f"{tmp_path / 'rules.py'}:words")
    result = compared(flags, capfd)
    assert result.code == 0 and "same and sft tie on every response" in result.stdout, result.stderr
    found = found_in(tmp_path / "out")
    assert found["rewards"] == ["reward", "words"]
    for pair in found["pairs"]:
        if pair["model"] == "same":  # which took the place of other weights in one engine
            even = {"value": 0.5, "low": 0.5, "high": 0.5, "null": 0.5, "differs": False}
            assert pair["win_rate"] == even and pair["ties"] == 9 and pair["difference"]["value"] == 0.0
    for sample in found["samples"]:
        first, same = sample["responses"]["sft"], sample["responses"]["same"]
        assert first == same and first["kl"] == 0.0
        assert first["scores"]["words"] == len(first["response"].split())


def test_models_in_one_environment(tiny, models, tmp_path, capfd):
    """It says two words after each turn, pays for each token, and fails after a turn of one token."""
    (tmp_path / "talks.py").write_text(
        "from engine.rollout import Reply\n"
        "class Words:\n"
        "    def __init__(self, row): pass\n"
        "    def step(self, turn):\n"
        "        assert len(turn.tokens) > 1\n"
        "        return Reply(text='w05 w06', reward=float(len(turn.tokens)), done=turn.number == 2)\n"
        "def said(prompts, responses): return [len(response.split()) for response in responses]\n"
    )
    make, seen = ExperienceMaker.make_experience, []

    def noted(self, *args, **kwargs):
        seen.append(make(self, *args, **kwargs))
        return seen[-1]

    folders = {"sft": tiny.folder / "sft", "near": models / "near", "same": models / "same"}
    given = [f"{name}={folder}" for name, folder in folders.items()]
    talks = {"environment": f"{tmp_path / 'talks.py'}:Words", "reward_function": f"{tmp_path / 'talks.py'}:said"}
    flags = flags_of(tiny, given, output_dir=tmp_path / "out", max_answer_seq_len=16, stop=["w1", "w2"], **talks)
    del flags["reward_model_name_or_path"]
    with mock.patch.object(ExperienceMaker, "make_experience", noted):
        result = compared(flags, capfd)
    assert result.code == 0, result.stderr
    found = found_in(tmp_path / "out")
    assert found["rewards"] == ["said", "environment"] and found["how"]["environment"].endswith("talks.py:Words")
    first = plain.policy(tiny.folder, "sft")
    for model, experience in zip(found["models"], seen, strict=True):
        rollout, own = experience.rollout, plain.policy(folders[model["name"]].parent, folders[model["name"]].name)
        with torch.no_grad():
            apart = plain.logprobs(own, rollout, 1.0) - plain.logprobs(first, rollout, 1.0)
        drawn = rollout.action_mask
        assert set(rollout.responses[rollout.response_mask & ~drawn].tolist()) == {5, 6}
        assert model["kl"]["value"] == pytest.approx((apart * drawn).sum(-1).mean().item(), abs=1e-4)
        assert model["tokens"]["value"] == pytest.approx(drawn.sum().item() / 9)
        samples = [sample["responses"][model["name"]] for sample in found["samples"]]
        failed = sum("reward" not in sample["turns"][-1] for sample in samples)
        assert f"the environment failed in {failed / 9:.1%} of the responses" in result.stdout
        for sample, tokens in zip(samples, drawn.sum(-1).tolist(), strict=True):
            own_turns, others = sample["turns"][::2], sample["turns"][1::2]
            assert sample["tokens"] == tokens and {turn["by"] for turn in own_turns} == {"policy"}
            assert [(turn["by"], turn["text"].split()) for turn in others] == [("environment", ["w05", "w06"])] * len(
                others
            )
            unpaid = "reward" not in own_turns[-1]
            assert (
                sample["scores"]["environment"] == sum(turn.get("reward", 0.0) for turn in own_turns) == tokens - unpaid
            )
            assert sample["scores"]["said"] == sum(len(turn["text"].split()) for turn in sample["turns"])
    pairs = {pair["model"]: pair for pair in found["pairs"] if pair["reward"] == "environment"}
    assert pairs["same"]["ties"] == 9 and pairs["near"]["ties"] < 9


def test_restart_points_runs_and_adapters_are_models(tiny, models, tmp_path, capfd):
    trained = tmp_path / "run"
    flags = tiny.flags(3, output_dir=trained, save_steps=2, num_eval_prompts=2, actor_learning_rate=0.05)
    result = run_here(3, flags, capfd)
    assert result.code == 0, result.stderr
    point = trained / "checkpoints" / "step_000002"
    given = [f"sft={tiny.folder / 'sft'}", f"point={point}", f"run={trained}", f"lora={models / 'lora_adapter'}"]
    before = snapshot(trained)
    result = compared(flags_of(tiny, given, output_dir=tmp_path / "out", greedy=True), capfd)
    assert result.code == 0, result.stderr
    found = found_in(tmp_path / "out")
    for sample in found["samples"]:
        assert sample["responses"]["point"] == sample["responses"]["run"], "the run ended with that step"
    assert all(
        any(sample["responses"][name] != sample["responses"]["sft"] for sample in found["samples"])
        for name in ("run", "lora")
    )
    assert snapshot(trained) == before and not (tmp_path / "out" / "exported").exists()
    assert found["how"]["temperature"] is None and "no estimate" in found["how"]["kl"]


def test_two_ranks_find_what_one_does(tiny, models, tmp_path, capfd):
    given = [f"sft={tiny.folder / 'sft'}", f"near={models / 'near'}"]
    flags = flags_of(tiny, given, num_samples_per_prompt=2)
    assert compared({**flags, "output_dir": tmp_path / "one"}, capfd).code == 0
    result = forked_program("training.tools.compare", {**flags, "output_dir": tmp_path / "two"}, ranks=2)
    assert result.code == 0, result.stderr
    one, two = found_in(tmp_path / "one"), found_in(tmp_path / "two")
    for ours, theirs in zip(one["samples"], two["samples"], strict=True):
        assert ours["prompt"] == theirs["prompt"]
        for name, response in ours["responses"].items():
            other = theirs["responses"][name]
            assert (response["response"], response["tokens"]) == (other["response"], other["tokens"])
            assert response["scores"] == pytest.approx(other["scores"], abs=1e-5)
            assert response["kl"] == pytest.approx(other["kl"], abs=1e-4)
    assert [pair["win_rate"] for pair in one["pairs"]] == [pair["win_rate"] for pair in two["pairs"]]


BAD = {
    "one model": ({"models": ["sft"]}, "that is one model. Give two or more"),
    "nothing to judge by": ({"reward_model_name_or_path": None}, "there is nothing to judge by"),
    "no folder": ({"models": ["sft", "gone=/nowhere"]}, "--models gone: there is no folder /nowhere"),
    "other tokens": ({"models": ["sft", "more"]}, "differs from that of --models sft"),
    "a column": ({"reward_function": "math_verify", "answer_column": "sum"}, "asks for the column sum"),
    "no such environment": ({"environment": "json:Guess"}, "--environment json:Guess: "),
    "no environment": ({"environment": "json:loads"}, "--environment json:loads: it has no method step"),
    "a damaged point": ({"models": ["sft", "step_000007"]}, "--models step_000007: the checkpoint"),
}


@pytest.mark.parametrize("changes, message", BAD.values(), ids=BAD)
def test_mistakes_have_one_message(tiny, models, tmp_path, capfd, monkeypatch, changes, message):
    for name in ("empty", "step_000007/config/actor"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "step_000007" / "manifest.json").write_text("{}")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny.folder / "sft" / name, tmp_path / "step_000007" / "config" / "actor" / name)
    for name in ("sft", "reward"):
        (tmp_path / name).symlink_to(tiny.folder / name)
    shutil.copytree(models / "near", tmp_path / "more")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "more")
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(tmp_path / "more")
    monkeypatch.chdir(tmp_path)
    flags = flags_of(tiny, ["sft", f"near={models / 'near'}"], output_dir=tmp_path / "out")
    assert_one_message(compared({**flags, **changes}, capfd), [message])
    assert not [path for path in tmp_path.glob("out/*") if path.suffix != ".lock"]


def test_nothing_is_overwritten(tiny, models, tmp_path, capfd):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "comparison.json").write_text("mine")
    given = [str(tiny.folder / "sft"), str(models / "near")]
    for out, message in ((tmp_path / "out", "is not empty"), (models / "near" / "out", "it lies in --models")):
        assert_one_message(compared(flags_of(tiny, given, output_dir=out), capfd), [message])
    assert (tmp_path / "out" / "comparison.json").read_text() == "mine"
