"""Several models that learn in one engine. Each model has its own parameters; all of them make their optimizer steps
together."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine import distributed
from engine.trace import traced
from engine.zero.engines import HostedRole, LearningModel, TrainedModel
from engine.zero.training_state import Master, Shard, TrainingState, scaled_gradients


class SharedEngine(TrainedModel):
    """An engine in which several models learn. Each parameter group of its optimizer belongs to one model.

        shared = SharedEngine(trunk, ds_config, optimizer, {"actor": 1.0, "critic": 1.0})
        critic, actor = shared.roles["critic"], shared.roles["actor"]
        critic.backward(value_loss, last=False)
        actor.backward(policy_loss, last=True)
        shared.step_roles({"critic": 2e-5, "actor": 1e-5})

    Each model's gradients are clipped by their own norm, as in an engine of its own; `ds_config` must therefore have no
    clipping. The weights and moments of a model that a step does not name stay as they are, bit by bit.

    Args:
        module: a module for which `module.as_role(role)` is the Policy or Scorer of a role.
        optimizer: an optimizer in which each parameter group has a "role".
        max_grad_norms: {role: the norm to which the gradients are clipped}; 0 for no clipping.
    """

    def __init__(
        self,
        module: nn.Module,
        ds_config: dict,
        optimizer: torch.optim.Optimizer,
        max_grad_norms: Mapping[str, float],
    ):
        assert not ds_config["gradient_clipping"], "DeepSpeed would clip by the norm over all models"
        owners = {parameter: group["role"] for group in optimizer.param_groups for parameter in group["params"]}
        super().__init__(module, ds_config, optimizer, "trunk")
        self.max_grad_norms = dict(max_grad_norms)
        self._norms: dict[str, float] | None = None  # gradient norms; None until this step has computed them
        # All parameters of a group belong to one role, so all parameters of a master belong to one role too.
        self._owned = [owners[master.parameters[0]] for master in self._by_stage.masters()]
        self.roles = {role: TrainedRole(self, role) for role in max_grad_norms}

    def masters_of(self, role: str) -> list[Master]:
        """The masters on this rank whose parameters the role trains."""
        return [master for master, owner in zip(self._by_stage.masters(), self._owned, strict=True) if owner == role]

    def gradient_norms(self) -> dict[str, float]:
        """{role: norm of the role's gradient after the last backward pass, without the loss scale}. The norm is
        infinite or NaN if a gradient of the role is infinite or NaN on any rank. All ranks call this together and get
        the same result."""
        if self._norms is None:
            squares = dict.fromkeys(self.roles, torch.zeros((), dtype=torch.float64, device=distributed.device()))
            for owner, gradients in zip(self._owned, self._by_stage.gradients(), strict=True):
                for gradient in gradients:
                    squares[owner] = squares[owner] + gradient.float().norm().double().to(squares[owner].device) ** 2
            sums = torch.stack(list(squares.values()))
            if not self._by_stage.replicated:
                sums = distributed.all_reduce_sum(sums)
            self._norms = dict(zip(self.roles, (sums.sqrt() / self.loss_scale).tolist(), strict=True))
        return self._norms

    def overflowed(self) -> bool:
        """Whether any role's gradient is infinite or NaN on any rank, after the last backward pass."""
        return any(role.overflowed() for role in self.roles.values())

    def step_roles(self, lrs: Mapping[str, float], overflow: bool = False, skip: bool = False) -> bool:
        """Make one optimizer step for the roles in `lrs`; returns whether weights changed. lrs: {role: learning rate}.

        overflow, skip: as in `step`.
        """
        norms, factors = self.gradient_norms(), {}
        for group in self.ds_engine.optimizer.param_groups:
            group["lr"] = lrs.get(group["role"], 0.0) * group.get("lr_ratio", 1.0)
        for master, owner in zip(self._by_stage.masters(), self._owned, strict=True):
            factors[id(master.tensor)] = self._clip_factor(owner, norms[owner]) if owner in lrs else None
        with scaled_gradients(self._by_stage.masters()[0].adam, factors):
            stepped = self._step(overflow, skip)
        self._by_stage.forget_gradients()
        self._norms = None
        for role in lrs if stepped else ():
            self.roles[role].grad_norm = norms[role]
        return stepped

    def _clip_factor(self, role: str, norm: float) -> float:
        """The factor that clips the role's gradient, as in `torch.nn.utils.clip_grad_norm_`."""
        limit = self.max_grad_norms[role]
        return min(1.0, limit / (norm + 1e-6)) if limit else 1.0


class TrainedRole(HostedRole, LearningModel):
    """One of the models that learn in a SharedEngine. It has the interface of a TrainedModel."""

    host: SharedEngine

    def __init__(self, host: SharedEngine, role: str):
        super().__init__(host, role)
        self.grad_norm = 0.0  # gradient norm of the latest step, before clipping
        self.state = _RoleState(self.module, _RoleMasters(host, role))

    @property
    def version(self) -> int:
        """The host's version, which increases when the weights of any role change."""
        return self.host.version

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled (fp16). With a loss scale overflows are normal."""
        return self.host.scales_loss

    @property
    def loss_scale(self) -> float:
        """The fp16 loss scale, which all roles share; 1 in other dtypes."""
        return self.host.loss_scale

    @traced("{0.role} backward")
    def backward(self, loss: Tensor, last: bool) -> None:
        """As `TrainedModel.backward`. last: whether this is the last backward pass of any role before the optimizer
        step."""
        self.host.backward(loss, last)

    def overflowed(self) -> bool:
        """Whether a gradient of this role is infinite or NaN on any rank, after the last backward pass."""
        return not self.host.gradient_norms()[self.role] < float("inf")

    def step(self, lr: float, overflow: bool = False, skip: bool = False) -> bool:
        """As `TrainedModel.step`, for this role only."""
        return self.host.step_roles({self.role: lr}, overflow, skip)


class _RoleMasters:
    """The part of a SharedEngine's stage that one role trains."""

    def __init__(self, host: SharedEngine, role: str):
        self.host, self.role = host, role

    @property
    def replicated(self) -> bool:
        return self.host._by_stage.replicated

    def masters(self) -> list[Master]:
        return self.host.masters_of(self.role)

    def loss_scaler(self) -> Any:
        return self.host._by_stage.loss_scaler()

    def refresh_from_masters(self) -> None:
        self.host._by_stage.refresh_from_masters()


class _RoleState(TrainingState):
    """The training state of one role. Weights that this role does not train are not part of the state: they belong to
    another role, or are still as in their files."""

    def _frozen(self) -> tuple[list[Shard], list[Shard]]:
        return [], []
