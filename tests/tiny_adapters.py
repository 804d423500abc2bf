"""Adapter folders for the models of tests/tiny_models.py, with updates that are not nothing."""

from pathlib import Path
from types import SimpleNamespace

import torch

from engine.models.loading import load_policy, new_scorer
from engine.models.lora import LoraSpec, adapt
from tests.tiny_models import PAD, make_tokenizer
from training.program import model_folders


@torch.no_grad()
def make_adapter(folder: Path | str, base: str, *, scorer: bool = False, dim: int = 4, seed: int = 1, **lora) -> str:
    """Save an adapter of a model's folder, of a reward model with its head and an offset if `scorer`; returns it.

    lora: further fields of LoraSpec.
    """
    module = new_scorer(base, torch.float32, PAD, seed) if scorer else load_policy(base, torch.float32)
    if scorer:
        module.model.config.score_offset = -0.3
    adapt(module, LoraSpec(dim=dim, alpha=6.0, only=True, seed=seed, **lora), "made")
    generator = torch.Generator().manual_seed(seed)
    for _, b in module.adapters.factors().values():
        b.copy_(0.1 * torch.randn(b.shape, generator=generator))
    folder = Path(folder)
    model_folders.save_forms(SimpleNamespace(module=module), make_tokenizer(), folder.parent, folder.name, merged=False)
    return str(folder.with_name(model_folders.adapter_name(folder.name)))
