"""The arithmetic that phases need, beside numbers by hand and beside what torch counts, and their speed as metrics; and
traces of single steps: which are made, what is named in them, and that other steps name nothing.

What stands in a trace of a real run is looked at in tests/e2e/test_programs.py.
"""

import contextlib
import gzip
import json
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from engine.errors import RunStopped, UserError
from engine.experience import position_ids
from engine.models.hydra import load_hydra
from engine.models.loading import load_policy, load_scorer
from engine.models.lora import LoraSpec, adapt
from engine.trace import traced
from scripts.harness.models import make_causal_lm, make_scorer
from training.config.step3 import RLHFFlags
from training.reporting.metrics import Accumulator
from training.reporting.step_metrics import (
    LESS_MEMORY,
    Arithmetic,
    Cost,
    Profiler,
    StepLog,
    TrainingArithmetic,
    add_counts,
)
from training.runtime.plan import check_profile_steps

SMALL = Cost(matrices=100, trained=60, passed=60, attention=8, head=10, head_trained=0)
LENGTHS, PREDICTED = torch.tensor([2, 3]), torch.tensor([1, 2])


def test_costs_by_hand():
    # 5 tokens, 3 + 6 pairs, 3 log-probs.
    assert SMALL.forward(LENGTHS, PREDICTED) == 2 * 100 * 5 + 4 * 8 * 9 + 2 * 10 * 3 == 1348
    # Backward: trained twice over, 60 % of attention's twice, through the head once.
    assert SMALL.training(LENGTHS, PREDICTED) == 1348 + 4 * 60 * 5 + 8 * 8 * 0.6 * 9 + 2 * 10 * 3 == 2953.6


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
@pytest.mark.parametrize("kind", ["policy", "scorer", "hydra"])
def test_costs_are_what_torch_counts(tmp_path, family, kind):
    make, load = (make_scorer, load_scorer) if kind == "scorer" else (make_causal_lm, load_policy)
    path = make(tmp_path, family)
    module = load_hydra(path, torch.float32, layers=1) if kind == "hydra" else load(path, torch.float32)
    rows, length, predicted = 2, 12, 0 if kind == "scorer" else 5
    tokens = torch.arange(4, 4 + rows * length).view(rows, length)
    mask = torch.ones_like(tokens)
    how = {} if kind == "scorer" else {"response_length": predicted}
    with FlopCounterMode(display=False) as flops, sdpa_kernel(SDPBackend.MATH):
        output = module(tokens, mask, position_ids(mask), **how)
        (output if kind == "scorer" else output[0]).sum().backward()
    cost = Cost.of(module)
    needed = cost.training(torch.tensor([length] * rows), torch.tensor([predicted] * rows))
    # torch computes the pairs of a token and later ones, too; the score head's products are left out here.
    later = rows * (length**2 - length * (length + 1) // 2)
    unneeded = (4 + 8 * cost.passed / cost.matrices) * cost.attention * later
    score_head = 3 * 2 * module.model.score.weight.numel() * rows * length if kind == "scorer" else 0
    # Some versions of transformers have positions times frequencies as a product of matrices.
    counts = flops.get_flop_counts()
    rotary = sum(sum(count.values()) for name, count in counts.items() if name.endswith("rotary_emb"))
    assert rotary in (0, 2 * rows * length * 4)  # 4 frequencies a head
    assert flops.get_total_flops() - rotary == needed + unneeded + score_head


def test_adapters_cost_no_gradients_of_matrices_and_experts_are_not_counted(tmp_path):
    path = make_causal_lm(tmp_path, "llama")
    whole, adapted = load_policy(path, torch.float32), load_policy(path, torch.float32)
    adapt(adapted, LoraSpec(dim=4, only=True), "actor")
    assert Cost.of(adapted) == replace(Cost.of(whole), trained=0, head_trained=0)
    whole.model.config.num_experts = 4
    assert Cost.of(whole) is None


def test_phases_are_told_by_their_speed_and_use_of_the_gpu():
    ones = torch.ones(2, 3, dtype=torch.int64)
    rollout = SimpleNamespace(
        attention_mask=torch.tensor([[0, 1, 1], [1, 1, 1]]),
        actions=ones[:, :1].bool(),
        logprobs=torch.zeros(2, 1),
    )
    actor, critic, reward = SMALL, replace(SMALL, head=0), replace(SMALL, head=0, matrices=50)
    needs = Arithmetic(SimpleNamespace())
    needs.costs, needs.peak = (actor, critic, reward), 1000.0
    lengths, labels = torch.tensor([2, 3]), torch.tensor([1, 1])
    both = actor.forward(lengths, labels), critic.forward(lengths, labels) + reward.forward(lengths, labels)
    seconds = {"generate": 2.0, "make_experience": 4.0, "train": 5.0}
    for sampled, policies in ((False, 2), (True, 1)):
        experience = SimpleNamespace(rollout=rollout, logprobs=rollout.logprobs if sampled else torch.zeros(2, 1))
        metrics = Accumulator()
        needs.add_to(metrics, seconds, [rollout], experience, epochs=3, critic_epochs=3)
        assert metrics.reduce() == pytest.approx(
            {
                "speed/make_experience": 5 / 4,
                "speed/train": 3 * 5 / 5,
                "mfu/generate": actor.forward(torch.tensor([1, 2]), labels).item() / 1000 / 2,
                "mfu/make_experience": (policies * both[0] + both[1]).item() / 1000 / 4,
                "mfu/train": 3 * (actor.training(lengths, labels) + critic.training(lengths, labels)).item() / 1000 / 5,
            }
        )
    critic_alone = needs.of_step([rollout], experience, epochs=0, critic_epochs=1)["train"]
    assert critic_alone == critic.training(lengths, labels)
    apart = needs.of_step([rollout], experience, epochs=1, critic_epochs=4)["train"]
    assert apart == 4 * critic.training(lengths, labels) + actor.training(lengths, labels)
    needs.peak, metrics = None, Accumulator()
    needs.add_to(metrics, seconds, [rollout], experience, epochs=3, critic_epochs=3)
    assert set(metrics.reduce()) == {"speed/make_experience", "speed/train"}


def test_an_optimizer_step_of_one_model_is_told_in_the_same_way():
    needs = TrainingArithmetic(SimpleNamespace())
    needs.cost, needs.peak = SMALL, 1000.0
    masks = [torch.tensor([[1, 1, 0]]), torch.tensor([[1, 1, 1, 0]])]  # rows of LENGTHS, micro-batches of one
    metrics = Accumulator()
    needs.add_to(metrics, 5.0, masks, PREDICTED.sum())
    assert metrics.reduce() == pytest.approx({"speed/train": 5 / 5, "mfu/train": 2953.6 / 1000 / 5})
    for needs.cost, needs.peak in ((None, 1000.0), (SMALL, None)):
        metrics = Accumulator()
        needs.add_to(metrics, 5.0, masks, PREDICTED.sum())
        assert metrics.reduce() == {"speed/train": 1.0}


class FakeModel:
    """Stands for a model: its methods are ranges of a trace, as those of the engine's models are."""

    role = "critic"

    @traced("{0.role} backward")
    def backward(self, rows: int = 3) -> torch.Tensor:
        return torch.ones(rows).sum()

    @traced("reward model")
    def score(self) -> torch.Tensor:
        return torch.ones(3).sum()


def test_only_the_steps_asked_for_are_recorded(tmp_path):
    lines, model = [], FakeModel()
    profiler = Profiler([2, 4], tmp_path, say=lines.append)
    for step in (1, 2, 3, 4):
        with profiler.record(step):
            assert model.backward(rows=5) == 5
            model.score()
    files = sorted((tmp_path / "profile").iterdir())
    assert [file.name for file in files] == ["step_000002_rank0.json.gz", "step_000004_rank0.json.gz"]
    assert len(lines) == 2 and lines[0].startswith(f"step 2 recorded: {tmp_path}/profile/step_000002_rank*.json.gz")
    for file in files:
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
        assert names == ["critic backward", "reward model"]


def test_nothing_is_named_while_no_step_is_recorded(tmp_path, monkeypatch):
    named = []
    monkeypatch.setattr("engine.trace.record_function", lambda name: named.append(name) or contextlib.nullcontext())
    profiler, model = Profiler([2], tmp_path, say=str), FakeModel()
    for step in (1, 2, 3):
        with profiler.record(step):
            model.backward()
            model.score()
    assert named == ["critic backward", "reward model"]


def test_a_link_in_the_place_of_a_recording_is_not_written_through(tmp_path):
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "step_000001_rank0.json.gz").symlink_to(tmp_path / "theirs")
    with Profiler([1], tmp_path, say=str).record(1):
        FakeModel().score()
    assert (tmp_path / "theirs").read_text() == "theirs"


def test_a_step_that_raises_leaves_no_recording(tmp_path):
    profiler = Profiler([1], tmp_path, say=pytest.fail)
    with pytest.raises(ZeroDivisionError), profiler.record(1):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with Profiler([1], tmp_path, say=str).record(1):  # the profiler has been stopped: it can be started again
        FakeModel().score()


@pytest.mark.parametrize(
    "steps, first, last, told",
    [
        ([4], 1, 3, "--profile_steps 4: this run trains steps 1 to 3. Name some of these."),
        ([9, 5, 6, 4], 5, 8, "--profile_steps 9 4: this run trains steps 5 to 8. Name some of these."),
        ([3], 4, 3, "--profile_steps 3: this run ends with step 3, which is done. Leave the flag out."),
    ],
)
def test_steps_that_the_run_does_not_train(steps, first, last, told):
    with pytest.raises(UserError) as caught:
        check_profile_steps(steps, first, last)
    assert str(caught.value) == told


def test_steps_that_the_run_trains():
    check_profile_steps([], 4, 3)
    check_profile_steps([3, 1, 3], 1, 3)


@pytest.mark.parametrize("phase", LESS_MEMORY)
def test_memory_that_runs_out_in_a_phase_is_told_with_flags_of_step_3(phase):
    with pytest.raises(RunStopped) as stopped, StepLog().phase(phase):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has ...")
    told = str(stopped.value)
    assert told == f"CUDA out of memory on rank 0, in the phase {phase}. Give {LESS_MEMORY[phase]}."
    flags = {word.strip(",.").removeprefix("--") for word in told.split() if word.startswith("--")}
    assert flags and flags <= {field.name for field in fields(RLHFFlags)}


def test_what_a_backend_counts_is_told_for_each_response():
    metrics = Accumulator()
    for turns, seconds in ((10.0, 0.5), (2.0, 2.0)):
        add_counts(metrics, {"responses": 4.0, "turns": turns, "environment_seconds": seconds}, "rollout")
    add_counts(metrics, {}, "rollout")
    assert metrics.reduce() == {"rollout/turns": 1.5, "time/rollout_environments": 2.0}
