"""The base class of rollout backends, and the settings of sampling."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.algorithms import Dialect
from engine.experience import PromptBatch, Rollout


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How responses are sampled: from the policy itself, at a temperature, with keyed uniform numbers.

    There is no top_k and no top_p: log-probs describe the full distribution, so that is what is sampled from.

    max_new_tokens: T, the most tokens a response may have.
    temperature: temperature of sampling; the log-probs that PPO compares are taken at the same one. 0 takes the most
        likely token without drawing.
    vocabulary_size: token ids from this number on are never drawn. Embeddings are often padded, and an id that the
        tokenizer does not know may be outside the reward model's vocabulary. None for no bound.
    stop_token_ids: tokens that end a response and belong to it. Without these and stop_strings all responses have
        max_new_tokens.
    never_drawn: tokens that are never drawn, as if their probability were 0. Log-probs are still those of the full
        distribution.
    stop_strings: texts that end a response with the token that completes them.
    pad_token_id: what fills the slots after a response.
    seed: of the keyed uniform numbers.
    logprob_temperature: rollouts contain the sampler's log-prob of each token at this temperature; None for no
        log-probs.
    with_entropy: rollouts also contain the entropy of each token's distribution, for steps in which no forward pass
    computes it.
    """

    max_new_tokens: int
    pad_token_id: int
    stop_token_ids: tuple[int, ...]
    temperature: float = 1.0
    stop_strings: tuple[str, ...] = ()
    seed: int = 0
    vocabulary_size: int | None = None
    logprob_temperature: float | None = None
    with_entropy: bool = False
    never_drawn: tuple[int, ...] = ()

    @classmethod
    def of(cls, dialect: Dialect, ends: Sequence[int], dtype: str, **fields) -> "SamplingConfig":
        """How this dialect samples from an actor in this dtype ("fp32", "fp16" or "bf16"). Log-probs are always noted:
        they tell how far the sampler is from the trainer.

        ends: the ids of the tokens that end a response where it may end.
        """
        return cls(
            stop_token_ids=tuple(ends) if dialect.sampling == "until_eos" else (),
            never_drawn=tuple(ends) if dialect.sampling == "without_eos" else (),
            temperature=dialect.sampling_temperature,
            logprob_temperature=dialect.logprob_temperature,
            with_entropy=dialect.takes_sampled_logprobs(exact=dtype == "fp32"),
            **fields,
        )


class RolloutBackend(ABC):
    """Draws responses from the actor with its current weights.

    A class of your own inherits from this one and writes `generate`.

    why: the reason for the choice, as a run prints it.
    computes_as_actor: whether its log-probs come from the actor's own code and weights, so that in fp32 they equal
        those of a forward pass within rounding. Only then `old_logprobs` "auto" takes the sampler's log-probs.
        decoding_ran: which of engine.rollout.passes.DECODING read single tokens; "" for a backend with its own
        inference engine.
    fallback: why single tokens went through the actor's own code although a faster way was wanted; "" if the faster way
        was used, None if none was wanted.
    finished: a callback for responses that are done while others are still being drawn; a backend need not call it.
    """

    why: str = ""
    computes_as_actor: bool = False
    decoding_ran: str = ""
    fallback: str | None = None
    finished: Callable[[Rollout], None] | None = None

    @abstractmethod
    def generate(self, prompts: PromptBatch, sampling: SamplingConfig) -> Rollout:
        """One response for each row. All ranks call this together, each with its own prompts."""

    def release_memory(self) -> None:
        """Nothing will be generated for a while, so memory may be freed. By default nothing is freed."""
        return
