"""What no weight file holds, rotary frequencies say, is the same in a partitioned model as in a whole one."""

import json

import pytest
import torch

from engine.models.loading import DTYPES, load_policy, load_scorer
from engine.zero.config import CONFIG_DIR
from scripts.harness.models import make_family
from scripts.harness.ranks import run_ranks


def both(folders: list[str], dtype: str) -> dict[str, dict[str, tuple[dict, dict]]]:
    """By folder and kind of model: its buffers by name, partitioned and not."""
    stage3 = json.loads((CONFIG_DIR / "zero3.json").read_text()) | {dtype: {"enabled": True}}
    stage3 |= {"train_micro_batch_size_per_gpu": 1}
    found: dict[str, dict[str, tuple[dict, dict]]] = {}
    for folder in folders:
        found[folder] = {}
        for name, load in (("actor", load_policy), ("reward", load_scorer)):
            path = f"{folder}/{name}"
            models = [load(path, DTYPES[dtype], config) for config in (stage3, None)]
            found[folder][name] = tuple(dict(model.named_buffers()) for model in models)
    return found


FAMILIES = ("llama", "gemma3_text", "gptj")  # frequencies, scales, tables of positions


@pytest.fixture(scope="module", params=["bf16", "fp16"])
def buffers(request, tmp_path_factory) -> dict:
    """By family and kind of model: its buffers by name, partitioned and not."""
    folders = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, folder in folders.items():
        make_family(family, folder)
    paths = {str(folder): family for family, folder in folders.items()}
    found, *_ = run_ranks("tests.distributed.test_buffers:both", world=1, folders=list(paths), dtype=request.param)
    return {paths[path]: kinds for path, kinds in found.items()}


def test_buffers_are_those_of_the_whole_model(buffers):
    differ = {}
    for family, kinds in buffers.items():
        for kind, (partitioned, whole) in kinds.items():
            assert partitioned.keys() == whole.keys()
            for name, buffer in whole.items():
                other = partitioned[name]
                if other.dtype != buffer.dtype or not torch.equal(other, buffer):
                    differ[family, kind, name] = (other.dtype, buffer.dtype)
    assert differ == {}


def test_rotary_frequencies_are_float32(buffers):
    partitioned, _ = buffers["llama"]["actor"]
    (frequencies,) = [buffer for name, buffer in partitioned.items() if name.endswith("rotary_emb.inv_freq")]
    powers = torch.arange(0, 8, 2, dtype=torch.float64) / 8  # 8 numbers a head
    assert frequencies.dtype == torch.float32
    assert torch.allclose(frequencies.double(), 10000.0**-powers, rtol=1e-6)
