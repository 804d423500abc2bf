"""Token log-probs: against float64, chunked against whole, the one-token shift, and the memory of a chunk."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.algo.logprobs import chunk_elements, head_logprobs, predicting, token_logprobs

B, T, D, V = 2, 24, 4, 64
CHUNK = 8 * V  # 8 of the 48 positions at a time


def reference_logprobs(logits: np.ndarray, labels: np.ndarray, temperature: float = 1.0) -> tuple:
    """Log-probs and entropy by definition, in float64."""
    scaled = logits.astype(np.float64) / temperature
    shifted = scaled - scaled.max(-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return np.take_along_axis(logs, labels[..., None], -1)[..., 0], -(np.exp(logs) * logs).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_values_against_float64(temperature):
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(0, 4, (3, 5, 50)).astype(np.float32), rng.integers(0, 50, (3, 5))
    logprobs, entropy = token_logprobs(torch.tensor(logits), torch.tensor(labels), temperature, with_entropy=True)
    expected, expected_entropy = reference_logprobs(logits, labels, temperature)
    np.testing.assert_allclose(logprobs.numpy(), expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(entropy.numpy(), expected_entropy, rtol=0, atol=1e-5)


def test_temperature_by_hand():
    # Logits ln 9 and 0: probabilities 0.9 and 0.1; at temperature 2 the odds are 3 to 1.
    logits, labels = torch.tensor([[math.log(9.0), 0.0]]), torch.tensor([0])
    assert token_logprobs(logits, labels)[0].item() == pytest.approx(math.log(0.9), abs=1e-6)
    assert token_logprobs(logits, labels, 2.0)[0].item() == pytest.approx(math.log(0.75), abs=1e-6)


def test_entropy_by_hand_and_only_when_asked_for():
    logits = torch.tensor([[math.log(0.5), math.log(0.25), math.log(0.25)]], requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([1]), with_entropy=True)
    assert entropy.item() == pytest.approx(1.5 * math.log(2), abs=1e-6)
    (slope,) = torch.autograd.grad(entropy.sum(), logits)
    # dH / dz_j = -p_j (ln p_j + H), with H = 1.5 ln 2 and ln p_j = -ln 2, or -2 ln 2
    torch.testing.assert_close(slope, math.log(2) * torch.tensor([[-0.25, 0.125, 0.125]]), rtol=0, atol=1e-6)
    logprobs, entropy = token_logprobs(logits, torch.tensor([1]))
    assert entropy.tolist() == [0.0] and not entropy.requires_grad and logprobs.requires_grad


def test_impossible_tokens_add_nothing_to_the_entropy():
    logits = torch.tensor([[0.0, -math.inf, 0.0], [-math.inf, 3.0, -math.inf]], requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([2, 1]), with_entropy=True)
    assert logprobs.tolist() == pytest.approx([-math.log(2), 0.0], abs=1e-6)
    assert entropy.tolist() == pytest.approx([math.log(2), 0.0], abs=1e-6)
    (slope,) = torch.autograd.grad(entropy.sum(), logits, retain_graph=True)
    torch.testing.assert_close(slope, torch.zeros(2, 3), rtol=0, atol=1e-6)  # at its largest, and constant
    logprobs.sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.5, 0.0, 0.5], [0.0, 0.0, 0.0]]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_widened_before_the_softmax(dtype):
    rng = np.random.default_rng(1)
    logits = torch.tensor(rng.normal(0, 3, (4, 40)), dtype=dtype)
    labels = torch.tensor(rng.integers(0, 40, 4))
    logprobs, entropy = token_logprobs(logits, labels, 0.7, with_entropy=True)
    assert logprobs.dtype == entropy.dtype == torch.float32
    expected, expected_entropy = reference_logprobs(logits.float().numpy(), labels.numpy(), 0.7)
    np.testing.assert_allclose(logprobs.numpy(), expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(entropy.numpy(), expected_entropy, rtol=0, atol=1e-5)


def test_a_token_is_predicted_one_position_before_it_stands():
    # Prompt 3 positions, response 2: tokens at positions 3 and 4 are read at 2 and 3; 4 predicts a token not drawn.
    states = torch.arange(10).view(1, 5, 2)
    assert predicting(states, 2).tolist() == [[[4, 5], [6, 7]]]
    sequence = torch.tensor([[7, 8, 9, 1, 0]])
    odds = [0.1, 0.2, 0.7, 0.6, 0.9]  # of token 1 at each position; token 0 has the rest
    logits = torch.tensor([[[math.log(1 - p), math.log(p)] for p in odds]])
    logprobs, _ = token_logprobs(predicting(logits, 2), sequence[:, -2:])
    assert logprobs[0].tolist() == pytest.approx([math.log(0.7), math.log(1 - 0.6)], abs=1e-6)


def head_case(dtype=torch.float32, bias=True) -> tuple:
    rng = np.random.default_rng(2)
    tensors = [torch.tensor(rng.normal(0, 1.5, shape), dtype=dtype) for shape in ((B, T, D), (V, D), (V,))]
    hidden, weight, offset = (tensor.requires_grad_() for tensor in tensors)
    return hidden, weight, offset if bias else None, torch.tensor(rng.integers(0, V, (B, T)))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk", [CHUNK, V, 1, 7 * V])  # 8, 1, 1 and 7 positions, 7 leaving a shorter last chunk
def test_chunked_equals_unchunked_in_values_and_gradients(chunk, bias):
    upstream = torch.tensor(np.random.default_rng(3).normal(size=(B, T)), dtype=torch.float32)
    results = []
    for size in (chunk, B * T * V):
        hidden, weight, offset, labels = head_case(bias=bias)
        logprobs, entropy = head_logprobs(hidden, weight, offset, labels, 0.8, True, at_once=size)
        (logprobs * upstream + entropy * upstream.flip(0)).sum().backward()
        gradients = [tensor.grad for tensor in (hidden, weight, offset) if tensor is not None]
        results.append([logprobs.detach(), entropy.detach(), *gradients])
    for chunked, whole in zip(*results, strict=True):
        assert chunked.shape == whole.shape
        torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-5)


def test_the_head_against_float64_with_gradients():
    hidden, weight, offset, labels = head_case()
    logprobs, entropy = head_logprobs(hidden, weight, offset, labels, 0.8, True, at_once=CHUNK)
    logits = hidden.detach().double().numpy() @ weight.detach().double().numpy().T + offset.detach().double().numpy()
    expected, expected_entropy = reference_logprobs(logits, labels.numpy(), 0.8)
    np.testing.assert_allclose(logprobs.detach().numpy(), expected, rtol=0, atol=2e-5)
    np.testing.assert_allclose(entropy.detach().numpy(), expected_entropy, rtol=0, atol=2e-5)
    logprobs.sum().backward()
    # d log p(label) / d logits = (onehot - softmax) / temperature
    scaled = logits / 0.8
    soft = np.exp(scaled - scaled.max(-1, keepdims=True))
    soft /= soft.sum(-1, keepdims=True)
    slope = (np.eye(V)[labels.numpy()] - soft) / 0.8
    np.testing.assert_allclose(hidden.grad.numpy(), slope @ weight.detach().double().numpy(), rtol=0, atol=1e-4)
    np.testing.assert_allclose(offset.grad.numpy(), slope.sum((0, 1)), rtol=0, atol=1e-4)
    expected_weight = np.einsum("btv,btd->vd", slope, hidden.detach().double().numpy())
    np.testing.assert_allclose(weight.grad.numpy(), expected_weight, rtol=0, atol=1e-4)


@pytest.mark.parametrize("low_rank", [False, True])
def test_the_gradient_of_the_entropy_in_chunks_is_that_of_whole_logits(low_rank):
    """Whole logits in float64, and the entropy by torch's own distribution."""
    hidden, weight, offset, labels = head_case()
    torch.manual_seed(5)
    factors = [torch.randn(B, T, 2, requires_grad=True), torch.randn(2, V, requires_grad=True)] if low_rank else []
    learned = [hidden, weight, offset, *factors]
    upstream = torch.rand(B, T)
    _, entropy = head_logprobs(hidden, weight, offset, labels, 0.8, True, CHUNK, *factors)
    found = torch.autograd.grad((entropy * upstream).sum() / upstream.numel(), learned)
    exact = [tensor.detach().double().requires_grad_() for tensor in learned]
    logits = exact[0] @ exact[1].T + exact[2] + (exact[3] @ exact[4] if low_rank else 0.0)
    entropy = torch.distributions.Categorical(logits=logits / 0.8).entropy()
    expected = torch.autograd.grad((entropy * upstream).sum() / upstream.numel(), exact)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() < 1e-6 * other.norm()


class LargestTensor(TorchDispatchMode):
    """Notes the most elements of any floating-point tensor that an operation gives."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.numel = max(self.numel, leaf.numel())
        return result


def largest_tensor(at_once: int, dtype=torch.float32, training=True) -> int:
    hidden, weight, offset, labels = head_case(dtype)
    with LargestTensor() as largest, torch.set_grad_enabled(training):
        logprobs, entropy = head_logprobs(hidden, weight, offset, labels, with_entropy=True, at_once=at_once)
        if training:
            (logprobs + entropy).sum().backward()
    return largest.numel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_no_tensor_is_larger_than_a_chunk(dtype, training):
    assert V * D < CHUNK and B * T * D < CHUNK  # so that the logits are what is measured
    assert largest_tensor(CHUNK, dtype, training) == CHUNK
    assert largest_tensor(B * T * V, dtype, training) == B * T * V  # the measure sees a whole (B, T, V)


@pytest.mark.parametrize(
    "memory, expected", [(16_900_000_000, 1 << 24), (84_980_000_000, 82_988_281), (150_110_000_000, 146_591_796)]
)
def test_a_chunk_grows_with_a_gpus_memory(memory, expected, monkeypatch):
    """In float32 a 256th of it, so a number for each KiB; 2 ** 24 on CPUs, on GPUs of 16 GB, and without gradients."""
    gpu = SimpleNamespace(total_memory=memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    assert chunk_elements(torch.device("cuda")) == expected
    assert chunk_elements(torch.device("cpu")) == 1 << 24
    with torch.no_grad():
        assert chunk_elements(torch.device("cuda")) == 1 << 24


def test_a_chunk_keeps_no_logits_for_the_backward_pass():
    kept = []
    hidden, weight, offset, labels = head_case()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t):
        head_logprobs(hidden, weight, offset, labels, at_once=CHUNK)
    assert max(kept, default=0) < CHUNK
