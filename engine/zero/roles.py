"""Several models that learn within one engine, each with its own parameters, and make their optimizer steps
together."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine import distributed
from engine.trace import traced
from engine.zero.engines import Copies, HostedRole, LearningModel, TrainedModel
from engine.zero.shards import Master, Shard, TrainingState, scaled_gradients


class SharedModel(TrainedModel):
    """A module within which several models learn: one engine, and one optimizer whose groups are the models'.

        shared = SharedModel(trunk, ds_config, optimizer, {"actor": 1.0, "critic": 1.0})
        critic, actor = shared.roles["critic"], shared.roles["actor"]
        critic.backward(value_loss, last=False)
        actor.backward(policy_loss, last=True)
        shared.step_roles({"critic": 2e-5, "actor": 1e-5})

    A model's gradients are clipped by their own norm, as if it had an engine of its own; `ds_config` therefore has no
    clipping. A model that is not named in a step keeps its weights and moments, bit by bit.

    Args:
        module: `module.as_role(role)` is the Policy or Scorer that it is in a role.
        optimizer: each of its groups has a "role".
        max_grad_norms: by role; 0 for no clipping.
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
        self._norms: dict[str, float] | None = None  # since the last step
        # A group's parameters are of one role, and so are a master's.
        self._owned = [owners[master.parameters[0]] for master in self._by_stage.masters()]
        self.roles = {role: TrainedRole(self, role) for role in max_grad_norms}

    def masters_of(self, role: str) -> list[Master]:
        """This rank's masters of what the role trains."""
        return [master for master, owner in zip(self._by_stage.masters(), self._owned, strict=True) if owner == role]

    def gradient_norms(self) -> dict[str, float]:
        """By role, the norm of its gradient after the last backward, without the loss scale; infinite or NaN where a
        gradient is, on any rank. All ranks call this together, and get the same."""
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
        """Whether a gradient is infinite or NaN on any rank, after the last backward."""
        return any(role.overflowed() for role in self.roles.values())

    def step_roles(self, lrs: Mapping[str, float], overflow: bool = False, skip: bool = False) -> bool:
        """Apply one optimizer step to these roles, each at its learning rate; returns whether weights changed.

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
        """What the role's gradient is multiplied by, as `torch.nn.utils.clip_grad_norm_` has it."""
        limit = self.max_grad_norms[role]
        return min(1.0, limit / (norm + 1e-6)) if limit else 1.0


class TrainedRole(HostedRole, LearningModel):
    """One of the models that learn within a SharedModel. It is called and asked like a TrainedModel."""

    host: SharedModel

    def __init__(self, host: SharedModel, role: str):
        super().__init__(host, role)
        self.grad_norm = 0.0  # of the latest step, before clipping
        self.state = _RoleState(self.module, _RoleMasters(host, role))

    @property
    def version(self) -> int:
        """The host's, which goes up when the weights of any role change."""
        return self.host.version

    @property
    def copies(self) -> Copies | None:
        """The host's plain copies."""
        return self.host.copies

    @property
    def scales_loss(self) -> bool:
        """Whether gradients that overflow are a matter of course (fp16)."""
        return self.host.scales_loss

    @property
    def loss_scale(self) -> float:
        """The fp16 loss scale, one for all roles; 1 in other dtypes."""
        return self.host.loss_scale

    @traced("{0.role} backward")
    def backward(self, loss: Tensor, last: bool) -> None:
        """As `TrainedModel.backward`; last: of the passes of all roles before the step."""
        self.host.backward(loss, last)

    def overflowed(self) -> bool:
        """Whether a gradient of this role's is infinite or NaN on any rank, after the last backward."""
        return not self.host.gradient_norms()[self.role] < float("inf")

    def step(self, lr: float, overflow: bool = False, skip: bool = False) -> bool:
        """A step of this role alone; as in `TrainedModel`."""
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
