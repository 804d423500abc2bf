"""The device that this process computes on, its memory and its dtypes, as reported by DeepSpeed's accelerator."""

import os
import time

import psutil
import torch


def device() -> torch.device:
    """The device that this rank computes on."""
    from deepspeed.accelerator import get_accelerator

    return torch.device(get_accelerator().current_device_name())


def on_gpu() -> bool:
    """Whether this run computes on CUDA GPUs. With DS_ACCELERATOR=cpu it does not, even if there are GPUs."""
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().device_name() == "cuda"


def now() -> float:
    """Seconds of wall-clock time, when this rank's GPU has done all that it was given."""
    if on_gpu():
        torch.cuda.synchronize()
    return time.perf_counter()


def capability() -> tuple[int, int] | None:
    """The compute capability of this rank's NVIDIA GPU, such as (7, 0) for a V100; None without an NVIDIA GPU."""
    return torch.cuda.get_device_capability() if on_gpu() and torch.version.cuda is not None else None


def ranks_of_this_machine() -> int:
    """The number of ranks on this machine, from the environment variables of the launcher (deepspeed, torchrun); 1
    without a launcher."""
    names = ("LOCAL_SIZE", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    return next((int(os.environ[name]) for name in names if name in os.environ), 1)


def free_memory() -> int:
    """The number of free bytes of this rank's GPU; on CPUs, this rank's share of the host's free bytes."""
    if on_gpu():
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return psutil.virtual_memory().available // ranks_of_this_machine()


def natural_dtype() -> str:
    """The default dtype on this machine: "bf16" on GPUs that support it, "fp16" on other GPUs, "fp32" on CPUs."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return "fp32"
    if on_gpu():
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return "bf16" if accelerator.is_bf16_supported() else "fp16"


def why_not(dtype: str) -> str | None:
    """The reason why this machine cannot train in this dtype ("fp16" or "bf16"), and what to use instead; None if it
    can."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if dtype == "fp16" and not accelerator.is_fp16_supported():
        return f"this machine's {accelerator.device_name()} has no fp16 training in DeepSpeed. Use fp32, or bf16."
    if dtype == "bf16" and not accelerator.is_bf16_supported():
        return f"this machine's {accelerator.device_name()} has no bf16. Use fp16 or fp32."
    if dtype == "bf16" and on_gpu() and not torch.cuda.is_bf16_supported(including_emulation=False):
        return f"{torch.cuda.get_device_name()} only emulates bf16, slowly. Use fp16 or fp32."
    return None
