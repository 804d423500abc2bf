"""Rollouts by vLLM in the trainer's processes. No other file uses vLLM."""

import gc
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from engine import distributed
from engine.actor_copy import Model
from engine.algo.sampling import keyed_uniforms
from engine.distributed import RankGroup
from engine.errors import UserError
from engine.experience import PromptBatch, Rollout
from engine.gpus import NCCL
from engine.models.config_and_tokenizer import head_sizes
from engine.models.saving import merged_weights
from engine.rollout.base import RolloutBackend, SamplingConfig
from engine.rollout.decode import CHECK_EVERY
from engine.rollout.request import Draws, Ends, Request, make_requests, prompts_of_group, rollout_of
from engine.trace import moved, traced
from engine.zero.accelerator import on_gpu
from engine.zero.gathering import full_numel

SAMPLERS = ("keyed", "own")  # how tokens are drawn: with this project's keyed random numbers, or by vLLM's own sampler
VERSIONS = ("0.32.",)  # tested versions; others may have renamed internals that this file uses
WORKSPACE = 2_000_000_000  # the number of bytes that vLLM's activations and CUDA graphs are assumed to take
SPARE_SLOTS = 256  # two blocks on CPUs: vLLM holds one block of slots back, and a row takes whole blocks
HEADS_ON_CPU = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # head sizes that vLLM's CPU kernels support

_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # vLLM's engine runs in this process and reads its tensors
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the runner that vLLM's CPU build takes; on GPUs vLLM would take its second one
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # only for top-k and top-p, but it needs nvcc when vLLM starts (vllm #49497)
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
_SETTINGS_ON_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise vLLM binds all threads of this process to cores
    "TORCH_COMPILE_DISABLE": "1",  # otherwise the first call takes minutes
}
# The names in shared memory of the buffers of vLLM's groups on CPUs. vLLM never removes the buffers, and the next run
# would use the same names.
_BUFFERS = "*-tp:*-cpushm_*"


class VLLMRollouts(RolloutBackend):
    """Generates with vLLM (all ranks create this object together). Each group of neighbouring ranks holds one actor,
    divided among the ranks of the group by tensor parallelism.

    At the first call after an update vLLM gets the new weights, bucket by bucket, with adapters merged in. vLLM sleeps
    from `release_memory` to the next call. The ranks of a group generate responses to all prompts of the group
    together; each rank keeps the responses to its own prompts.

    Args:
        rows_at_once: the number of responses per rank for which memory for keys and values is planned.
        row_length: the largest number of tokens of a prompt and its response together. cache_bytes: the number of bytes
            for keys and values on each rank.
        tensor_parallel: the number of ranks in a group.
        sampler: one of SAMPLERS; with either, `Draws` records the log-probs.
        moments: the number of bytes that the training engines allocate in their first step and keep.
        prefix_cache: whether vLLM keeps the keys and values of earlier prompts and responses until the weights change,
            for prompts that begin with them. It is for conversations.

    Raises: UserError if vLLM is not installed, or a GPU has too little memory.
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
        prefix_cache: bool = False,
    ):
        vllm_version()
        self.actor = actor
        self.tokenizer = tokenizer
        self.group = RankGroup(tensor_parallel)
        self.on_gpu = on_gpu()
        self._draws = _Current()
        self._keyed = sampler == "keyed"
        self._prefix_cache = prefix_cache
        self._loaded: int | None = None  # the version of the weights that vLLM holds
        self._asleep: set[str] = set()
        for name, value in (_SETTINGS if self.on_gpu else _SETTINGS | _SETTINGS_ON_CPU).items():
            os.environ.setdefault(name, value)
        from vllm import LLM

        moved("vLLM starts")
        model, threads = actor.module.model, torch.get_num_threads()
        config = type(model.config).from_dict(model.config.to_dict())
        if actor.module.adapters is not None and actor.module.adapters.tied_head is not None:
            config.tie_word_embeddings = False  # once merged, an adapted head differs from the embedding
        # Waking up from level 2, vLLM restores parameters and buffers, but ALiBi's slopes are neither (AttentionImpl).
        self._level = 1 if model.config.model_type == "bloom" or getattr(model.config, "alibi", False) else 2
        share = {}
        if self.on_gpu:
            weights = sum(full_numel(p) * p.element_size() for p in model.parameters())
            share["gpu_memory_utilization"] = _share(weights // tensor_parallel, cache_bytes, moments)
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
                enable_prefix_caching=prefix_cache,
                enable_sleep_mode=self.on_gpu,
                async_scheduling=False,  # a token's position is counted when the token is drawn
                disable_log_stats=True,
                seed=0,
                logits_processors=[_sampling_class(self._draws, self._keyed)],
            )
        self._unlink_buffers()
        gc.unfreeze()  # vLLM has hidden all existing objects, the trainer's too, from the garbage collector
        torch.set_num_threads(threads)  # on GPUs vLLM leaves one thread, unless OMP_NUM_THREADS is set
        # At exit vLLM would close process groups that the run has closed before.
        self._llm.llm_engine.engine_core._finalizer.detach()

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig) -> Rollout:
        """One response for each row of the prompts (all ranks of a group call this together)."""
        if self._loaded != self.actor.version:
            self._load()
        whole, own = prompts_of_group(prompts, self.group)
        requests = make_requests(whole, sampling.max_new_tokens)
        draws = Draws(whole, sampling, max(request.most for request in requests))
        self._draw(whole, requests, draws)
        recorded = {name: column[own] for name, column in draws.recorded.items()}
        return rollout_of(prompts, requests[own], sampling.pad_token_id, recorded)

    def release_memory(self) -> None:
        """Free the GPU memory of vLLM's weights, keys and values until the next call, which loads the weights again. On
        CPUs nothing is freed."""
        if self.on_gpu and not self._asleep:
            moved("vLLM goes to sleep")
            self._llm.sleep(level=self._level)
            self._asleep, self._loaded = {"weights", "kv_cache"}, None

    @traced("vLLM takes weights")
    def _load(self) -> None:
        """Load the actor's current weights into vLLM, in the order and with the names that Hugging Face uses."""
        self._wake("weights")
        weights = _noted(merged_weights(self.actor.module))
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if not self.on_gpu:
            self._llm.apply_model(_pack_tied_head)
        if self._prefix_cache:
            self._llm.reset_prefix_cache()  # keys and values are those of the old weights
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
            """Whether the request of this row is finished. drawn: the tokens drawn since the last call."""
            request, new = requests[row], unseen[row]
            new += drawn
            request.drawn += len(drawn)
            # vLLM itself stops at end tokens. Stop strings are searched only every CHECK_EVERY tokens, as in this
            # project's loop.
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
                max_tokens=requests[place].most,
                stop_token_ids=list(sampling.stop_token_ids),
                ignore_eos=True,  # only the tokens in `sampling` end a response
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                extra_args={"place": place},
            )
            engine.add_request(str(place), {"prompt_token_ids": prompt}, parameters)
        while engine.has_unfinished_requests():
            moved("vLLM draws a token")
            outputs = {int(output.request_id): output for output in engine.step()}
            drawn = {row: list(output.outputs[0].token_ids) for row, output in outputs.items()}
            if not self._keyed:
                self._draws.record(drawn)
            enough = [row for row, tokens in drawn.items() if has_enough(row, tokens) and not outputs[row].finished]
            engine.abort_request([str(row) for row in enough])
        self._draws.now = None

    def _unlink_buffers(self) -> None:
        """Remove the names of this run's buffers in shared memory, once all ranks have opened the buffers (all ranks
        call this together)."""
        distributed.barrier()
        _unlink_queue()
        if distributed.local_rank() == 0 and not self.on_gpu:
            for path in Path("/dev/shm").glob(_BUFFERS):
                path.unlink(missing_ok=True)
        distributed.barrier()

    def _wake(self, part: str) -> None:
        if part in self._asleep:
            moved("vLLM wakes up")
            self._llm.wake_up(tags=[part])
            self._asleep.remove(part)


def vllm_version() -> str:
    """The version of the installed vLLM or of its CPU build. Raises: UserError if vLLM is not installed, or its version
    is not among VERSIONS."""
    for package in ("vllm", "vllm-cpu"):
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        if version.startswith(VERSIONS):
            return version
        raise UserError(
            f"--rollout_backend vllm: {package} {version} is installed, but only {VERSIONS[0]}x has been tried. "
            "Install that version (scripts/vllm_environment.sh makes an environment), or take another backend."
        )
    raise UserError(
        "--rollout_backend vllm: vLLM is not installed here. scripts/vllm_environment.sh makes an environment with "
        "vLLM and the versions that training needs. --rollout_backend auto needs no vLLM."
    )


def check_heads(config: PretrainedConfig, name: str, tensor_parallel: int, on_cpu: bool) -> None:
    """Raise UserError if vLLM cannot compute this model's attention. name: the model's name in the message."""
    heads, _, width = head_sizes(config)
    if heads % tensor_parallel:
        raise UserError(
            f"--vllm_tensor_parallel_size {tensor_parallel}: the {heads} attention heads of {name} cannot be divided "
            f"equally among so many ranks. Give a number that divides {heads}."
        )
    if on_cpu and width not in HEADS_ON_CPU:
        raise UserError(
            f"--rollout_backend vllm: {name} has attention heads of size {width}; on CPUs vLLM supports the sizes "
            f"{', '.join(map(str, HEADS_ON_CPU))}. Take --rollout_backend auto, or a GPU."
        )


def _share(weights: int, cache: int, moments: int) -> float:
    """The fraction of a GPU's memory that vLLM is told to ask for (`gpu_memory_utilization`).

    vLLM refuses to start if less memory is free; its default fraction is 0.92 (request_memory in
    vllm/v1/worker/utils.py). The size of the memory for keys and values is given by cache_bytes, not by this fraction.

    Args:
        weights, cache: the number of bytes of weights, and of keys and values, on each rank. moments: as in
            VLLMRollouts.

    Raises: UserError on all ranks if one rank has too little free memory.
    """
    free, total = _gpu_memory()
    free = -distributed.largest(-free)
    needed = weights + cache + WORKSPACE
    nccl = NCCL if distributed.world_size() > 1 else 0  # vLLM's groups allocate this before vLLM checks the free memory
    if needed + nccl + moments > free:
        raise UserError(
            f"--rollout_backend vllm: vLLM needs {(needed + nccl) / 1e9:.1f} GB of a GPU (weights {weights / 1e9:.1f}, "
            f"keys and values {cache / 1e9:.1f}, working memory {(WORKSPACE + nccl) / 1e9:.1f}), and Adam's moments "
            f"need {moments / 1e9:.1f}. With the models loaded, {free / 1e9:.1f} of {total / 1e9:.1f} GB are free. Set "
            "a larger --vllm_tensor_parallel_size, a smaller --per_device_generation_batch_size, a higher "
            "--actor_zero_stage and --critic_zero_stage, or --offload."
        )
    return needed / total


def _gpu_memory() -> tuple[int, int]:
    """Returns (free bytes, total bytes) of this rank's GPU memory, after torch's allocator has returned its unused
    memory."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()


def _unlink_queue() -> None:
    """Remove the name of the shared memory that serves as the message queue of a group's ranks. Call this only after
    all ranks have opened the queue. If the name still existed at the end of the run, Python would report a leak."""
    from vllm.distributed.parallel_state import get_tp_group

    queue = get_tp_group().mq_broadcaster
    if queue is not None and queue.buffer is not None and queue.buffer.is_creator:
        queue.buffer.shared_memory.unlink()
        queue.buffer.is_creator = False


def _noted(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The given weights, unchanged. Each time vLLM gets a weight, "vLLM takes weights" is recorded as this rank's
    present activity, because gathering the weight has recorded another activity."""
    for name, weight in weights:
        moved("vLLM takes weights")
        yield name, weight


class _Current:
    """State that this file shares with the logits processor; vLLM creates the processor.

    now: the `Draws` of the current call. seen: only set in steps in which vLLM's own sampler draws. It holds the logits
    (B, V) and a list of (row of the logits, the prompt's row in the batch of prompts, number of tokens that the
    response had).
    """

    now: Draws | None = None
    seen: tuple[Tensor, list[tuple[int, int, int]]] | None = None

    def record(self, drawn: Mapping[int, Sequence[int]]) -> None:
        """Record the log-probs of the tokens of one decoding step. drawn: {the prompt's row: a sequence with the token
        drawn for it, or an empty one}."""
        if self.now is None or self.seen is None:
            return
        logits, rows = self.seen
        found = torch.tensor([(*row, *drawn[row[1]]) for row in rows if drawn.get(row[1])], dtype=torch.int64)
        which, places, counts, tokens = found.view(-1, 4).to(logits.device).unbind(1)
        self.now.record(logits[which], tokens, places, counts)
        self.seen = None


def _sampling_class(current: _Current, keyed: bool) -> type:
    """The class of the logits processor. keyed: whether the processor draws each token with keyed random numbers. If
    not, it only excludes tokens that must not be drawn."""
    from vllm.v1.sample.logits_processor import LogitsProcessor
    from vllm.v1.sample.logits_processor.builtin import process_dict_updates
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SecondLogitsProcessor

    class Sampling(LogitsProcessor, SecondLogitsProcessor):
        """A logits processor that knows, for each row of vLLM's batch, which prompt the row answers and how many tokens
        its response has. It has the interfaces of both of vLLM's model runners: the first runner reports changes of its
        rows, the second assigns a slot to each request and passes the slots of its rows (`ctx`)."""

        def __init__(self, vllm_config: Any, state: Any, is_pin_memory: bool = False):
            self._state = state  # of requests; the first runner passes a device, which is not used
            self._rows: dict[int, Any] = {}

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: Any) -> None:
            process_dict_updates(self._rows, batch_update, lambda asked, _, drawn: (asked.extra_args["place"], drawn))

        def add_request(self, req_idx: int, sampling_params: Any) -> bool:
            self._rows[req_idx] = (sampling_params.extra_args or {}).get("place")  # None: vLLM warms up
            return self._rows[req_idx] is not None

        def _drawing(self, ctx: Any) -> list[tuple[int, int, int]]:
            """For each row that draws: (row, the prompt's row in the batch of prompts, number of tokens drawn)."""
            if ctx is None:
                return [(row, place, len(drawn)) for row, (place, drawn) in self._rows.items()]
            slots = ctx.idx_mapping_np
            lengths = ctx.seq_lens_upper_bound_np[: len(slots)]
            read = lengths >= self._state.prefill_len.np[slots]  # the others' prompts are read in parts
            counts = lengths - self._state.prompt_len.np[slots]
            return [(int(row), self._rows[slots[row]], int(counts[row])) for row in read.nonzero()[0]]

        def apply(self, logits: Tensor, ctx: Any = None) -> Tensor:
            if current.now is None or not (rows := self._drawing(ctx)):
                return logits
            if not keyed:
                current.seen = logits, rows  # vLLM gets a new tensor, so these logits stay as they are
                return current.now.possible(logits)
            which, prompts, positions = torch.tensor(rows, device=logits.device).unbind(1)
            tokens = current.now.draw(logits[which], prompts, positions)
            logits[which] = torch.full_like(logits[which], -torch.inf).scatter_(1, tokens, 0.0)
            return logits

    return Sampling


def _pack_tied_head(model: Any) -> None:
    """Update the output head of a model on CPUs whose head is also its embedding. On CPUs layers keep a packed copy of
    their weights, and vLLM 0.32 packs the head only when it first loads the model."""
    if not model.config.tie_word_embeddings:
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    head = model.lm_head
    head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.detach(), requires_grad=False)
    dispatch_cpu_unquantized_gemm(head, remove_weight=False)
