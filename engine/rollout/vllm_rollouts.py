"""Rollouts by vLLM within the trainer's own processes; the only file that uses vLLM."""

import gc
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from engine import distributed
from engine.algo.sampling import keyed_uniforms
from engine.copies import Model
from engine.distributed import RankGroup
from engine.errors import UserError
from engine.experience import PromptBatch, Rollout
from engine.memory.gpus import NCCL
from engine.models.saving import merged_weights
from engine.rollout.base import RolloutBackend, SamplingConfig
from engine.rollout.decode import CHECK_EVERY
from engine.rollout.request import Draws, Ends, Request, prompts_of_group, requests_of, rollout_of
from engine.trace import moved, traced
from engine.zero.accelerator import on_gpu
from engine.zero.communication import SHARED_MEMORY, clear_dead_buffers
from engine.zero.gathering import full_numel

SAMPLERS = ("keyed", "own")  # what draws: our own random numbers, or vLLM's sampler
VERSIONS = ("0.32.",)  # that this was tried with; another may have moved what is used here
WORKSPACE = 2_000_000_000  # bytes of activations of what it reads at once, and of its CUDA graphs; assumed
HEADS_ON_CPU = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # widths that its kernels have there

_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, whose tensors it is given
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
_SETTINGS_ON_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # it would bind this process's threads, the trainer's too, to cores
    "TORCH_COMPILE_DISABLE": "1",  # minutes at the first call, otherwise
}
# Shared memory of its groups on CPUs, which it never removes, and the names of which the next run would use again.
_BUFFERS = "*-tp:*-cpushm_*"


class VLLMRollouts(RolloutBackend):
    """Generates with vLLM, which holds the actor spread over groups of neighbouring ranks (all ranks make it together).

    Weights reach it bucket by bucket after an update, adapters merged; until then they are empty. From `release_memory`
    to the next call it sleeps. The ranks of a group draw the responses to the prompts of all of them, and each keeps
    those to its own.

    Args:
        rows_at_once: how many responses a rank's part of the memory for keys and values is for.
        row_length: most tokens of prompt and response. cache_bytes: for keys and values, on each rank.
        tensor_parallel: ranks in a group.
        sampler: one of SAMPLERS; log-probs are noted by `Draws` either way.
        moments: bytes that engines beside it take in their first step, and keep.

    Raises: UserError where vLLM is not here, or a GPU has no room for it.
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
        vllm_version()
        self.actor, self.tokenizer, self.group = actor, tokenizer, RankGroup(tensor_parallel)
        self.on_gpu, self._draws, self._keyed = on_gpu(), _Current(), sampler == "keyed"
        self._loaded: int | None = None  # the version of the weights that vLLM holds
        self._asleep: set[str] = set()
        for name, value in (_SETTINGS if self.on_gpu else _SETTINGS | _SETTINGS_ON_CPU).items():
            os.environ.setdefault(name, value)
        from vllm import LLM

        moved("vLLM starts")
        model = actor.module.model
        config = type(model.config).from_dict(model.config.to_dict())
        if actor.module.adapters is not None and actor.module.adapters.tied_head is not None:
            config.tie_word_embeddings = False  # an adapted head is a matrix of its own when it is merged
        share = {}
        if self.on_gpu:
            weights = sum(full_numel(p) * p.element_size() for p in model.parameters())
            share["gpu_memory_utilization"] = _share(weights // tensor_parallel, cache_bytes, moments)
        self._clear_buffers()
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            self._llm = LLM(
                model=folder,
                skip_tokenizer_init=True,
                load_format="dummy",
                dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
                max_model_len=row_length,
                max_num_seqs=rows_at_once * tensor_parallel,
                kv_cache_memory_bytes=cache_bytes,
                **share,
                tensor_parallel_size=tensor_parallel,
                distributed_executor_backend="external_launcher",
                enforce_eager=not self.on_gpu,
                enable_prefix_caching=False,  # of weights that are gone
                enable_sleep_mode=self.on_gpu,
                async_scheduling=False,  # a token's place is counted when it is drawn
                disable_log_stats=True,
                seed=0,
                logits_processors=[_sampling_class(self._draws, self._keyed)],
            )
        self._clear_buffers(own=True)
        gc.unfreeze()  # it hides all objects that there are, the trainer's too, from the garbage collector
        # At exit it would close process groups behind the run, which has closed them all by then.
        self._llm.llm_engine.engine_core._finalizer.detach()

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
        """Nothing is generated for a while: vLLM gives back what it has on the GPU, weights, keys and values, which are
        lost. On CPUs it keeps them."""
        if self.on_gpu and not self._asleep:
            moved("vLLM goes to sleep")
            self._llm.sleep(level=2)
            self._asleep = {"weights", "kv_cache"}
        if self.on_gpu:
            self._loaded = None

    @traced("vLLM takes weights")
    def _load(self) -> None:
        """Load the actor's current weights into vLLM, by Hugging Face's names and in their order."""
        self._wake("weights")
        weights = _noted(merged_weights(self.actor.module))
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if not self.on_gpu:
            self._llm.apply_model(_pack_tied_head)
        self._loaded = self.actor.version

    @traced("vLLM generates")
    def _draw(self, prompts: PromptBatch, requests: Sequence[Request], draws: Draws) -> None:
        """Draw the responses to all prompts of the group."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling, engine = draws.sampling, self._llm.llm_engine
        ends = Ends(self.tokenizer, sampling.stop_token_ids, sampling.stop_strings)
        unseen: list[list[int]] = [[] for _ in requests]

        def has_enough(row: int, drawn: list[int]) -> bool:
            """Whether a request has, with the tokens that were drawn since the last time."""
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
        self._wake("kv_cache")
        self._draws.now = draws
        for place, (prompt, seed) in enumerate(zip(ids, seeds, strict=True)):
            parameters = SamplingParams(
                temperature=1.0 if self._keyed else sampling.temperature,
                seed=None if self._keyed else seed,
                max_tokens=sampling.max_new_tokens,
                stop_token_ids=list(sampling.stop_token_ids),
                ignore_eos=True,  # what ends a response is said by `sampling` alone
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                extra_args={"place": place},
            )
            engine.add_request(str(place), {"prompt_token_ids": prompt}, parameters)
        while engine.has_unfinished_requests():
            moved("vLLM draws a token")
            outputs = engine.step()
            drawn = {int(output.request_id): list(output.outputs[0].token_ids) for output in outputs}
            if not self._keyed:
                self._draws.record(drawn)
            enough = [
                output.request_id
                for output in outputs
                if has_enough(int(output.request_id), drawn[int(output.request_id)]) and not output.finished
            ]
            if enough:
                engine.abort_request(enough)
        self._draws.now = None

    def _clear_buffers(self, own: bool = False) -> None:
        """Remove what runs that died have left; or the names of this run's own, when all ranks have them open."""
        distributed.barrier()
        if own:
            _unlink_queue()
        if distributed.local_rank() == 0 and not self.on_gpu:
            clear_dead_buffers(pattern=_BUFFERS)
            for path in SHARED_MEMORY.glob(_BUFFERS) if own else ():
                path.unlink(missing_ok=True)
        distributed.barrier()

    def _wake(self, part: str) -> None:
        if part in self._asleep:
            moved("vLLM wakes up")
            self._llm.wake_up(tags=[part])
            self._asleep.remove(part)


def vllm_version() -> str:
    """The installed version of vLLM, with or without CUDA. Raises: UserError where it is missing or was never tried."""
    for package in ("vllm", "vllm-cpu"):
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        if version.startswith(VERSIONS):
            return version
        raise UserError(
            f"--rollout_backend vllm: {package} {version} is installed, and this was tried with {VERSIONS[0]}x alone. "
            "Install that (scripts/vllm_environment.sh makes an environment), or take another backend."
        )
    raise UserError(
        "--rollout_backend vllm: vLLM is not installed here. scripts/vllm_environment.sh makes an environment that has "
        "it beside the versions that training needs; --rollout_backend auto needs none."
    )


def check_heads(config: PretrainedConfig, name: str, tensor_parallel: int, on_cpu: bool) -> None:
    """Raise UserError where vLLM cannot compute this model's attention. name: what the message calls the model."""
    config = config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    if heads % tensor_parallel:
        raise UserError(
            f"--vllm_tensor_parallel_size {tensor_parallel}: {name} has {heads} attention heads, and each rank takes "
            f"as many. Give a number that divides {heads}."
        )
    if on_cpu and width not in HEADS_ON_CPU:
        raise UserError(
            f"--rollout_backend vllm: {name} has attention heads of {width} numbers; on CPUs vLLM has them of "
            f"{', '.join(map(str, HEADS_ON_CPU))}. Take --rollout_backend auto, or a GPU."
        )


def _share(weights: int, cache: int, moments: int) -> float:
    """Which part of a GPU's memory vLLM is to ask for: it refuses to start where less is free, and asks for 0.92 by
    itself (request_memory in vllm/v1/worker/utils.py); how many keys and values it has is said by cache_bytes alone.

    weights, cache: bytes on each rank. moments: as in VLLMRollouts. Raises: UserError on all ranks where one has too
    few.
    """
    free, total = _gpu_memory()
    free = -distributed.largest(-free)
    needed = weights + cache + WORKSPACE
    nccl = NCCL if distributed.world_size() > 1 else 0  # its groups', before it looks at what is free
    if needed + nccl + moments > free:
        raise UserError(
            f"--rollout_backend vllm: it takes {(needed + nccl) / 1e9:.1f} GB of a GPU (weights {weights / 1e9:.1f}, "
            f"keys and values {cache / 1e9:.1f}, working memory {(WORKSPACE + nccl) / 1e9:.1f}), Adam's moments "
            f"{moments / 1e9:.1f} beside it, and {free / 1e9:.1f} of {total / 1e9:.1f} GB are free once the models are "
            "loaded. Set a larger --vllm_tensor_parallel_size, a smaller --per_device_generation_batch_size, a higher "
            "--actor_zero_stage and --critic_zero_stage, or --offload."
        )
    return needed / total


def _gpu_memory() -> tuple[int, int]:
    """Bytes of this rank's GPU: free, once torch's allocator has given back what it does not use, and in all."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()


def _unlink_queue() -> None:
    """Remove the name of the memory that a group's ranks share as a queue, which all of them have open by now: of one
    that still has its name at a run's end Python warns as of a leak."""
    from vllm.distributed.parallel_state import get_tp_group

    queue = get_tp_group().mq_broadcaster
    if queue is not None and queue.buffer is not None and queue.buffer.is_creator:
        queue.buffer.shared_memory.unlink()
        queue.buffer.is_creator = False


def _noted(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights; while vLLM has one, and not while the next are gathered, "vLLM takes weights" was begun last."""
    for name, weight in weights:
        moved("vLLM takes weights")
        yield name, weight


class _Current:
    """Shared state through which the logits processor, which vLLM makes, finds the current `Draws`.

    seen: what it leaves of a step in which vLLM's own sampler draws: the logits (B, V), and rows of them with the place
    of the prompt that each answers and how many tokens that had.
    """

    now: Draws | None = None
    seen: tuple[Tensor, list[tuple[int, int, int]]] | None = None

    def record(self, drawn: Mapping[int, Sequence[int]]) -> None:
        """Note log-probs of a step's tokens: prompt's place -> the one that was drawn for it, if there is one."""
        if self.now is None or self.seen is None:
            return
        logits, rows = self.seen
        found = torch.tensor([(*row, *drawn[row[1]]) for row in rows if drawn.get(row[1])], dtype=torch.int64)
        which, places, counts, tokens = found.view(-1, 4).to(logits.device).unbind(1)
        self.now.record(logits[which], tokens, places, counts)
        self.seen = None


def _sampling_class(current: _Current, keyed: bool) -> type:
    """The logits processor that draws with our random numbers (keyed), or sees to it alone that what is not to be drawn
    is not."""
    from vllm.v1.sample.logits_processor import LogitsProcessor
    from vllm.v1.sample.logits_processor.builtin import process_dict_updates

    class Sampling(LogitsProcessor):
        """Of the rows of vLLM's batch, which prompt each answers, and the tokens that it has."""

        def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
            self._rows: dict[int, tuple[int, list[int]]] = {}

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: Any) -> None:
            process_dict_updates(self._rows, batch_update, lambda asked, prompt, drawn: _place(asked.extra_args, drawn))

        def apply(self, logits: Tensor) -> Tensor:
            if current.now is None or not self._rows:
                return logits
            rows = [(row, place, len(drawn)) for row, (place, drawn) in self._rows.items()]
            if not keyed:
                current.seen = logits, rows  # logits that stay as they are: those that go on are another tensor
                return current.now.possible(logits)
            which, prompts, positions = torch.tensor(rows, device=logits.device).unbind(1)
            tokens = current.now.draw(logits[which], prompts, positions)
            logits[which] = torch.full_like(logits[which], -torch.inf).scatter_(1, tokens, 0.0)
            return logits

    return Sampling


def _place(extra: dict[str, int] | None, drawn: list[int]) -> tuple[int, list[int]] | None:
    return (extra["place"], drawn) if extra and "place" in extra else None


def _pack_tied_head(model: Any) -> None:
    """Have a head that is the embedding too hold its numbers: on CPUs layers keep a packed copy of their weights, and
    vLLM 0.32 packs this one when it loads the model alone."""
    if not model.config.tie_word_embeddings:
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    head = model.lm_head
    head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.detach(), requires_grad=False)
    dispatch_cpu_unquantized_gemm(head, remove_weight=False)
