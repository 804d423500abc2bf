"""Weights & Biases, for those who want it: it takes over what is written for TensorBoard, names included.

check_wandb(project)                       # before any work
run = start_wandb(project, name, folder)   # before the SummaryWriter is made, which W&B then listens to
"""

import importlib.util
from pathlib import Path

from engine.errors import UserError


def check_wandb(project: str | None, *, tensorboard: bool = True) -> None:
    """Raise UserError where a project is given and W&B cannot be used: not installed, or TensorBoard switched off."""
    if project is None:
        return
    if not project.strip():
        raise UserError(f"--wandb_project {project!r}: give the project a name.")
    spec = importlib.util.find_spec("wandb")
    if spec is None or spec.origin is None:  # without an origin it is no package, but the folder that W&B writes into
        raise UserError(
            f"--wandb_project {project}: the package wandb is not installed. pip install wandb, or leave the flag out."
        )
    if not tensorboard:
        raise UserError(
            f"--wandb_project {project}: W&B takes over what is written for TensorBoard, which is switched "
            "off. Switch it on, or leave the flag out."
        )


def start_wandb(project: str, name: str, folder: Path):
    """The W&B run that TensorBoard's curves go to from now on; its own files go to `folder`. For the main rank only."""
    import wandb

    return wandb.init(project=project, name=name, dir=str(folder), sync_tensorboard=True)
