"""What ranks exchange in a step, on paper: which calls, of how many bytes, from how the memory plan has engines come by
their weights."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from engine.memory.engine_plan import EnginePlan
from engine.memory.workload import Workload
from engine.zero.gathering import GATHER_BUCKET

ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER = "all-gather", "all-reduce", "reduce-scatter"
COPIES, GENERATION, EXPERIENCE, GATHERS, REDUCTIONS = (
    "copies are filled",
    "responses are drawn through partitions",
    "experience is made through partitions",
    "training gathers weights",
    "gradients are reduced",
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """Collective calls of one kind. what: in which part of a step. role: of the engine. calls: how many, each of which
    gives every rank `size` bytes, or sums up so many of each rank."""

    what: str
    role: str
    kind: str
    calls: int
    size: float

    @property
    def total(self) -> float:
        """Bytes of all calls."""
        return self.calls * self.size


def traffic_of_ppo(engines: Mapping[str, EnginePlan], workload: Workload) -> list[Exchange]:
    """What a step of PPO exchanges between all ranks. engines: by role, of its memory plan.

    Left out are the few bytes of metrics, and what ranks that hold a copy together exchange for each token.
    """
    found: list[Exchange] = []
    passes = -(-workload.responses // workload.micro_batch)
    for role, engine in engines.items():
        if engine.stage == 3:
            found += _weights_to_compute(role, engine, workload, passes)
        if engine.trains:
            for _ in range(workload.updates):
                found += _update(role, engine, workload.passes)
    return _together(found)


def traffic_of_training(engine: EnginePlan, passes: int) -> list[Exchange]:
    """What an optimizer step of one model exchanges in so many forward and backward passes."""
    return _together(list(_update("model", engine, passes)))


def _weights_to_compute(role: str, engine: EnginePlan, workload: Workload, passes: int) -> Iterator[Exchange]:
    """Of a partitioned model: to draw responses (the actor), and to make experience."""
    calls = -(-engine.numbers // GATHER_BUCKET)
    fill = Exchange(COPIES, role, ALL_GATHER, calls, engine.numbers * engine.width / calls)
    if role == "actor":
        if engine.generates:
            yield fill
        else:
            rounds = -(-workload.responses // workload.generated) * workload.response
            yield from _through_partitions(GENERATION, role, engine, rounds)
        if engine.computes:
            return  # with the copy that has generated
    if engine.computes:
        if engine.trains or engine.shared:  # frozen weights in a copy of their own stay
            yield fill
    else:
        yield from _through_partitions(EXPERIENCE, role, engine, passes)


def _through_partitions(what: str, role: str, engine: EnginePlan, times: int) -> Iterator[Exchange]:
    for unit in engine.units:
        yield Exchange(what, role, ALL_GATHER, times, unit * engine.width)


def _update(role: str, engine: EnginePlan, passes: int) -> Iterator[Exchange]:
    """Of one optimizer step.

    Stage 0 sums gradients up, 1 and 2 hand each rank its part of the sum, 2 in each pass, and gather new weights; 3
    gathers weights before each forward and backward pass, unless they are kept.
    Source: Rajbhandari et al. 2020, ZeRO, section 7; DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py and stage3.py.
    """
    calls = max(1, -(-engine.trains // engine.bucket))
    size = engine.trains * engine.width / calls
    if engine.stage == 0:
        yield Exchange(REDUCTIONS, role, ALL_REDUCE, calls, size)
        return
    each_pass = engine.stage == 2 or (engine.stage == 3 and not engine.kept.gradients)
    yield Exchange(REDUCTIONS, role, REDUCE_SCATTER, calls * (passes if each_pass else 1), size)
    if engine.stage < 3:
        yield Exchange(GATHERS, role, ALL_GATHER, 1, engine.trains * engine.width)
    elif not engine.lent:
        yield from _through_partitions(GATHERS, role, engine, 1 if engine.kept.weights else 2 * passes)


def _together(exchanges: list[Exchange]) -> list[Exchange]:
    """Calls of the same kind and size as one entry."""
    counted: dict[tuple[str, str, str, float], int] = {}
    for one in exchanges:
        key = one.what, one.role, one.kind, one.size
        counted[key] = counted.get(key, 0) + one.calls
    return [Exchange(what, role, kind, calls, size) for (what, role, kind, size), calls in counted.items()]
