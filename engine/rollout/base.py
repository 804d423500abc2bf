"""The base class of rollout backends, and the settings of sampling."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.algorithms import Dialect
from engine.experience import PromptBatch, Rollout


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """The settings of sampling. Tokens are drawn from the full distribution of the policy, at a temperature, with keyed
    uniform random numbers.

    There is no top_k and no top_p, because the log-probs that PPO compares are those of the full distribution.

    max_new_tokens: T, the largest number of tokens in a response.
    temperature: the temperature at which tokens are drawn, and at which PPO compares log-probs. With 0 the most likely
        token is taken.
    vocabulary_size: token ids from this number on are never drawn. A model's embedding often has more rows than the
        tokenizer has tokens, and an id that the tokenizer does not know may be outside the reward model's vocabulary.
        With None all ids may be drawn.
    stop_token_ids: tokens that end a response and belong to it. With neither stop tokens nor stop_strings, every
        response has max_new_tokens tokens.
    never_drawn: tokens that are never drawn, as if their probability were 0. Log-probs are still those of the full
        distribution.
    stop_strings: a response ends with the token that completes one of these texts.
    pad_token_id: the token at positions after a response.
    seed: the seed of the keyed uniform random numbers.
    logprob_temperature: the temperature at which the sampler records the log-prob of each token; None if it records
        none.
    with_entropy: whether the sampler also records the entropy of each token's distribution, for steps in which no
        forward pass computes it.
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
        """The settings with which this dialect samples from an actor in this dtype ("fp32", "fp16" or "bf16"). The
        sampler always records log-probs, since they show how much it differs from the trainer.

        ends: the ids of the tokens that end a response, in dialects in which a response may end early.
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

    A backend of your own inherits from this class and implements `generate`.

    why: the reason why this backend was chosen, as a run prints it.
    computes_as_actor: whether the backend's log-probs come from the actor's own code and weights, so that in fp32 they
        equal those of a forward pass within rounding. Only then does `old_logprobs` "auto" take the sampler's
        log-probs.
    decoding_ran: which way of engine.rollout.passes.DECODING read single tokens; "" for a backend with an inference
        engine of its own.
    fallback: the reason why single tokens went through the actor's own code although a faster way was asked for; "" if
        the faster way was used, None if no faster way was asked for.
    finished: a callback that gets finished responses while others are still being drawn; a backend need not call it.
    """

    why: str = ""
    computes_as_actor: bool = False
    decoding_ran: str = ""
    fallback: str | None = None
    finished: Callable[[Rollout], None] | None = None

    @abstractmethod
    def generate(self, prompts: PromptBatch, sampling: SamplingConfig) -> Rollout:
        """One response for each row of the prompts, of no more than `prompts.most` tokens. All ranks call this
        together, each with its own prompts."""

    def counts(self) -> dict[str, float]:
        """What this rank has counted since the last call of this method, as {name: sum}. By default nothing is
        counted."""
        return {}

    def release_memory(self) -> None:
        """Called when nothing will be generated for a while. A backend may free memory here. By default nothing is
        freed."""
        return
