"""Which models compute through a whole copy of their weights, and by which backend the actor generates, and why."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine import distributed
from engine.memory.copies import CopyNeed, place_copies
from engine.rollout.backends import ReplicaRollouts, Zero3Rollouts
from engine.rollout.base import RolloutBackend
from engine.rollout.cache import cache_bytes
from engine.rollout.decode import slots_of_a_row
from engine.rollout.vllm_backend import VLLMRollouts
from engine.rollout.vllm_engine import vllm_version
from engine.whole_copies import Model, WholeCopies, architecture
from engine.zero import accelerator
from engine.zero.engines import TrainedModel
from engine.zero.gathering import full_numel
from engine.zero.roles import TrainedRole

# The names of --rollout_backend. One of your own has what makes it of the actor and its tokenizer, a class mostly; the
# built-in ones, which models share copies with, are made by `build_rollouts`.
ROLLOUT_BACKENDS: dict[str, Callable[..., RolloutBackend] | None] = dict.fromkeys(("auto", "replica", "zero3", "vllm"))


@dataclass(frozen=True)
class Placement:
    """Which models compute through copies (at stages 0 to 2 their own modules), and why these."""

    why: str
    models: Sequence[Model] = ()
    copies: WholeCopies = field(default_factory=WholeCopies)


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
    tensor_parallel: int = 1,
    sampler: str = "keyed",
) -> RolloutBackend:
    """The backend of this name; "auto" takes the fastest that fits in memory. Its `why` says what was taken and why.

    Args:
        actor: a role within an engine computes with that one's copies.
        others: models that are to make experience through whole copies too, each where there is room for its own.
        rows_at_once, row_length: responses decoded side by side, and tokens of prompt and response, for the cache.
        between_steps: as in WholeCopies. decoding: as in Sampler; zero3 has no use for it.
        tensor_parallel, sampler: as in VLLMRollouts; others have no use for them.

    A backend of your own is given none of these, and experience is made through the engines themselves.

    Raises: KeyError for an unknown backend.
    """
    make, actor = ROLLOUT_BACKENDS[name], actor.host
    if make is not None:
        return make(actor, tokenizer)
    if name == "vllm":
        return _vllm_rollouts(actor, tokenizer, rows_at_once or 1, row_length, tensor_parallel, sampler)
    models = [actor, *(model for model in others if model is not actor)]
    if name == "auto":
        slots = (rows_at_once or 1) * slots_of_a_row(row_length, waiting=True)
        placed = _placement(models, cache_bytes(actor.module.model, slots), between_steps)
    else:
        placed = Placement("as asked", models if name == "replica" else (), WholeCopies(between_steps))
    for model in models:
        model.copies = placed.copies if _among(model, placed.models) else None
    why, copies = placed.why, placed.copies
    rollouts: RolloutBackend
    if actor.copies is None:
        rollouts, plain = Zero3Rollouts(actor, tokenizer, rows_at_once, copies), "ZeRO's hooks"
    else:
        plain = "copies do not stay between steps" if copies.between_steps != "keep" else ""
        rollouts = ReplicaRollouts(actor, tokenizer, rows_at_once, copies, "plain" if plain else decoding)
    if plain and decoding in ("recorded", "graphs", "compiled"):
        why = f"{why}; tokens are not {decoding}: {plain}"
    rollouts.why = f"rollouts by {'zero3' if actor.copies is None else 'replica'}: {why}"
    return rollouts


def _vllm_rollouts(
    actor: Model, tokenizer, rows_at_once: int, row_length: int, tensor_parallel: int, sampler: str
) -> VLLMRollouts:
    rollouts = VLLMRollouts(
        actor,
        tokenizer,
        rows_at_once=rows_at_once,
        row_length=row_length,
        cache_bytes=cache_bytes(actor.module.model, rows_at_once * row_length),
        tensor_parallel=tensor_parallel,
        sampler=sampler,
    )
    spread = f"each actor on {tensor_parallel} ranks" if tensor_parallel > 1 else "a whole actor on each rank"
    drawn = "with our random numbers" if sampler == "keyed" else "by its own sampler"
    rollouts.why = f"rollouts by vllm {vllm_version()}: as asked; {spread}, tokens drawn {drawn}"
    return rollouts


def _placement(models: Sequence[Model], cache: int, between_steps: str) -> Placement:
    """What `place_copies` decides for these models, the same on all ranks. cache: bytes of keys and values."""
    free = -distributed.largest(-accelerator.free_memory())
    decided = place_copies([copy_need(model) for model in models], cache, free, between_steps)
    chosen = [models[place] for place in decided.models]
    return Placement(decided.why, chosen, WholeCopies(decided.between_steps, decided.shared))


def copy_need(model: Model) -> CopyNeed:
    """What a whole copy of a model takes on each rank, and what comes with the model's first step: gradients, which
    stages 2 and 3 divide, and Adam's moments."""
    sizes = [(full_numel(p) * p.element_size(), p.requires_grad) for p in model.module.parameters()]
    gradients = sum(size for size, trains in sizes if trains)
    moments = 0
    if isinstance(model, TrainedModel):  # Adam makes its two, float32, in its first step, beside the masters
        moments = sum(2 * shard.nbytes for shard in model.master_shards() if shard.device == distributed.device())
    return CopyNeed(
        role=model.role,
        stage=model.stage,
        kind=architecture(model.module),
        size=sum(size for size, _ in sizes),
        gradients=gradients // (distributed.world_size() if model.stage >= 2 else 1) + moments,
    )


def _among(model: Model, models: Sequence[Model]) -> bool:
    return any(model is one for one in models)
