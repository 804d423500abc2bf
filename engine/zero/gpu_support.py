"""Checks whether torch can compute on this machine's GPUs. A build of torch has machine code for some GPU architectures
only.

python -m engine.zero.gpu_support     prints how many GPUs torch can use; exit code 2 and a message where some are
                                      there that it cannot use
"""

import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence

import torch

from engine.errors import UserError
from engine.zero.accelerator import ranks_of_this_machine

OLDER = (
    "Take torch built for CUDA 12.6, which runs on V100 and with drivers from 525 on: pip install torch==2.13.0+cu126 "
    "--index-url https://download.pytorch.org/whl/cu126; for the scripts that make an environment: export "
    "TORCH_INDEX=https://download.pytorch.org/whl/cu126 (docs/gpus.md)."
)
NEWER = "Take a build of torch for a newer CUDA, or a newer torch (docs/gpus.md)."
ON_CPU = "To compute on the CPU, and leave the GPUs alone: DS_ACCELERATOR=cpu."
TURING = (7, 5)  # the oldest architecture that CUDA 13 compiles for


def has_code(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Whether a build of torch runs on a GPU of this compute capability.

    Machine code (sm_80) runs on GPUs with the same major version and the same or a higher minor version. Machine code
    for one kind of GPU (sm_90a) runs on GPUs of that kind only. The driver compiles PTX (compute_90) for any GPU with
    the same or a higher compute capability. Source: CUDA C++ Programming Guide, "Binary Compatibility", "PTX
    Compatibility".

    architectures: the result of `torch.cuda.get_arch_list`.
    """
    return any(_runs(capability, architecture) for architecture in architectures)


def _runs(capability: tuple[int, int], architecture: str) -> bool:
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", architecture)
    if found is None:
        return False
    kind, major, minor, suffix = found.groups()
    built = int(major), int(minor)
    if suffix == "a":
        return capability == built
    same_major = capability[0] == built[0] and capability >= built
    return same_major or (kind == "compute" and not suffix and capability >= built)


def usable_gpus() -> int:
    """The number of GPUs that torch sees and can use; 0 if the machine has no GPU, or if DS_ACCELERATOR chooses CPUs.

    The GPUs of this machine's ranks are checked. If no launcher has started ranks, all GPUs are checked.
    Raises: UserError for a GPU that torch cannot use.
    """
    if os.environ.get("DS_ACCELERATOR", "cuda") != "cuda":
        return 0
    seen = torch.cuda.device_count()
    if seen == 0:
        _refuse_unseen()
    if torch.version.cuda is not None:  # AMD's GPUs are not checked
        for device in range(min(seen, ranks_of_this_machine()) if "LOCAL_RANK" in os.environ else seen):
            _refuse_without_code(device)
    return seen


def _refuse_without_code(device: int) -> None:
    build = f"torch {torch.__version__} (CUDA {torch.version.cuda})"
    try:
        capability, name = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
    except RuntimeError as error:  # for example if the driver is older than CUDA
        reason = str(error).splitlines()[0]
        raise UserError(f"GPU {device} is there, and {build} cannot use it: {reason} {OLDER} {ON_CPU}") from None
    architectures = torch.cuda.get_arch_list()
    if architectures and not has_code(capability, architectures):
        raise UserError(
            f"GPU {device} ({name}) has compute capability {capability[0]}.{capability[1]}, for which {build} has no "
            f"code: it has {', '.join(architectures)}. {OLDER if capability < TURING else NEWER} {ON_CPU}"
        )


def _refuse_unseen() -> None:
    """To be called if torch sees no GPU. Raises: UserError if the driver lists GPUs that no environment variable
    hides."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return
    listed = _listed_gpus()
    if not listed:
        return
    build = f"torch {torch.__version__}"
    if torch.version.cuda is None:
        why = f"{build} is built without CUDA. Install one that is built for it (docs/gpus.md)."
    elif visible is not None:
        why = f"{build} sees none of them with CUDA_VISIBLE_DEVICES={visible}. Name some that are there, or unset it."
    else:
        why = f"{build} (CUDA {torch.version.cuda}) sees none of them: is the driver too old for this CUDA? {OLDER}"
    raise UserError(f"nvidia-smi lists {', '.join(listed)}, but {why} {ON_CPU}")


def _listed_gpus() -> list[str]:
    """The names of the GPUs that the driver lists, with their compute capabilities; empty without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    for asked in ("name,compute_cap", "name"):  # drivers before 510 do not know compute capabilities: exit code 2
        words = [program, f"--query-gpu={asked}", "--format=csv,noheader"]
        try:
            answer = subprocess.run(words, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            return []
        if not answer.returncode:
            names = dict.fromkeys(" ".join(line.replace(",", " ").split()) for line in answer.stdout.splitlines())
            return [name for name in names if name]
    return []


def main() -> int:
    """Run the command line; returns the exit code."""
    warnings.simplefilter("ignore")  # torch warns about such GPUs at length; the message is enough
    try:
        print(usable_gpus())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
