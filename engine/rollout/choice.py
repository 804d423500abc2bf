"""Which models compute through a whole copy of their weights, and by which backend the actor generates, and why."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine import distributed
from engine.rollout.backends import ReplicaRollouts, Zero3Rollouts
from engine.rollout.base import RolloutBackend
from engine.rollout.cache import cache_bytes
from engine.rollout.decode import slots_of_a_row
from engine.whole_copies import Model, WholeCopies, copy_bytes, gradient_bytes
from engine.zero import accelerator
from engine.zero.roles import TrainedRole

# The names of --rollout_backend. One of your own has what makes it of the actor and its tokenizer, a class mostly; the
# built-in ones, which models share copies with, are made by `build_rollouts`.
ROLLOUT_BACKENDS: dict[str, Callable[..., RolloutBackend] | None] = dict.fromkeys(("auto", "replica", "zero3"))
# Of the free memory: for a copy of each model, for copies that models share, for shared ones given back in training.
OWN_SHARE, KEPT_SHARE, FREED_SHARE = 0.2, 0.4, 0.8


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
) -> RolloutBackend:
    """The backend of this name; "auto" takes the fastest that fits in memory. Its `why` says what was taken and why.

    Args:
        actor: a role within an engine computes with that one's copies.
        others: models that are to make experience through whole copies too, each where there is room for its own.
        rows_at_once, row_length: responses decoded side by side, and tokens of prompt and response, for the cache.
        between_steps: as in WholeCopies. decoding: as in Sampler; zero3 has no use for it.

    A backend of your own is given none of these, and experience is made through the engines themselves.

    Raises: KeyError for an unknown backend.
    """
    make, actor = ROLLOUT_BACKENDS[name], actor.host
    if make is not None:
        return make(actor, tokenizer)
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
    if plain and decoding in ("recorded", "compiled"):
        why = f"{why}; tokens are not {decoding}: {plain}"
    rollouts.why = f"rollouts by {'zero3' if actor.copies is None else 'replica'}: {why}"
    return rollouts


def _placement(models: Sequence[Model], cache: int, between_steps: str) -> Placement:
    """Copies of as many models as fit, the same on all ranks. The first is the actor, which a copy helps most.

    cache: bytes of keys and values.
    """
    # Optimizers have their states by now; gradients come with the first step.
    later = cache + sum(gradient_bytes(model) for model in models)
    free = -distributed.largest(-accelerator.free_memory())
    if all(model.stage < 3 for model in models):
        why = "no weights are partitioned, so the models' own modules compute"
        if between_steps == "keep" and later > KEPT_SHARE * free:
            between_steps, why = "free", f"{why}; keys and values, {cache / 1e9:.2f} GB, are given back while training"
        return Placement(why, models, WholeCopies(between_steps))
    room = f"with keys, values and gradients, of {free / 1e9:.1f} GB free on each rank"
    fitting: list[Model] = []
    for model in models:
        if copy_bytes([*fitting, model], shared=True) + later <= FREED_SHARE * free:
            fitting.append(model)
    left = [model for model in models if not _among(model, fitting)]
    copied = [model for model in fitting if model.stage == 3]
    everything = f"{(copy_bytes(models, shared=True) + later) / 1e9:.2f} GB"
    if not copied:
        return Placement(f"whole copies would take {everything} {room}", fitting, WholeCopies(between_steps))
    copies, size, note = _kept(fitting, later, free, between_steps)
    whose = "each model" if not copies.shared else "models of one shape"
    why = f"a whole copy {'of' if not copies.shared else 'for'} {whose} takes {size / 1e9:.2f} GB {room}{note}"
    if left:
        why += (
            f"; so it is with {_roles(copied)}, while {_roles(left)} compute through partitions: with all models it "
            f"would be {everything}"
        )
    return Placement(why, fitting, copies)


def _kept(models: Sequence[Model], later: int, free: int, between_steps: str) -> tuple[WholeCopies, int, str]:
    """The fastest kind of copies for which there is room, the bytes that they take with `later`, and a note on them."""
    own, shared = (copy_bytes(models, shared=shared) + later for shared in (False, True))
    if own <= OWN_SHARE * free:
        return WholeCopies(between_steps, shared=False), own, ""
    if shared <= KEPT_SHARE * free:
        return WholeCopies(between_steps), shared, ""
    given_back = "free" if between_steps == "keep" else between_steps
    return WholeCopies(given_back), shared, ", and is given back while training"


def _among(model: Model, models: Sequence[Model]) -> bool:
    return any(model is one for one in models)


def _roles(models: Sequence[Model]) -> str:
    return " and ".join(model.role for model in models)
