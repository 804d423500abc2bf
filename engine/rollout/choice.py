"""Which rollout backend a run has, and why."""
from collections.abc import Sequence

from engine import distributed
from engine.ds_engine import FrozenModel, TrainedModel
from engine.errors import UserError
from engine.replica import Replicas, replica_bytes
from engine.rollout.base import RolloutBackend
from engine.rollout.cache import cache_bytes
from engine.rollout.replica import ReplicaRollouts
from engine.rollout.zero3 import Zero3Rollouts

ROLLOUT_BACKENDS = ("auto", "replica", "zero3", "hybrid")
KEPT_SHARE, FREED_SHARE = 0.4, 0.8  # of the free memory: for copies that stay while training, and that do not


def check_backend(name: str) -> None:
    """Raise UserError for a backend that cannot work here."""
    if name == "hybrid":
        raise UserError(
            "--rollout_backend hybrid: DeepSpeed's hybrid engine cannot generate with this version of transformers. "
            "Its fused layers keep keys and values in an argument `layer_past`, which transformers 5 no longer gives "
            "(models share one cache, `past_key_values`), and they are CUDA kernels. Take auto or replica, which "
            "gathers the weights once per update too.")


def build_rollouts(name: str, actor: TrainedModel | FrozenModel, tokenizer, *,
                   others: Sequence[TrainedModel | FrozenModel] = (), rows_at_once: int | None = None,
                   row_length: int = 0, between_steps: str = "keep") -> RolloutBackend:
    """The backend of this name; "auto" takes the fastest that fits in memory. Its `why` says what was taken and why.

    Args:
        others: models that are to make experience with plain copies too, where the backend has them.
        rows_at_once, row_length: responses decoded side by side, and tokens of prompt and response, for the cache.
        between_steps: as in Replicas.

    Raises: UserError for a backend that cannot work here, KeyError for an unknown one.
    """
    check_backend(name)
    models = [actor, *(model for model in others if model is not actor)]
    why = "as asked"
    if name == "auto":
        name, between_steps, why = _fastest(models, actor, (rows_at_once or 1) * row_length, between_steps)
    if name == "zero3":
        rollouts = Zero3Rollouts(actor, tokenizer, rows_at_once)
    else:
        replicas = {"replica": Replicas}[name](between_steps)
        for model in models:
            model.lender = replicas
        rollouts = ReplicaRollouts(actor, tokenizer, rows_at_once, replicas)
    rollouts.why = f"rollouts by {name} ({why})"
    return rollouts


def _fastest(models: list[TrainedModel | FrozenModel], actor: TrainedModel | FrozenModel, slots: int,
             between_steps: str) -> tuple[str, str, str]:
    """Name, what becomes of copies between steps, and why; the same on all ranks."""
    if all(model.stage < 3 for model in models):
        return "replica", between_steps, "no weights are partitioned, so the actor's own module generates"
    copies, cache = replica_bytes(models), cache_bytes(actor.module.model, slots)
    free = -distributed.largest(-distributed.free_memory())
    sizes = (f"{copies / 1e9:.2f} GB of copies and {cache / 1e9:.2f} GB of keys and values, "
             f"{free / 1e9:.2f} GB free a rank")
    if copies + cache <= KEPT_SHARE * free:
        return "replica", between_steps, sizes
    if copies + cache <= FREED_SHARE * free:
        kept = "free" if between_steps == "keep" else between_steps
        return "replica", kept, f"{sizes}: given back while training"
    return "zero3", between_steps, f"{sizes}: a copy would not fit"
