"""The plain reference step: PPO's step as it is usually written, on Hugging Face models and without DeepSpeed.

    plain = Plain(actor, critic, dtype=torch.float32, response_length=64, micro_batch=16)
    sequences = plain.generate(prompts)
    plain.train(plain.make_experience(sequences))

Nothing is made slow: no gradients where none are needed, no cache where nothing is generated, fused AdamW, all
gradients of a model reduced over ranks at once. Nothing is made clever either. Dropout is off, as in our engines: all
models stay in eval mode. In bf16 AdamW works on the bf16 weights themselves, which is less work than on the float32
masters that DeepSpeed keeps.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationConfig

from engine import distributed
from engine.algo.advantages import gae
from engine.algo.losses import clipped_surrogate, clipped_value_loss
from engine.experience import PromptBatch

KL_COEF = 0.1
GAMMA = 1.0
LAMBDA = 0.95
CLIP_RANGE = 0.2
MAX_GRAD_NORM = 1.0
LEARNING_RATE = 1e-6
TORCH_LINEAR = torch._C._nn.linear  # what F.linear is until DeepSpeed's zero.Init puts its own in its place, for good


@contextlib.contextmanager
def torch_linear() -> Iterator[None]:
    """Within this context layers compute as torch has them, whatever ZeRO-3 has put there for its own models."""
    patched = F.linear
    F.linear = TORCH_LINEAR
    try:
        yield
    finally:
        F.linear = patched


@dataclass(frozen=True, slots=True)
class PlainExperience:
    """sequences (B, S) int64; logprobs, values, advantages, returns (B, T) float32."""

    sequences: Tensor
    logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor


class Plain:
    """Four models in one process, two optimizers; each rank has all of it and its own share of the rows.

    Prompts have no padding and responses are all equally long, so that there is nothing to mask.
    """

    def __init__(self, actor: str, critic: str, *, dtype: torch.dtype, response_length: int, micro_batch: int):
        self.response_length, self.micro_batch = response_length, micro_batch

        def load(auto_class, path: str, trained: bool) -> nn.Module:
            model = auto_class.from_pretrained(path, dtype=dtype).to(distributed.device()).eval()
            return model.requires_grad_(trained)

        self.actor, self.reference = (load(AutoModelForCausalLM, actor, trained) for trained in (True, False))
        self.critic, self.reward = (
            load(AutoModelForSequenceClassification, critic, trained) for trained in (True, False)
        )
        # No EOS token: responses are to be equally long. Otherwise sampling from the policy itself.
        self.actor.generation_config = GenerationConfig(
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            min_new_tokens=response_length,
            max_new_tokens=response_length,
            pad_token_id=0,
        )
        self.optimizers = {
            model: torch.optim.AdamW(
                model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
            )
            for model in (self.actor, self.critic)
        }

    @torch.no_grad()
    def generate(self, prompts: PromptBatch) -> Tensor:
        """Prompts with sampled responses, (B, S) int64."""
        with torch_linear():
            return self.actor.generate(
                input_ids=prompts.input_ids, attention_mask=prompts.attention_mask, use_cache=True, synced_gpus=False
            )

    @torch.no_grad()
    def make_experience(self, sequences: Tensor) -> PlainExperience:
        """What the four models say of the sequences, and the advantages that follow from it."""
        with torch_linear():
            pieces = sequences.split(self.micro_batch)
            logprobs = torch.cat([self._logprobs(self.actor, piece) for piece in pieces])
            reference = torch.cat([self._logprobs(self.reference, piece) for piece in pieces])
            values = torch.cat([self._values(self.critic, piece)[:, :-1] for piece in pieces])
            scores = torch.cat([self._values(self.reward, piece)[:, -1] for piece in pieces])
        rewards = -KL_COEF * (logprobs - reference)
        rewards[:, -1] += scores
        advantages, returns = gae(rewards, values, GAMMA, LAMBDA)
        white = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        return PlainExperience(sequences, logprobs, values, white, returns)

    def train(self, experience: PlainExperience) -> None:
        """One optimizer step of the critic and one of the actor, on all rows."""
        mask = torch.ones_like(experience.logprobs, dtype=torch.bool)
        tokens = mask.numel() * distributed.world_size()

        def critic_loss(rows: slice) -> Tensor:
            values = self._values(self.critic, experience.sequences[rows])[:, :-1]
            return clipped_value_loss(
                values, experience.values[rows], experience.returns[rows], mask[rows], CLIP_RANGE
            ).loss

        def actor_loss(rows: slice) -> Tensor:
            logprobs = self._logprobs(self.actor, experience.sequences[rows])
            return clipped_surrogate(
                logprobs, experience.logprobs[rows], experience.advantages[rows], mask[rows], CLIP_RANGE
            ).loss

        with torch_linear():
            self._optimizer_step(self.critic, lambda rows: critic_loss(rows) / tokens, len(mask))
            self._optimizer_step(self.actor, lambda rows: actor_loss(rows) / tokens, len(mask))

    def _optimizer_step(self, model: nn.Module, loss: Callable[[slice], Tensor], rows: int) -> None:
        for first in range(0, rows, self.micro_batch):
            loss(slice(first, first + self.micro_batch)).backward()
        sum_gradients(model)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        self.optimizers[model].step()
        model.zero_grad(set_to_none=True)

    def _logprobs(self, model: nn.Module, sequences: Tensor) -> Tensor:
        """(B, T) float32, log-probs of the response tokens."""
        logits = model(input_ids=sequences, attention_mask=torch.ones_like(sequences), use_cache=False).logits
        logits = logits[:, -self.response_length - 1 : -1]
        labels = sequences[:, -self.response_length :].unsqueeze(-1)
        return F.log_softmax(logits.float(), dim=-1).gather(-1, labels).squeeze(-1)

    def _values(self, model: nn.Module, sequences: Tensor) -> Tensor:
        """(B, T + 1) float32, the score head at the last prompt token and at each response token."""
        hidden = model.base_model(input_ids=sequences, attention_mask=torch.ones_like(sequences), use_cache=False)[0]
        return model.score(hidden).squeeze(-1).float()[:, -self.response_length - 1 :]


def sum_gradients(model: nn.Module) -> None:
    """Add the gradients of all ranks up; each rank's loss was divided by the number of tokens on all ranks."""
    if distributed.world_size() == 1:
        return
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = _flatten_dense_tensors(gradients)
    dist.all_reduce(flat)
    for gradient, total in zip(gradients, _unflatten_dense_tensors(flat, gradients)):
        gradient.copy_(total)
