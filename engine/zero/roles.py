"""Several models that learn in one engine. Each has its own parameters; they make their optimizer steps together."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine import distributed
from engine.trace import traced
from engine.zero.engines import Copies, HostedRole, LearningModel, TrainedModel
from engine.zero.shards import Master, Shard, TrainingState, scaled_gradients


class SharedModel(TrainedModel):
    """An engine in which several models learn. Each parameter group of its optimizer belongs to one model.

        shared = SharedModel(trunk, ds_config, optimizer, {"actor": 1.0, "critic": 1.0})
        critic, actor = shared.roles["critic"], shared.roles["actor"]
        critic.backward(value_loss, last=False)
        actor.backward(policy_loss, last=True)
        shared.step_roles({"critic": 2e-5, "actor": 1e-5})

    The gradients of each model are clipped by their own norm, as in an engine of its own; so `ds_config` must have no
    clipping. If a step does not name a model, the model's weights and moments stay as they are, bit by bit.

    Args:
        module: `module.as_role(role)` is the Policy or Scorer of a role.
        optimizer: each of its parameter groups has a "role".
        max_grad_norms: {role: the norm that gradients are clipped to}; 0 for no clipping.
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
        self._norms: dict[str, float] | None = None  # gradient norms; None until they are computed in a step
        # All parameters of a group are of one role, so all parameters of a master are too.
        self._owned = [owners[master.parameters[0]] for master in self._by_stage.masters()]
        self.roles = {role: TrainedRole(self, role) for role in max_grad_norms}

    def masters_of(self, role: str) -> list[Master]:
        """This rank's masters of the parameters that the role trains."""
        return [master for master, owner in zip(self._by_stage.masters(), self._owned, strict=True) if owner == role]

    def gradient_norms(self) -> dict[str, float]:
        """{role: norm of its gradient after the last backward pass, without the loss scale}; infinite or NaN if a
        gradient is on any rank. All ranks call this together and get the same result."""
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
        """Make one optimizer step for the roles in `lrs`, {role: learning rate}; returns whether weights changed.

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
    """One of the models that learn in a SharedModel. It has the interface of a TrainedModel."""

    host: SharedModel

    def __init__(self, host: SharedModel, role: str):
        super().__init__(host, role)
        self.grad_norm = 0.0  # of the latest step, before clipping
        self.state = _RoleState(self.module, _RoleMasters(host, role))

    @property
    def version(self) -> int:
        """The host's version, which increases when the weights of any role change."""
        return self.host.version

    @property
    def copies(self) -> Copies | None:
        """The host's copies."""
        return self.host.copies

    @property
    def scales_loss(self) -> bool:
        """Whether there is a loss scale (fp16); overflows are then normal."""
        return self.host.scales_loss

    @property
    def loss_scale(self) -> float:
        """The fp16 loss scale, one for all roles; 1 in other dtypes."""
        return self.host.loss_scale

    @traced("{0.role} backward")
    def backward(self, loss: Tensor, last: bool) -> None:
        """As `TrainedModel.backward`. last: whether this is the last pass of all roles before the step."""
        self.host.backward(loss, last)

    def overflowed(self) -> bool:
        """Whether a gradient of this role is infinite or NaN on any rank, after the last backward pass."""
        return not self.host.gradient_norms()[self.role] < float("inf")

    def step(self, lr: float, overflow: bool = False, skip: bool = False) -> bool:
        """As `TrainedModel.step`, for this role only."""
        return self.host.step_roles({self.role: lr}, overflow, skip)


class _RoleMasters:
    """The part of a SharedModel's stage that one role trains."""

    def __init__(self, host: SharedModel, role: str):
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
    """The training state of one role. Weights that it does not train belong to another role, or are unchanged from
    their files."""

    def _frozen(self) -> tuple[list[Shard], list[Shard]]:
        return [], []
