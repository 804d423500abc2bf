"""Host memory of all ranks together while a model is loaded, and while it is saved."""

import gc
import os
from pathlib import Path

from engine import distributed
from engine.models.loading import load_policy
from engine.models.reading import read_tokenizer
from engine.rlhf_engine import EngineSpec, frozen_model
from engine.zero.communication import init
from engine.zero.config import EngineConfig
from tests.host_memory import HostMemory
from training.program import model_folders


def loaded_and_saved(path: str, warm: str, output: str, stage: int) -> dict[str, int]:
    """Bytes beyond what there was before: the peak while the model at `path` is loaded, what is at rest with it, and
    the peak while it is saved to a folder of `output`; of both on rank 0.

    warm: a tiny model that is loaded and saved first, so that code and buffers that come once are not counted.
    """
    init()
    spec, choice = EngineSpec(actor_path="", critic_path=""), EngineConfig("reference", stage)
    pids = distributed.all_gather_objects(os.getpid())
    tiny = frozen_model(load_policy, warm, choice, spec)
    model_folders.save(tiny, read_tokenizer(warm, "model"), Path(output), "warm")

    with _measured(pids) as loading:
        model = frozen_model(load_policy, path, choice, spec)
        distributed.barrier()
    with _measured(pids) as saving:
        model_folders.save(model, read_tokenizer(warm, "model"), Path(output), "actor")
        distributed.barrier()
    return {
        "loading": loading.peak - loading.before,
        "at_rest": loading.after - loading.before,
        "saving": saving.peak - saving.before,
    }


def _measured(pids: list[int]) -> HostMemory:
    gc.collect()
    distributed.barrier()
    return HostMemory(pids if distributed.is_main() else [])
