"""What docs/extending.md brings from outside trains for two steps, each with numbers that were computed otherwise."""

import importlib
import math
import operator
import re
import shutil
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.algo.kl import KL_ESTIMATORS
from engine.algo.losses import kl_loss
from engine.algorithms import DIALECTS, ESTIMATORS, Dialect, get_dialect
from engine.errors import UserError
from engine.rlhf_engine import EngineSpec, RLHFEngine
from engine.rollout import ROLLOUT_BACKENDS, SamplingConfig, build_rollouts
from engine.zero.config import EngineConfig
from scripts.harness import models as tiny_models
from scripts.harness.models import EOS, PAD
from scripts.harness.programs import Tiny, command_line, metric_lines
from tests import reward_server
from training.config.parsing import parse_flags
from training.config.step3 import RLHFFlags
from training.data.examples import prompt_batch
from training.ppo_trainer import PPOConfig, PPOTrainer, StepReport
from training.reporting.step_metrics import STEP_METRICS

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
PAGES_URL = "http://127.0.0.1:8000/score"
PROMPTS = ["w10 w11 w12", "w20 w21"]
STOPS = (EOS, 7, 11, 19, 23)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    tiny_models.make_causal_lm(folder / "sft", "gpt2")
    tiny_models.make_scorer(folder / "reward", "gpt2")
    return folder


def write_page(folder: Path, url: str) -> None:
    """The page's files, with the server's address in place of the page's."""
    *parts, loop, script = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    source = "\n\n".join(parts)
    assert source.count(PAGES_URL) == 1
    (folder / "extensions.py").write_text(source.replace(PAGES_URL, url))
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)  # it would pass for this one's, written in one second
    (folder / "own_loop.py").write_text(loop)
    (folder / "own_step3.py").write_text(script)


def responses(server: reward_server.Server) -> list[str]:
    """All that it has scored."""
    return [text for asked in server.asked for text in asked["responses"]]


@pytest.fixture
def server():
    with reward_server.serving() as server:
        yield server


@pytest.fixture
def extensions(folder, server, monkeypatch):
    """The page's extensions.py, imported anew; what it adds to the tables goes again."""
    tables = (ESTIMATORS, KL_ESTIMATORS, DIALECTS, ROLLOUT_BACKENDS, STEP_METRICS)
    before = [table.copy() for table in tables]
    write_page(folder, server.url)
    monkeypatch.syspath_prepend(folder)
    sys.modules.pop("extensions", None)
    yield importlib.import_module("extensions")
    del sys.modules["extensions"]
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.extend(content) if isinstance(table, list) else table.update(content)


def build(
    folder, dialect: Dialect, *, backend: str = "replica", temperature: float = 1.0, stage: int = 0, **roles
) -> PPOTrainer:
    """A trainer of the tiny models; with a critic and a reward model where the dialect has a critic."""
    spec = EngineSpec(
        actor_path=str(folder / "sft"),
        critic_path=str(folder / "reward") if dialect.has_critic else None,
        with_critic=dialect.has_critic,
        reward_paths=None if dialect.has_critic else (),
        actor=EngineConfig("actor", stage),
    )
    models = RLHFEngine.from_pretrained(spec)
    sampling = SamplingConfig.of(dialect, STOPS, "fp32", max_new_tokens=6, pad_token_id=PAD)
    roles = {name: make(models) for name, make in roles.items()}
    return PPOTrainer(
        models=models,
        rollouts=build_rollouts(backend, models.actor, models.tokenizer),
        dialect=dialect,
        config=PPOConfig(total_steps=2, micro_batch_size=4),
        sampling=replace(sampling, temperature=temperature),
        **roles,
    )


def two_steps(trainer: PPOTrainer) -> list[StepReport]:
    """Both steps, in which the actor has learned something."""
    before = trainer.models.actor.version
    reports = [trainer.step(prompt_batch(PROMPTS, trainer.models.tokenizer, visit=step)) for step in range(2)]
    assert trainer.models.actor.version > before
    return reports


def apart(rewards: list[float], lengths: list[int]) -> list[float]:
    """OPO's advantages of one group."""
    baseline = math.fsum(map(operator.mul, rewards, lengths)) / sum(lengths)
    return [reward - baseline for reward in rewards]


def test_an_advantage_by_hand(extensions):
    """1 of one token, 4 of two: the baseline is 3. What is not valid counts nowhere; what is alone learns nothing."""
    given = extensions.AdvantageInputs(
        rewards=torch.tensor([[1.0, 0.0], [1.0, 3.0], [0.0, 9.0], [5.0, 0.0], [0.0, 7.0], [0.0, 7.0]]),
        values=torch.zeros(6, 2),
        policy_mask=torch.tensor([[True, False], *[[True, True]] * 5]),
        valid=torch.tensor([True, True, False, True, False, False]),
        group_size=3,
        gamma=1.0,
        lam=1.0,
    )
    advantages, returns = extensions.opo(given)
    assert advantages.tolist() == [-2.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert returns.tolist() == [1.0, 4.0, 9.0, 5.0, 7.0, 7.0]


def test_an_estimators_needs_are_checked(extensions):
    with pytest.raises(UserError, match="OPO compares the responses to one prompt with each other"):
        get_dialect("opo").override(samples_per_prompt=1)
    with pytest.raises(UserError, match="OPO has no critic"):
        get_dialect("default").override(advantage_estimator="opo", samples_per_prompt=4)


def test_a_kl_estimator(extensions, folder):
    dialect = get_dialect("default").override(kl_estimator="abs")
    for report in two_steps(build(folder, dialect)):
        batch = report.batch
        penalties = ((batch.logprobs - batch.ref_logprobs).abs() * batch.policy_mask).sum(-1)
        torch.testing.assert_close(batch.rewards.sum(-1), batch.processed_scores - 0.1 * penalties)
    assert penalties.min() > 0
    logprobs = torch.tensor([[-1.0, -3.0]], requires_grad=True)
    loss = kl_loss(logprobs, torch.tensor([[-2.0, -1.0]]), torch.tensor([[True, True]]), "abs")
    loss.backward()
    assert loss.item() == 3.0 and logprobs.grad.tolist() == [[1.0, -1.0]]


def test_a_dialect(extensions, folder):
    """With gamma and lambda 1 a return is the sum of the rewards to come, whatever the critic says."""
    dialect = get_dialect("monte_carlo")
    assert dialect.differences(get_dialect("default")) == {"lam": (1.0, 0.95)}
    for report in two_steps(build(folder, dialect)):
        batch = report.batch
        for rewards, returns, mask in zip(batch.rewards, batch.returns, batch.policy_mask, strict=True):
            own = rewards[mask].double().tolist()
            expected = [math.fsum(own[slot:]) for slot in range(len(own))]
            assert returns[mask].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_a_dialect_and_a_backend_are_known_to_flags_and_unknown_ones_named(extensions):
    words = command_line({"output_dir": "out", "data_path": "p.jsonl", "actor_model_name_or_path": "sft"})
    words += ["--reward_function", "extensions.py:RewardServer", "--rollout_backend", "generate"]
    args = parse_flags(RLHFFlags, [*words, "--dialect", "monte_carlo"], "")
    assert args.resolved.dialect.lam == 1.0
    with pytest.raises(UserError, match=r"--decoding plain needs --rollout_backend auto\|replica\|zero3\. Give that"):
        parse_flags(RLHFFlags, [*words, "--decoding", "plain"], "")
    with pytest.raises(UserError, match=r"invalid choice: 'opoo' .*'monte_carlo'"):
        parse_flags(RLHFFlags, [*words, "--dialect", "opoo"], "")


def test_a_rollout_backend(extensions, folder):
    """Nearly without temperature it draws what the built-in one draws; a response ends with its first stop token."""
    trainer = build(folder, get_dialect("default"), backend="generate", temperature=1e-4, stage=3)
    models = trainer.models
    assert type(trainer.rollouts) is extensions.GenerateRollouts
    drawn = []
    for report in two_steps(trainer):
        rollout = report.batch.rollout
        drawn.append(rollout.responses)
        for row, mask, ended in zip(rollout.responses, rollout.response_mask, rollout.ended, strict=True):
            tokens = row.tolist()
            ends = [place + 1 for place, token in enumerate(tokens) if token in STOPS]
            length = min([*ends, len(tokens)])
            assert mask.tolist() == [slot < length for slot in range(len(tokens))] and ended == bool(ends)
    greedy = build_rollouts("replica", models.actor, models.tokenizer)
    prompts = prompt_batch(PROMPTS, models.tokenizer)
    by_both = [backend.generate(prompts, trainer.sampling) for backend in (greedy, trainer.rollouts)]
    assert by_both[0].sequences.tolist() == by_both[1].sequences.tolist()
    assert by_both[0].response_mask.tolist() == by_both[1].response_mask.tolist()
    assert drawn[0].shape[0] == len(PROMPTS)


def test_the_pages_loop(extensions, folder, server, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    exec((folder / "own_loop.py").read_text(), {})
    printed = [list(map(float, line.split())) for line in capsys.readouterr().out.splitlines() if "." in line]
    scores = list(map(reward_server.score, responses(server)))
    by_step = [scores[:8], scores[8:]]
    expected = [[statistics.fmean(step), statistics.pstdev(step)] for step in by_step]
    assert len(scores) == 16 and sum(printed, []) == pytest.approx(sum(expected, []))


@pytest.mark.slow
def test_the_pages_script(tmp_path, server):
    """All of them at once, through the command line."""
    tiny = Tiny(tmp_path)
    write_page(tmp_path, server.url)
    flags = tiny.flags(
        3,
        dialect="opo",
        rollout_backend="generate",
        reward_function="extensions.py:RewardServer",
        critic_model_name_or_path=None,
        output_dir=tmp_path / "out",
        num_eval_prompts=0,
        dtype="fp32",
    )
    command = [sys.executable, str(tmp_path / "own_step3.py"), *command_line(flags)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "dialect opo\n" in ended.stdout and "rollouts by generate\n" in ended.stdout
    scores, lines = list(map(reward_server.score, responses(server))), metric_lines(tmp_path / "out")
    by_step = [scores[:16], scores[16:]]  # 4 prompts of 4 responses
    assert [line["step"] for line in lines] == [1, 2] and len(scores) == 32
    for line, step in zip(lines, by_step, strict=True):
        assert line["objective/scores"] == pytest.approx(statistics.fmean(step))
        assert line["objective/scores_std"] == pytest.approx(statistics.pstdev(step))
    means = list(map(statistics.fmean, by_step))
    assert [line["own/best"] for line in lines] == pytest.approx([means[0], max(means)])
    journal = [line.split() for line in (tmp_path / "journal.txt").read_text().splitlines()]
    assert [step for step, _ in journal] == ["1", "2"] and [float(s) for _, s in journal] == pytest.approx(means)
