"""Host memory of several ranks together: a model is in it once while it is loaded and saved."""

import gc
import os
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine import distributed
from engine.host_memory import releasing_freed_memory
from engine.models.config_and_tokenizer import read_tokenizer
from engine.models.loading import load_policy
from engine.rlhf_engine import EngineSpec, frozen_model
from engine.zero.communication import init
from engine.zero.config import EngineConfig
from scripts.harness.models import BOS, EOS, PAD, save_random
from scripts.harness.ranks import run_ranks
from training.runtime import model_folders

_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ ")  # the line of /proc/PID/smaps that a mapping begins with


class HostMemory:
    """Bytes of host memory of some processes together (PSS: a page that n of them have mapped counts 1/n for each, so
    that one of a file which all read counts once): `before`, the `peak` of samples within this context, and `after`.

    A page of a file that is mapped counts from when it is first read until it is unmapped; the system's own cache of
    files does not count. Nor do libraries: their pages are shared with whatever else runs on the machine, so that a
    share of them grows when a process ends that has nothing to do with these.
    """

    def __init__(self, pids: Sequence[int], interval: float = 0.01):
        self.pids, self.interval = pids, interval
        self.before = self.peak = self.after = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "HostMemory":
        self.before = self.peak = self.now()
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._done.set()
        self._thread.join()
        self.after = self.now()

    def now(self) -> int:
        """Bytes at this moment."""
        return sum(_pss(pid) for pid in self.pids)

    def _sample(self) -> None:
        while not self._done.is_set():
            self.peak = max(self.peak, self.now())
            time.sleep(self.interval)


def _pss(pid: int) -> int:
    kilobytes, counts = 0, True
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if line.startswith("Pss:"):
            kilobytes += int(line.split()[1]) * counts
        elif _MAPPING.match(line):
            counts = ".so" not in line
    assert kilobytes, "the system does not count"
    return kilobytes * 1024


def loaded_and_saved(path: str, warm: str, output: str, stage: int, settings: str | None = None) -> dict[str, int]:
    """Bytes, of both ranks on the first: the peak while the model at `path` is loaded, beyond what there was before;
    what it takes at rest; and the peak while it is saved to a folder of `output`, beyond that.

    warm: a tiny model that is loaded and saved first, so that code and buffers that come once are not counted.
    settings: DeepSpeed's, if not those that come with the project.
    """
    init()
    spec, choice = EngineSpec(actor_path="", critic_path=""), EngineConfig("reference", stage, path=settings)
    pids = distributed.all_gather_objects(os.getpid())
    pids = pids if distributed.is_main() else []
    tokenizer = read_tokenizer(warm, "model")
    tiny = frozen_model(load_policy, warm, choice, spec)
    model_folders.save(tiny, tokenizer, Path(output), "warm")
    peaks, model = [], None
    for _ in range(3):  # others' processes that end have shared pages count more here: the least is the load's own
        model = None
        _settle()
        with HostMemory(pids) as loading:
            model = frozen_model(load_policy, path, choice, spec)
            distributed.barrier()
        peaks.append(loading.peak - loading.before)
    _settle()
    with HostMemory(pids) as saving:
        model_folders.save(model, tokenizer, Path(output), "model")
        distributed.barrier()
    return {
        "loading": min(peaks),
        "at_rest": saving.before - loading.before,
        "saving": saving.peak - saving.before,
    }


def _settle() -> None:
    """Count nothing twice that is free already."""
    gc.collect()
    with releasing_freed_memory():
        pass
    distributed.barrier()


def make_llama(folder: Path | str, width: int, layers: int, words: int, pickled: bool = False) -> int:
    """Save a Llama with random weights, by torch.save if `pickled`, and a tokenizer of fewer words; returns the bytes
    of its weights."""
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        max_position_embeddings=128,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    model = LlamaForCausalLM(config)
    save_random(model, folder)
    if pickled:
        (Path(folder) / "model.safetensors").unlink()
        torch.save(model.state_dict(), Path(folder) / "pytorch_model.bin")
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


SLACK = 24e6  # pieces of files that are read, and what the libraries take for themselves


def test_a_model_is_in_host_memory_once_while_it_is_loaded_and_saved(tmp_path, folder):
    make_llama(tmp_path / "warm", width=16, layers=1, words=64)
    size = make_llama(tmp_path / "source", width=448, layers=12, words=64)
    given = {"path": str(tmp_path / "source"), "warm": str(tmp_path / "warm"), "output": str(tmp_path / "out")}
    given |= {"stage": 3, "settings": f"{folder}/stage3.json"}
    found = run_ranks("tests.distributed.test_host_memory:loaded_and_saved", **given)[0]
    assert 153e6 < size < 156e6 and abs(found["at_rest"] - size) < SLACK, (size, found)
    assert found["loading"] < 1.3 * size + SLACK, (size, found)  # all of it, its place for good included
    assert found["saving"] < 0.3 * size + SLACK, (size, found)
    for path in (tmp_path / "source").glob("*.safetensors"):
        assert (tmp_path / "out" / "model" / path.name).read_bytes() == path.read_bytes()
