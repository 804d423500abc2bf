"""What a training state is made of, what is refused or made up for when it is read, and what a resumed run puts into
each of the three optimizers; one process, no model.
"""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from engine.engine_spec import OptimizerSpec
from engine.errors import UserError
from engine.optim import TensorFlowAdam, build_optimizer
from engine.zero.communication import init
from engine.zero.config import EngineConfig, build_ds_config
from engine.zero.engines import TrainedModel
from engine.zero.training_state import MOMENTS, moment_of, set_steps, settle, steps_of
from tests.engine.zero.inspecting import pretend_cpus_have_fp16
from tests.engine.zero.shard_memory import InMemory, whole

LR = 1e-2


class Parts(nn.Module):
    """A matrix, its tied twin, a vector that the loss does not need, a number that does not train, and buffers."""

    def __init__(self, width: int = 3):
        super().__init__()
        init()
        self.matrix = nn.Linear(width, 5, bias=False)
        self.twin = nn.Linear(width, 5, bias=False)
        self.twin.weight = self.matrix.weight
        self.idle = nn.Parameter(torch.arange(4.0))
        self.still = nn.Parameter(torch.tensor([7.0]), requires_grad=False)
        self.register_buffer("kept", torch.tensor([1, 2]))
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def forward(self, inputs):
        return (self.matrix(inputs) - self.twin(2 * inputs)).square().sum()


def built(module: nn.Module, stage: int, dtype: str = "fp32", optimizer=None) -> TrainedModel:
    config = build_ds_config(EngineConfig("actor", stage), dtype=dtype, micro_batch_size=1)
    adam = optimizer or build_optimizer(module, OptimizerSpec(lr=LR, weight_decay=0.1, decay="all"), offload=False)
    return TrainedModel(module.to({"fp32": torch.float32, "fp16": torch.float16}[dtype]), config, adam)


def step(model: TrainedModel) -> None:
    weight = next(model.module.parameters())
    model.backward(model(torch.arange(6, dtype=weight.dtype).view(2, 3) / 8), last=True)
    model.step(LR, model.overflowed())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_number_has_one_name(stage):
    state = whole((model := built(Parts(), stage)).shards())
    assert set(state) == {"weights/matrix.weight", "weights/idle", "frozen/still", "frozen/kept"}
    assert state["weights/idle"].tolist() == [0, 1, 2, 3] and state["frozen/still"].item() == 7
    assert state["frozen/kept"].tolist() == [1, 2] and state["frozen/kept"].dtype == torch.int64
    assert model.scalars() == {"adam_steps": 0, "loss_scale": {}}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_before_the_first_step_there_are_no_moments_and_a_stepped_engine_forgets_its_own(stage):
    """Adam's first step moves each weight by the learning rate, beside decay; another step after it by less or more."""
    torch.manual_seed(
        0
    )  # Adam's first step is smaller where a gradient is hardly larger than eps: no luck is asked for
    first, other = built(Parts(), stage), built(Parts(), stage)
    source, scalars = InMemory(whole(first.shards())), first.scalars()
    step(other)
    other.load_shards(source, scalars)
    assert other.scalars() == scalars and not any("exp_avg" in shard.name for shard in other.shards())
    for model in (first, other):
        step(model)
    got, expected = whole(other.shards()), whole(first.shards())
    assert got.keys() == expected.keys() and "exp_avg/matrix.weight" in got
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    before = source.tensors["weights/matrix.weight"]
    moved = got["weights/matrix.weight"] - before * (1 - LR * 0.1)
    torch.testing.assert_close(moved.abs(), torch.full_like(moved, LR), rtol=1e-3, atol=0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_weight_that_the_loss_does_not_need_is_stepped_like_the_others(stage):
    """So that one count says all, and no layout has moments that another has not."""
    model = built(Parts(), stage)
    for _ in range(3):
        step(model)
    assert model.scalars()["adam_steps"] == 3
    assert whole(model.shards())["exp_avg/idle"].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_tensorflows_adam_goes_on_as_it_would_have(stage):
    def made():
        module = Parts()
        with torch.no_grad():
            module.matrix.weight.copy_(torch.arange(15.0).view(5, 3) / 8)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return built(module, stage, optimizer=TensorFlowAdam(trained, lr=LR))

    first, other = made(), made()
    step(first)
    other.load_shards(InMemory(whole(first.shards())), first.scalars())
    for model in (first, other):
        step(model)
    got, expected = whole(other.shards()), whole(first.shards())
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert other.scalars()["adam_steps"] == 2


def test_all_counters_of_the_loss_scale_come_back_and_its_settings_do_not():
    pretend_cpus_have_fp16()
    first, other = built(Parts(), 2, "fp16"), built(Parts(), 2, "fp16")
    step(first)
    counters = {"cur_scale": 128.0, "cur_iter": 9, "last_overflow_iter": 5, "cur_hysteresis": 1}
    scaler, own = first.ds_engine.optimizer.loss_scaler, other.ds_engine.optimizer.loss_scaler
    vars(scaler).update(counters, scale_window=77)
    assert first.scalars()["loss_scale"] == counters
    other.load_shards(InMemory(whole(first.shards())), first.scalars())
    assert {name: getattr(own, name) for name in counters} == counters and other.loss_scale == 128
    assert own.scale_window == 200  # of configs/ds/zero2.json


def test_another_models_state_is_refused_before_anything_is_read():
    model = built(Parts(), 0)
    step(model)
    state, scalars = whole(model.shards()), model.scalars()
    wider = built(Parts(width=4), 0)
    before = {name: tensor.clone() for name, tensor in whole(wider.shards()).items()}
    sentence = "another model's: exp_avg/matrix.weight is (5, 3) there and (5, 4) here"
    with pytest.raises(UserError, match=re.escape(sentence)):
        wider.load_shards(InMemory(state), scalars)
    with pytest.raises(UserError, match="exp_avg/idle is absent there"):
        model.load_shards(InMemory({name: state[name] for name in state if name != "exp_avg/idle"}), scalars)
    with pytest.raises(UserError, match=r"weights/more is \(2,\) there and absent here"):
        model.load_shards(InMemory(state | {"weights/more": torch.zeros(2)}), scalars)
    after = whole(wider.shards())
    assert all(torch.equal(after[name], before[name]) for name in before) and wider.version == 0


def adams(parameter) -> dict[str, torch.optim.Optimizer]:
    return {
        "fused": torch.optim.AdamW([parameter], lr=0.1, fused=True),
        "plain": torch.optim.AdamW([parameter], lr=0.1, foreach=False),
        "tensorflow": TensorFlowAdam([parameter], lr=0.1),
    }


@pytest.mark.parametrize("form", ["fused", "plain", "tensorflow"])
def test_a_state_that_is_made_is_what_a_step_would_have_made(form):
    """Same names, dtypes and shapes; a step with a gradient of 0 leaves moments of 0, and counts."""
    stepped, fresh = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    one, other = adams(stepped)[form], adams(fresh)[form]
    stepped.grad = torch.zeros(3)
    one.step()
    assert steps_of(one, stepped) == 1 and steps_of(other, fresh) == 0
    assert moment_of(other, fresh, "exp_avg") is None and fresh not in other.state  # looking leaves no trace
    set_steps(other, fresh, 1)
    assert other.state[fresh].keys() == one.state[stepped].keys() == {"step", *MOMENTS}
    for name, value in one.state[stepped].items():
        made = other.state[fresh][name]
        assert torch.equal(made, value) and (made.dtype, made.device) == (value.dtype, value.device)
        assert not made.requires_grad
    set_steps(other, fresh, 7)
    assert steps_of(other, fresh) == 7
    set_steps(other, fresh, 0)
    assert steps_of(other, fresh) == 0 and fresh not in other.state
    settle(other, 7)  # nothing to do


def test_deepspeeds_cpu_adam_goes_through_the_steps_that_are_behind_it():
    """Its C++ multiplies the powers of beta up; what they are after 3 steps, in float32, another way would round."""
    parameter, powers = torch.zeros(4), {"step": 0, "first": torch.tensor(1.0), "second": torch.tensor(1.0)}

    def adam_update(opt_id, step, lr, first, second, eps, decay, bias_correction, weight, *_):
        assert (opt_id, lr, decay, bias_correction) == (5, 0.0, 0.0, True) and len(weight) == 1
        assert step == powers["step"] + 1
        powers.update(step=step, first=powers["first"] * first, second=powers["second"] * second)

    group = {"params": [parameter], "betas": (0.9, 0.95), "eps": 1e-8}
    update = SimpleNamespace(adam_update=adam_update)
    adam = SimpleNamespace(state={parameter: {}}, param_groups=[group], opt_id=5, ds_opt_adam=update)
    set_steps(adam, parameter, 3)
    assert adam.state[parameter]["step"] == 3 and type(adam.state[parameter]["step"]) is int
    settle(adam, 3)
    assert powers["step"] == 3
    assert powers["first"].item() == pytest.approx(0.729) and powers["second"].item() == pytest.approx(0.857375)
