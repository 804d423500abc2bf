"""What every rollout backend offers, and how samples are to be drawn."""

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
    temperature: of sampling; the log-probs that PPO compares are taken at the same one. 0 for the most likely token,
        of which nothing is drawn.
    vocabulary_size: token ids from this on are never drawn: embeddings are often padded, and an id that the tokenizer
        does not know may be outside the reward model's vocabulary. None for no bound.
    stop_token_ids: tokens that end a response and belong to it; with none, and no strings, all have max_new_tokens.
    never_drawn: tokens that are not drawn, as if they had no probability. Log-probs are the full distribution's still.
    stop_strings: texts that end a response with the token that completes them.
    pad_token_id: what fills the slots after a response.
    seed: of the keyed uniform numbers.
    logprob_temperature: rollouts then hold each token's log-prob at this temperature, as the sampler had it. None for
        none.
    with_entropy: and the entropy of its distribution, which is wanted where no forward pass gives it.
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
    """Draws responses from the actor as it stands now.

    A class of your own inherits from this one and writes `generate`.

    why: what a run says of the choice.
    computes_as_actor: whether its log-probs are computed by the actor's own code and weights, so that in fp32 they are
        a forward pass's within rounding. `old_logprobs` "auto" takes those of no other sampler for the actor's.
    decoding_ran: which of engine.rollout.passes.DECODING read single tokens; "" where an engine of its own does.
    fallback: why single tokens went through the actor's own code, where something faster was to read them; "" where it
        did, None where nothing was to.
    finished: is called with responses that are done while others are still drawn, if a backend does so at all.
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
        """Nothing is generated for a while: what is not needed meanwhile may be given back. By default nothing is."""
        return
