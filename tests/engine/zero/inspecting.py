"""What engines hold, for tests: full weights, float32 masters, Adam's moments, gradients, what stands partitioned."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from torch import Tensor, nn
from torch import distributed as dist

from engine.zero.engines import FrozenModel, TrainedModel


def pretend_cpus_have_fp16() -> None:
    """DeepSpeed refuses fp16 on CPUs without AVX512-FP16, where it is slow but right."""
    get_accelerator().is_fp16_supported = lambda: True


def weights(model: TrainedModel | FrozenModel) -> dict[str, Tensor]:
    """Copies of the module's full weights, in its own dtype, by Hugging Face's names (all ranks call this)."""
    named = dict(model.module.model.named_parameters())
    away = [p for p in named.values() if getattr(p, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE]
    with deepspeed.zero.GatheredParameters(away, enabled=bool(away)):
        return {name: parameter.detach().clone() for name, parameter in named.items()}


def masters(model: TrainedModel) -> dict[str, Tensor]:
    """Copies of the full float32 weights that the optimizer updates (all ranks call this)."""
    named = _trained(model)
    if model.stage > 0:
        return {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in named}
    return {name: _master(model, parameter).detach().clone() for name, parameter in named}


def moments(model: TrainedModel, moment: str = "exp_avg") -> dict[str, Tensor]:
    """Copies of Adam's full first or second ("exp_avg_sq") moments (all ranks call this)."""
    named = _trained(model)
    if model.stage in (1, 2):  # DeepSpeed links them when the first group has been stepped, and the others have none
        model.ds_engine.optimizer._lazy_init_hp_params_optimizer_state()
    if model.stage > 0:
        return {name: safe_get_full_optimizer_state(parameter, moment).clone() for name, parameter in named}
    state = model.ds_engine.optimizer.state
    return {name: state[_master(model, parameter)][moment].clone() for name, parameter in named}


def _trained(model: TrainedModel) -> list[tuple[str, Tensor]]:
    if model.stage in (1, 2):
        _link(model.ds_engine.optimizer)
    return [(name, parameter) for name, parameter in model.module.model.named_parameters() if parameter.requires_grad]


def _link(zero) -> None:
    """Have DeepSpeed look up anew where masters lie. Only where parameters are padded does it look at their order,
    which `round_robin_gradients` changes; else it answers with other parameters' numbers."""
    padding = zero.round_robin_bit16_padding
    zero.round_robin_bit16_padding = [[1] * len(group) for group in padding]
    zero._link_all_hp_params()
    zero.round_robin_bit16_padding = padding
    zero._hp_optimizer_states_linked = False


def _master(model: TrainedModel, parameter: Tensor) -> Tensor:
    """At stage 0: the float32 copy that the optimizer holds of a parameter, or the parameter itself."""
    optimizer = model.ds_engine.optimizer
    halves = [p for group in getattr(optimizer, "fp16_groups", []) for p in group]
    masters = [p for group in getattr(optimizer, "fp32_groups", []) for p in group]
    return next((master for half, master in zip(halves, masters, strict=True) if half is parameter), parameter)


def gradients(model: TrainedModel) -> dict[str, Tensor]:
    """Copies of what trains: its full gradients between the last backward and the step (all ranks call this)."""

    def read(parameter):
        return parameter.grad if model.stage == 0 else safe_get_full_grad(parameter)

    named = model.module.model.named_parameters()
    return {name: read(parameter).detach().clone() for name, parameter in named if parameter.requires_grad}


def partitioned(model: TrainedModel | FrozenModel) -> list[tuple[str, bool, int, int]]:
    """(name, whether it stands partitioned, elements here, elements in all) of each parameter; stage 3 only."""
    return [
        (
            name,
            parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE and parameter.numel() == 0,
            parameter.ds_tensor.numel(),
            parameter.ds_numel,
        )
        for name, parameter in model.module.named_parameters()
        if hasattr(parameter, "ds_id")
    ]


def parameter_bytes(model: TrainedModel | FrozenModel) -> int:
    """Of this rank's parameters: its shards where they are partitioned."""
    return sum(getattr(p, "ds_tensor", p).numel() * p.element_size() for p in model.module.parameters())


def partition_away(parameter: Tensor) -> None:
    """Leave a parameter as ZeRO-3 does between uses: without its numbers, and with its full shape beside it."""
    parameter.ds_shape = parameter.shape
    parameter.data = parameter.data.new_empty(0)


def hpz_groups(module: nn.Module) -> set[int | None]:
    """How many ranks share a second copy of the module's weights (hpZ); None for weights that have none."""
    groups = {parameter.ds_zero_param_process_group for parameter in module.parameters()}
    return {None if group is None else dist.get_world_size(group) for group in groups}


def second_copies(module: nn.Module) -> int:
    """Of how many parameters this rank holds its share of a second copy."""
    return sum(parameter.ds_secondary_tensor is not None for parameter in module.parameters())


@contextlib.contextmanager
def counted_gathers() -> Iterator[list]:
    """Within this context the list, which is given, grows by an entry each time that DeepSpeed gathers weights."""
    gathers: list = []
    backend = deepspeed.comm.comm.cdb
    gather = backend.all_gather_function

    def counted(*args, **kwargs):
        gathers.append(None)
        return gather(*args, **kwargs)

    with mock.patch.object(backend, "all_gather_function", counted):
        yield gathers
