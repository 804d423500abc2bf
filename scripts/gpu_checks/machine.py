"""The GPUs that are here, and what their data sheets promise."""

import re
from dataclasses import dataclass

import torch

from engine.memory.table import gb
from scripts.gpu_checks.trial import Trial
from training.reporting.run_record import versions

COPIED = 1 << 30  # bytes


@dataclass(frozen=True, slots=True)
class DataSheet:
    """flops: a second, of dense matrices in 16 bits. bandwidth: bytes of memory a second."""

    flops: float
    bandwidth: float


# By words of what torch.cuda.get_device_name says; the first whose words are all in it counts. NVIDIA's data sheets,
# "NVIDIA H200 Tensor Core GPU" and alike, which state twice the dense rate ("with sparsity") for Hopper.
DATA_SHEETS = {
    ("H200", "NVL"): DataSheet(835e12, 4800e9),
    ("H200",): DataSheet(989e12, 4800e9),
    ("H100", "NVL"): DataSheet(835e12, 3900e9),
    ("H100", "PCIE"): DataSheet(756e12, 2000e9),
    ("H100",): DataSheet(989e12, 3350e9),  # SXM
    ("A100", "80GB", "PCIE"): DataSheet(312e12, 1935e9),
    ("A100", "80GB"): DataSheet(312e12, 2039e9),  # SXM
    ("A100",): DataSheet(312e12, 1555e9),  # 40 GB
    ("V100", "PCIE"): DataSheet(112e12, 900e9),
    ("V100",): DataSheet(125e12, 900e9),  # SXM2
}


def data_sheet(name: str) -> DataSheet | None:
    """What the GPU promises that torch calls so; None for one that is not listed."""
    found = set(re.split(r"[\s-]+", name.upper()))
    return next((sheet for words, sheet in DATA_SHEETS.items() if found.issuperset(words)), None)


def device() -> torch.device:
    """The GPU, or the CPU in a dry run."""
    from engine.zero import accelerator

    return accelerator.device()


def look(trial: Trial) -> None:
    """Versions, the GPUs, and whether the first one computes and copies as its data sheet says."""
    trial.figures |= {name: version or "-" for name, version in versions().items() if name in _TOLD}
    if not trial.needs_gpu("the GPU's name, its memory and what it copies a second"):
        return
    free, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    trial.figures |= {
        "GPUs": torch.cuda.device_count(),
        "name": name,
        "memory, GB": gb(total),
        "free, GB": gb(free),
        "CUDA": torch.version.cuda or "-",
        "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
    }
    sheet, rate = data_sheet(name), _copied_a_second()
    trial.figures["copies, GB/s read and written"] = round(rate / 1e9)
    if sheet:
        trial.figures["share of the data sheet's bandwidth"] = round(rate / sheet.bandwidth, 2)
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
