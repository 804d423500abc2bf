"""The memory plan of the run that is to begin, on machines like this."""

from engine.errors import UserError
from engine.memory.memory_plan import MemoryPlan
from training.flags.rlhf_arguments import RLHFFlags
from training.flags.supervised_arguments import SupervisedFlags
from training.program.memory_lines import planned_model, setting_here


def planned(args: RLHFFlags | SupervisedFlags) -> MemoryPlan:
    """The plan; raises UserError where a model's configuration cannot be read."""
    if isinstance(args, RLHFFlags):
        return setting_here(args, args.resolved_dialect()[0]).planned()
    return planned_model(args)


def planned_or_why(args: RLHFFlags | SupervisedFlags) -> MemoryPlan | str:
    """The plan, or why there is none."""
    try:
        return planned(args)
    except UserError as error:
        return str(error)


def written(plan: MemoryPlan) -> int:
    """Bytes of the trained models, and of one restart point: float32 weights and Adam's two moments."""
    trained = [engine.model for engine in plan.engines.values() if engine.model.trains]
    return sum(model.numbers * model.width + 12 * model.trains for model in trained)
