"""Before the first update, and after a refresh of the reference, actor and reference are one model: a KL between them
says that one of them is not what it should be."""

import torch

from engine import distributed
from engine.errors import RunStopped
from engine.experience import Experience

_MANTISSA = {"bf16": 2.0**-7, "fp16": 2.0**-10, "fp32": 2.0**-23}  # the step between a number and the next, of 1
SPREAD = 32.0
EXACT = 1e-3

_OF_MODELS = (
    "One of them does not hold the SFT model's weights, or computes with them otherwise: try --rollout_backend zero3 "
    "and --dtype fp32, and look at the DeepSpeed files of both."
)
_OF_SAMPLER = (
    "The actor's were taken from the sampler (old_logprobs=sampler), which does not hold the actor's weights, or "
    "computes with them otherwise. Take --old_logprobs forward: rollout/logprob_gap then tells how far the sampler is "
    "from the actor, and --set correction=token_truncate makes up for it."
)


def rounding_bound(dtype: str, temperature: float = 1.0) -> float:
    """How far apart two computations of a token's log-prob by one model may be on average, in nats, by rounding alone.

    A log-prob is the difference of two numbers as large as logits become, about SPREAD, and each is off by about one
    step of the dtype there: SPREAD * 2**-7 = 0.25 in bf16, and an eighth of that in fp16. Means measured
    with small models are a sixtieth of that between a sampler's log-probs and a forward pass's, and 0 between forward
    passes; single tokens reach half of it. In fp32 it is EXACT, a thousand times what was measured, as sums are longer
    in large models; or fp16's bound, where torch was told to multiply matrices with TF32, whose mantissa is as long.
    Weights that are random are nats away. Dividing logits by a temperature under 1 enlarges all of it.
    """
    step = _MANTISSA[dtype]
    if dtype == "fp32" and torch.get_float32_matmul_precision() != "highest":
        step = _MANTISSA["fp16"]
    return max(SPREAD * step, EXACT) / min(temperature, 1.0)


def stop_unless_at_reference(step: int, experience: Experience, bound: float | None) -> None:
    """Stop on all ranks where actor and reference do not agree on responses, though they are one model (all ranks call
    this): in step 1, and in a step after a refresh of the reference.

    bound: of the mean absolute difference of their log-probs, a token; None for no such look. Raises: RunStopped.
    """
    if bound is None:
        return
    gaps = experience.kl.double().abs()
    sums = torch.stack([gaps.sum(), experience.rollout.response_mask.sum().double()])
    total, tokens = distributed.all_reduce_sum(sums).tolist()
    gap = total / max(tokens, 1.0)
    if gap > bound:
        sampled = experience.logprobs is experience.rollout.logprobs
        since = "no weight has been changed" if step == 1 else "the reference has just become the actor"
        raise RunStopped(
            f"step {step}: {since}, so actor and reference are one model, and the KL between them has to be 0. But "
            f"their log-probs differ by {gap:.3g} nats a token on average; rounding explains {bound:.3g}. "
            f"{_OF_SAMPLER if sampled else _OF_MODELS}"
        )
