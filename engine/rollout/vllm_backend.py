"""Rollouts by vLLM in the trainer's own processes."""

from collections.abc import Sequence

from engine.algo.sampling import keyed_uniforms
from engine.copies import Model
from engine.distributed import RankGroup
from engine.experience import PromptBatch, Rollout
from engine.models.saving import merged_weights
from engine.rollout.base import RolloutBackend, SamplingConfig
from engine.rollout.decode import CHECK_EVERY, rollout_of
from engine.rollout.draws import Draws
from engine.rollout.joined import prompts_of_group
from engine.rollout.request import Ends, Request, requests_of
from engine.rollout.vllm_engine import VLLMEngine
from engine.trace import traced
from engine.zero.gathering import full_numel

SAMPLERS = ("keyed", "own")  # what draws: our own random numbers, or vLLM's sampler


class VLLMRollouts(RolloutBackend):
    """Generates with vLLM, which holds the actor spread over groups of neighbouring ranks.

    Weights reach it bucket by bucket after an update, adapters merged. From `release_memory` to the next call it
    sleeps. The ranks of a group draw the responses to the prompts of all of them, and each keeps those to its own.

    Args:
        rows_at_once: how many responses a rank's part of the memory for keys and values is for.
        row_length: most tokens of prompt and response.
        tensor_parallel: ranks in a group. sampler: one of SAMPLERS. moments: as in VLLMEngine.
    """

    def __init__(
        self,
        actor: Model,
        tokenizer,
        *,
        rows_at_once: int,
        row_length: int,
        cache_bytes: int,
        tensor_parallel: int = 1,
        sampler: str = "keyed",
        moments: int = 0,
    ):
        self.actor, self.tokenizer, self.group = actor, tokenizer, RankGroup(tensor_parallel)
        model = actor.module.model
        config = type(model.config).from_dict(model.config.to_dict())
        if actor.module.adapters is not None and actor.module.adapters.tied_head is not None:
            config.tie_word_embeddings = False  # an adapted head is a matrix of its own when it is merged
        self.engine = VLLMEngine(
            config,
            next(model.parameters()).dtype,
            rows=rows_at_once * tensor_parallel,
            row_length=row_length,
            cache_bytes=cache_bytes,
            tensor_parallel=tensor_parallel,
            keyed=sampler == "keyed",
            weight_bytes=sum(full_numel(p) * p.element_size() for p in model.parameters()),
            moments=moments,
        )
        self._loaded: int | None = None  # the version of the weights that vLLM holds

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig) -> Rollout:
        """One response for each row; ranks of a group go on together."""
        if self._loaded != self.actor.version:
            self._load()
        whole, own = prompts_of_group(prompts, self.group)
        requests = requests_of(whole, sampling.max_new_tokens)
        draws = Draws(whole, sampling, sampling.max_new_tokens)
        self._draw(whole, requests, draws)
        recorded = {name: column[own] for name, column in draws.recorded.items()}
        return rollout_of(prompts, requests[own], sampling.pad_token_id, recorded)

    def release_memory(self) -> None:
        """Nothing is generated for a while: vLLM gives back what it has on the GPU."""
        self.engine.sleep()
        if self.engine.on_gpu:
            self._loaded = None

    @traced("vLLM takes weights")
    def _load(self) -> None:
        self.engine.load(merged_weights(self.actor.module))
        self._loaded = self.actor.version

    @traced("vLLM generates")
    def _draw(self, prompts: PromptBatch, requests: Sequence[Request], draws: Draws) -> None:
        sampling = draws.sampling
        ends = Ends(self.tokenizer, sampling.stop_token_ids, sampling.stop_strings)
        unseen: list[list[int]] = [[] for _ in requests]

        def look(row: int, drawn: list[int]) -> bool:
            request, new = requests[row], unseen[row]
            new += drawn
            request.drawn += len(drawn)
            # A text is looked for as seldom as in our own loop; a token that ends a response is seen by vLLM itself.
            if drawn and drawn[-1] not in ends.tokens and request.drawn < request.most and len(new) < CHECK_EVERY:
                return False
            request.look(new, ends)
            new.clear()
            return request.finished

        ids = [row[mask.bool()].tolist() for row, mask in zip(prompts.input_ids, prompts.attention_mask, strict=True)]
        seeds = keyed_uniforms(sampling.seed, prompts.indices, prompts.samples, 0).mul(2**31).long().tolist()
        self.engine.generate(ids, draws, seeds, look)
