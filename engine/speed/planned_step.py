"""The step of PPO that a memory plan comes to."""

from collections.abc import Mapping

from engine.engine_spec import EngineSpec
from engine.memory.memory_plan import MemoryPlan
from engine.memory.workload import Workload
from engine.speed.decoding import Decoder
from engine.speed.step import Step


def step_of(planned: MemoryPlan, spec: EngineSpec, load: Workload, decoders: Mapping[str, Decoder]) -> Step:
    """The step of a plan. decoders: the models' shapes, by the engines' roles."""
    placed, engines, roles = planned.placed, planned.engines, [config.role for config in spec.engine_configs]
    whole = frozenset(roles[place] for place in placed.models)
    divided = frozenset(roles[place] for place in placed.divided)
    freed = frozenset(roles[place] for place in placed.freed)
    merged = {role for role in divided if role in engines and engines[role].unmerged}  # and can draw alone
    hosts = dict(spec.hosts)
    if spec.share_trunk and spec.with_critic:
        hosts["critic"] = "actor"
    vllm = load.parts if load.backend == "vllm" else None
    return Step(
        moving=spec.reference_moves,
        decoders={**decoders, **{role: decoders[host] for role, host in hosts.items()}},
        engines=engines,
        hosts=hosts,
        rows=load.responses,
        decoded=min(load.generated, load.responses),
        prompt=load.prompt,
        response=load.response,
        micro_batch=load.micro_batch,
        mini_batches=load.mini_batches,
        updates=load.updates_of("actor"),
        critic_updates=(load.updates_of("critic"), load.mini_batches_of("critic")) if load.critic_passes else None,
        texts=load.texts,
        whole=whole,
        divided=divided - merged,
        group=placed.ranks,
        own=frozenset(role for role, engine in engines.items() if not engine.shared) - freed,
        stays=placed.between_steps == "keep",
        drawing=placed.ranks if "actor" in merged else vllm,
        checkpointed=spec.actor_gradient_checkpointing,
        offloaded=frozenset(config.role for config in spec.engine_configs if config.offload),
    )
