"""Responses by vLLM in the trainer's process, against those of our own sampler."""

import importlib.util

import torch

from scripts.gpu_checks.check import Skipped, Trial
from scripts.gpu_checks.copies import only_free
from scripts.gpu_checks.decoding import sixteen_bits
from scripts.gpu_checks.models import metrics_of, program, random_models, write_prompts

STEPS = 2
FREE = {"vllm": 0.4, "auto": None}  # of the GPU's memory: the rest is taken before, as by engines that are loaded


def alike(trial: Trial) -> None:
    """Two steps at stage 3 with --rollout_backend vllm, beside memory that is taken, and with auto: the same policy,
    whose log-probs agree."""
    if importlib.util.find_spec("vllm") is None:
        raise Skipped("vllm is not installed (scripts/vllm_environment.sh makes an environment with it)")
    if not trial.needs_gpu("vLLM"):
        return
    actor, critic = random_models(trial, "34m")
    prompts = write_prompts(trial.folder / "prompts.jsonl", 64, 16, vocabulary=8000)
    found = {}
    for backend, free in FREE.items():
        with trial.part(backend), only_free(free and free * torch.cuda.mem_get_info()[1]):
            output = trial.folder / backend
            program(
                3,
                actor_model_name_or_path=actor,
                critic_model_name_or_path=critic,
                data_path=prompts,
                data_output_path=trial.folder / "cache",
                output_dir=output,
                rollout_backend=backend,
                old_logprobs="forward",
                max_prompt_seq_len=32,
                max_answer_seq_len=64,
                per_device_generation_batch_size=16,
                per_device_training_batch_size=16,
                num_eval_prompts=0,
                max_steps=STEPS,
                ppo_epochs=1,
                actor_zero_stage=3,
                critic_zero_stage=3,
                max_kl=1e9,
                dtype=sixteen_bits(trial),
            )
            found[backend] = metrics_of(trial, output)[STEPS]
            trial.tell({f"{backend}, generate s": round(found[backend]["time/generate"], 3)})
    if len(found) == 2:
        ours, theirs = found["auto"]["objective/entropy"], found["vllm"]["objective/entropy"]
        trial.tell({"entropy": round(ours, 4), "vllm's": round(theirs, 4)})
        trial.expect(abs(theirs / ours - 1) < 0.02, f"with vLLM the entropy is {theirs:.4g}, not {ours:.4g}")
