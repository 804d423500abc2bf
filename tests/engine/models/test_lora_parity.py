"""LoRA against DeepSpeed-Chat's layer, whose formulas are written out here, in Llamas and OPTs.

Source of the formulas: microsoft/DeepSpeedExamples 83757d9c, dschat/utils/module/lora.py, LinearLayer_LoRA and
convert_linear_layer_to_lora. Its factors lie transposed: right (in, dim) is A^T, left (dim, out) is B^T.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM

from engine.experience import position_ids
from engine.models.loading import load_policy
from engine.models.lora import LoraSpec, adapt
from scripts.harness.models import VOCABULARY, make_causal_lm

DIM, CLOSE = 4, 5e-6  # rounding, of processors that sum in another order, too
MODULE_NAMES = {"llama": "layers.", "opt": "decoder.layers."}
SEQUENCES = torch.arange(3, 3 + 2 * 9).view(2, 9) % VOCABULARY
MASK = torch.ones_like(SEQUENCES)


class DeepSpeedChatLinear(nn.Module):
    """The linear layer with factors, as DeepSpeed-Chat computes it; fused: with the update in its weight."""

    def __init__(self, linear: nn.Linear, dim: int, scaling: float = 1.0):
        super().__init__()
        self.weight, self.bias = linear.weight.requires_grad_(False), linear.bias
        rows, columns = linear.weight.shape
        self.right, self.left = nn.Parameter(torch.zeros(columns, dim)), nn.Parameter(torch.zeros(dim, rows))
        nn.init.kaiming_uniform_(self.right, a=math.sqrt(5))
        self.scaling, self.fused = scaling / dim, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.linear(x, self.weight, self.bias)
        return out if self.fused else out + (x @ self.right @ self.left) * self.scaling

    @torch.no_grad()
    def fuse(self) -> None:
        self.weight += self.scaling * torch.matmul(self.left.t(), self.right.t())
        self.fused = True

    @torch.no_grad()
    def unfuse(self) -> None:
        self.weight -= self.scaling * torch.matmul(self.left.t(), self.right.t())
        self.fused = False


def deepspeed_chat_model(folder: str, family: str) -> tuple[nn.Module, dict[str, DeepSpeedChatLinear]]:
    """The model with every nn.Linear replaced whose name contains the module name, and these layers by name."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    linears = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    replaced = {}
    for name, linear in linears:
        if MODULE_NAMES[family] in name:
            replaced[name] = DeepSpeedChatLinear(linear, DIM)
            model.set_submodule(name, replaced[name])
    return model, replaced


def logprobs(model: nn.Module) -> torch.Tensor:
    """(2, 8) float32, of every token but the first."""
    logits = model(input_ids=SEQUENCES, attention_mask=MASK).logits
    return logits[:, :-1].log_softmax(-1).gather(-1, SEQUENCES[:, 1:, None]).squeeze(-1)


@pytest.fixture(params=MODULE_NAMES)
def both(request, tmp_path):
    """Our Policy and DeepSpeed-Chat's model with the same factors, none of them 0, and its layers by name."""
    folder = make_causal_lm(tmp_path / request.param, request.param)
    policy = load_policy(folder, torch.float32).train()
    adapt(policy, LoraSpec(dim=DIM, targets=MODULE_NAMES[request.param]), "actor")
    theirs, layers = deepspeed_chat_model(folder, request.param)
    generator = torch.Generator().manual_seed(5)
    ours = policy.adapters.factors()
    assert ours.keys() == layers.keys() and len(layers) == {"llama": 14, "opt": 12}[request.param]
    with torch.no_grad():
        for name, (a, b) in ours.items():
            b.copy_(torch.randn(b.shape, generator=generator))
            layers[name].right.copy_(a.T)
            layers[name].left.copy_(b.T)
    return policy, theirs, layers


def own_logprobs(policy) -> torch.Tensor:
    return policy(SEQUENCES, MASK, position_ids(MASK), response_length=SEQUENCES.shape[1] - 1)[0]


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got - wanted).norm() / wanted.norm()).item()


def test_outputs_and_gradients_are_the_same(both):
    """Without only_optimize_lora: of factors, biases, norms and embeddings."""
    policy, theirs, layers = both
    got, wanted = own_logprobs(policy), logprobs(theirs)
    assert relative(got, wanted) < CLOSE
    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(6))
    (got * weight).sum().backward()
    (wanted * weight).sum().backward()
    ours = policy.adapters.factors()
    for name, layer in layers.items():
        assert relative(ours[name][0].grad.T, layer.right.grad) < CLOSE, name
        assert relative(ours[name][1].grad.T, layer.left.grad) < CLOSE, name
    rest = {name: p for name, p in theirs.named_parameters() if p.requires_grad and ".right" not in name}
    own = {name.replace(".base_layer", ""): p for name, p in policy.model.named_parameters() if p.requires_grad}
    trained = {name for name in rest if not name.endswith(".left")}
    assert trained == {name for name in own if ".lora_" not in name}
    for (
        name
    ) in trained:  # that of a key's bias is 0, as it moves all scores of a query alike: nothing is relative to it
        error = (own[name].grad - rest[name].grad).norm().item()
        assert error < CLOSE * max(rest[name].grad.norm().item(), 1.0), name


def test_fused_weights_are_the_same_and_compute_the_same(both):
    policy, theirs, layers = both
    before, separate = {name: layer.weight.clone() for name, layer in layers.items()}, logprobs(theirs)
    for name, layer in layers.items():
        layer.fuse()
        ours = policy.model.get_submodule(name)
        merged = ours.get_base_layer().weight + ours.get_delta_weight("actor")
        assert relative(merged, layer.weight) < CLOSE, name
    assert relative(logprobs(theirs), separate) < 10 * CLOSE  # their own rounding, of another order of sums
    for name, layer in layers.items():
        layer.unfuse()
        assert relative(layer.weight, before[name]) < CLOSE


def test_factors_start_from_the_same_distribution():
    """Uniform, as far to both sides, with the variance of that: bound^2 / 3."""
    linear = nn.Linear(400, 300)
    theirs = DeepSpeedChatLinear(linear, 16)
    bound = 1 / math.sqrt(16)
    assert not theirs.left.any() and theirs.right.abs().max() <= bound
    assert theirs.right.abs().max() > 0.99 * bound and theirs.right.var().item() == pytest.approx(
        bound**2 / 3, rel=0.05
    )


def test_our_factors_start_within_the_same_bounds(tmp_path):
    policy = load_policy(make_causal_lm(tmp_path / "llama"), torch.float32)
    adapt(policy, LoraSpec(dim=16), "actor")
    bound = 1 / math.sqrt(16)
    for a, b in policy.adapters.factors().values():
        assert not b.any() and 0.95 * bound < a.abs().max() <= bound
        assert a.var().item() == pytest.approx(bound**2 / 3, rel=0.25)
