"""Chooses the rollout backend."""

from collections.abc import Callable, Sequence

from engine import distributed
from engine.actor_copy import ActorCopy, Model, copies_bytes
from engine.errors import UserError
from engine.models.attention import keeps_states
from engine.models.checking import can_decode
from engine.rollout.backends import ReplicaRollouts, Zero3Rollouts
from engine.rollout.base import RolloutBackend
from engine.rollout.decode import slots_of_a_row
from engine.rollout.passes import cache_bytes, resolved_decoding
from engine.rollout.placement import Placement, place_copy
from engine.rollout.vllm_rollouts import SPARE_SLOTS, VLLMRollouts, vllm_version
from engine.zero import accelerator
from engine.zero.engines import TrainedModel
from engine.zero.gathering import full_numel
from engine.zero.shared_engine import TrainedRole

# {name for --rollout_backend: a function (actor, tokenizer) -> backend}. Add a backend of your own here; the function
# is usually the backend's class. None marks a built-in backend, which `build_rollouts` creates itself.
ROLLOUT_BACKENDS: dict[str, Callable[..., RolloutBackend] | None] = dict.fromkeys(("auto", "replica", "zero3", "vllm"))


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
    prefix_cache: bool = False,
) -> RolloutBackend:
    """The rollout backend with this name. "auto" is "replica", with a copy on as many ranks as `place_copy` says. The
    backend's attribute `why` explains the choice.

    Args:
        actor: a model, or a role in a shared engine.
        others: the other models on this rank; their first optimizer steps allocate memory too.
        rows_at_once: the number of responses decoded at the same time. row_length: the largest number of tokens of a
            prompt and its response together.
        between_steps: as in ActorCopy. decoding: as in Sampler; zero3 ignores it.
        tensor_parallel: how many ranks hold the actor's copy together (None: 1, or with "auto" as few as fit).
        sampler, prefix_cache: as in VLLMRollouts; other backends ignore them.

    A user's own backend gets only the actor and the tokenizer.

    Raises: KeyError if no backend has this name. UserError if the backend cannot draw from the actor, if the actor
    cannot be divided among that many ranks, or if "auto" finds no room for its copy.
    """
    make, actor = ROLLOUT_BACKENDS[name], actor.host
    if make is not None:
        return make(actor, tokenizer)
    models = [actor, *(model for model in others if model is not actor)]
    if name == "vllm":
        parts = tensor_parallel or 1
        return _vllm_rollouts(models, tokenizer, rows_at_once or 1, row_length, parts, sampler, prefix_cache)
    if not can_decode(type(actor.module.model), actor.module.model.config):
        raise UserError(f"--rollout_backend {name}: layers of the actor keep what this backend's cache does not hold.")
    if name == "zero3":
        rollouts: RolloutBackend = Zero3Rollouts(actor, tokenizer, rows_at_once)
        rollouts.why = "rollouts by zero3: as asked; decoding plain: ZeRO's hooks fetch each layer"
        return rollouts
    most, placement = accelerator.ranks_of_this_machine(), Placement(tensor_parallel or 1, between_steps, "as asked")
    asked = tensor_parallel or (1 if name == "replica" else None)
    sizes = copies_bytes(actor.module, most, asked) if actor.stage == 3 else {1: 0}
    if name == "auto":
        rows = rows_at_once or 1
        cache = cache_bytes(actor.module, rows * slots_of_a_row(row_length, waiting=True), rows)
        free = -distributed.largest(-accelerator.free_memory()) - sum(map(_later, models))
        placement = place_copy(sizes, cache, free, between_steps, states=cache_bytes(actor.module, 0, rows))
        if not placement.fits:
            raise UserError(
                f"--rollout_backend auto: {placement.why}. Give a smaller --per_device_generation_batch_size, more "
                "ranks on each machine, or --rollout_backend zero3, which gathers every layer for each token: slow."
            )
    actor.copy = copy = ActorCopy(actor, placement.ranks if actor.stage == 3 else 1, placement.between_steps)
    how, reason = _decoding(copy, decoding)
    rollouts = ReplicaRollouts(actor, tokenizer, rows_at_once, copy, how, row_length)
    rollouts.why = f"rollouts by replica: {placement.why}; decoding {how}: {reason}"
    return rollouts


def _decoding(copy: ActorCopy, asked: str) -> tuple[str, str]:
    """(how single tokens go through the model, the reason)."""
    if asked != "plain" and copy.group.size > 1:
        return "plain", "the ranks that hold a copy together exchange what its layers compute"
    if asked != "plain" and copy.between_steps != "keep":
        return "plain", "the copy, keys and values do not stay between steps"
    if asked != "plain" and keeps_states(copy.model.module.model.config):
        return "plain", "layers keep a state, which a second pass over a token would change"
    how = resolved_decoding(asked, accelerator.on_gpu())
    return how, "as asked" if how == asked else f"auto on {'GPUs' if accelerator.on_gpu() else 'CPUs'}"


def _vllm_rollouts(
    models: Sequence[Model],
    tokenizer,
    rows_at_once: int,
    row_length: int,
    tensor_parallel: int,
    sampler: str,
    prefix_cache: bool,
) -> VLLMRollouts:
    actor = models[0]
    rollouts = VLLMRollouts(
        actor,
        tokenizer,
        rows_at_once=rows_at_once,
        row_length=row_length,
        cache_bytes=cache_bytes(actor.module, rows_at_once * row_length + SPARE_SLOTS, rows_at_once),
        tensor_parallel=tensor_parallel,
        sampler=sampler,
        prefix_cache=prefix_cache,
        moments=sum(_moments(model) for model in models),
    )
    spread = f"each actor on {tensor_parallel} ranks" if tensor_parallel > 1 else "a whole actor on each rank"
    drawn = "with our random numbers" if sampler == "keyed" else "by its own sampler"
    rollouts.why = f"rollouts by vllm {vllm_version()}: as asked; {spread}, tokens drawn {drawn}"
    return rollouts


def _later(model: Model) -> int:
    """The number of bytes that a model's first optimizer step allocates on a rank and keeps: gradients, which stages 2
    and 3 divide among ranks, and Adam's moments."""
    gradients = sum(full_numel(p) * p.element_size() for p in model.module.parameters() if p.requires_grad)
    return gradients // (distributed.world_size() if model.stage >= 2 else 1) + _moments(model)


def _moments(model: Model) -> int:
    """The number of bytes that Adam's two moments take on the device. They are float32, like the master weights, and
    Adam allocates them in its first step."""
    if not isinstance(model, TrainedModel):
        return 0
    return sum(2 * shard.nbytes for shard in model.master_shards() if shard.device == distributed.device())
