"""Tensors read from weight files by pieces are those that the libraries read."""

from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from engine.lazy import Lazy
from engine.models.weight_files import tensors_of

TENSORS = {
    "matrix": torch.randn(7, 5),
    "half": torch.randn(3, 4, 2).half(),
    "bfloat": torch.randn(33).bfloat16(),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "double": torch.randn(4).double(),
}


@pytest.fixture(params=["safetensors", "bin"])
def file(request, tmp_path):
    path = tmp_path / f"model.{request.param}"
    if request.param == "bin":
        torch.save(TENSORS, path)
    else:
        save_file(TENSORS, path)
    return path


@pytest.mark.parametrize("piece", [16, 1 << 24])
def test_they_are_the_files(file, piece):
    with mock.patch("engine.models.weight_files.PIECE", piece):
        found = tensors_of(file)
        assert found.keys() == TENSORS.keys()
        for name, expected in TENSORS.items():
            assert (found[name].shape, found[name].dtype) == (expected.shape, expected.dtype)
            assert torch.equal(found[name].whole(), expected)
            target = torch.zeros(expected.shape, dtype=torch.float64)
            assert torch.equal(target.copy_(found[name]), expected.double())


def test_what_is_computed_with_them_is_plain(file):
    found = tensors_of(file)
    stacked = torch.stack([found["matrix"], found["matrix"] * 2])
    assert type(stacked) is torch.Tensor and torch.equal(stacked[1], TENSORS["matrix"] * 2)
    transposed = torch.zeros(5, 7).t().copy_(found["matrix"])  # not contiguous
    assert torch.equal(transposed, TENSORS["matrix"])
    assert torch.zeros(2, 7, 5).copy_(found["matrix"])[1].equal(TENSORS["matrix"])  # broadcast


def test_what_only_hands_them_on_reads_nothing():
    def fill(target):
        raise AssertionError("read")

    lazy = Lazy.of((3, 4), torch.float16, fill)
    assert (len(lazy), lazy.dim(), lazy.numel(), lazy.element_size(), lazy.nbytes) == (3, 2, 12, 2, 24)
    assert lazy.detach().contiguous() is lazy and lazy.is_floating_point() and lazy.device.type == "meta"


def test_what_has_no_place_of_its_own_is_left_to_torch(tmp_path):
    matrix = torch.randn(3, 5)
    torch.save({"turned": matrix.t(), "part": matrix[1:], "whole": torch.arange(3)}, tmp_path / "a.bin")
    found = tensors_of(tmp_path / "a.bin")
    assert list(found) == ["part"] and torch.equal(found["part"].whole(), matrix[1:])
    torch.save({"matrix": matrix}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    assert tensors_of(tmp_path / "old.bin") == {}


def test_a_file_that_has_become_shorter_is_told(file):
    found = tensors_of(file)
    file.write_bytes(b"")
    with pytest.raises(OSError, match="ends within a tensor"):
        found["matrix"].whole()
