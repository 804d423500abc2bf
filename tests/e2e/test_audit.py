"""The audit from its command line: its numbers beside a count of all subsets and plain models; its messages."""

import json
from itertools import combinations
from statistics import fmean
from unittest import mock

import pytest
import torch

from engine.experience_maker import ExperienceMaker
from scripts.harness.programs import Result, assert_one_message, command_line
from tests.distributed import plain
from tests.reward_server import score, serving
from training.runtime.launch import run
from training.tools.audit import __main__ as audit

RULES = """
def tokens(prompts, responses): return [len(response.split()) for response in responses]
def first(prompts, responses): return [response.split()[:1] == ["w05"] for response in responses]
def nothing(prompts, responses): return [float("nan")] * len(responses)
"""


def flags_of(tiny, folder, **changes) -> dict:
    """Flags of a short audit, with these changes."""
    (folder / "rules.py").write_text(RULES)
    return {
        "sft_model_name_or_path": tiny.folder / "sft",
        "data_path": tiny.folder / "prompts.jsonl",
        "reward_model_name_or_path": tiny.folder / "reward",
        "reward_function": f"{folder / 'rules.py'}:tokens",
        "num_eval_prompts": 5,
        "num_samples_per_prompt": 6,
        "max_prompt_seq_len": 6,
        "max_answer_seq_len": 8,
        "per_device_eval_batch_size": 4,
        "output_dir": folder / "out",
        **changes,
    }


def audited(flags: dict, capfd) -> Result:
    """Run the program in this process."""
    capfd.readouterr()
    with mock.patch("engine.distributed.shutdown"):
        code = run(audit.main, audit.AuditFlags, audit.__doc__, command_line(flags))
    return Result(code, *capfd.readouterr())


def test_its_numbers_are_those_of_all_subsets_and_of_plain_models(tiny, tmp_path, capfd):
    make, seen = ExperienceMaker.make_experience, []

    def noted(self, *args, **kwargs):
        seen.append(make(self, *args, **kwargs))
        return seen[-1]

    with mock.patch.object(ExperienceMaker, "make_experience", noted), serving() as server:
        given = {"judge": f"{tmp_path / 'rules.py'}:first", "reward_url": server.url}
        result = audited(flags_of(tiny, tmp_path, **given), capfd)
    assert result.code == 0, result.stderr
    found = json.loads((tmp_path / "out" / "audit.json").read_text())
    samples = found["samples"]
    assert len(samples) == 30 and set(found["rewards"]) == {"reward", "tokens score", "server"}
    (experience,) = seen
    rollout = experience.rollout
    with torch.no_grad():
        logprobs = plain.logprobs(plain.policy(tiny.folder, "sft"), rollout, 1.0) * rollout.response_mask
    likelihood = (logprobs.sum(-1) / rollout.response_mask.sum(-1)).tolist()
    assert sorted(sample["likelihood"] for sample in samples) == pytest.approx(sorted(likelihood), abs=1e-4)
    assert [sample["tokens score"] for sample in samples] == [len(sample["response"].split()) for sample in samples]
    assert [sample["server"] for sample in samples] == pytest.approx([score(one["response"]) for one in samples])
    by_prompt = [samples[start : start + 6] for start in range(0, 30, 6)]
    for k in (1, 2, 4, 6):
        for name in ("reward", "first", "tokens", "likelihood"):
            best = [
                fmean(
                    each[name] for each in subset if each["tokens score"] == max(one["tokens score"] for one in subset)
                )
                for own in by_prompt
                for subset in combinations(own, k)
            ]
            assert found["rewards"]["tokens score"]["best_of"][str(k)][name][0] == pytest.approx(fmean(best))
    page = (tmp_path / "out" / "audit.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and all(
        name in page for name in ("by reward<", "by tokens score<", "audit.json")
    )
    assert "the best of 6" in result.stdout and "judged by first, " in result.stdout


def test_a_judge_without_numbers_is_named(tiny, tmp_path, capfd):
    result = audited(flags_of(tiny, tmp_path, judge=f"{tmp_path / 'rules.py'}:nothing"), capfd)
    assert result.code == 1
    assert "30 of 30 held-out samples have a score or KL that is NaN or infinite (reward_nothing)." in result.stderr


BAD = {
    "no reward": ({"reward_model_name_or_path": None, "reward_function": None}, "there is no reward"),
    "one response": ({"num_samples_per_prompt": 1}, "--num_samples_per_prompt 1"),
    "its own judge": ({"judge": "rules.py:tokens", "reward_function": "rules.py:tokens"}, "would judge itself"),
    "no judge": ({"judge": "rules.py:none"}, "--judge rules.py:none: "),
    "no server": (
        {"reward_url": "http://127.0.0.1:9/score", "reward_url_timeout": 0.2, "reward_url_patience": 0},
        "9/score",
    ),
}


@pytest.mark.parametrize("changes, message", BAD.values(), ids=BAD)
def test_mistakes_have_one_message(tiny, tmp_path, capfd, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    assert_one_message(audited(flags_of(tiny, tmp_path, **changes), capfd), [message])
    assert not list(tmp_path.glob("out/audit*"))
