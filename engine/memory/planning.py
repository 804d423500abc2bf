"""Makes the memory plan. For each moment of a run, the plan adds up the memory that the models, their passes and ZeRO
need. The models are built on the meta device.

`plan` makes the plan of step 3 (PPO). `plan_one_model` makes the plan of steps 1 and 2, in which one model trains
without rollouts.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.copies import copies_bytes
from engine.engine_spec import EngineSpec, OptimizerSpec
from engine.host_memory import COPIES_SHARE
from engine.memory.blueprint import Blueprint, blueprints, built
from engine.memory.memory_plan import MemoryPlan, Moment, gb
from engine.memory.passes import Rows, decoding_passes, scoring_pass, training_pass
from engine.memory.workload import Cluster, Workload
from engine.memory.zero_memory import FLOAT, Averages, Bytes, ZeroMemory, bucket_numbers
from engine.models.attention import USUAL, Attention
from engine.models.lora import LoraSpec
from engine.models.reading import CLASSIFIER, LANGUAGE_MODEL
from engine.rollout.cache import cache_bytes
from engine.rollout.decode import slots_of_a_row
from engine.rollout.placing import Placing, placed
from engine.zero.config import EngineConfig, build_ds_config, with_fitting_sizes, zero_settings
from engine.zero.long_batch import KEPT, Kept


def plan(spec: EngineSpec, workload: Workload, cluster: Cluster) -> MemoryPlan:
    """The memory plan of a run with these engines. Reads only the configurations of the models.

    Raises: UserError if a model's config.json cannot be read, or if a DeepSpeed file is wrong.
    """
    return Planner(spec, workload, cluster).plan()


@dataclass
class Planner:
    """Makes the memory plan of a run.

    engines: {role: engine}.
    placing: how responses are drawn.
    copy: the bytes of the actor's copy.
    kept: {role of the engine: what is kept whole between the passes of an optimizer step}; filled while the plan is
        made.
    """

    spec: EngineSpec
    workload: Workload
    cluster: Cluster

    def __post_init__(self):
        self.models = blueprints(self.spec)
        self.engines = {role: self._engine(role) for role in self.models}
        self.averages = Averages(self.spec, self.engines["actor"])
        actor, load = self.models["actor"], self.workload
        most = max(load.responses, -(-load.evaluated // self.cluster.world))
        self.slots = slots = slots_of_a_row(load.prompt + load.response, waiting=load.generated < most)
        self.cache = Bytes().add(
            "actor", "keys and values", cache_bytes(actor.module.model, slots * load.decoded.count)
        )
        self.vllm = Bytes()
        if load.backend == "vllm":  # each rank of a group holds a part of the keys and values of all rows of the group
            held = cache_bytes(actor.module.model, (load.prompt + load.response) * load.decoded.count)
            self.vllm = Bytes({"vLLM": {"weights": actor.width * actor.numbers // load.parts, "keys and values": held}})
            self.cache = Bytes()
        self.moments: list[Moment] = []
        self.kept: dict[str, Kept] = {}
        self.rest, self.host_rest = self._at_rest()
        written = sum((engine.written for engine in self.engines.values()), self.averages.written)
        copy, self.checkpoints = checkpoint_copy(load.checkpoints, written, self.rest, self.host_rest, self.cluster)
        self.host_rest = self.host_rest + copy
        self.copy, self.placing = self._placing()

    def _engine(self, role: str) -> ZeroMemory:
        spec, model = self.spec, self.models[role]
        config = next(config for config in spec.engine_configs if config.role == role)
        ds_config = build_ds_config(
            config, dtype=spec.dtype, micro_batch_size=spec.micro_batch_size, trained=model.trained
        )
        optimizer = {"actor": spec.actor_optimizer, "critic": spec.critic_optimizer}.get(role)
        return ZeroMemory(
            model,
            config.stage,
            zero_settings(with_fitting_sizes(model.module, ds_config)),
            self.cluster.world,
            optimizer,
            offload=config.offload and config.stage == 0 and not model.trained,
            on_gpu=self.cluster.on_gpu,
            master_width=FLOAT // 2 if ds_config["bf16"].get("bf16_master_weights_and_grads") else FLOAT,
            passes=self.workload.passes_of(role),
        )

    def plan(self) -> MemoryPlan:
        """The plan of the run."""
        self._load()
        self._generate()
        self._experience()
        self._train()
        self._save()
        return MemoryPlan(
            tuple(self.moments),
            self.cluster,
            self.placing.why,
            checkpoints=self.checkpoints,
            placed=self.placing.fits,
        )

    def _moment(
        self, phase: str, name: str, device: Iterable[Bytes], host: Iterable[Bytes] = (), once: Iterable[Bytes] = ()
    ) -> None:
        parts = [sum(part, Bytes()) for part in (device, host, once)]
        self.moments.append(Moment(phase, name, *parts))

    def _at_rest(self, stepped: bool = True) -> tuple[Bytes, Bytes]:
        device, host = Bytes(), Bytes()
        for engine in self.engines.values():
            on_device, on_host = engine.at_rest(stepped)
            device, host = device + on_device, host + on_host
        averages = self.averages.bytes
        return (device, host + averages) if self.averages.on_host else (device + averages, host)

    def _placing(self) -> tuple[Bytes, Placing]:
        load, actor = self.workload, self.engines["actor"]
        if load.backend in ("vllm", "zero3"):
            return Bytes(), Placing(1, load.between_steps, f"by {load.backend}")
        room = self.cluster.room if load.backend == "auto" else None
        sizes = {1: 0}
        if actor.stage == 3:
            asked = load.group or (None if room is not None else 1)
            sizes = copies_bytes(actor.model.module, self.cluster.gpus, asked)
        placing = Placing(min(sizes), load.between_steps, "as asked")
        if room is not None:
            gradients = sum(
                one.model.width * one.model.trains // (self.cluster.world if one.stage >= 2 else 1)
                for one in self.engines.values()
            )
            placing = placed(sizes, self.cache.total, room - self.rest.total - gradients, load.between_steps)
        return Bytes().add("copies", "weights", sizes[placing.ranks]), placing

    @property
    def _kept(self) -> Bytes:
        """The bytes of the copy, keys and values that are kept during training. On GPUs vLLM sleeps during training and
        holds no memory."""
        kept = self.copy + self.cache if self.placing.between_steps == "keep" else Bytes()
        return kept if self.cluster.on_gpu else kept + self.vllm

    def _lent(self, role: str, updates: int) -> bool:
        """Whether this many optimizer steps' passes read the weights from the actor's copy."""
        plain = self.models["actor"].module.adapters is None and self.placing.ranks == 1
        stays = self.placing.between_steps != "host"
        return role == "actor" and bool(self.copy.total) and plain and stays and updates <= 1

    def _bucket(self, role: str, numbers: int) -> Bytes:
        """The bytes of the buffers that gathering `numbers` elements needs, one bucket at a time."""
        model = self.models[role]
        if self.engines[role].stage < 3:
            return Bytes()
        gathered = bucket_numbers(numbers, model.largest, self.cluster.world)
        return Bytes().add("copies", "gathered", model.width * gathered)

    def _load(self) -> None:
        device, host = Bytes(), Bytes()
        for role, engine in self.engines.items():
            on_device, on_host = engine.at_rest(stepped=False)
            (read, reading), (making, loading) = engine.reading, engine.loading
            self._moment("load", f"{role} is read", [device, read], [host, reading])
            self._moment("load", f"{role} is loaded", [device, on_device, making], [host, on_host, loading])
            self._moment("load", f"{role} is checked", [device, on_device, engine.gathered()], [host, on_host])
            device, host = device + on_device, host + on_host
        if self.averages.bytes.total:
            device, host = self._at_rest(stepped=False)
            self._moment("load", "the average is made", [device], [host])

    def _generate(self) -> None:
        passes = _kinds("actor", decoding_passes(self.models["actor"], self.workload.decoded, self.slots))
        if self.workload.backend == "vllm":
            bucket = self._bucket("actor", self.models["actor"].numbers)
            self._moment("generate", "vLLM takes weights", [self.rest, self.vllm, bucket], [self.host_rest])
            self._moment("generate", "vLLM draws responses", [self.rest, self.vllm, passes], [self.host_rest])
            return
        always, host = [self.rest, self.cache, self.copy], [self.host_rest]
        if self.copy.total:
            bucket = self._bucket("actor", self.models["actor"].numbers)
            self._moment("generate", "the actor's copy is filled", [*always, bucket], host)
        whole = Bytes() if self.copy.total else self.engines["actor"].gathered(ahead=False)
        self._moment("generate", "responses are drawn", [*always, passes, whole], host)

    def _experience(self) -> None:
        always = [self.rest, self.cache, self.copy, self.vllm]
        for role in ("actor", "reference", "critic", "reward"):
            host = self._host(role)
            if host is None:
                continue
            engine = self.engines[host]
            moving = role == "reference" and self.spec.reference_moves  # the actor's own model, with other weights
            if moving:
                device, on_host = self.averages.exchanged
                self._moment(
                    "experience", "the reference takes the actor's place", [*always, device], [self.host_rest, on_host]
                )
            played = None if role == host or moving else role
            needed = _kinds(role, scoring_pass(engine.model, self.workload.rows, played))
            kept, lent = Kept(weights=self._fits(engine, always)), self._lent(role, 0)
            whole = Bytes() if lent else engine.gathered(kept=kept)
            if kept.weights and not lent and engine.stage == 3 and self.cluster.world > 1:
                filled = [*always, whole, self._bucket(host, engine.model.numbers), engine.on_device()]
                self._moment("experience", f"{role}'s weights are gathered", filled, [self.host_rest])
            self._moment(
                "experience", f"{role} computes", [*always, needed, whole, engine.on_device()], [self.host_rest]
            )

    def _fits(self, engine: ZeroMemory, held: list[Bytes]) -> bool:
        """Whether an engine's whole weights stay gathered for all passes that compute experience."""
        room = self.cluster.room
        return room is None or engine.model.width * engine.model.numbers <= KEPT * (room - sum(held, Bytes()).total)

    def _host(self, role: str) -> str | None:
        """The role whose engine computes this role; None if the run does not have this role."""
        host = self.spec.engine_of.get(role, role)
        if role == "critic" and self.spec.share_trunk and self.spec.with_critic:
            host = "actor"
        return host if host in self.engines else None

    def _train(self) -> None:
        moved = self.copy if self.placing.between_steps == "host" else Bytes()
        always, host_bytes = [self.rest, self._kept], [self.host_rest, moved]
        held = Bytes()
        trained = {role: host for role in ("critic", "actor") if (host := self._host(role)) is not None}
        for role, host in trained.items():
            engine, passes = self.engines[host], self.workload.passes_of(role)
            played = None if role == host else role
            needed = _kinds(role, training_pass(engine.model, self.workload.rows, played, self.cluster.gpu_bytes))
            # In an engine with several roles, the gradients of an earlier role count like those of an earlier pass.
            made = passes if host not in list(trained.values())[: list(trained).index(role)] else passes + 1
            kept = self.kept[host] = self._kept_whole(engine, passes, needed, held)
            lent = self._lent(host, self.workload.updates_of(role)) and self.placing.between_steps == "keep"
            whole = Bytes() if lent else engine.gathered(backward=True, kept=kept)
            if kept.weights and not lent:  # in the first pass they are fetched as usual
                first = [*always, held, needed, engine.in_backward(1), engine.gathered(backward=True)]
                self._moment("train", f"{role}'s first pass", first, host_bytes)
            backward = [*always, held, needed, engine.in_backward(made, kept), whole]
            self._moment("train", f"{role}'s backward pass", backward, host_bytes)
            reduced = [*always, held, engine.in_reduction(made), whole if kept.weights else Bytes()]
            self._moment("train", f"{role}'s gradients are reduced", reduced, host_bytes)
            if role == host:
                held = held + engine.held
        for host in dict.fromkeys(trained.values()):
            on_device, on_host = self.engines[host].in_step
            self._moment("train", f"{host}'s optimizer step", [*always, held, on_device], [*host_bytes, on_host])
            held = Bytes({other: kinds for other, kinds in held.by_role.items() if other != host})

    def _kept_whole(self, engine: ZeroMemory, passes: int, needed: Bytes, held: Bytes) -> Kept:
        """What the engine keeps whole between the passes of an optimizer step. needed: the bytes that one pass needs.
        held: the bytes of the gradients of other engines."""
        # On CPUs a run decides this in the first step, when Adam's moments do not exist yet.
        rest = self.rest if self.cluster.on_gpu else self._at_rest(stepped=False)[0]
        free = None if self.cluster.room is None else self.cluster.room - (rest + self._kept + held).total
        return engine.kept(passes, needed + engine.gathered(backward=True) + engine.in_backward(passes), free)

    def _save(self) -> None:
        for role in ("actor", "critic"):
            if role in self.engines:
                engine = self.engines[role]
                tensor = engine.largest_tensor
                whole = tensor if engine.stage == 3 else Bytes()
                self._moment("save", f"{role} is written", [self.rest, self._kept, whole], [self.host_rest], [tensor])


def checkpoint_copy(wanted: bool, written: Bytes, rest: Bytes, host_rest: Bytes, cluster: Cluster) -> tuple[Bytes, str]:
    """(the bytes in host memory of a rank's copy of its state, a text about the copy). There is no copy if it would
    take more than COPIES_SHARE of the free host memory; a run decides the same.

    wanted: whether checkpoints are written from copies. written: the bytes that a rank writes into a checkpoint. rest,
    host_rest: the bytes on its device and in its host memory between two steps.
    """
    held = host_rest.total + (0 if cluster.on_gpu else rest.total)
    size = f"{gb(written.total)} GB a rank"
    if not wanted:
        return Bytes(), ""
    if cluster.host is not None and written.total > COPIES_SHARE * (cluster.host / cluster.gpus - held):
        return Bytes(), f"training waits while they are written, as host memory has no room for copies of {size}"
    return written, f"written while training goes on, from copies in host memory of {size}"


def _kinds(role: str, sizes: dict[str, int]) -> Bytes:
    return Bytes({role: sizes})


@dataclass(frozen=True, slots=True, kw_only=True)
class OneModel:
    """The model that trains in step 1, or in step 2 if `scorer` is true, and how it trains.

    rows: the number of rows in one forward and backward pass. length: the number of tokens in each row. passes: the
    number of passes in one optimizer step. checkpoints: as in Workload.
    """

    path: str
    scorer: bool
    engine: EngineConfig
    optimizer: OptimizerSpec
    dtype: str
    rows: int
    length: int
    passes: int = 1
    checkpointing: bool = False
    checkpoints: bool = False
    lora: LoraSpec | None = None
    trust_remote_code: bool = False
    attention: Attention = USUAL

    @property
    def blueprint(self) -> Blueprint:
        """The blueprint of the model's engine. Raises: UserError, as `engine.memory.blueprint.built` does."""
        return built(
            "model",
            self.path,
            CLASSIFIER if self.scorer else LANGUAGE_MODEL,
            True,
            dtype=self.dtype,
            trust_remote_code=self.trust_remote_code,
            attention=self.attention,
            checkpointing=self.checkpointing,
            lora=self.lora,
        )


def plan_one_model(one: OneModel, cluster: Cluster) -> MemoryPlan:
    """The memory plan of loading, training and saving one model. Raises: UserError, as `plan` does."""
    model = one.blueprint
    ds_config = build_ds_config(one.engine, dtype=one.dtype, micro_batch_size=one.rows)
    zero = zero_settings(with_fitting_sizes(model.module, ds_config))
    engine = ZeroMemory(
        model, one.engine.stage, zero, cluster.world, one.optimizer, on_gpu=cluster.on_gpu, passes=one.passes
    )
    unstepped, unstepped_host = engine.at_rest(stepped=False)
    rest, host = engine.at_rest()
    copy, checkpoints = checkpoint_copy(one.checkpoints, engine.written, rest, host, cluster)
    host = host + copy
    (read, reading), (making, loading) = engine.reading, engine.loading
    needed = Bytes({"model": training_pass(model, Rows(one.rows, 1, one.length - 1), gpu=cluster.gpu_bytes)})
    first = needed + engine.in_backward(1) + engine.gathered(backward=True)
    room = cluster.room
    free = None if room is None else room - (rest if cluster.on_gpu else unstepped).total  # as in step 3
    kept = engine.kept(one.passes, needed + engine.in_backward(one.passes) + engine.gathered(backward=True), free)
    whole = engine.gathered(backward=True, kept=kept)
    backward, reduced = engine.in_backward(one.passes, kept), engine.in_reduction(one.passes)
    step, step_host = engine.in_step
    tensor = engine.largest_tensor
    saved = tensor if engine.stage == 3 else Bytes()
    moments = (
        Moment("load", "the model is read", read, reading, Bytes()),
        Moment("load", "the model is loaded", unstepped + making, unstepped_host + loading, Bytes()),
        *([Moment("train", "the first pass", rest + first, host, Bytes())] if kept.weights else []),
        Moment("train", "the backward pass", rest + needed + backward + whole, host, Bytes()),
        Moment("train", "gradients are reduced", rest + reduced + (whole if kept.weights else Bytes()), host, Bytes()),
        Moment("train", "the optimizer's step", rest + engine.held + step, host + step_host, Bytes()),
        Moment("save", "the model is written", rest + saved, host, tensor),
    )
    return MemoryPlan(moments, cluster, "", checkpoints=checkpoints)
