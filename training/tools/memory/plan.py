"""The memory plan of a run: for each phase of a step, the bytes of models, passes and ZeRO on one GPU at the phase's
peak. The models are built on the meta device from their configurations; no weights are read.

Loading and saving are left out: they take less than the step. Terms of less than a few percent are left out too.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property

from engine.actor_copy import copies_bytes
from engine.host_memory import COPIES_SHARE
from engine.models.config_and_tokenizer import CLASSIFIER, LANGUAGE_MODEL
from engine.rollout.decode import slots_of_a_row
from engine.rollout.passes import cache_bytes
from engine.rollout.placement import Placement, place_copy
from engine.zero.gather_once import KEPT, NOTHING_KEPT, Kept, what_to_keep
from training.config.step3 import RLHFFlags
from training.config.supervised import RewardFlags, SupervisedFlags
from training.reward_texts import reading_limit
from training.tools.memory.cluster import FRAGMENTS, Cluster
from training.tools.memory.engines import Bytes, Engine
from training.tools.memory.meta_model import built, meta_models, with_packing
from training.tools.memory.passes import forward_pass, prompt_pass, training_pass

PHASES = ("generate", "experience", "train")
ROLES = ("model", "actor", "critic", "reference", "reward", "ema", "copy", "vLLM")
KINDS = ("weights", "gradients", "optimizer", "buffers", "gathered", "activations", "keys and values")
"""optimizer: float32 master weights and Adam's moments. buffers: further memory for communication and for the optimizer
step. gathered: whole weights that ZeRO-3 gathers from partitions for some time."""
WIDTH = 12


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a phase, and the bytes on a rank's device and, by this rank, in host memory."""

    phase: str
    name: str
    device: Bytes
    host: Bytes


@dataclass(frozen=True)
class MemoryPlan:
    """The bytes at the moments of a step. The step is not the first one, so Adam's moments exist.

    loading: the bytes that each rank takes of host memory for a model that is being loaded.
    rollouts: a text that says how responses are drawn. placed: whether `--rollout_backend auto` finds room for the
        actor's copy; if not, it refuses the run.
    checkpoint: the bytes of a rank's copy of its state, from which checkpoints are written while training goes on; 0 if
        training waits while they are written.
    """

    moments: list[Moment]
    cluster: Cluster
    loading: int = 0
    rollouts: str = ""
    placed: bool = True
    checkpoint: int = 0

    def peak_of(self, phase: str) -> Moment:
        """The moment of this phase at which the most bytes are on the device."""
        return max((moment for moment in self.moments if moment.phase == phase), key=lambda one: one.device.total())

    @property
    def phases(self) -> list[str]:
        """The phases of this plan, in the order of PHASES."""
        return [phase for phase in PHASES if any(moment.phase == phase for moment in self.moments)]

    @cached_property
    def peak(self) -> Moment:
        """The moment at which the most bytes are on the device."""
        return max(self.moments, key=lambda moment: moment.device.total())

    @property
    def host(self) -> int:
        """The largest number of bytes in a node's host memory. On CPUs this is all memory."""
        sizes = [(one.host if self.cluster.on_gpu else one.device + one.host).total() for one in self.moments]
        return self.cluster.gpus * max(max(sizes) + self.checkpoint, self.loading)

    @property
    def fragments(self) -> int:
        """The number of bytes that torch's allocator is expected to hold in addition to the peak."""
        return round(FRAGMENTS * self.peak.device.total())

    @property
    def needed(self) -> int:
        """The number of bytes that a GPU must have."""
        return self.peak.device.total() + self.fragments + self.cluster.reserved

    @property
    def fits(self) -> bool | None:
        """Whether GPU and host have enough memory, and `auto` finds room for the actor's copy. If only one of the two
        memory sizes is known, only this one is compared; None if neither is known."""
        sizes = ((self.needed, self.cluster.gpu), (self.host, self.cluster.host))
        known = [needed <= there for needed, there in sizes if there is not None]
        return self.placed and all(known) if known else None


def check_split_models(args: RLHFFlags) -> None:
    """Raise UserError if several ranks are to compute sequences together, which a model cannot."""
    for name, path in args.models if args.sequence_parallel_size > 1 else ():
        args.check_attention(path, LANGUAGE_MODEL if name.startswith("actor") else CLASSIFIER, f"--{name}")


def plan(args: RLHFFlags, cluster: Cluster) -> MemoryPlan:
    """The memory plan of step 3 with these flags.

    Raises: UserError if flags contradict each other, a model's config.json cannot be read, or a DeepSpeed file is
    wrong.
    """
    return _Planner(args, cluster).plan()


@dataclass
class _Planner:
    """Makes the memory plan of step 3. engines: {role: engine}. rest, host_rest: the bytes on a rank's device and in
    host memory between steps, without the actor's copy."""

    args: RLHFFlags
    cluster: Cluster
    moments: list[Moment] = field(default_factory=list)

    def __post_init__(self):
        args, spec = self.args, self.args.spec
        self.spec, self.dialect = spec, args.resolved.dialect
        self.models = meta_models(spec, self.cluster.kernel)
        self.engines = {
            config.role: Engine.of(
                self.models[config.role],
                config,
                spec.dtype,
                self.cluster,
                self._passes(config.role),
                spec.critic_optimizer if config.role == "critic" else spec.actor_optimizer,
            )
            for config in spec.engine_configs
        }
        held = [engine.at_rest() for engine in self.engines.values()]
        self.rest, self.host_rest = (sum(parts, Bytes()) for parts in zip(*held, strict=True))
        self._averages()
        self._rollouts()

    def _passes(self, role: str) -> int:
        """The number of passes in one optimizer step of this model. If it learns from texts too, it makes as many
        passes over those."""
        mini_batches = self._schedule(role)[1]
        rows = self.args.rows_per_rank // mini_batches * self.args.sequence_parallel_size  # of a group of ranks
        micro_batches = -(-rows // self.args.per_device_training_batch_size)
        return micro_batches * (2 if self.args.unsupervised_dataset_name is not None else 1)

    def _schedule(self, role: str) -> tuple[int, int]:
        """(epochs, optimizer steps in an epoch) of this model after each rollout."""
        dialect = self.dialect
        own = role == "critic" and dialect.critic_learns_apart
        return dialect.critic_passes if own else (dialect.ppo_epochs, dialect.mini_batches)

    def _averages(self) -> None:
        """Add the moving average and a moving reference."""
        actor = self.engines["actor"]
        spec = self.spec
        found = Bytes()
        if spec.ema_decay is not None:
            found["ema", "weights"] = actor.average
        if spec.reference_refresh_steps is not None:
            found["reference", "weights"] = actor.average
        self.written = found.total() // (actor.world if actor.stage == 0 else 1)
        if spec.ema_device == "cpu" or actor.offloads_optimizer:
            self.host_rest = self.host_rest + found
        else:
            self.rest = self.rest + found

    def _rollouts(self) -> None:
        """Find out how the actor's copy is held, and how many bytes copy, keys and values take."""
        args = self.args
        actor = self.engines["actor"]
        model = self.models["actor"].module
        rows = args.per_device_generation_batch_size * self.dialect.samples_per_prompt
        length = args.max_prompt_seq_len + args.max_answer_seq_len
        waiting = rows < max(args.rows_per_rank, -(-args.num_eval_prompts // self.cluster.world))
        self.cache = Bytes()
        self.copy = Bytes()
        self.vllm = Bytes()
        self.placement = Placement(1, args.replicas_between_steps, f"by {args.rollout_backend}")
        if args.rollout_backend == "vllm":  # each rank of a group holds a part of all rows of the group
            self.vllm["vLLM", "weights"] = actor.bytes("weights", actor.model.numbers).total() // (
                args.vllm_tensor_parallel_size
            )
            self.vllm["vLLM", "keys and values"] = cache_bytes(model, length * rows, rows)
            return
        self.cache["actor", "keys and values"] = cache_bytes(model, slots_of_a_row(length, waiting) * rows, rows)
        if args.rollout_backend == "zero3":
            return
        states = cache_bytes(model, 0, rows)
        room = self.cluster.room if args.rollout_backend == "auto" else None
        sizes = {1: 0}
        if actor.stage == 3:
            asked = args.inference_tp_size or (None if room is not None else 1)
            sizes = copies_bytes(model, self.cluster.gpus, asked)
        self.placement = Placement(min(sizes), args.replicas_between_steps, "as asked")
        if room is not None:
            cache = cache_bytes(model, slots_of_a_row(length, waiting=True) * rows, rows)
            gradients = sum(
                engine.model.width * engine.model.trains // (engine.world if engine.stage >= 2 else 1)
                for engine in self.engines.values()
            )
            free = room - self.rest.total() - gradients
            self.placement = place_copy(sizes, cache, free, args.replicas_between_steps, states)
        self.cache["actor", "keys and values"] += states * (self.placement.ranks - 1)
        self.copy["copy", "weights"] = sizes[self.placement.ranks]

    def plan(self) -> MemoryPlan:
        """The plan of the run."""
        self._generate()
        self._experience()
        self._train()
        written = self.written + sum(engine.written.total() for engine in self.engines.values())
        checkpoint = _checkpoint_copy(self.args.schedule().copies, written, self.rest, self.host_rest, self.cluster)
        return MemoryPlan(
            self.moments,
            self.cluster,
            max(engine.loading for engine in self.engines.values()),
            self.placement.why,
            self.placement.fits,
            checkpoint,
        )

    def _moment(self, phase: str, name: str, *device: Bytes, host: Bytes | None = None) -> None:
        self.moments.append(Moment(phase, name, sum(device, self.rest), self.host_rest + (host or Bytes())))

    def _generate(self) -> None:
        args, actor = self.args, self.engines["actor"]
        rows = min(args.per_device_generation_batch_size * self.dialect.samples_per_prompt, args.rows_per_rank)
        held, whole = self.cache + self.copy + self.vllm, actor.gathered()
        if (self.copy + self.vllm).total():
            self._moment("generate", "the actor's copy is filled", held, actor.gathered_in_buckets)
            whole = Bytes()
        prompts = prompt_pass(actor.model, rows, args.max_prompt_seq_len)
        needed = Bytes({("actor", "activations"): prompts})
        self._moment("generate", "responses are drawn", held, needed, whole)

    def _experience(self) -> None:
        held, room = self.cache + self.copy + self.vllm, self.cluster.room
        for role in ("actor", "reference", "critic", *self.spec.rewards):
            host = self._host(role)
            if host is None:
                continue
            engine = self.engines[host]
            # A moving reference is the actor's own model with other weights.
            played = None if role == host or (role == "reference" and self.spec.reference_moves) else role
            needed = Bytes({(role, "activations"): forward_pass(engine.model, *self._rows_of(role), played)})
            whole = engine.model.width * engine.model.numbers
            kept = Kept(weights=room is None or whole <= KEPT * (room - (self.rest + held).total()))
            gathered = held + engine.gathered(kept) + engine.computing
            if kept.weights and engine.gathered().total():
                self._moment("experience", f"{role}'s weights are gathered", gathered, engine.gathered_in_buckets)
            self._moment("experience", f"{role} computes", gathered, needed)

    def _train(self) -> None:
        between = self.placement.between_steps
        kept_rollouts = self.copy + self.cache if between == "keep" else Bytes()
        if not self.cluster.on_gpu:
            kept_rollouts = kept_rollouts + self.vllm  # on GPUs vLLM sleeps during training
        whole_copy = (
            between == "keep"
            and self.copy.total() > 0
            and self.placement.ranks == 1
            and self.models["actor"].module.adapters is None
        )
        trained = {role: host for role in ("critic", "actor") if (host := self._host(role)) is not None}
        held = Bytes()  # gradients of the engine whose passes are done
        for role, host in trained.items():
            engine = self.engines[host]
            played = None if role == host else role
            bonus = role == "actor" and self.dialect.entropy_coef > 0
            needed = Bytes({(role, "activations"): training_pass(engine.model, *self._rows, played, bonus)})
            kept = _kept_whole(engine, needed, self.rest + kept_rollouts + held, self.cluster)
            # The passes of a single update read the weights of a whole copy, if there is one.
            lent = host == "actor" and whole_copy and math.prod(self._schedule(role)) == 1
            gathered = Bytes() if lent else engine.gathered(kept)
            if kept.weights and not lent:  # in the first pass layers are fetched as usual
                first = [kept_rollouts, held, needed, engine.in_backward(), engine.gathered()]
                self._moment("train", f"{role}'s first pass", *first)
            backward = [kept_rollouts, held, needed, engine.in_backward(kept), gathered]
            self._moment("train", f"{role}'s backward pass", *backward)
            if role == host:
                held = held + engine.held
        for host in dict.fromkeys(trained.values()):
            self._moment("train", f"{host}'s optimizer step", kept_rollouts, held, self.engines[host].in_step)
            held = held - self.engines[host].held

    @property
    def _rows(self) -> tuple[int, int, int]:
        """(sequences, their tokens, their responses' tokens) of a pass that computes experience or trains."""
        args = self.args
        rows = min(args.per_device_training_batch_size, args.rows_per_rank * args.sequence_parallel_size)
        return rows, args.max_prompt_seq_len + args.max_answer_seq_len, args.max_answer_seq_len

    def _rows_of(self, role: str) -> tuple[int, int, int]:
        """As `_rows`, of a pass of this role: a reward model that reads texts has rows of a length of its own."""
        rows, length, response = self._rows
        if self.spec.rewards.get(role) in self.spec.text_reward_paths:
            length = reading_limit(self.models[role].module.model.config, self.args.max_reward_seq_len, length)
        return rows, length, response

    def _host(self, role: str) -> str | None:
        """The role whose engine computes this role; None if the run does not have this role."""
        host = self.spec.engine_of.get(role, role)
        if role == "critic" and self.spec.share_trunk and self.spec.with_critic:
            host = "actor"
        return host if host in self.engines else None


def _kept_whole(engine: Engine, needed: Bytes, held: Bytes, cluster: Cluster) -> Kept:
    """What a run keeps whole between the passes of an optimizer step. needed: the bytes of a pass. held: those that are
    there before it."""
    if engine.stage < 3 or engine.world == 1 or engine.passes < 2:
        return NOTHING_KEPT
    if cluster.room is None:
        return Kept(weights=True, gradients=True)
    passes = (needed + engine.in_backward() + engine.gathered()).total()
    model = engine.model
    weights, gradients = model.width * model.numbers, model.width * model.trains
    return what_to_keep(weights, gradients, passes if cluster.on_gpu else None, cluster.room - held.total())


def _checkpoint_copy(wanted: bool, written: int, rest: Bytes, host_rest: Bytes, cluster: Cluster) -> int:
    """The bytes of a rank's copy of its state in host memory, which is made if it takes at most COPIES_SHARE of what is
    free there; a run decides the same."""
    held = (host_rest if cluster.on_gpu else host_rest + rest).total()
    fits = cluster.host is None or written <= COPIES_SHARE * (cluster.host / cluster.gpus - held)
    return written if wanted and fits else 0


def plan_one_model(args: SupervisedFlags, cluster: Cluster) -> MemoryPlan:
    """The memory plan of step 1 or 2 with these flags. Raises: UserError, as `plan` does."""
    scorer = isinstance(args, RewardFlags)
    model = built(
        "model",
        args.model_name_or_path,
        CLASSIFIER if scorer else LANGUAGE_MODEL,
        True,
        dtype=str(args.dtype),
        trust_remote_code=args.trust_remote_code,
        checkpointing=args.gradient_checkpointing,
        lora=args.lora(),
        attention=with_packing(args.attention, str(args.dtype), cluster.kernel),
    )
    passes = args.gradient_accumulation_steps * args.sequence_parallel_size
    engine = Engine.of(model, args.engine_config(), str(args.dtype), cluster, passes, args.optimizer())
    rows = args.per_device_train_batch_size * (2 if scorer else 1)  # both responses of a pair
    one_pass = training_pass(model, rows, args.max_seq_len, args.max_seq_len - 1)
    needed, (rest, host) = Bytes({("model", "activations"): one_pass}), engine.at_rest()
    kept = _kept_whole(engine, needed, rest, cluster)
    whole = engine.gathered(kept)
    checkpoint = _checkpoint_copy(args.schedule().copies, engine.written.total(), rest, host, cluster)
    moments = [
        Moment("train", "the backward pass", rest + needed + engine.in_backward(kept) + whole, host),
        Moment("train", "the optimizer's step", rest + engine.held + engine.in_step, host),
    ]
    return MemoryPlan(moments, cluster, engine.loading, checkpoint=checkpoint)


def table(plan: MemoryPlan, title: str) -> str:
    """A table of the GB (10^9 bytes) on one GPU, at the peak of each phase, by role and by kind; and lines that say
    whether the run fits."""
    device = "GPU" if plan.cluster.on_gpu else "rank"
    tops = {phase: plan.peak_of(phase).device for phase in plan.phases}
    lines = [
        f"memory plan: {title}; GB of one {device}, each phase at its peak, the highest marked *",
        _row("", [f"{phase}{'*' if phase == plan.peak.phase else ''}" for phase in tops]),
    ]
    roles = {role for top in tops.values() for role, _ in top}
    ordered = sorted(roles, key=lambda role: (ROLES.index(role.partition("_")[0]), len(role), role))
    for place, names in ((0, ordered), (1, KINDS)):
        for name in names:
            sizes = [sum(size for key, size in top.items() if key[place] == name) for top in tops.values()]
            if any(sizes):
                lines.append(_row(f"{'  ' * place}{name}", [gb(size) for size in sizes]))
        if place == 0:
            lines.append(_row("in all", [gb(top.total()) for top in tops.values()]))
    lines.append(f"peak: {plan.peak.name}")
    if plan.rollouts:
        lines.append(f"rollouts: {plan.rollouts}")
    if plan.checkpoint:
        lines.append(f"checkpoints: written from copies in host memory, {gb(plan.checkpoint)} GB a rank")
    if plan.cluster.on_gpu:
        lines.append(
            f"needed of a GPU: {gb(plan.peak.device.total())} planned + {gb(plan.fragments)} for fragments + "
            f"{gb(plan.cluster.reserved)} for CUDA and NCCL = {gb(plan.needed)} GB; host memory of a node: "
            f"{gb(plan.host)} GB"
        )
    return "\n".join([*lines, verdict(plan)])


def verdict(plan: MemoryPlan) -> str:
    """One line that says whether GPU and host have enough memory."""
    if plan.fits is None:
        return "fits: not said, as it is not known what the GPU has"
    parts = []
    if plan.cluster.gpu is not None:
        parts.append(f"{gb(plan.needed)} of {gb(plan.cluster.gpu)} GB")
    if plan.cluster.host is not None:
        parts.append(f"host {gb(plan.host)} of {gb(plan.cluster.host)} GB")
    return f"fits: {'yes' if plan.fits else 'no'}, {'; '.join(parts)}"


def _row(name: str, cells: list[str]) -> str:
    return f"{name:<18}" + "".join(f"{cell:>{WIDTH}}" for cell in cells)


def gb(size: int) -> str:
    """A number of bytes as a text in GB, with one decimal; small sizes get more decimals."""
    gb = size / 1e9
    return "-" if not size else f"{gb:.1f}" if gb >= 9.95 else f"{gb:.2f}" if gb >= 0.1 else f"{gb:.4f}"
