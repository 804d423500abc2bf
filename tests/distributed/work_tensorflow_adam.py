"""Run by ranks: TensorFlow's Adam in engines of every ZeRO stage, on gradients that are given."""
import torch
from torch import Tensor, nn

from engine.ds_config import EngineChoice, build_ds_config
from engine.ds_engine import TrainedModel, full_state
from engine.optim import build_optimizer

BETAS, EPS = (0.9, 0.999), 1e-5


class Given(nn.Module):
    """Weights whose gradient is what it is called with."""

    def __init__(self, weights: dict[str, Tensor]):
        super().__init__()
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(weight.clone()))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        """A scalar: the products' sum."""
        return sum((getattr(self, name) * gradient).sum() for name, gradient in gradients.items())


def all_stages(folder: str, stages: tuple, weights: dict, gradients: list, rates: list) -> dict:
    """The weights of each stage after all steps; every rank adds half of each gradient."""
    return {stage: trained(folder, stage, weights, gradients, rates) for stage in stages}


def trained(folder: str, stage: int, weights: dict, gradients: list, rates: list) -> dict:
    """The weights of one stage."""
    choice = EngineChoice("actor", stage, path=f"{folder}/stage{stage}.json")
    module = Given(weights)
    optimizer = build_optimizer(module, 0.0, BETAS, EPS, 0.0, offload=False, form="tf_adam")
    model = TrainedModel(module, build_ds_config(choice, dtype="fp32", micro_batch_size=1, gradient_clipping=0.0),
                         optimizer)
    for step, rate in zip(gradients, rates):
        model.backward(model({name: gradient / 2 for name, gradient in step.items()}), last=True)
        model.step(rate)
    return full_state(model.module)

