"""Whole copies of partitioned models: what `--rollout_backend auto` chooses under real limits, and their memory between
steps; and whether a run's phases take the memory that is planned for them.
"""

import contextlib
import re
from collections.abc import Iterator

import torch

from engine.experience import Rollout
from engine.rollout import build_rollouts
from engine.zero.accelerator import free_memory
from engine.zero.gathering import full_numel
from scripts.gpu_checks.check import Skipped, Trial
from scripts.gpu_checks.decoding import sixteen_bits, told
from scripts.gpu_checks.machine import device
from scripts.gpu_checks.models import (
    metrics_of,
    new_trainer,
    program,
    prompts,
    random_models,
    rows,
    sizes_here,
    write_prompts,
)
from scripts.gpu_checks.steps import give_back
from training.ppo_trainer import PPOTrainer

# Free memory, in sizes of all four models together, and what auto makes of it (engine/memory/copies.py). A model takes
# a quarter of that size, actor and critic as much again for gradients and twice as much for Adam's moments, together
# 1.5; so copies of its own 2.5, which may be a fifth of what is free, and shared ones 2, which may be two fifths, and
# four if they are given back. With 1.9 there is no room even for the actor's 1.75.
LEVELS = {"own": 15.0, "shared": 7.0, "shared, given back": 3.5, "partitions": 1.9}
TOKENS = 64
WITHIN = 0.1


def under_limits(trial: Trial) -> None:
    """auto with much, less and little free memory: what it says it will, the same tokens, and never too much."""
    trainer = new_trainer(trial, size="34m", stage=3, dtype="fp32", tokens=TOKENS, backend="zero3")
    engines = trainer.models.engines
    size = sum(full_numel(p) * p.element_size() for model in engines for p in model.module.parameters())
    trial.tell({"all weights, GB": round(size / 1e9, 3)})
    limits = LEVELS if trial.needs_gpu("limits of memory") else dict.fromkeys(["own"], 0.0)
    first: Rollout | None = None
    for expected, sizes in limits.items():
        with trial.part(expected), only_free(sizes * size if sizes else None):
            trainer.rollouts = built(trial, trainer)
            trial.expect(
                kind(trainer) == expected,
                f"with {free_memory() / size:.2f} times the weights free auto took {kind(trainer)}, not {expected}: "
                f"{trainer.rollouts.why}",
            )
            found = drawn(trial, trainer, expected)
            first = first or found
            alike = int((found.responses == first.responses).all(-1).sum())
            trial.tell({expected: f"{alike} of {len(found.responses)} rows alike"})
            trial.expect(alike >= 0.9 * len(found.responses), f"{expected}: {alike} rows are those of other copies")
        for model in engines:
            model.copies = None
        trainer.rollouts = None
        give_back()


def built(trial: Trial, trainer: PPOTrainer, name: str = "auto", between_steps: str = "keep"):
    """The backend of this name for the trainer's models."""
    return build_rollouts(
        name,
        trainer.models.actor,
        trainer.models.tokenizer,
        others=trainer.models.engines,
        rows_at_once=rows(trial),
        row_length=2 * trainer.sampling.max_new_tokens,
        between_steps=between_steps,
        decoding="auto",
    )


def kind(trainer: PPOTrainer) -> str:
    """Which copies the actor computes with, one of LEVELS."""
    copies = trainer.models.actor.host.copies
    if copies is None:
        return "partitions"
    if not copies.shared:
        return "own"
    return "shared" if copies.between_steps == "keep" else "shared, given back"


def drawn(trial: Trial, trainer: PPOTrainer, name: str) -> Rollout:
    """Responses and experience of one step, without its training. name: in figures."""
    vocabulary = trainer.models.actor.module.model.config.vocab_size
    batch = prompts(rows(trial), trainer.sampling.max_new_tokens, vocabulary).to(device())
    rollout = trainer.rollouts.generate(batch, trainer.sampling)
    told(trial, name, trainer.rollouts)
    trainer.experience_maker.make_experience(rollout)
    trainer.rollouts.release_memory()
    return rollout


@contextlib.contextmanager
def only_free(wanted: float | None) -> Iterator[None]:
    """Take memory until no more than so many bytes are free; None for none."""
    give_back()
    taken = free_memory() - wanted if wanted is not None else 0
    if taken < 0:
        raise ValueError(f"{free_memory() / 1e9:.1f} GB are free, fewer than {wanted / 1e9:.1f}")
    ballast = torch.empty(int(taken), dtype=torch.uint8, device=device())
    yield
    del ballast


def between_steps(trial: Trial) -> None:
    """--replicas_between_steps keep, free and host: the same tokens when copies come back, and their memory given back
    while they are not needed."""
    with_memory = trial.needs_gpu("what the copies give back")
    for way in ("keep", "free", "host") if with_memory else ("keep", "free"):  # a CPU's copies are on the host anyway
        with trial.part(way):
            trainer = new_trainer(
                trial, size="34m", stage=3, dtype="fp32", tokens=TOKENS, backend="replica", between_steps=way
            )
            held_before = allocated()
            first = drawn(trial, trainer, way)
            modules = trainer.rollouts.copies._modules.values()
            kept = allocated() - held_before
            again = drawn(trial, trainer, way)
            alike = int((first.responses == again.responses).all(-1).sum())
            trial.tell({f"{way}, rows alike": f"{alike} of {len(first.responses)}"})
            trial.expect(alike >= 0.9 * len(first.responses), f"{way}: only {alike} rows are drawn again")
            trial.expect(bool(modules) == (way != "free"), f"{way}: {len(modules)} copies are there between steps")
            if with_memory:
                trial.tell({f"{way}, held between steps, GB": round(kept / 1e9, 3)})
                size = sum(full_numel(p) * p.element_size() for p in trainer.models.actor.module.parameters())
                limit_kept = kept >= size if way == "keep" else kept < 0.1 * size
                trial.expect(
                    limit_kept, f"{way}: {kept / 1e9:.3f} GB are held between steps, a copy is {size / 1e9:.3f}"
                )
            trainer.step(prompts(rows(trial), TOKENS // 8, trainer.models.actor.module.model.config.vocab_size))
            trial.expect(drawn(trial, trainer, way).responses.shape == first.responses.shape, f"{way}: other responses")
        trainer = modules = first = again = None
        give_back()


def allocated() -> int:
    """Bytes that tensors hold on the GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated() if device().type == "cuda" else 0


def planned(trial: Trial) -> None:
    """One step of step 3: its own line of planned and measured bytes is right within a tenth."""
    counts = trial.needs_gpu("peaks of phases (a CPU's are not counted)")
    sizes = sizes_here(trial)
    actor, critic = random_models(trial, *sizes)
    rows, length = (4, 16) if trial.dry else (16, 256)
    trial.tell({"models": "tiny OPTs" if trial.dry else " and ".join(sizes)})
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
        trial.tell({f"{phase}, GB planned": plan, f"{phase}, GB measured": measured})
        off = plan / measured - 1
        trial.expect(abs(off) <= WITHIN, f"{phase}: planned {plan} GB, measured {measured}, {off:+.0%}")


def figures_of(printed: str) -> dict[str, tuple[float, float]]:
    """(planned, measured) GB by phase, of the line that step 3 prints after its first step."""
    line = next((line for line in printed.splitlines() if line.startswith("memory, ")), "")
    if "not planned" in line:
        raise Skipped(line)
    found = re.findall(r"([a-z]+) (\d[\d.]*) / (\d[\d.]*)", line.rpartition(": ")[2].partition(";")[0])
    return {phase: (float(plan), float(measured)) for phase, plan, measured in found}
