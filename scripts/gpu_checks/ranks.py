"""All GPUs of this machine together: step 3 by DeepSpeed's launcher."""

import os
import socket
import subprocess
import sys

import torch

from scripts.gpu_checks.check import ROOT
from scripts.gpu_checks.decoding import sixteen_bits
from scripts.gpu_checks.models import random_models
from scripts.gpu_checks.programs import metrics_of, words_of, write_prompts
from scripts.gpu_checks.trial import Trial

STEPS = 3


def together(trial: Trial, *stages: int) -> None:
    """Steps at these stages over all ranks: the same data on as many GPUs as there are, by NCCL (two CPUs, by gloo)."""
    count = 2 if trial.dry else torch.cuda.device_count()
    trial.needs_gpu("NCCL")
    trial.figures["ranks"] = count
    entropies = []
    for stage in stages:
        with trial.part(f"stage {stage}"):
            last = launched(trial, count, stage)
            entropies.append(last["objective/entropy"])
            trial.figures[f"stage {stage}, s"] = round(sum(last[f"time/{phase}"] for phase in PHASES), 3)
    if len(entropies) > 1:
        trial.figures["entropy"] = round(entropies[0], 4)
        trial.expect(max(entropies) < 1.02 * min(entropies), f"stages end with entropies {entropies}")


PHASES = ("generate", "make_experience", "train")


def launched(trial: Trial, ranks: int, stage: int) -> dict[str, float]:
    """The last step's metrics of a run by the launcher."""
    actor, critic = random_models(trial, "350m")
    output = trial.folder / f"stage{stage}"
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
        "actor_zero_stage": stage,
        "critic_zero_stage": stage,
        "max_kl": 1e9,
        "dtype": sixteen_bits(trial),
    }
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks)]
    launcher += ["--master_port", str(free_port()), str(ROOT / "training" / "step3_rlhf.py")]
    subprocess.run([*launcher, *words_of(flags)], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return metrics_of(output)[STEPS]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]
