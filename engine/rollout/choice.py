"""Chooses the rollout backend, and which models compute with copies of their weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from engine import distributed
from engine.copies import (
    Model,
    PlainCopies,
    TensorParallelCopies,
    WholeCopies,
    architecture,
    divided_bytes,
    group_sizes,
    why_no_group,
)
from engine.memory.copies import Copies, CopyNeed, copies_together, place_copies
from engine.rollout.backends import ReplicaRollouts, Zero3Rollouts
from engine.rollout.base import RolloutBackend
from engine.rollout.cache import cache_bytes
from engine.rollout.decode import slots_of_a_row
from engine.rollout.passes import resolved_decoding
from engine.rollout.vllm_rollouts import SPARE_SLOTS, VLLMRollouts, vllm_version
from engine.zero import accelerator
from engine.zero.engines import TrainedModel
from engine.zero.gathering import full_numel
from engine.zero.roles import TrainedRole

# {name for --rollout_backend: a function (actor, tokenizer) -> backend}. Add a backend of your own here; the function
# is usually the backend's class. None marks a built-in backend, which `build_rollouts` creates itself.
ROLLOUT_BACKENDS: dict[str, Callable[..., RolloutBackend] | None] = dict.fromkeys(("auto", "replica", "zero3", "vllm"))


@dataclass(frozen=True)
class Placement:
    """Which models compute with which copies. Models at stages 0 to 2 compute with their own modules.

    why: the reason for this placement, as a text.
    parts: all objects that hold copies, each with the models that it copies; the first may have no models.
    """

    why: str
    parts: Sequence[tuple[PlainCopies, Sequence[Model]]]

    def of(self, model: Model) -> PlainCopies | None:
        """The object that holds the copy that a model computes with; None if the model has no copy."""
        return next((copies for copies, models in self.parts if any(model is one for one in models)), None)


def build_rollouts(
    name: str,
    actor: Model | TrainedRole,
    tokenizer,
    *,
    others: Sequence[Model] = (),
    rows_at_once: int | None = None,
    row_length: int = 0,
    between_steps: str = "keep",
    decoding: str = "plain",
    tensor_parallel: int | None = None,
    sampler: str = "keyed",
    training: int | str = "what training takes is not known",
) -> RolloutBackend:
    """The rollout backend with this name. "auto" takes the fastest backend that fits in memory. The backend's attribute
    `why` explains the choice.

    Args:
        actor: a model, or a role in a shared engine. A role computes with that engine's copies.
        others: models that compute experience. They get whole copies too, as far as these fit in memory.
        rows_at_once: the number of responses decoded at the same time. row_length: the largest number of tokens of a
            prompt and its response together.
        between_steps: as in WholeCopies. decoding: as in Sampler; zero3 ignores it.
        tensor_parallel: how many ranks hold a copy together. "vllm" and "replica" always use this number (None: 1).
            "auto" uses it only for a model whose whole copy does not fit (None: as few ranks as possible).
        sampler: as in VLLMRollouts; other backends ignore it.
        training: as in place_copies; all ranks must pass the same value.

    A user's own backend gets only the actor and the tokenizer; the models then compute experience with their engines.

    Raises: KeyError if no backend has this name.
    """
    make, actor = ROLLOUT_BACKENDS[name], actor.host
    if make is not None:
        return make(actor, tokenizer)
    models = [actor, *(model for model in others if model is not actor)]
    if name == "vllm":
        return _vllm_rollouts(models, tokenizer, rows_at_once or 1, row_length, tensor_parallel or 1, sampler)
    cache = cache_bytes(actor.module.model, (rows_at_once or 1) * slots_of_a_row(row_length, waiting=True))
    placed = _placement(name, models, cache, between_steps, tensor_parallel, training)
    for model in models:
        model.copies = placed.of(model)
        if isinstance(model.copies, TensorParallelCopies) and model.module.adapters is not None:
            model.copies = None  # adapters are merged into the copy: it can generate, but not compute another role
    copies, (first, *more) = placed.of(actor), [each for each, _ in placed.parts]
    plain = _why_plain(copies)
    if plain and decoding != "plain":
        how, reason = "plain", plain
    else:
        how = resolved_decoding(decoding, accelerator.on_gpu())
        reason = "as asked" if how == decoding else f"auto on {'GPUs' if accelerator.on_gpu() else 'CPUs'}"
    if copies is None:
        rollouts: RolloutBackend = Zero3Rollouts(actor, tokenizer, rows_at_once, first, more)
    else:
        others_too = [each for each in (first, *more) if each is not copies]
        rollouts = ReplicaRollouts(actor, tokenizer, rows_at_once, copies, how, others_too, row_length)
    backend = "zero3" if copies is None else "replica"
    rollouts.why = f"rollouts by {backend}: {placed.why}; decoding {how}: {reason}"
    return rollouts


def _why_plain(copies: PlainCopies | None) -> str:
    """The reason why single tokens have to go through the model's own code; "" if they can go a faster way."""
    if copies is None:
        return "ZeRO's hooks fetch each layer"
    if isinstance(copies, TensorParallelCopies):
        return "the ranks that hold a copy together exchange what its layers compute"
    return "" if copies.between_steps == "keep" else "copies, keys and values do not stay between steps"


def _vllm_rollouts(
    models: Sequence[Model], tokenizer, rows_at_once: int, row_length: int, tensor_parallel: int, sampler: str
) -> VLLMRollouts:
    actor = models[0]
    rollouts = VLLMRollouts(
        actor,
        tokenizer,
        rows_at_once=rows_at_once,
        row_length=row_length,
        cache_bytes=cache_bytes(actor.module.model, rows_at_once * row_length + SPARE_SLOTS),
        tensor_parallel=tensor_parallel,
        sampler=sampler,
        moments=sum(_moments(model) for model in models),
    )
    spread = f"each actor on {tensor_parallel} ranks" if tensor_parallel > 1 else "a whole actor on each rank"
    drawn = "with our random numbers" if sampler == "keyed" else "by its own sampler"
    rollouts.why = f"rollouts by vllm {vllm_version()}: as asked; {spread}, tokens drawn {drawn}"
    return rollouts


def _placement(
    name: str,
    models: Sequence[Model],
    cache: int,
    between_steps: str,
    tensor_parallel: int | None,
    training: int | str,
) -> Placement:
    """The placement that "auto", "replica" or "zero3" gives the copies of these models; it is the same on all ranks.
    models: the first is the actor. cache: the number of bytes of keys and values. Other arguments: as in
    `build_rollouts`."""
    ranks = tensor_parallel or 1
    asked = (ranks,) if name == "replica" and ranks > 1 else ()
    sizes = asked or group_sizes(accelerator.ranks_of_this_machine(), tensor_parallel)

    def divide(place: int) -> tuple[Mapping[int, int], str | None]:
        return divided_bytes(models[place].module, sizes, generates=place == 0)

    if name == "auto":
        free = -distributed.largest(-accelerator.free_memory())
        decided = place_copies([copy_need(model) for model in models], cache, free, between_steps, divide, training)
        if any(model.stage == 3 for model in models):
            note = why_no_group(accelerator.ranks_of_this_machine(), tensor_parallel)
            decided = replace(decided, why=decided.why + note)
    elif asked:
        decided = copies_together([copy_need(model) for model in models], ranks, between_steps, divide)
    else:
        whole = tuple(range(len(models))) if name == "replica" else ()
        decided = Copies(whole, "as asked", between_steps=between_steps)
    kept = [models[place] for place in decided.models if place not in decided.freed]
    freed = [models[place] for place in decided.models if place in decided.freed]
    others = "free" if decided.freed else decided.between_steps
    together = TensorParallelCopies(decided.ranks, others, cache) if decided.divided else None
    parts: list[tuple[PlainCopies, Sequence[Model]]] = []
    for kind, whose in ((decided.between_steps, kept), (others, freed)):
        if whose or not parts:
            smaller = _Smaller(models[0], cache, sizes if name == "auto" else (), kind, together)
            parts.append((WholeCopies(kind, decided.shared, smaller), whose))
    if together is not None:
        parts.append((together, [models[place] for place in decided.divided]))
    return Placement(decided.why, parts)


class _Smaller:
    """Replaces a model's whole copy, if it turns out not to fit in memory, by a tensor-parallel copy that several ranks
    hold together.

    actor: the model that generates.
    cache: the number of bytes of the actor's keys and values.
    sizes: the possible numbers of ranks in a group. If no tensor-parallel copy exists yet, the largest size is taken,
        because the estimate of what fits was already wrong once.
    together: the tensor-parallel copies of other models, or None.
    """

    def __init__(
        self,
        actor: Model,
        cache: int,
        sizes: Sequence[int],
        between_steps: str,
        together: TensorParallelCopies | None,
    ):
        self.actor, self.cache, self.sizes = actor, cache, sizes
        self.between_steps, self.together = between_steps, together

    def __call__(self, model: Model) -> TensorParallelCopies | None:
        """The tensor-parallel copies for a model, or None if the model cannot be divided (all ranks call this
        together)."""
        sizes = self.sizes if self.together is None else (self.together.group.size,)
        parts, _ = divided_bytes(model.module, sizes, generates=model is self.actor)
        if parts and self.together is None:
            self.together = TensorParallelCopies(max(parts), self.between_steps, self.cache)
        return self.together if parts else None


def copy_need(model: Model) -> CopyNeed:
    """The memory that a whole copy of a model takes on each rank, and the memory that the model's first optimizer step
    adds: gradients, which stages 2 and 3 divide among ranks, and Adam's moments."""
    sizes = [(full_numel(p) * p.element_size(), p.requires_grad) for p in model.module.parameters()]
    gradients = sum(size for size, trains in sizes if trains)
    return CopyNeed(
        role=model.role,
        stage=model.stage,
        kind=architecture(model.module),
        size=sum(size for size, _ in sizes),
        gradients=gradients // (distributed.world_size() if model.stage >= 2 else 1) + _moments(model),
    )


def _moments(model: Model) -> int:
    """The number of bytes that Adam's two moments take on the device. They are float32, like the master weights, and
    Adam allocates them in its first step."""
    if not isinstance(model, TrainedModel):
        return 0
    return sum(2 * shard.nbytes for shard in model.master_shards() if shard.device == distributed.device())
