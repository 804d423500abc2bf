"""From logits to tokens: each response with random numbers of its own."""

import torch
from torch import Tensor

from engine.algo.logprobs import token_logprobs
from engine.algo.sampling import keyed_uniforms, sample_tokens
from engine.experience import PromptBatch
from engine.rollout.base import SamplingConfig


class Draws:
    """Draws the tokens of a call's responses, and records what the dialect asks for.

    `recorded` has, under the names of Rollout's fields, (len(prompts), places) float32; nothing where `sampling` asks
    for no log-probs. places: tokens that may be drawn for a response, those behind its end included.
    """

    def __init__(self, prompts: PromptBatch, sampling: SamplingConfig, places: int):
        device = prompts.input_ids.device
        self.sampling = sampling
        self.uniforms = keyed_uniforms(
            sampling.seed,
            prompts.indices.unsqueeze(1),
            prompts.samples.unsqueeze(1),
            torch.arange(places, device=device),
        )
        self.never_drawn = torch.tensor(sampling.never_drawn, dtype=torch.int64, device=device)
        names = ["logprobs"] * (sampling.logprob_temperature is not None) + ["entropy"] * sampling.with_entropy
        self.recorded = {name: torch.zeros(len(prompts), places, device=device) for name in names}

    def draw(self, logits: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        """(B, 1) int64, the tokens at these places (B,) of the responses to these rows (B,) of the prompts.

        logits: (B, V) in any float dtype.
        """
        sampling = self.sampling
        choice = self._without_never_drawn(logits)[:, : sampling.vocabulary_size]
        if sampling.temperature == 0.0:
            tokens = choice.argmax(-1)
        else:
            tokens = sample_tokens(choice, self.uniforms[rows, places], sampling.temperature)
        self.record(logits, tokens, rows, places)
        return tokens.unsqueeze(1)

    def record(self, logits: Tensor, tokens: Tensor, rows: Tensor, places: Tensor) -> None:
        """Note what the dialect asks for of the tokens (B,) that these logits were drawn as, by whatever sampler.
        Arguments as of `draw`."""
        sampling = self.sampling
        if sampling.logprob_temperature is not None:
            found = token_logprobs(logits, tokens, sampling.logprob_temperature, sampling.with_entropy)
            for column, values in zip(self.recorded.values(), found):
                column[rows, places] = values

    def possible(self, logits: Tensor) -> Tensor:
        """The logits (B, V), with -inf for what is not to be drawn, in a new tensor: for another sampler."""
        unknown = torch.arange(logits.shape[1], device=logits.device) >= (self.sampling.vocabulary_size or torch.inf)
        return self._without_never_drawn(logits).masked_fill(unknown, -torch.inf)

    def _without_never_drawn(self, logits: Tensor) -> Tensor:
        return logits.index_fill(1, self.never_drawn, -torch.inf) if len(self.never_drawn) else logits
