"""What step 3 makes of its flags before it trains: the reward, and a script's own dialect."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from engine.errors import RunStopped
from engine.reward.base import CombinedReward, RewardSource
from engine.reward.function import FunctionReward
from tests.training.config.command_lines import step3
from training import step3_rlhf
from training.config.reward import build_reward
from training.step3_rlhf import choose_rollouts, exact_sampler, show


def score(prompts, responses):
    return [0.0] * len(responses)


def reward_of(model=None, function=None, **flags):
    args = step3(**flags)
    functions = dict.fromkeys(args.reward_function, function)
    return build_reward(args, functions, [] if model is None else [model], None, [{}])


def test_a_source_alone_is_the_reward_itself():
    model = object()
    assert reward_of(model) is model
    assert isinstance(reward_of(function=score, reward_function="m:f"), FunctionReward)


@pytest.mark.parametrize(
    "flags, sources",
    [
        ({"reward_model_weight": 2}, {"model"}),
        ({"length_penalty": 0.5}, {"model"}),
        ({"reward_function": "m:f", "reward_model_name_or_path": "reward"}, {"model", "f"}),
        ({"reward_function": "m:f", "reward_weights": 2}, {"function"}),
    ],
)
def test_weights_penalties_and_two_sources_are_combined(flags, sources):
    model = object() if "model" in sources else None
    reward = reward_of(model, score, **flags)
    assert isinstance(reward, CombinedReward) and set(reward.sources) == sources
    assert reward.length_penalty == flags.get("length_penalty", 0.0)


@pytest.mark.parametrize(
    "dtype, computes_as_actor, fields, told",
    [
        ("fp32", True, {}, False),
        ("fp32", False, {}, False),  # vLLM, whose log-probs "auto" does not take
        ("bf16", True, {}, False),
        ("fp32", True, {"set": "old_logprobs=sampler"}, False),  # the actor's own, within rounding
        ("fp32", False, {"set": "old_logprobs=sampler"}, True),
        ("bf16", True, {"set": "old_logprobs=sampler"}, True),
        ("bf16", False, {"set": "correction=token_truncate"}, False),
    ],
)
def test_old_log_probs_of_another_sampler_are_told(monkeypatch, capsys, dtype, computes_as_actor, fields, told):
    rollouts = SimpleNamespace(why="rollouts by a stand-in", computes_as_actor=computes_as_actor)
    monkeypatch.setattr(step3_rlhf, "build_rollouts", lambda *args, **settings: rollouts)
    args = step3(dtype=dtype, **fields)
    plan = SimpleNamespace(dialect=args.resolved.dialect, environments=None)
    assert choose_rollouts(args, plan, SimpleNamespace(actor=None, tokenizer=None, engines=[])) is rollouts
    assert exact_sampler(args, rollouts) == (dtype == "fp32" and computes_as_actor)
    first, *others = capsys.readouterr().out.splitlines()
    assert first == rollouts.why and [line[:34] for line in others] == ["old log-probs are the sampler's, a"] * told


OWN_PROGRAM = """
from engine.algorithms import DIALECTS
from training import step3_rlhf

DIALECTS["mine"] = DIALECTS["default"].override(name="mine", lam=0.5)
step3_rlhf.program()
"""


@pytest.mark.slow
def test_a_script_adds_a_dialect_and_runs_the_program(tmp_path):
    (tmp_path / "own.py").write_text(OWN_PROGRAM)
    flags = {
        "dialect": "mine",
        "kl_coef": "0.25",
        "data_path": "nobody/prompts",
        "output_dir": "out",
        "actor_model_name_or_path": "absent",
        "critic_model_name_or_path": "absent",
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    command = [sys.executable, str(tmp_path / "own.py"), *words, "--dry_run"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "dialect mine\n  kl_coef = 0.25 (given; the dialect's is 0.1)" in ended.stdout


def test_a_reward_source_that_cannot_be_made_is_named():
    class Judge(RewardSource):
        def __init__(self, tokenizer):
            raise ConnectionError("no answer")

        def score(self, rollout):
            raise AssertionError

    with pytest.raises(RunStopped, match="the reward source rules.py:Judge raised ConnectionError: no answer"):
        reward_of(function=Judge, reward_function="rules.py:Judge")


@pytest.mark.parametrize("step, share, told", [(1, 0.8, True), (1, 0.05, False), (2, 0.8, False)])
def test_many_clipped_scores_are_told_after_the_first_step(step, share, told):
    lines = []
    run = SimpleNamespace(writer=SimpleNamespace(write=lines.append))
    show(run, 0, SimpleNamespace(step=step, metrics={"objective/clipped": share}))
    assert [line[:24] for line in lines] == ["WARNING: 80% of the late"] * told
