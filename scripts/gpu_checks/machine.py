"""The GPUs that are here, and what their data sheets promise."""

import shutil

import torch
from torch.utils.cpp_extension import CUDA_HOME

from engine.gpus import data_sheet
from scripts.gpu_checks.check import Trial
from training.reporting.run_record import versions

COPIED = 1 << 30  # bytes


def device() -> torch.device:
    """The GPU, or the CPU in a dry run."""
    from engine.zero import accelerator

    return accelerator.device()


def look(trial: Trial) -> None:
    """Versions, the GPUs, and whether the first one computes and copies as its data sheet says."""
    trial.tell({name: version or "-" for name, version in versions().items() if name in _TOLD})
    trial.tell({"C++ compiler": shutil.which("c++") or "none", "CUDA_HOME": CUDA_HOME or "none"})
    if not trial.needs_gpu("the GPU's name, its memory and what it copies a second"):
        return
    free, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    trial.tell(
        {
            "GPUs": torch.cuda.device_count(),
            "name": name,
            "memory, GB": round(total / 1e9, 1),
            "free, GB": round(free / 1e9, 1),
            "CUDA": torch.version.cuda or "-",
            "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
        }
    )
    sheet, rate = data_sheet(name), _copied_a_second()
    trial.tell({"copies, GB/s read and written": round(rate / 1e9)})
    if sheet:
        trial.tell({"share of the data sheet's bandwidth": round(rate / sheet.bandwidth, 2)})
        trial.expect(rate > 0.5 * sheet.bandwidth, f"it copies {rate / 1e9:.0f} GB/s: is another program using it?")
    product = torch.full((64, 64), 0.5, device="cuda") @ torch.full((64, 64), 2.0, device="cuda")
    trial.expect(bool((product == 64.0).all()), "its matrix products are wrong")


_TOLD = ("python", "torch", "transformers", "deepspeed", "peft", "vllm")


def _copied_a_second() -> float:
    source = torch.zeros(COPIED, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target.copy_(source)
    begin.record()
    for _ in range(10):
        target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    return 10 * 2 * COPIED / (begin.elapsed_time(end) / 1e3)
