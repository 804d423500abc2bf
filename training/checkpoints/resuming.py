"""Resumes runs: finds the checkpoint, verifies that it is whole, and restores its models, on any number of ranks and at
any ZeRO stage. For exports it also provides the adapter in the checkpoint of a LoRA run, and the model with this
adapter merged in.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine import distributed
from engine.atomic_files import file_order, remove_folder
from engine.errors import SharedError, UserError
from engine.files import misfit, parsed_json, without_links
from engine.lazy import Lazy
from engine.models.adapter_folders import CLASSIFIER, HEAD, PREFIX, AdapterFolder, read_adapter
from engine.models.adapters import is_factor, merged, update
from engine.models.checking import check_base
from engine.models.loading import load_policy, load_scorer, new_scorer
from engine.models.model_paths import is_adapter
from engine.models.reward_formats import is_deepspeed_chat_scorer
from engine.models.saving import BASE
from engine.reference import EMA
from engine.zero.engines import TrainedModel
from training.checkpoints.conditions import BEFORE, FIRST, UNLOGGED, Conditions
from training.checkpoints.files import (
    AUTO,
    CONFIG,
    REFERENCE,
    STATE_FILE,
    ShardFiles,
    checkpoints_in,
    damages,
    holds_checkpoint,
    set_aside,
    step_of,
    unfinished_in,
)
from training.checkpoints.files import EMA as EMA_FOLDER
from training.runtime.ranks import checked

NUMBER, ABSENT = int | float, type(None)
STATE = {
    "steps_done": int,
    "models": {str: {"adam_steps": int, "loss_scale": {str: NUMBER}}},
    "ema": bool,
    "settings": dict,
    "contents": {str: ([str | None], str | None)},
    UNLOGGED: (ABSENT, {str: NUMBER | None}),
    BEFORE: (ABSENT, {str: [NUMBER]}),
    FIRST: (ABSENT, [str]),
}
"""The kind of a checkpoint's state in all three steps; see `misfit`."""
OF_STEP_3 = {
    **dict.fromkeys(("optimizer_steps", "samples", "prompt_batches"), int),
    "kl": dict,
    "score_scale": {"totals": [NUMBER, NUMBER, NUMBER]},
    "likelihood_scale": (ABSENT, {"totals": [NUMBER, NUMBER, NUMBER]}),
    "reward": (ABSENT, {"standardised": [{"totals": (ABSENT, [NUMBER, NUMBER, NUMBER])}]}),
}
SHOWN = 3  # number of damaged files that a message names


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was found and verified at the start of a run.

    folder: .../checkpoints/step_N. state: the content of its trainer_state.json (training/checkpoints/conditions.py).
    in_output_dir: whether the checkpoint lies in this run's --output_dir; if so, the metrics there are continued.
    passed_over: a line for each newer checkpoint that is damaged, and therefore was not used.
    """

    folder: Path
    state: dict
    in_output_dir: bool = False
    passed_over: tuple[str, ...] = ()

    @classmethod
    def find(cls, path: str | None, output_dir: str, with_ema: bool = False) -> "Checkpoint | None":
        """The checkpoint that --resume names; None if the run starts anew (all ranks call this).

        All files of a checkpoint are hashed before it is chosen. If `path` is a run's output folder and its newest
        checkpoint is damaged, the checkpoint before it is tried.

        Args:
            path: the value of --resume: a checkpoint's folder; the output folder of a run; or "auto" for the newest
                checkpoint in `output_dir`, if there is one. None if the flag is not given.
            output_dir: the folder into which the resumed run writes.
            with_ema: whether the resumed run keeps a moving average.

        Raises: UserError on all ranks if there is no checkpoint at `path`, if the named checkpoint or all checkpoints
            of the run are damaged, or if the checkpoint has a moving average and the resumed run keeps none.
        """
        if path is None:
            return None
        by_name, folders = checked(lambda: _candidates(path, output_dir))
        passed_over: list[str] = []
        for folder in folders:
            found = damages(folder)
            if not found:
                state = checked(partial(_read, folder / STATE_FILE, with_ema))
                in_output_dir = without_links(folder).parent.parent == without_links(output_dir)
                return cls(folder, state, in_output_dir, tuple(passed_over))
            more = f", and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            passed_over.append(f"the checkpoint {folder} is damaged: {', '.join(found[:SHOWN])}{more}")
            if by_name:
                raise SharedError(
                    f"--resume: {passed_over[0]}. Give the run's output folder, whose newest whole one is then taken."
                )
        if path == AUTO and not passed_over:
            return None
        raise SharedError(f"--resume {path}: {'; '.join(passed_over)}. There is no other one: begin anew.")

    @property
    def steps_done(self) -> int:
        """How many steps had been trained when the checkpoint was written."""
        return self.state["steps_done"]

    def lines(self) -> list[str]:
        """The lines that the run prints about the checkpoint from which it resumes."""
        return [
            *(f"PASSED OVER: {line}" for line in self.passed_over),
            f"goes on from {self.folder}, after step {self.steps_done}",
        ]

    def check(self, conditions: Conditions, last_step: int) -> None:
        """Raise UserError if a run with these conditions, which ends at `last_step`, cannot resume from this
        checkpoint."""
        conditions.check(Conditions.read(self.state), self.folder)
        if self.steps_done > last_step:
            raise UserError(
                f"--resume {self.folder}: it stands at step {self.steps_done}, behind the run's last "
                f"step {last_step}. Raise --max_steps or --num_train_epochs."
            )


def _candidates(path: str, output_dir: str) -> tuple[bool, list[Path]]:
    """(whether `path` is itself a checkpoint's folder; the folders of the checkpoints to try, the first one first)."""
    if path == AUTO:
        return False, checkpoints_in(Path(output_dir))[::-1]
    folder = Path(path)
    if folder.is_dir() and (step_of(folder) is not None or holds_checkpoint(folder)):
        return True, [folder]
    points = checkpoints_in(folder)[::-1]
    if not points:
        raise UserError(
            f"--resume {path}: no checkpoint there. Give a folder .../checkpoints/step_N, or the output folder of a "
            "run that wrote some (--save_steps)."
        )
    return False, points


def _read(path: Path, with_ema: bool) -> dict:
    """The content of the state file of a whole checkpoint."""
    try:
        state = parsed_json(path.read_text(encoding="utf-8"))
        if not (fault := misfit(state, STATE, "state")):
            kl = state["settings"].get("kl_controller")
            adaptive = {"kl": {"value": NUMBER}} if kl == "adaptive" else {}
            fault = misfit(state, {**OF_STEP_3, **adaptive} if kl is not None else {}, "state")
        if fault:
            raise ValueError(fault)
    except (ValueError, OSError) as error:
        raise UserError(f"--resume: {path} is broken ({error}). Use an earlier checkpoint.") from None
    if state["ema"] and not with_ema:
        raise UserError(
            f"--resume {path.parent}: it has a moving average, which would be lost. Give --enable_ema, as when the "
            "run began."
        )
    return state


def set_aside_newer(output_dir: Path, step: int) -> None:
    """Rename the checkpoints after `step` to step_N.abandoned (rank 0 does). A run that resumes from an older
    checkpoint repeats the later steps. The next --resume must not find their old checkpoints.

    Checkpoints that were half written or half deleted when the run was killed are removed.
    """
    if distributed.is_main():
        for folder in unfinished_in(output_dir):
            with contextlib.suppress(OSError):
                remove_folder(folder)
        for checkpoint in checkpoints_in(output_dir):
            if (step_of(checkpoint) or 0) > step:
                set_aside(checkpoint)
    distributed.barrier()


def restore(
    checkpoint: Checkpoint, models: Mapping[str, TrainedModel], ema: EMA | None = None, reference: EMA | None = None
) -> list[str]:
    """Load a checkpoint into the models, the moving average and a reference that is refreshed (all ranks call this).

    If the run keeps a moving average and the checkpoint has none, the average begins with the checkpoint's weights, and
    lines that say so are returned. Raises: UserError if the checkpoint holds other models.
    """
    for name, model in models.items():
        if name not in checkpoint.state["models"]:
            raise UserError(f"--resume {checkpoint.folder}: it has no {name}. Use an earlier checkpoint.")
        model.load_shards(ShardFiles(Path(checkpoint.folder) / name), checkpoint.state["models"][name])
    if reference is not None:
        reference.load_shards(ShardFiles(checkpoint.folder / REFERENCE))
    if ema is None:
        return []
    if checkpoint.state["ema"]:
        ema.load_shards(ShardFiles(checkpoint.folder / EMA_FOLDER))
        return []
    for mean, weights in zip(ema.means, ema.actor.master_shards(), strict=True):
        mean.copy_(weights)
    return ["changed since the checkpoint: --enable_ema; the average begins with the weights of the checkpoint"]


OF_MODELS = ("config.json", "generation_config.json")  # files of a whole model that an adapter's folder lacks


class Tensors(dict[str, Tensor]):
    """Tensors by name, in the order in which they are written to a file. Some of them are `Lazy`."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        order = sorted(tensors, key=lambda name: file_order(name, tensors[name].dtype))
        super().__init__({name: tensors[name] for name in order})

    def shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of one tensor."""
        return tuple(self[name].shape), self[name].dtype

    def only(self, names: Sequence[str]) -> "Tensors":
        """The tensors with these names."""
        return Tensors({name: self[name] for name in names})


class CheckpointAdapter:
    """One of a checkpoint's models, which was trained with LoRA.

    Args:
        model: the model's name, which is also the name of its adapter.
        tensors: the model's tensors in the checkpoint, by their names in the adapted model.
        base: the folder of the frozen weights; None for the folder that the run used.

    Raises: UserError if the model has no adapter.
    """

    def __init__(self, checkpoint: Checkpoint, model: str, tensors, base: str | None = None):
        self.checkpoint = checkpoint
        self.model = model
        self.tensors = tensors
        folder = str(checkpoint.folder / CONFIG / model)
        if not is_adapter(folder):
            raise UserError(f"{checkpoint.folder} has no adapter of the {model}. Leave --adapter out.")
        self.base, self.config = base, folder

    def adapter(self) -> Tensors:
        """{name in peft: weight} of the adapter. Raises: UserError if weights outside the adapter were trained too."""
        found = {}
        for name in self.tensors:
            if is_factor(name):
                found[f"{PREFIX}{name.removesuffix(f'.{self.model}.weight')}.weight"] = self.tensors[name]
            elif name.startswith(f"{HEAD}."):
                found[f"{PREFIX}{name}"] = self.tensors[name]
            elif self.tensors.is_trained(name):
                raise UserError(
                    f"{self.checkpoint.folder}: beside the factors {name} and others train, for which an adapter has "
                    "no place. Leave --adapter out."
                )
        return Tensors(found)

    def merged(self) -> Tensors:
        """The weights of the model with its adapter merged in; each matrix is merged when it is asked for.

        Raises: UserError if the base (the model with which the run began) is missing, or if its weights have changed
        since.
        """
        adapter = self._folder()
        model = self._base(adapter)
        found = _weights(model)
        for name in self.tensors:
            if not is_factor(name):
                found[name.replace(BASE, ".")] = self.tensors[name]
        for name in self.tensors:
            layer, is_a, _ = name.partition(".lora_A.")
            if is_a:  # also for a head that shares the embedding's matrix, which has one name only
                found[f"{layer}.weight"] = self._merged(adapter, layer, model.get_submodule(layer))
        return Tensors(found)

    def _merged(self, adapter: AdapterFolder, layer: str, part: Any) -> Tensor:
        weight = part.weight.detach()

        def fill(target: Tensor) -> None:
            a, b = (self.tensors[f"{layer}.lora_{factor}.{self.model}.weight"] for factor in "AB")
            change = update(a, b, adapter.scaling(layer, a.shape[0]), transposed=isinstance(part, Conv1D))
            target.copy_(merged(weight, change))

        return Lazy.of(tuple(weight.shape), weight.dtype, fill)

    def _folder(self) -> AdapterFolder:
        try:
            found = read_adapter(self.config, str(self.checkpoint.folder), self.base)
        except UserError as error:
            raise UserError(f"{error} Or say with --base where it stands now.") from None
        assert found is not None
        check_base(found)
        return found

    def _base(self, adapter: AdapterFolder) -> PreTrainedModel:
        """The model with which the run began."""
        what = str(self.checkpoint.folder)
        load: Any = load_policy
        if is_deepspeed_chat_scorer(adapter.base, what):
            load = load_scorer
        elif adapter.config.task_type == CLASSIFIER:
            load = partial(new_scorer, pad_token_id=None, seed=None)
        return load(adapter.base, self.tensors.dtype, what=what).model


def _weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """{name: weight} of the weights that are saved with a model. A tied weight is listed under one name only."""
    saved = model.state_dict().keys()
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in named if name in saved}
