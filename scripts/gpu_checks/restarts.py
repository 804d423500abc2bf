"""A checkpoint, the run that goes on from it, and the average of the actor's weights."""

from pathlib import Path

import torch
from safetensors import safe_open

from scripts.gpu_checks.check import Trial
from scripts.gpu_checks.models import TINY, metrics_of, program, random_models, write_prompts

STEPS, SAVED = 4, 2


def resumed(trial: Trial) -> None:
    """Four steps at stage 3 with --enable_ema, and the last two again from the checkpoint: the same end, and an
    average between the start and the end."""
    size = TINY if trial.dry else "34m"
    actor, critic = random_models(trial, size)
    flags = {
        "actor_model_name_or_path": actor,
        "critic_model_name_or_path": critic,
        "data_path": write_prompts(trial.folder / "prompts.jsonl", 64, 8, vocabulary=500),
        "data_output_path": trial.folder / "cache",
        "max_prompt_seq_len": 16,
        "max_answer_seq_len": 8 if trial.dry else 32,
        "per_device_generation_batch_size": 4 if trial.dry else 16,
        "per_device_training_batch_size": 4,
        "num_eval_prompts": 0,
        "max_steps": STEPS,
        "ppo_epochs": 1,
        "actor_learning_rate": 1e-3,
        "critic_learning_rate": 1e-3,
        "num_warmup_steps": 0,
        "max_kl": 1e9,
        "actor_zero_stage": 3,
        "critic_zero_stage": 2,
        "dtype": "fp32",
        "enable_ema": True,
        "ema_decay": 0.5,
        "save_steps": SAVED,
    }
    whole, later = trial.folder / "whole", trial.folder / "later"
    program(3, **flags, output_dir=whole)
    program(3, **flags, output_dir=later, resume=whole / "checkpoints" / f"step_{SAVED:06d}")
    first, second = metrics_of(trial, whole), metrics_of(trial, later)
    trial.expect(sorted(second) == list(range(SAVED + 1, STEPS + 1)), f"the second run made steps {sorted(second)}")
    entropies = [run[SAVED + 1]["objective/entropy"] for run in (first, second)]
    trial.tell({"entropy after the checkpoint": round(entropies[0], 5)})
    trial.expect(abs(entropies[1] / entropies[0] - 1) < 1e-3, f"after the restart the entropy is {entropies[1]:.6g}")
    begin, end, again, average = (
        weights(folder) for folder in (Path(actor), whole / "actor", later / "actor", whole / "actor_ema")
    )
    moved, apart, behind = ((end - other).norm().item() for other in (begin, again, average))
    trial.tell(
        {
            "moved": round(moved, 4),
            "apart after the restart, of that": round(apart / moved, 4),
            "average behind by, of that": round(behind / moved, 4),
        }
    )
    trial.expect(apart < 0.2 * moved, f"the two ends are {apart / moved:.2f} of the way apart")
    trial.expect(0.02 * moved < behind < 0.98 * moved, f"the average is behind by {behind / moved:.3f} of the way")


def weights(folder: Path) -> torch.Tensor:
    """All numbers of a model's folder as one float32 vector, in the order of their names."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name).float().flatten() for name in file.keys()}
    return torch.cat([found[name] for name in sorted(found)])
