"""Learning-rate schedules by hand; which parameters AdamW decays, and its first step; TensorFlow's Adam, which
lm-human-preferences trains with, against NumPy.
"""

import copy
import math
import re

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from engine.algo.logprobs import token_logprobs
from engine.algo.losses import policy_loss
from engine.algo.schedules import SCHEDULES, lr_factor
from engine.algorithms import get_dialect
from engine.engine_spec import OptimizerSpec
from engine.optim import TensorFlowAdam, build_optimizer
from engine.zero.gathering import full_shape
from scripts.harness.models import make_config
from tests.engine.zero.inspecting import partition_away


@pytest.mark.parametrize(
    "schedule, expected",
    [
        # 2 steps of warm-up of 10: 1/2, 1; then progress 0/8 .. 8/8
        ("constant", {0: 0.5, 1: 1.0, 2: 1.0, 6: 1.0, 9: 1.0, 10: 1.0, 11: 1.0}),
        ("linear", {0: 0.5, 1: 1.0, 2: 1.0, 3: 0.875, 6: 0.5, 9: 0.125, 10: 0.0, 11: 0.0}),
        (
            "cosine",
            {0: 0.5, 1: 1.0, 2: 1.0, 4: 0.5 + math.sqrt(2) / 4, 6: 0.5, 8: 0.5 - math.sqrt(2) / 4, 10: 0.0, 11: 0.0},
        ),
    ],
)
def test_schedules_by_hand(schedule, expected):
    for step, factor in expected.items():
        assert lr_factor(step, total=10, warmup=2, schedule=schedule) == pytest.approx(factor, abs=1e-12)


def test_warm_up_grows_in_equal_steps_and_its_first_is_not_lost():
    assert [lr_factor(step, 100, 4, "cosine") for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_without_warm_up_the_first_step_is_at_the_peak():
    assert [lr_factor(step, 4, 0, "linear") for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_a_run_shorter_than_its_warm_up():
    assert [lr_factor(step, 2, 4, "linear") for step in range(2)] == [0.25, 0.5]
    assert lr_factor(4, 4, 4, "linear") == 1.0  # no division by the 0 steps that are left


def test_a_schedule_that_a_user_adds(monkeypatch):
    """By one line of the table, which the dialect's field and the flags of all three steps look at."""
    monkeypatch.setitem(SCHEDULES, "root", lambda progress: (1 - progress) ** 0.5)
    assert lr_factor(4, total=10, warmup=2, schedule="root") == 0.75**0.5
    assert get_dialect("default").override(lr_schedule="root").lr_schedule == "root"


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.norm = nn.LayerNorm(2)
        self.linear = nn.Linear(2, 4)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


def build(module: nn.Module, offload: bool = False, **changed) -> torch.optim.Optimizer:
    return build_optimizer(module, OptimizerSpec(**{"lr": 0.1, "weight_decay": 0.5, **changed}), offload)


def test_matrices_are_decayed_and_vectors_are_not():
    module = Small()
    optimizer = build(module)
    assert type(optimizer) is torch.optim.AdamW
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    names = {name: decays.get(id(parameter)) for name, parameter in module.named_parameters()}
    assert names == {
        "embedding.weight": 0.5,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
        "linear.weight": 0.5,
        "linear.bias": 0.0,
        "frozen.weight": None,
        "frozen.bias": None,
    }
    assert all(
        (group["lr"], group["betas"], group["eps"]) == (0.1, (0.9, 0.95), 1e-8) for group in optimizer.param_groups
    )


def test_a_partitioned_parameter_counts_by_its_whole_shape():
    module = nn.Linear(2, 4)
    for parameter in module.parameters():
        partition_away(parameter)
    groups = build(module).param_groups
    assert [(group["weight_decay"], [tuple(full_shape(p)) for p in group["params"]]) for group in groups] == [
        (0.5, [(4, 2)]),
        (0.0, [(4,)]),
    ]


def test_a_group_without_parameters_is_left_out():
    module = nn.Linear(2, 4, bias=False)
    assert [group["weight_decay"] for group in build(module).param_groups] == [0.5]


def test_the_first_steps_of_adamw_by_hand():
    module = nn.Linear(1, 1)
    with torch.no_grad():
        module.weight.fill_(2.0)
        module.bias.fill_(2.0)
    optimizer = build(module)
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    optimizer.step()
    # Bias-corrected, the first step is lr x sign(g); decay takes lr x 0.5 of the weight: 2 x 0.95 - 0.1.
    assert (module.weight.item(), module.bias.item()) == (pytest.approx(1.8, abs=1e-6), pytest.approx(1.9, abs=1e-6))
    for parameter in module.parameters():
        parameter.grad.fill_(-1.0)
    optimizer.step()
    # m = 0.09 x 3 - 0.1 = 0.17, /(1 - 0.81); v = 0.95 x 0.05 x 9 + 0.05 = 0.4775, /(1 - 0.9025)
    move = 0.1 * (0.17 / 0.19) / math.sqrt(0.4775 / 0.0975)
    assert module.bias.item() == pytest.approx(1.9 - move, abs=1e-6)
    assert module.weight.item() == pytest.approx(1.8 * 0.95 - move, abs=1e-6)


def test_a_warm_up_from_zero_lags_one_step_behind():
    """transformers' get_scheduler: step / warmup, so the first step has rate 0 and the peak comes after the warm-up."""
    assert [lr_factor(step, 100, 4, "constant", warmup_from_zero=True) for step in range(5)] == [0, 0.25, 0.5, 0.75, 1]


def test_vectors_are_decayed_where_that_is_wanted():
    optimizer = build(Small(), decay="all")
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.5]


@pytest.mark.parametrize(
    "family, spared",
    [
        # of GPT-2's vectors the biases and the last norm: its ln_1 and ln_2 have names that are not in the list
        ("gpt2", r"bias|ln_f\.weight"),
        ("llama", r"input_layernorm\.weight|post_attention_layernorm\.weight|norm\.weight"),
        ("opt", r"bias|layer_norm\.weight"),
    ],
)
def test_deepspeed_chat_decays_by_names(family, spared):
    """Its list read by hand for the names of each family."""
    model = AutoModelForCausalLM.from_config(make_config(family))
    optimizer = build(model, decay="deepspeed_chat")
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    found = {name: decays[id(parameter)] for name, parameter in model.named_parameters()}
    assert found == {name: 0.0 if re.search(f"({spared})$", name) else 0.5 for name in found}
    vectors = {name for name, parameter in model.named_parameters() if parameter.dim() == 1 and found[name]}
    assert {name.split(".")[-2] for name in vectors} == ({"ln_1", "ln_2"} if family == "gpt2" else set())


def test_an_unknown_rule_of_decay_is_refused():
    with pytest.raises(ValueError, match="'vectors': known are matrices, all, deepspeed_chat"):
        build(Small(), decay="vectors")


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(ValueError, match="'sgd': known are adamw, tf_adam"):
        build(Small(), form="sgd", weight_decay=0.0)


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


@pytest.mark.slow
def test_the_first_update_of_a_small_gpt2_is_gentler():
    settings = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-5}
    pytorch = approxkl_of_the_first_update(lambda params: torch.optim.Adam(params, **settings))
    tensorflow = approxkl_of_the_first_update(lambda params: TensorFlowAdam(params, **settings))
    assert 0 < 3 * tensorflow < pytorch
