"""What this process computes on, how many share its machine, and whether torch can compute on the GPUs that are there:
with stand-ins for torch's answers and for nvidia-smi.
"""

import re
from pathlib import Path

import pytest
import torch

from engine.errors import SharedError, UserError
from engine.zero.accelerator import on_gpu, ranks_of_this_machine
from engine.zero.gpu_support import has_code, main, usable_gpus
from training.runtime.environment import check_gpus

ROOT = Path(__file__).resolve().parents[3]
CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
CUDA_12_6 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
V100, A100, H100 = ("Tesla V100-SXM2-32GB", (7, 0)), ("NVIDIA A100-SXM4-80GB", (8, 0)), ("NVIDIA H100", (9, 0))
NEWEST = ("a GPU of next year", (13, 0))


@pytest.mark.parametrize(
    "capability, architectures, runs",
    [
        ((7, 0), CUDA_13, False),
        ((7, 0), CUDA_12_6, True),
        ((8, 9), ["sm_80"], True),  # the same major version, a higher minor one
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_90a"], True),
        ((10, 3), ["sm_100a"], False),
        ((12, 1), ["compute_120"], True),
        ((13, 0), ["sm_90", "compute_120"], True),  # PTX
        ((7, 0), ["compute_80"], False),
        ((13, 0), ["compute_90a"], False),
        ((12, 0), ["gfx942"], False),
    ],
)
def test_which_gpus_a_build_runs_on(capability, architectures, runs):
    assert has_code(capability, architectures) is runs


@pytest.fixture
def machine(monkeypatch):
    """A stand-in for torch on a machine with these GPUs; `launched`: by how many ranks, this one the LOCAL_RANK."""
    for name in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def make(gpus, architectures=CUDA_13, cuda: str | None = "13.0", broken: str | None = None) -> None:
        def of(index: int) -> tuple:
            if broken is not None:
                raise RuntimeError(broken)
            return gpus[index]

        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch, "__version__", "2.13.0")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: of(index)[0])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: of(index)[1])
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: architectures)

    return make


@pytest.fixture
def smi(monkeypatch, tmp_path):
    """A stand-in for nvidia-smi, alone on the PATH, that answers so; without an answer it is not there."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(answer: str, code: int = 0, known: str = "name,compute_cap") -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(
            f'#!/bin/sh\n[ "$1" = --query-gpu={known} ] || {{ echo no valid field; exit 2; }}\n'
            f'echo "{answer}"\nexit {code}\n'
        )
        program.chmod(0o755)

    return make


def refusal() -> str:
    with pytest.raises(UserError) as refused:
        usable_gpus()
    return str(refused.value)


def build_for_cuda_12() -> str:
    """The command for GPUs and drivers that PyPI's build does not serve. pip counts PyPI's 2.13.0 as torch==2.13.0 and
    would leave it; 2.13.0+cu126 it does not, and constraints.txt admits both (PEP 440, local versions)."""
    (pinned,) = re.findall(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return f"pip install {pinned}+cu126 --index-url https://download.pytorch.org/whl/cu126"


def test_gpus_that_the_build_has_code_for_are_counted(machine):
    machine([A100, H100])
    assert usable_gpus() == 2
    machine([V100], CUDA_12_6, "12.6")
    assert usable_gpus() == 1


def test_a_v100_without_code_for_it_is_refused_with_what_serves_it(machine):
    machine([A100, V100])
    said = refusal()
    assert said.startswith(
        "GPU 1 (Tesla V100-SXM2-32GB) has compute capability 7.0, for which torch 2.13.0 (CUDA 13.0) has no code: it "
        "has sm_75, sm_80,"
    )
    for part in (build_for_cuda_12(), "TORCH_INDEX=https://download.pytorch.org/whl/cu126", "=cpu"):
        assert part in said


def test_a_gpu_that_is_newer_than_the_build_wants_a_newer_one(machine):
    machine([NEWEST], CUDA_12_6, "12.6")
    said = refusal()
    assert "13.0" in said and "newer torch" in said and "V100" not in said


def test_a_driver_that_is_too_old_is_told_in_one_line(machine):
    """As on a rented H100 with driver 535."""
    machine([H100], broken="The NVIDIA driver on your system is too old (found version 12020).\nPlease update")
    said = refusal()
    assert "GPU 0 is there" in said and "too old (found version 12020)" in said and "Please" not in said
    assert build_for_cuda_12() in said


def test_ranks_look_at_the_gpus_that_they_take(machine, monkeypatch):
    """A display's old GPU behind the one that the only rank takes is left alone."""
    machine([A100, V100])
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert usable_gpus() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert "GPU 1" in refusal()


def test_the_first_rank_of_a_host_tells_it(machine, monkeypatch):
    machine([V100, V100])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for local_rank, told in (("0", True), ("1", False)):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        with pytest.raises(UserError) as refused:
            check_gpus()
        assert isinstance(refused.value, SharedError) is not told


@pytest.mark.parametrize(
    "cuda, visible, part",
    [
        (None, None, "torch 2.13.0 is built without CUDA"),
        ("13.0", None, "is the driver too old for this CUDA?"),
        ("13.0", "7", "sees none of them with CUDA_VISIBLE_DEVICES=7"),
    ],
)
def test_gpus_that_torch_does_not_see_are_refused(machine, smi, monkeypatch, cuda, visible, part):
    machine([], cuda=cuda)
    smi("Tesla V100-SXM2-32GB, 7.0\nTesla V100-SXM2-32GB, 7.0")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    said = refusal()
    assert said.startswith("nvidia-smi lists Tesla V100-SXM2-32GB 7.0, but") and part in said


def test_a_driver_that_knows_no_capabilities_is_told_too(machine, smi):
    """As those before 510, which are the ones that are too old for today's CUDA."""
    machine([])
    smi("Tesla V100-SXM2-32GB\nTesla V100-SXM2-32GB", known="name")
    assert refusal().startswith("nvidia-smi lists Tesla V100-SXM2-32GB, but torch 2.13.0 (CUDA 13.0) sees none of them")


def test_no_gpus_or_hidden_ones_are_none(machine, smi, monkeypatch):
    machine([])
    assert usable_gpus() == 0  # no nvidia-smi
    smi("NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.", code=9)
    assert usable_gpus() == 0
    smi("")
    assert usable_gpus() == 0
    smi("Tesla V100-SXM2-32GB, 7.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert usable_gpus() == 0
    machine([V100])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert usable_gpus() == 0


def test_the_program_prints_the_number_or_the_message(machine, capsys):
    machine([A100, H100])
    assert main() == 0 and capsys.readouterr().out == "2\n"
    machine([V100])
    assert main() == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: GPU 0 (Tesla V100-SXM2-32GB) has")


@pytest.mark.parametrize(
    "environment, ranks",
    [
        ({}, 1),
        ({"WORLD_SIZE": "8"}, 8),
        ({"WORLD_SIZE": "16", "LOCAL_SIZE": "8"}, 8),  # the deepspeed launcher's
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "4"}, 4),  # torchrun's
    ],
)
def test_the_ranks_that_share_a_machine_are_the_launchers(environment, ranks, monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert ranks_of_this_machine() == ranks


def test_a_run_on_cpus_is_none_on_a_gpu_though_the_machine_has_one(monkeypatch):
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(get_accelerator(), "device_name", lambda: "cpu")
    assert not on_gpu()
    monkeypatch.setattr(get_accelerator(), "device_name", lambda: "cuda")
    assert on_gpu()
