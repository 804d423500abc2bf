"""All GPUs of this machine together: step 3 by DeepSpeed's launcher."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from scripts.gpu_checks.check import ROOT, Trial
from scripts.gpu_checks.decoding import sixteen_bits
from scripts.gpu_checks.models import metrics_of, random_models, words_of, write_prompts
from scripts.harness import free_port

STEPS = 3


def side_by_side(trial: Trial) -> None:
    """Steps at stages 3 and 1 over all GPUs, by NCCL (two CPUs, by gloo), and with copies that ranks hold together:
    they end with one entropy."""
    count = 2 if trial.dry else torch.cuda.device_count()
    trial.needs_gpu("NCCL")
    trial.tell({"ranks": count})
    entropies = {}
    ways: dict[str, dict[str, object]] = {f"stage {stage}": stages_of(stage) for stage in (3, 1)}
    if count % 2 == 0:
        together = {"rollout_backend": "replica", "inference_tp_size": 2}
        ways["copies that two ranks hold together"] = stages_of(3) | together
    for name, flags in ways.items():
        with trial.part(name):
            last = launched(trial, count, trial.folder / name.replace(" ", "_"), flags)
            entropies[name] = round(last["objective/entropy"], 4)
            trial.tell({f"{name}, s": round(sum(last[f"time/{phase}"] for phase in PHASES), 3)})
    trial.tell({f"{name}, entropy": entropy for name, entropy in entropies.items()})
    apart = max(entropies.values(), default=1) / min(entropies.values(), default=1)
    trial.expect(apart < 1.02, f"the last steps' entropies are {entropies}")


def stages_of(stage: int) -> dict[str, object]:
    """The flags of one stage for both models."""
    return {"actor_zero_stage": stage, "critic_zero_stage": stage}


PHASES = ("generate", "make_experience", "train")


def launched(trial: Trial, ranks: int, output: Path, further: dict[str, object]) -> dict[str, float]:
    """The last step's metrics of a run by the launcher, with these further flags."""
    actor, critic = random_models(trial, "350m")
    length = 8 if trial.dry else 128
    flags = {
        "actor_model_name_or_path": actor,
        "critic_model_name_or_path": critic,
        "data_path": write_prompts(trial.folder / "prompts.jsonl", 64 * ranks, length, vocabulary=500),
        "data_output_path": trial.folder / "cache",
        "output_dir": output,
        "max_prompt_seq_len": length,
        "max_answer_seq_len": length,
        "per_device_generation_batch_size": 4 if trial.dry else 16,
        "per_device_training_batch_size": 4 if trial.dry else 8,
        "num_eval_prompts": 0,
        "max_steps": STEPS,
        "ppo_epochs": 1,
        "max_kl": 1e9,
        "enable_tensorboard": "false",
        "dtype": sixteen_bits(trial),
        **further,
    }
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks)]
    launcher += ["--master_port", str(free_port()), str(ROOT / "training" / "step3_rlhf.py")]
    subprocess.run([*launcher, *words_of(flags)], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return metrics_of(trial, output)[STEPS]
