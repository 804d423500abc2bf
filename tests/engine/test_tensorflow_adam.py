"""TensorFlow's Adam, which lm-human-preferences trains with, against NumPy."""

import copy

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from engine.algo.logprobs import token_logprobs
from engine.algo.losses import policy_loss
from engine.optim import TensorFlowAdam
from tests.engine.test_optim import Small, build


def tensorflow_adam(weights: list, gradients: list, lr: list, b1=0.9, b2=0.999, eps=1e-5) -> list:
    """The update rule of tf.train.AdamOptimizer's documentation, one array after the other, in float64."""
    weights = [w.copy() for w in weights]
    m, v = ([np.zeros_like(w) for w in weights] for _ in range(2))
    for t, (step, rate) in enumerate(zip(gradients, lr), 1):
        lr_t = rate * np.sqrt(1 - b2**t) / (1 - b1**t)
        for i, g in enumerate(step):
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * g * g
            weights[i] = weights[i] - lr_t * m[i] / (np.sqrt(v[i]) + eps)
    return weights


# Gradients around eps, where the two forms differ most.
RNG = np.random.default_rng(0)
SHAPES = [(3, 4), (5,), ()]
WEIGHTS = [RNG.normal(size=shape) for shape in SHAPES]
GRADIENTS = [[RNG.normal(scale=3e-5, size=shape) for shape in SHAPES] for _ in range(50)]
RATES = [1e-2 * (1 - step / 50) for step in range(50)]


def trained(optimizer_of, split: bool = False) -> list:
    """The weights after 50 steps; with `split`, each matrix as two flat shards, as ZeRO hands them out."""

    def parts(array):
        flat = torch.tensor(array, dtype=torch.float32)
        return list(flat.flatten().tensor_split(2)) if split and flat.dim() == 2 else [flat]

    params = [part.clone().requires_grad_() for weight in WEIGHTS for part in parts(weight)]
    optimizer = optimizer_of(params)
    for gradients, rate in zip(GRADIENTS, RATES):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for param, gradient in zip(params, [part for g in gradients for part in parts(g)]):
            param.grad = gradient
        optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize("split", [False, True])
def test_tensorflows_adam_against_numpy_for_50_steps(split):
    got = trained(lambda params: TensorFlowAdam(params, lr=0.0, betas=(0.9, 0.999), eps=1e-5), split)
    expected = tensorflow_adam(WEIGHTS, GRADIENTS, RATES)
    np.testing.assert_allclose(
        torch.cat([part.flatten() for part in got]).numpy(),
        np.concatenate([weight.reshape(-1) for weight in expected]),
        rtol=0,
        atol=1e-6,
    )
    other = trained(lambda params: torch.optim.Adam(params, lr=0.0, betas=(0.9, 0.999), eps=1e-5))
    assert abs(other[0].numpy() - expected[0]).max() > 1e-2  # the other form would be seen


def test_epsilon_weighs_more_in_the_first_step():
    # g = eps = 1e-5: m / (1 - b1) = g and v / (1 - b2) = g^2. PyTorch: g / (g + eps) = 1/2 of the rate.
    # TensorFlow: sqrt(0.001) g / (sqrt(0.001) g + eps) = 0.0306535 of it.
    moved = []
    for form in (torch.optim.Adam, TensorFlowAdam):
        weight = torch.zeros(1, requires_grad=True)
        weight.grad = torch.full((1,), 1e-5)
        form([weight], lr=1.0, betas=(0.9, 0.999), eps=1e-5).step()
        moved.append(-weight.item())
    assert moved == [pytest.approx(0.5, rel=1e-5), pytest.approx(0.0306535, rel=1e-4)]


def test_parameters_without_gradient_stay_and_count_no_step():
    one, two = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    optimizer = TensorFlowAdam([one, two], lr=0.1)
    one.grad = torch.ones(2)
    optimizer.step()
    assert one.abs().min() > 0 and not two.any() and two not in optimizer.state
    two.grad = torch.ones(2)
    one.grad = None
    optimizer.step()
    assert torch.equal(one, two)  # each has made its first step


def test_tensorflows_adam_goes_on_from_its_state():
    weight = torch.ones(3, requires_grad=True)
    straight = TensorFlowAdam([weight], lr=0.1)
    for step in range(4):
        weight.grad = torch.arange(3.0) - step
        straight.step()
        if step == 1:
            restarted = weight.detach().clone().requires_grad_()
            resumed = TensorFlowAdam([restarted], lr=0.5)
            resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
    for step in (2, 3):
        restarted.grad = torch.arange(3.0) - step
        resumed.step()
    assert torch.equal(weight, restarted)


def test_tensorflows_adam_is_built_of_all_trained_parameters():
    module = Small()
    optimizer = build(module, form="tf_adam", weight_decay=0.0, offload=True)
    assert type(optimizer) is TensorFlowAdam and len(optimizer.param_groups) == 1
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {
        id(p) for p in module.parameters() if p.requires_grad
    }
    assert optimizer.step(lambda: 7.0) == 7.0


def approxkl_of_the_first_update(optimizer_of) -> float:
    """Mean (lp - lp0)^2 / 2 of a small GPT-2's tokens after one step on whitened advantages.

    A large batch, since the larger it is the smaller are the gradients, and the more does epsilon weigh.
    """
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=32,
            n_embd=64,
            n_layer=1,
            n_head=4,
            n_positions=25,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    tokens, advantages = torch.randint(32, (2048, 25)), torch.randn(2048, 24)
    mask = torch.ones_like(advantages, dtype=torch.bool)
    optimizer = optimizer_of(model.parameters())

    def logprobs():
        return token_logprobs(model(tokens).logits[:, :-1], tokens[:, 1:])[0]

    old = logprobs()
    policy_loss(old, old.detach(), advantages, mask, 0.2).loss.div(mask.sum()).backward()
    optimizer.step()
    return (logprobs() - old).detach().square().mean().item() / 2


def test_the_first_update_of_a_small_gpt2_is_gentler():
    settings = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-5}
    pytorch = approxkl_of_the_first_update(lambda params: torch.optim.Adam(params, **settings))
    tensorflow = approxkl_of_the_first_update(lambda params: TensorFlowAdam(params, **settings))
    assert 0 < 3 * tensorflow < pytorch
