"""What sampling should answer, the plain way: one row at a time, the whole sequence anew for each token, no cache.

tokens, ended = plain_answer(model, [5, 9, 33], index=12, sample=0, how=sampling)
"""

import torch

from engine.rollout.base import SamplingConfig
from scripts.harness.models import make_tokenizer

TOKENIZER = make_tokenizer()


def plain_answer(model, prompt: list[int], index: int, sample: int, how: SamplingConfig) -> tuple[list[int], bool]:
    """The response of a Hugging Face language model to one prompt, and whether it ended by itself."""
    response: list[int] = []
    while len(response) < how.max_new_tokens:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + response])).logits[0, -1]
        for token in how.never_drawn:
            logits[token] = -torch.inf
        passed = (logits / how.temperature).softmax(-1).cumsum(-1) > uniform(how.seed, index, sample, len(response))
        response.append(passed.nonzero()[0].item())
        text = TOKENIZER.decode(response) if how.stop_strings else ""
        if response[-1] in how.stop_token_ids or any(string in text for string in how.stop_strings):
            return response, True
    return response, False


ROUND = (1 << 64) - 1


def splitmix(state: int) -> int:
    """The output of SplitMix64 that follows `state`, in Python's integers."""
    bits = (state + 0x9E3779B97F4A7C15) & ROUND
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & ROUND
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & ROUND
    return bits ^ (bits >> 31)


def uniform(seed: int, *keys: int) -> float:
    """The random number of a seed and keys, such as a prompt's index, a sample's number and a position."""
    bits = seed & ROUND
    for key in keys:
        bits = splitmix(bits) ^ (key & ROUND)
    return (splitmix(splitmix(bits)) >> 11) / 2**53
