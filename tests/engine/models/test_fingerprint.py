"""A model's fingerprint changes with its weights and its configuration, and with nothing else."""

import itertools
import shutil
from pathlib import Path

import huggingface_hub
import pytest

from engine.models.checking import BLOCK, BLOCKS, block_starts, fingerprint
from scripts.harness import model_damages as damages
from scripts.harness.models import make_causal_lm

FLAG = "--actor_model_name_or_path"


def flip(path: Path, place: int) -> None:
    """Change one byte."""
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))


def test_it_is_of_the_contents(tmp_path):
    folder = make_causal_lm(tmp_path / "a")
    known = fingerprint(folder, FLAG)
    shutil.copytree(folder, tmp_path / "moved")
    assert fingerprint(str(tmp_path / "moved"), FLAG) == known
    damages.edit_config(folder, transformers_version="4.0", _name_or_path="elsewhere")
    (Path(folder) / "notes.txt").write_text("not looked at")
    assert fingerprint(folder, FLAG) == known
    damages.edit_config(folder, rms_norm_eps=1e-3)
    assert fingerprint(folder, FLAG) != known
    assert fingerprint(make_causal_lm(tmp_path / "b", seed=1), FLAG) != known
    pickled = damages.as_pickle(tmp_path / "moved")
    before = fingerprint(str(tmp_path / "moved"), FLAG)
    flip(pickled, pickled.stat().st_size // 2)
    assert fingerprint(str(tmp_path / "moved"), FLAG) not in (before, known)


@pytest.mark.parametrize("share", [0.0, 0.4, 0.999])
def test_every_shard_counts(tmp_path, share):
    index = damages.in_shards(make_causal_lm(tmp_path))
    known = fingerprint(str(tmp_path), FLAG)
    shard = max(index.parent.glob("*.safetensors"))
    flip(shard, int(shard.stat().st_size * share))
    assert fingerprint(str(tmp_path), FLAG) != known


def test_blocks_are_all_of_a_small_file_and_evenly_spaced_in_a_large_one():
    assert block_starts(0) == [] and block_starts(BLOCK + 1) == [0, BLOCK]
    all_of_it = block_starts(BLOCK * BLOCKS)
    assert all_of_it == [BLOCK * number for number in range(BLOCKS)]
    size = 5_000_000_000
    starts = block_starts(size)
    assert len(starts) == BLOCKS and starts[0] == 0 and starts[-1] + BLOCK == size
    steps = {after - before for before, after in itertools.pairwise(starts)}
    assert max(steps) - min(steps) <= 1 and 79e6 < min(steps) < 80e6  # 63 steps in 5 GB


def test_of_a_name_on_the_hub_it_is_the_commit(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "abc123"
    make_causal_lm(snapshot)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda path, name: str(snapshot / name))
    assert fingerprint("owner/name", FLAG) == "commit abc123"
    (snapshot / "model.safetensors").unlink()
    assert fingerprint("owner/name", FLAG) is None
