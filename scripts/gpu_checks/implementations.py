"""Models with each implementation of attention, on left-padded rows, against the written-out products."""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.errors import UserError
from engine.experience import position_ids
from engine.models.attention import IMPLEMENTATIONS, Attention
from engine.models.config_and_tokenizer import LANGUAGE_MODEL
from engine.models.loading import DTYPES, load_policy
from engine.models.policy import Policy
from scripts.gpu_checks.check import Trial
from scripts.gpu_checks.decoding import GAP, sixteen_bits
from scripts.gpu_checks.machine import device
from scripts.gpu_checks.models import prompts, random_models

OTHERS = {name: Attention(name, packing="padded") for name in IMPLEMENTATIONS if name != "auto"}
OTHERS |= {
    f"{name}, packed": Attention(name, packing="packed") for name in ("sdpa", "flash_attention_2", "flash_attention_3")
}
GRADIENT = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.02}  # distance of two gradients, as a share of their length


def against_math(trial: Trial) -> None:
    """Log-probs and gradients of ragged rows: what torch chooses, and what --attn_implementation and --packing have
    here, against torch's plain products."""
    trial.needs_gpu("the kernels of GPUs")
    path, _ = random_models(trial, "136m")
    for dtype in ("fp32", sixteen_bits(trial)):
        policy = load_policy(path, DTYPES[dtype]).to(device())
        batch = ragged(trial, policy.model.config.vocab_size)
        with sdpa_kernel(SDPBackend.MATH):
            expected = computed(policy, *batch)
        with trial.part(f"{dtype} chosen"):
            compared(trial, dtype, "chosen", computed(policy, *batch), expected)
        for name, attention in OTHERS.items():
            with trial.part(f"{dtype} {name}"):
                by_another(trial, path, dtype, name, attention, batch, expected)


def by_another(
    trial: Trial, path: str, dtype: str, name: str, attention: Attention, batch: tuple, expected: tuple
) -> None:
    """The same with --attn_implementation and --packing, where this machine has them."""
    try:
        attention.check(path, LANGUAGE_MODEL, dtype, "the model")
    except UserError:
        trial.tell({f"{dtype} {name}": "not here"})
        return
    policy = load_policy(path, DTYPES[dtype], attention=attention).to(device())
    compared(trial, dtype, name, computed(policy, *batch), expected)


def ragged(trial: Trial, vocabulary: int) -> tuple[Tensor, Tensor, int]:
    """Sequences and mask (B, S) of left-padded prompts with responses behind them, and how long these are."""
    rows, prompt, response = (4, 12, 12) if trial.dry else (8, 256, 64)  # S % 128 == 64
    batch = prompts(rows, prompt, vocabulary)
    generator = torch.Generator().manual_seed(1)
    responses = torch.randint(4, vocabulary, (rows, response), generator=generator)
    sequences = torch.cat([batch.input_ids, responses], 1)
    mask = torch.cat([batch.attention_mask, torch.ones_like(responses)], 1)
    return sequences.to(device()), mask.to(device()), response


def computed(policy: Policy, sequences: Tensor, mask: Tensor, response: int) -> tuple[Tensor, Tensor]:
    """Log-probs (B, T) of the responses, and the gradient of their mean in all weights as one vector, float32."""
    policy.zero_grad(set_to_none=True)
    logprobs, _ = policy(sequences, mask, position_ids(mask), response_length=response)
    logprobs.mean().backward()
    return logprobs.detach(), torch.cat([p.grad.float().flatten() for p in policy.parameters() if p.grad is not None])


def compared(trial: Trial, dtype: str, name: str, found: tuple, expected: tuple) -> None:
    """Both are numbers, and within rounding of what is expected."""
    gap = (found[0] - expected[0]).abs().max().item()
    distance = ((found[1] - expected[1]).norm() / expected[1].norm()).item()
    trial.tell({f"{dtype} {name}, nats": gap, f"{dtype} {name}, gradient off by": distance})
    trial.expect(gap < GAP[dtype], f"{dtype} {name}: log-probs are {gap:.3g} nats off")
    trial.expect(distance < GRADIENT[dtype], f"{dtype} {name}: the gradient is off by {distance:.3g} of its length")
