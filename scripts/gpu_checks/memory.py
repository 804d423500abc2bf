"""What training/memory_plan.py plans, against the bytes that torch.cuda counts, phase by phase."""

import re

import torch

from scripts.gpu_checks.decoding import sixteen_bits
from scripts.gpu_checks.models import random_models
from scripts.gpu_checks.programs import metrics_of, program, write_prompts
from scripts.gpu_checks.trial import Skipped, Trial

WITHIN = 0.1
LARGE = 60e9  # bytes of a GPU that an actor of 1.3 billion numbers trains on, with a critic of 350 million


def planned(trial: Trial) -> None:
    """One step of step 3: its own line of planned and measured bytes is right within a tenth."""
    counts = trial.needs_gpu("peaks of phases (a CPU's are not counted)")
    sizes = ("opt-1.3b", "opt-350m") if trial.dry or has_much_memory() else ("350m", "350m")
    actor, critic = random_models(trial, *sizes)
    rows, length = (4, 16) if trial.dry else (16, 256)
    trial.figures["models"] = "tiny OPTs" if trial.dry else " and ".join(sizes)
    printed = program(
        3,
        actor_model_name_or_path=actor,
        critic_model_name_or_path=critic,
        data_path=write_prompts(trial.folder / "prompts.jsonl", 4 * rows, length, vocabulary=500),
        data_output_path=trial.folder / "cache",
        output_dir=trial.folder / "out",
        max_prompt_seq_len=length,
        max_answer_seq_len=length,
        per_device_generation_batch_size=rows,
        per_device_training_batch_size=rows // 2,
        num_eval_prompts=0,
        max_steps=1,
        ppo_epochs=1,
        dtype=sixteen_bits(trial),
        print_answers_interval=0,
    )
    metrics_of(trial, trial.folder / "out")
    pairs = figures_of(printed)
    trial.expect(bool(pairs) == counts, "step 3 printed no line of planned and measured bytes, or a CPU's did")
    for phase, (plan, measured) in pairs.items():
        trial.figures |= {f"{phase}, GB planned": plan, f"{phase}, GB measured": measured}
        off = plan / measured - 1
        trial.expect(abs(off) <= WITHIN, f"{phase}: planned {plan} GB, measured {measured}, {off:+.0%}")


def has_much_memory() -> bool:
    """Whether the larger model has room on this GPU."""
    return torch.cuda.mem_get_info()[1] >= LARGE


def figures_of(printed: str) -> dict[str, tuple[float, float]]:
    """(planned, measured) GB by phase, of the line that step 3 prints after its first step."""
    line = next((line for line in printed.splitlines() if line.startswith("memory, ")), "")
    if "not planned" in line:
        raise Skipped(line)
    found = re.findall(r"([a-z]+) (\d[\d.]*) / (\d[\d.]*)", line.rpartition(": ")[2].partition(";")[0])
    return {phase: (float(plan), float(measured)) for phase, plan, measured in found}
