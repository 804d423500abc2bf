"""Makes the memory plan. For each moment of a run, the plan adds up the memory that the models, their passes and ZeRO
need. The models are built on the meta device.

`plan` makes the plan of step 3 (PPO). `plan_one_model` makes the plan of steps 1 and 2, in which one model trains
without rollouts.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from engine.copies import divided_bytes, group_sizes, why_no_group
from engine.engine_spec import EngineSpec, OptimizerSpec
from engine.host_memory import COPIES_SHARE
from engine.memory.blueprint import Blueprint, blueprints, built
from engine.memory.copies import UNPLANNED, Copies, CopyNeed, copies_bytes, copies_together, place_copies
from engine.memory.memory_plan import MemoryPlan, Moment, gb
from engine.memory.passes import Rows, decoding_passes, scoring_pass, training_pass
from engine.memory.workload import Cluster, Workload
from engine.memory.zero_memory import FLOAT, Averages, Bytes, ZeroMemory, bucket_numbers
from engine.models.attention import USUAL, Attention
from engine.models.lora import LoraSpec
from engine.models.reading import CLASSIFIER, LANGUAGE_MODEL
from engine.rollout.cache import cache_bytes
from engine.rollout.decode import slots_of_a_row
from engine.zero.config import EngineConfig, build_ds_config, with_fitting_sizes, zero_settings
from engine.zero.long_batch import NOTHING_KEPT, Kept


def plan(spec: EngineSpec, workload: Workload, cluster: Cluster) -> MemoryPlan:
    """The memory plan of a run with these engines. Reads only the configurations of the models.

    Raises: UserError if a model's config.json cannot be read, or if a DeepSpeed file is wrong.
    """
    return Planner(spec, workload, cluster).plan()


@dataclass
class Planner:
    """Makes the memory plan of a run.

    engines: {role: engine}.
    needs: the memory that a whole copy of each engine's model takes.
    copies: which models have a copy.
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
        self._divided: dict[int, tuple[Mapping[int, int], str | None]] = {}
        self.rest, self.host_rest = self._at_rest()
        written = sum((engine.written for engine in self.engines.values()), self.averages.written)
        copy, self.checkpoints = checkpoint_copy(load.checkpoints, written, self.rest, self.host_rest, self.cluster)
        self.host_rest = self.host_rest + copy
        self.training = self._training()
        self.copies = self._copies()

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
            self.copies.why,
            adam=self.rest.total - self._at_rest(stepped=False)[0].total,
            engines=self.engines,
            training=self.training,
            checkpoints=self.checkpoints,
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

    @cached_property
    def needs(self) -> list[CopyNeed]:
        """The memory that a whole copy of each model takes, listed in the order of the engines."""
        needs = []
        for role, engine in self.engines.items():
            model = engine.model
            gradients = model.width * model.trains // (self.cluster.world if engine.stage >= 2 else 1)
            moments = engine.at_rest(stepped=True)[0].total - engine.at_rest(stepped=False)[0].total
            needs.append(
                CopyNeed(role, engine.stage, model.architecture, model.width * model.numbers, gradients + moments)
            )
        return needs

    def _copies(self) -> Copies:
        needs, between_steps = self.needs, self.workload.between_steps
        if self.workload.backend != "auto":
            chosen = tuple(range(len(needs))) if self.workload.backend == "replica" else ()
            if chosen and (ranks := self.workload.group or 1) > 1:
                return copies_together(needs, ranks, between_steps, self._divide)
            why = {"vllm": "the actor's, in vLLM", "zero3": "none"}.get(self.workload.backend, "as asked")
            return Copies(chosen, why, between_steps=between_steps)
        room = self.cluster.room
        if room is None:
            why = "of all models that are partitioned, as it is not known what memory there is"
            return Copies(tuple(range(len(needs))), why, between_steps=between_steps)
        loaded, _ = self._at_rest(stepped=False)
        free = room - loaded.total
        training = self.training if self.cluster.on_gpu else UNPLANNED  # a run does the same
        placed = place_copies(needs, self.cache.total, free, between_steps, self._divide, training)
        partitioned = any(need.stage == 3 for need in needs)
        return replace(
            placed, why=placed.why + (why_no_group(self.cluster.gpus, self.workload.group) if partitioned else "")
        )

    def _training(self) -> int:
        """The number of bytes that training adds on a device at its peak, not counting the loaded engines, copies, keys
        and values. The number assumes that no weights stay gathered between passes, even if there is room for them."""
        self.copies = Copies((), "", between_steps="free")
        self._train(keeps=False)
        peak = max(moment.device.total for moment in self.moments)
        self.moments.clear()
        return peak - self._at_rest(stepped=False)[0].total

    def _divide(self, place: int) -> tuple[Mapping[int, int], str | None]:
        """(`CopyNeed.divided`, `CopyNeed.obstacle`) for the model with this index. `place_copies` gets this function as
        `divide`."""
        if place not in self._divided:
            role, model = list(self.models.items())[place]
            sizes = group_sizes(self.cluster.gpus, self.workload.group)
            self._divided[place] = divided_bytes(model.module, sizes, role == "actor")
        return self._divided[place]

    def _copy_bytes(self, roles: Iterable[str]) -> Bytes:
        """The bytes of the copies that exist after these models have computed."""
        copies = self.copies
        whole = [self.needs[place] for place in copies.models if self.needs[place].role in roles]
        divided = [place for place in copies.divided if self.needs[place].role in roles]
        parts = {self.needs[place].kind: self._divide(place)[0][copies.ranks] for place in divided}
        return Bytes().add("copies", "weights", copies_bytes(whole, copies.shared) + sum(parts.values()))

    def _copied(self, role: str, generates: bool = False) -> bool:
        """Whether a model computes without ZeRO's hooks: with a copy or, at stages 0 to 2, with its own module.

        generates: whether the model draws responses. A divided copy with a merged adapter can only draw responses.
        """
        place, plain = list(self.engines).index(role), self.models[role].module.adapters is None
        divided = place in self.copies.divided and (plain or generates)
        return divided or place in self.copies.models or self.engines[role].stage < 3

    def _lent(self, role: str) -> bool:
        """Whether all passes of an optimizer step read the weights from the model's copy. This needs a copy that no
        other model has overwritten since it was filled."""
        place, copies = list(self.engines).index(role), self.copies
        alone = (
            not copies.shared or [self.needs[other].kind for other in copies.models].count(self.needs[place].kind) == 1
        )
        updates = max(map(self.workload.updates_of, ("actor", "critic") if self.spec.share_trunk else (role,)))
        return place in copies.models and alone and copies.kept(place) and updates == 1

    @property
    def _kept_roles(self) -> list[str]:
        return [role for place, role in enumerate(self.engines) if self.copies.kept(place)]

    @property
    def _kept(self) -> Bytes:
        """The bytes of the copies, keys and values that are kept during training. On GPUs vLLM sleeps during training
        and holds no memory."""
        copies = self._copy_bytes(self._kept_roles)
        if self.copies.between_steps == "keep":
            copies = copies + self.cache
        return copies if self.cluster.on_gpu else copies + self.vllm

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
        copies = self._copy_bytes({"actor", *self._kept_roles})
        always, host = [self.rest, self.cache, copies], [self.host_rest]
        if self._copied("actor", True) and self.engines["actor"].stage == 3:
            lora, bucket = self.spec.actor_lora, self._bucket("actor", self.models["actor"].numbers)
            filled = [*always, bucket]
            if lora is not None and lora.only and self.copies.between_steps == "keep":
                # Frozen models are copied only once, in the first step, when most other memory is not allocated yet.
                filled = [self._at_rest(stepped=False)[0], self._copy_bytes(["actor"]), bucket]
            self._moment("generate", "the actor's copy is filled", filled, host)
        whole = Bytes() if self._copied("actor", True) else self.engines["actor"].gathered(ahead=False)
        self._moment("generate", "responses are drawn", [*always, passes, whole], host)

    def _experience(self) -> None:
        always = [self.rest, self.cache, self._copy_bytes(self.engines), self.vllm]
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
            if self._copied(host) and (role == host or moving) and engine.stage == 3:
                # The actor's copy generated with its adapter merged, and is unmerged now. The critic's copy may be new.
                numbers = engine.model.unmerged if role == "actor" else engine.model.numbers
                filled = [*always, self._bucket(host, numbers)]
                self._moment("experience", f"the {role}'s copy is filled", filled, [self.host_rest])
            played = None if role == host or moving else role
            needed = _kinds(role, scoring_pass(engine.model, self.workload.rows, played))
            whole = Bytes() if self._copied(host) else engine.gathered()
            self._moment(
                "experience", f"{role} computes", [*always, needed, whole, engine.on_device()], [self.host_rest]
            )

    def _host(self, role: str) -> str | None:
        """The role whose engine computes this role; None if the run does not have this role."""
        host = self.spec.engine_of.get(role, role)
        if role == "critic" and self.spec.share_trunk and self.spec.with_critic:
            host = "actor"
        return host if host in self.engines else None

    def _train(self, keeps: bool = True) -> None:
        moved = self._copy_bytes(self.engines) if self.copies.between_steps == "host" else Bytes()
        always, host_bytes = [self.rest, self._kept], [self.host_rest, moved]
        held = Bytes()
        trained = {role: host for role in ("critic", "actor") if (host := self._host(role)) is not None}
        for role, host in trained.items():
            engine, passes = self.engines[host], self.workload.passes_of(role)
            played = None if role == host else role
            needed = _kinds(role, training_pass(engine.model, self.workload.rows, played, self.cluster.gpu_bytes))
            # In an engine with several roles, the gradients of an earlier role count like those of an earlier pass.
            made = passes if host not in list(trained.values())[: list(trained).index(role)] else passes + 1
            kept = self.kept[host] = self._kept_whole(engine, passes, needed, held) if keeps else NOTHING_KEPT
            whole = Bytes() if self._lent(host) else engine.gathered(backward=True, kept=kept)
            if kept.weights and not self._lent(host):  # in the first pass they are fetched as usual
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
    """The memory plan of loading, training and saving one model. Raises: UserError, as `engine.memory.plan` does."""
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
    return MemoryPlan(moments, cluster, "", engines={"model": engine}, checkpoints=checkpoints)
