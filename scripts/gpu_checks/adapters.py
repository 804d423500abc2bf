"""LoRA: adapters that train at stages 0 and 3, and one trunk for all four models."""

from pathlib import Path
from types import SimpleNamespace

import torch

from engine.models.loading import new_scorer
from engine.models.lora import LoraSpec, adapt
from engine.models.reading import read_tokenizer
from scripts.gpu_checks.decoding import sixteen_bits
from scripts.gpu_checks.models import new_trainer, random_models
from scripts.gpu_checks.steps import give_back, steps
from scripts.gpu_checks.trial import Trial
from training.program import model_folders

LORA = LoraSpec(dim=8, alpha=16.0, lr=1e-3, only=True)


def learn(trial: Trial) -> None:
    """Steps with adapters of actor and critic, whose frozen partners they are, too, then with one trunk for all."""
    actor, _ = random_models(trial, "34m")
    judge = reward_adapter(actor, trial.folder)
    for stage in (0,) if trial.dry else (0, 3):
        for name, engines, spec in (("shared", 2, {}), ("one trunk", 1, {"share_trunk": True, "critic_path": judge})):
            with trial.part(f"{name}, stage {stage}"):
                trainer = new_trainer(
                    trial, size="34m", stage=stage, dtype=sixteen_bits(trial), actor_lora=LORA, critic_lora=LORA, **spec
                )
                found = len(trainer.models.engines)
                trial.expect(found == engines, f"{name}: {found} engines, not {engines}")
                steps(trial, f"{name}, stage {stage}", trainer)
            trainer = None
            give_back()


def reward_adapter(base: str, folder: Path) -> str:
    """Save a reward model that is an adapter, with a head, of the language model at `base`; returns its folder."""
    scorer = new_scorer(base, torch.float32, 0, seed=1)
    scorer.model.config.score_offset = 0.0
    adapt(scorer, LORA, "reward")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, b in scorer.adapters.factors().values():
            b.copy_(0.01 * torch.randn(b.shape, generator=generator))
    model_folders.save_forms(
        SimpleNamespace(module=scorer), read_tokenizer(base, "actor"), folder, "judge", merged=False
    )
    return str(folder / model_folders.adapter_name("judge"))
