"""TensorFlow's Adam under ZeRO 0 to 3 on two ranks is what NumPy computes, for 50 steps, wherever its state lives."""

from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from engine.engine_spec import OptimizerSpec
from engine.models.loading import DTYPES
from engine.rlhf_engine import wrap_trained
from engine.zero.config import EngineConfig, build_ds_config
from tests.distributed.tiny_run import of_each
from tests.engine.zero.inspecting import masters

BETAS, EPS = (0.9, 0.999), 1e-5
DROPPED = 20  # before which step another one, of large gradients, leaves weights and moments as they are


class Given(nn.Module):
    """Weights whose gradient is what it is called with, in a model's place."""

    def __init__(self, weights: dict[str, Tensor]):
        super().__init__()
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(weight.clone()))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        """A scalar: the products' sum."""
        return sum((getattr(self, name).float() * gradient).sum() for name, gradient in gradients.items())


class Wrapped(nn.Module):
    """It as the `model` of another module, as engines have it."""

    base = None

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return self.model(gradients)


def trained(
    folder: str, stage: int, weights: dict, gradients: list, rates: list, dtype: str = "fp32", offload: bool = False
) -> dict:
    """The float32 weights of one engine after all steps, and one in their midst that is dropped."""
    choice = EngineConfig("actor", stage, offload, None if offload else f"{folder}/stage{stage}.json")
    config = build_ds_config(choice, dtype=dtype, micro_batch_size=1)
    module = Wrapped(Given(weights)).to(DTYPES[dtype])
    optimizer = OptimizerSpec(lr=0.0, betas=BETAS, eps=EPS, max_grad_norm=0.0, form="tf_adam")
    with mock.patch("engine.rlhf_engine.check_padding"):  # it has no rows
        model = wrap_trained(module, config, choice, optimizer)
    for number, (step, rate) in enumerate(zip(gradients, rates)):
        if number == DROPPED:
            model.backward(model({name: torch.ones_like(weight) for name, weight in weights.items()}), last=True)
            assert not model.step(rate, skip=True)
        model.backward(model({name: gradient / 2 for name, gradient in step.items()}), last=True)
        assert not model.overflowed()
        assert model.step(rate)
    return masters(model)


FLOAT32 = {
    f"{stage}{'_offload' if offload else ''}": {"stage": stage, "offload": offload}
    for stage in (0, 1, 2, 3)
    for offload in (False, True)
    if stage or not offload
}
HALF = {f"{stage}_{dtype}": {"stage": stage, "dtype": dtype} for stage in (0, 1, 2, 3) for dtype in ("bf16", "fp16")}
GENERATOR = torch.Generator().manual_seed(0)
SHAPES = {"matrix": (5, 7), "vector": (3,), "other": (4, 2)}  # 46 numbers: shards end within a matrix
WEIGHTS = {name: torch.randn(shape, generator=GENERATOR) for name, shape in SHAPES.items()}
# Around eps, where TensorFlow's form and PyTorch's differ most.
GRADIENTS = [
    {name: 3e-5 * torch.randn(shape, generator=GENERATOR) for name, shape in SHAPES.items()} for _ in range(50)
]
RATES = [1e-2 * (1 - step / 50) for step in range(50)]


@pytest.fixture(scope="module")
def ranks(folder) -> list:
    common = {"folder": folder, "weights": WEIGHTS, "gradients": GRADIENTS, "rates": RATES}
    return of_each("tests.distributed.test_tensorflow_adam:trained", FLOAT32 | HALF, **common)


def by_numpy(name: str, tensorflows: bool = True) -> np.ndarray:
    """How far this weight moves in all steps, in TensorFlow's form of Adam or in PyTorch's."""
    moved = np.zeros(SHAPES[name])
    first, second = np.zeros_like(moved), np.zeros_like(moved)
    for step, (gradients, rate) in enumerate(zip(GRADIENTS, RATES), 1):
        gradient = gradients[name].double().numpy()
        first = BETAS[0] * first + (1 - BETAS[0]) * gradient
        second = BETAS[1] * second + (1 - BETAS[1]) * gradient**2
        one, two = 1 - BETAS[0] ** step, 1 - BETAS[1] ** step
        if tensorflows:
            moved -= rate * np.sqrt(two) / one * first / (np.sqrt(second) + EPS)
        else:
            moved -= rate * first / one / (np.sqrt(second / two) + EPS)
    return moved


@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.parametrize("run", FLOAT32)
def test_each_stage_against_numpy(ranks, run, name):
    moved = by_numpy(name)
    assert abs(moved).max() > 1e-2
    for rank in ranks:
        np.testing.assert_allclose(rank[run][name].numpy(), WEIGHTS[name].double().numpy() + moved, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.parametrize("run", HALF)
def test_half_precision_updates_float32_masters(ranks, run, name):
    """What is left is the gradients' rounding, and the start's: masters begin as the rounded weights."""
    moved, other = by_numpy(name), by_numpy(name, tensorflows=False)
    dtype = torch.bfloat16 if run.endswith("bf16") else torch.float16
    start = WEIGHTS[name].to(dtype).double().numpy()
    assert np.linalg.norm(moved - other) > 0.1 * np.linalg.norm(moved), "PyTorch's form would have done"
    for rank in ranks:
        assert rank[run][name].dtype == torch.float32
        got = rank[run][name].double().numpy() - start
        assert np.linalg.norm(got - moved) < (0.02 if dtype == torch.bfloat16 else 0.005) * np.linalg.norm(moved)
