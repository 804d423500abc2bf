"""Which rollout backend a run has, and why."""

from collections.abc import Sequence

from engine import distributed
from engine.errors import UserError
from engine.rollout.base import RolloutBackend
from engine.rollout.cache import cache_bytes
from engine.rollout.decode import slots_of_a_row
from engine.rollout.partitions import Zero3Rollouts
from engine.rollout.whole_copy import ReplicaRollouts
from engine.whole_copies import Replicas, gradient_bytes, replica_bytes
from engine.zero.engines import FrozenModel, TrainedModel

ROLLOUT_BACKENDS = ("auto", "replica", "zero3", "hybrid")
# Of the free memory: for a copy of each model, for copies that models share, for shared ones given back in training.
OWN_SHARE, KEPT_SHARE, FREED_SHARE = 0.2, 0.4, 0.8


def check_backend(name: str) -> None:
    """Raise UserError for a backend that cannot work here."""
    if name == "hybrid":
        raise UserError(
            "--rollout_backend hybrid: DeepSpeed's hybrid engine cannot generate with this version of transformers. "
            "Its fused layers keep keys and values in an argument `layer_past`, which transformers 5 no longer gives "
            "(models share one cache, `past_key_values`), and they are CUDA kernels. Take auto or replica, which "
            "gathers the weights once per update too."
        )


def build_rollouts(
    name: str,
    actor: TrainedModel | FrozenModel,
    tokenizer,
    *,
    others: Sequence[TrainedModel | FrozenModel] = (),
    rows_at_once: int | None = None,
    row_length: int = 0,
    between_steps: str = "keep",
    decoding: str = "plain",
) -> RolloutBackend:
    """The backend of this name; "auto" takes the fastest that fits in memory. Its `why` says what was taken and why.

    Args:
        others: models that are to make experience with plain copies too, where the backend has them.
        rows_at_once, row_length: responses decoded side by side, and tokens of prompt and response, for the cache.
        between_steps: as in Replicas. decoding: as in Sampler; zero3 has no use for it.

    Raises: UserError for a backend that cannot work here, KeyError for an unknown one.
    """
    check_backend(name)
    if name not in ROLLOUT_BACKENDS:
        raise KeyError(name)
    models = [actor, *(model for model in others if model is not actor)]
    replicas, why = Replicas(between_steps), "as asked"
    if name == "auto":
        slots = (rows_at_once or 1) * slots_of_a_row(row_length, waiting=True)
        replicas, why = _fastest(models, cache_bytes(actor.module.model, slots), between_steps)
    if name == "zero3":
        replicas = None
    for model in models:
        model.lender = replicas
    if replicas is None:
        rollouts, plain = Zero3Rollouts(actor, tokenizer, rows_at_once, between_steps), "ZeRO's hooks"
    else:
        plain = "copies do not stay between steps" if replicas.between_steps != "keep" else ""
        rollouts = ReplicaRollouts(actor, tokenizer, rows_at_once, replicas, "plain" if plain else decoding)
    if plain and decoding in ("recorded", "compiled"):
        why = f"{why}; tokens are not {decoding}: {plain}"
    rollouts.why = f"rollouts by {'replica' if isinstance(rollouts, ReplicaRollouts) else 'zero3'}: {why}"
    return rollouts


def _fastest(models: list[TrainedModel | FrozenModel], cache: int, between_steps: str) -> tuple[Replicas | None, str]:
    """Whole copies of the models, or None where they would not fit, and why; the same on all ranks.

    cache: bytes of keys and values.
    """
    if all(model.stage < 3 for model in models):
        return Replicas(between_steps), "no weights are partitioned, so the models' own modules compute"
    # Optimizers have their states by now; gradients come with the first step.
    later = cache + sum(gradient_bytes(model) for model in models)
    own, shared = (replica_bytes(models, shared) + later for shared in (False, True))
    free = -distributed.largest(-distributed.free_memory())
    room = f"with keys, values and gradients, of {free / 1e9:.1f} GB free on each rank"
    if own <= OWN_SHARE * free:
        return Replicas(between_steps, shared=False), f"a whole copy of each model takes {own / 1e9:.2f} GB {room}"
    if shared <= KEPT_SHARE * free:
        return Replicas(between_steps), f"a whole copy for models of one shape takes {shared / 1e9:.2f} GB {room}"
    if shared <= FREED_SHARE * free:
        kept = "free" if between_steps == "keep" else between_steps
        return Replicas(kept), (
            f"a whole copy for models of one shape takes {shared / 1e9:.2f} GB {room}, and is given back while training"
        )
    return None, f"whole copies would take {shared / 1e9:.2f} GB {room}"
