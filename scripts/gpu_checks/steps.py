"""PPO steps at each ZeRO stage, in 16 bits: of all weights, with and without optimizer states in host memory; with
adapters; and with one trunk for all four models.
"""

import gc
import importlib.util
import math
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from engine.models.config_and_tokenizer import read_tokenizer
from engine.models.loading import new_scorer
from engine.models.lora import LoraSpec, adapt
from engine.zero.accelerator import why_not
from engine.zero.extensions import load_extension
from scripts.gpu_checks.check import Skipped, Trial
from scripts.gpu_checks.decoding import sixteen_bits, told
from scripts.gpu_checks.models import new_trainer, prompts, random_models, rows
from training.ppo_trainer import PPOTrainer

SEARCHED = 20  # fp16: steps in which the loss scale has to have been found


def at_all_stages(trial: Trial, dtype: str) -> None:
    """Steps at stages 0 to 3 from the same weights and prompts: all learn, and begin with the same policy."""
    if (reason := why_not(dtype)) is not None:
        if trial.dry:
            trial.needs_gpu(f"steps in {dtype}")
            return
        raise Skipped(reason)
    first: dict[str, float] = {}
    for stage in (0, 3) if trial.dry else range(4):
        with trial.part(f"stage {stage}"):
            found = steps(trial, f"stage {stage}", new_trainer(trial, stage=stage, dtype=dtype, ragged=True))
            first = first or found
            compared(trial, f"stage {stage}", found, first)
        give_back()


def offloaded(trial: Trial) -> None:
    """The same with --offload at stages 2 and 3, where DeepSpeed's own AdamW trains in host memory. It is built as on
    machines without nvcc, for it is C++ alone."""
    if trial.needs_gpu("DeepSpeedCPUAdam, in whose place torch's AdamW trained") and (reason := why_no_cpu_adam()):
        raise Skipped(reason)
    dtype = "fp32" if trial.dry else "bf16" if why_not("bf16") is None else "fp16"
    first = {}
    settings = [("stage 2 on the device", 2, False), ("stage 2", 2, True), ("stage 3", 3, True)]
    for name, stage, offload in settings[1:] if trial.dry else settings:
        with trial.part(name):
            trainer = new_trainer(trial, stage=stage, dtype=dtype, offload=offload)
            if not trial.dry:
                kept = {shard.device.type for shard in trainer.models.actor.master_shards()}
                trial.expect(kept == {"cpu" if offload else "cuda"}, f"{name}: master weights are on {kept}")
            found = steps(trial, name, trainer)
            first = first or found
            compared(trial, name, found, first)
        trainer = None
        give_back()


def why_no_cpu_adam() -> str | None:
    """Why DeepSpeedCPUAdam cannot be built here, in words; None once it is built."""
    missing = [
        name
        for name, there in (
            ("a C++ compiler", any(map(shutil.which, ("c++", "g++", "clang++")))),
            ("ninja", shutil.which("ninja") or importlib.util.find_spec("ninja")),
        )
        if not there
    ]
    if missing:
        return f"DeepSpeedCPUAdam is built where it is used, and here is no {' and no '.join(missing)}"
    try:
        with mock.patch("torch.utils.cpp_extension.CUDA_HOME", None):
            load_extension("CPUAdamBuilder")
    except Exception as error:  # whatever a compiler has to say
        return f"DeepSpeedCPUAdam cannot be built here: {' '.join(str(error).split())[:300]}"
    return None


def steps(trial: Trial, name: str, trainer: PPOTrainer) -> dict[str, float]:
    """Two steps, in fp16 as many as it takes to find the loss scale; returns the first one's metrics.

    Weights have to change, and everything that is measured to be a number.
    """
    before = checksum(trainer)
    vocabulary = trainer.models.actor.module.model.config.vocab_size
    metrics: list[dict[str, float]] = []
    while len(metrics) < 2 or (metrics[-1].get("policy/skipped", 0) > 0 and len(metrics) < SEARCHED):
        batch = prompts(rows(trial), trainer.sampling.max_new_tokens, vocabulary, first=len(metrics) * rows(trial))
        started = time.perf_counter()
        metrics.append(trainer.step(batch).metrics)
        trial.tell({f"{name}, s": round(time.perf_counter() - started, 3)})
    odd = [key for key, value in metrics[-1].items() if not math.isfinite(value) and not key.startswith("value/expl")]
    trial.expect(not odd, f"{name}: {', '.join(odd)} are no numbers")
    told(trial, name, trainer.rollouts)
    trial.expect(not metrics[-1].get("policy/skipped"), f"{name}: no loss scale was found in {SEARCHED} steps")
    trial.expect(checksum(trainer) != before, f"{name}: no weight changed")
    return metrics[0]


def compared(trial: Trial, name: str, found: dict[str, float], first: dict[str, float]) -> None:
    """The first step's entropy and gradient are those of the first setting, as far as other kernels and so other
    tokens let them be."""
    entropy, expected = found["objective/entropy"], first["objective/entropy"]
    trial.expect(abs(entropy / expected - 1) < 0.02, f"{name}: the entropy is {entropy:.4g}, not {expected:.4g}")
    length, expected = found["policy/grad_norm"], first["policy/grad_norm"]
    if math.isfinite(length) and math.isfinite(expected):  # fp16's first ones may overflow
        trial.tell({f"{name}, gradient": round(length, 4)})
        trial.expect(
            2 / 3 < length / expected < 3 / 2, f"{name}: the gradient is {length:.3g}, not {expected:.3g} long"
        )


def checksum(trainer: PPOTrainer) -> float:
    """The sum of what actor and critic are, in float64."""
    return sum(
        shard.double().abs().sum().item() for m in trainer.models.trained.values() for shard in m.master_shards()
    )


def give_back() -> None:
    """Let go of engines, which hold circles."""
    gc.collect()
    torch.cuda.empty_cache()


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
    from training.runtime import model_folders  # needs pyarrow, which most checks do without

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
