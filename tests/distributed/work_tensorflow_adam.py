"""Run by ranks: TensorFlow's Adam in engines of every ZeRO stage, precision and place, on gradients that are given."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from engine.engine_spec import OptimizerSpec
from engine.models.loading import DTYPES
from engine.rlhf_engine import wrap_trained
from engine.zero.config import EngineConfig, build_ds_config
from tests.engine.zero.inspecting import masters, pretend_cpus_have_fp16

BETAS, EPS = (0.9, 0.999), 1e-5
DROPPED = 20  # before which step another one, of large gradients, leaves weights and moments as they are


class Given(nn.Module):
    """Weights whose gradient is what it is called with, in a model's place; there is no attention to be asked about."""

    config = SimpleNamespace(_attn_implementation="sdpa")

    @property
    def base_model(self) -> "Given":
        return self

    def __init__(self, weights: dict[str, Tensor]):
        super().__init__()
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(weight.clone()))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        """A scalar: the products' sum."""
        return sum((getattr(self, name).float() * gradient).sum() for name, gradient in gradients.items())


class Wrapped(nn.Module):
    """It as the `model` of another module, as engines have it."""

    packs = False
    base = None

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return self.model(gradients)


def all_runs(folder: str, runs: dict[str, dict], weights: dict, gradients: list, rates: list) -> dict:
    """`trained` of each set of arguments, by the same names; every rank adds half of each gradient."""
    pretend_cpus_have_fp16()
    return {
        name: trained(folder, weights=weights, gradients=gradients, rates=rates, **run) for name, run in runs.items()
    }


def trained(
    folder: str, stage: int, weights: dict, gradients: list, rates: list, dtype: str = "fp32", offload: bool = False
) -> dict:
    """The float32 weights of one engine after all steps, and one in their midst that is dropped."""
    choice = EngineConfig("actor", stage, offload, None if offload else f"{folder}/stage{stage}.json")
    config = build_ds_config(choice, dtype=dtype, micro_batch_size=1)
    module = Wrapped(Given(weights)).to(DTYPES[dtype])
    model = wrap_trained(
        module, config, choice, OptimizerSpec(lr=0.0, betas=BETAS, eps=EPS, max_grad_norm=0.0, form="tf_adam")
    )
    for number, (step, rate) in enumerate(zip(gradients, rates)):
        if number == DROPPED:
            model.backward(model({name: torch.ones_like(weight) for name, weight in weights.items()}), last=True)
            assert not model.step(rate, skip=True)
        model.backward(model({name: gradient / 2 for name, gradient in step.items()}), last=True)
        assert not model.overflowed()
        assert model.step(rate)
    return masters(model)
