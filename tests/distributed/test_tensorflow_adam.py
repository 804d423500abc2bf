"""TensorFlow's Adam under ZeRO 0 to 3 on two ranks is what NumPy computes, for 50 steps."""
import numpy as np
import pytest
import torch

from tests.distributed.harness import run_ranks
from tests.distributed.work_tensorflow_adam import BETAS, EPS

STAGES = (0, 1, 2, 3)
GENERATOR = torch.Generator().manual_seed(0)
SHAPES = {"matrix": (5, 7), "vector": (3,), "other": (4, 2)}  # 46 numbers: shards end within a matrix
WEIGHTS = {name: torch.randn(shape, generator=GENERATOR) for name, shape in SHAPES.items()}
# Around eps, where TensorFlow's form and PyTorch's differ most.
GRADIENTS = [{name: 3e-5 * torch.randn(shape, generator=GENERATOR) for name, shape in SHAPES.items()}
             for _ in range(50)]
RATES = [1e-2 * (1 - step / 50) for step in range(50)]


@pytest.fixture(scope="module")
def ranks(folder) -> list:
    return run_ranks("tests.distributed.work_tensorflow_adam:all_stages", folder=folder, stages=STAGES,
                     weights=WEIGHTS, gradients=GRADIENTS, rates=RATES)


@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_against_numpy(ranks, stage, name):
    weight = WEIGHTS[name].double().numpy().copy()
    first, second = np.zeros_like(weight), np.zeros_like(weight)
    for step, (gradients, rate) in enumerate(zip(GRADIENTS, RATES), 1):
        gradient = gradients[name].double().numpy()
        first = BETAS[0] * first + (1 - BETAS[0]) * gradient
        second = BETAS[1] * second + (1 - BETAS[1]) * gradient ** 2
        lr = rate * np.sqrt(1 - BETAS[1] ** step) / (1 - BETAS[0] ** step)
        weight -= lr * first / (np.sqrt(second) + EPS)
    assert abs(weight - WEIGHTS[name].numpy()).max() > 1e-2
    np.testing.assert_allclose(ranks[0][stage][name].numpy(), weight, rtol=0, atol=1e-6)
