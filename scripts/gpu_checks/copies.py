"""The actor's copy: what `--rollout_backend auto` does with it under real limits, and its memory between steps; and
whether a run's training takes the memory that is planned for it.
"""

import contextlib
import re
from collections.abc import Iterator

import torch

from engine.actor_copy import copies_bytes
from engine.errors import UserError
from engine.experience import Rollout
from engine.rollout import build_rollouts
from engine.rollout.choice import _later
from engine.rollout.decode import slots_of_a_row
from engine.rollout.passes import cache_bytes
from engine.zero.accelerator import free_memory
from engine.zero.gathering import full_numel
from scripts.gpu_checks.check import Trial
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

# What the actor's copy, keys and values take of the memory that is free beside gradients and moments, by what auto does
# with them then (engine/rollout/placement.py).
LEVELS = {"keep": 0.3, "free": 0.68, "refused": 0.9}
TOKENS = 64
WITHIN = 0.1


def under_limits(trial: Trial) -> None:
    """auto with much, less and little free memory: what it says it will, the same tokens, and never too much."""
    trainer = new_trainer(trial, size="34m", stage=3, dtype="fp32", tokens=TOKENS, backend="zero3")
    limits = LEVELS if trial.needs_gpu("limits of memory") else dict.fromkeys(["keep"], 0.0)
    first: Rollout | None = None
    for expected, share in limits.items():
        with trial.part(expected), only_free(free_for(trial, trainer, share) if share else None):
            try:
                trainer.rollouts = built(trial, trainer)
                done = trainer.rollouts.copy.between_steps
                why = trainer.rollouts.why
            except UserError as error:
                done, why = "refused", str(error)
            trial.expect(done == expected, f"with {free_memory() / 1e9:.2f} GB free: {done}, not {expected}: {why}")
            if done == "refused":
                continue
            found = drawn(trial, trainer, expected)
            first = first or found
            alike = int((found.responses == first.responses).all(-1).sum())
            trial.tell({expected: f"{alike} of {len(found.responses)} rows alike"})
            trial.expect(alike >= 0.9 * len(found.responses), f"{expected}: {alike} rows are those of other copies")
        trainer.models.actor.copy = trainer.rollouts = None
        give_back()


def free_for(trial: Trial, trainer: PPOTrainer, share: float) -> float:
    """Bytes that have to be free for a copy, keys and values to take this share beside gradients and moments."""
    actor = trainer.models.actor
    slots = slots_of_a_row(2 * trainer.sampling.max_new_tokens, waiting=True)
    needed = copies_bytes(actor.module, 1)[1] + cache_bytes(actor.module, rows(trial) * slots, rows(trial))
    return sum(map(_later, trainer.models.engines)) + needed / share


def built(trial: Trial, trainer: PPOTrainer):
    """What auto takes for the trainer's models."""
    return build_rollouts(
        "auto",
        trainer.models.actor,
        trainer.models.tokenizer,
        others=trainer.models.engines,
        rows_at_once=rows(trial),
        row_length=2 * trainer.sampling.max_new_tokens,
        decoding="auto",
    )


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
    """--replicas_between_steps keep and free: the same tokens when the copy comes back, and its memory given back
    while it is not needed."""
    with_memory = trial.needs_gpu("what the copy gives back")
    for way in ("keep", "free"):
        with trial.part(way):
            trainer = new_trainer(
                trial, size="34m", stage=3, dtype="fp32", tokens=TOKENS, backend="replica", between_steps=way
            )
            held_before = allocated()
            first = drawn(trial, trainer, way)
            kept = allocated() - held_before
            again = drawn(trial, trainer, way)
            alike = int((first.responses == again.responses).all(-1).sum())
            trial.tell({f"{way}, rows alike": f"{alike} of {len(first.responses)}"})
            trial.expect(alike >= 0.9 * len(first.responses), f"{way}: only {alike} rows are drawn again")
            there = trainer.rollouts.copy._module is not None
            trial.expect(there == (way != "free"), f"{way}: there is a copy between steps: {there}")
            if with_memory:
                trial.tell({f"{way}, held between steps, GB": round(kept / 1e9, 3)})
                size = sum(full_numel(p) * p.element_size() for p in trainer.models.actor.module.parameters())
                limit_kept = kept >= size if way == "keep" else kept < 0.1 * size
                trial.expect(
                    limit_kept, f"{way}: {kept / 1e9:.3f} GB are held between steps, a copy is {size / 1e9:.3f}"
                )
            trainer.step(prompts(rows(trial), TOKENS // 8, trainer.models.actor.module.model.config.vocab_size))
            trial.expect(drawn(trial, trainer, way).responses.shape == first.responses.shape, f"{way}: other responses")
        trainer = first = again = None
        give_back()


def allocated() -> int:
    """Bytes that tensors hold on the GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated() if device().type == "cuda" else 0


def planned(trial: Trial) -> None:
    """One step of step 3: training takes the bytes that are planned, within a tenth. Before its first update Adam has
    no moments, so the other phases take less than planned."""
    counts = trial.needs_gpu("peaks of phases (a CPU's are not counted)")
    sizes = sizes_here(trial)
    actor, critic = random_models(trial, *sizes)
    rows, length = (4, 16) if trial.dry else (16, 256)
    trial.tell({"models": "tiny OPTs" if trial.dry else " and ".join(sizes)})
    flags = dict(
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
    measured = figures_of(program(3, **flags))
    metrics_of(trial, trial.folder / "out")
    trial.expect(bool(measured) == counts, "step 3 printed no line of measured bytes, or a CPU's did")
    for phase, (size, expected) in measured.items():
        trial.tell({f"{phase}, GB planned": expected, f"{phase}, GB measured": size})
        off = expected / size - 1
        least = -WITHIN if phase == "train" else 0.0
        right = least <= off and (phase != "train" or off <= WITHIN)
        trial.expect(right, f"{phase}: planned {expected} GB, measured {size}, {off:+.0%}")


def figures_of(printed: str) -> dict[str, tuple[float, float]]:
    """{phase: (measured GB, planned GB)}, of the line that step 3 prints after its first step."""
    line = next((line for line in printed.splitlines() if line.startswith("memory, ")), "")
    found = re.findall(r"([a-z_]+) (\d+\.\d) \((\d+\.\d)\)", line)
    return {phase: (float(size), float(planned)) for phase, size, planned in found}
