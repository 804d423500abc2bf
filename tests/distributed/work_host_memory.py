"""Host memory of all ranks together while a model is loaded, and while it is saved."""

import gc
import os
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine import distributed
from engine.host_memory import freed_memory_given_back
from engine.models.loading import load_policy
from engine.models.reading import read_tokenizer
from engine.rlhf_engine import EngineSpec, frozen_model
from engine.zero.communication import init
from engine.zero.config import EngineConfig
from scripts.harness.models import BOS, EOS, PAD, save_random
from tests.host_memory import HostMemory
from training.runtime import model_folders


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
    _settle()
    with HostMemory(pids) as loading:
        model = frozen_model(load_policy, path, choice, spec)
        distributed.barrier()
    _settle()
    with HostMemory(pids) as saving:
        model_folders.save(model, tokenizer, Path(output), "model")
        distributed.barrier()
    return {
        "loading": loading.peak - loading.before,
        "at_rest": saving.before - loading.before,
        "saving": saving.peak - saving.before,
    }


def _settle() -> None:
    """Count nothing twice that is free already."""
    gc.collect()
    with freed_memory_given_back():
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
