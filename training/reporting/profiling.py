"""Recordings of single steps by torch.profiler: one file a rank and step, in the format of Chrome's traces.

    profiler = Profiler([3, 4], trainer, output_dir, say=print)
    with profiler.record(step=3):                # writes output_dir/profile/step_000003_rank0.json.gz; nothing for 5
        trainer.step(prompts)

ui.perfetto.dev opens such a file. Within the phases, which PhaseClock names, the passes of each model are ranges of
their own. They are marked from outside, and only while a step is recorded: other steps run the code as it stands.
Shapes, memory and Python's stacks are left out, since they make a file many times as large.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, record_function

from engine import distributed, whole_copies
from engine.models.policy import Policy
from engine.models.scorer import Scorer
from engine.reward.combined import CombinedReward
from engine.rollout.passes import CompiledPasses, Passes, RecordedPasses
from engine.zero.accelerator import on_gpu
from training.ppo_trainer import PPOTrainer
from training.program.output_folder import PROFILE


class Profiler:
    """Records some steps of a trainer.

    steps: their numbers, from 1. say: told on each rank what has been written.
    """

    def __init__(self, steps: Sequence[int], trainer: PPOTrainer, output_dir: Path, say: Callable[[str], None]):
        self.steps, self.trainer = frozenset(steps), trainer
        self.folder, self.say = output_dir / PROFILE, say

    @contextlib.contextmanager
    def record(self, step: int) -> Iterator[None]:
        """Record what happens in this context if `step` is one of those asked for; a step that raises leaves none."""
        if step not in self.steps:
            yield
            return
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu()
        with torch.profiler.profile(activities=activities) as profile, marked(self.trainer):
            yield
        self.folder.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(self.folder / f"step_{step:06d}_rank{distributed.rank()}.json.gz"))
        self.say(
            f"step {step} recorded: {self.folder}/step_{step:06d}_rank*.json.gz, one file a rank. Open one in "
            "https://ui.perfetto.dev (it stays in your browser) or chrome://tracing."
        )


@contextlib.contextmanager
def marked(trainer: PPOTrainer) -> Iterator[None]:
    """Within this context every forward and backward pass, optimizer step and score is a named range of the trace."""
    engine = trainer.models
    methods = [
        (Policy, "forward", "policy forward"),
        (Scorer, "forward", "scorer forward"),
        (engine.reference, "ref_logprobs", "reference"),
        (whole_copies, "copy_weights", "gather of weights"),
        (Passes, "prompts", "prompts"),
        *((kind, "tokens", "token") for kind in (Passes, RecordedPasses, CompiledPasses)),
    ]
    for role, model in (("actor", engine.actor), ("critic", engine.critic)):
        if model is not None:
            methods += [(model, "backward", f"{role} backward"), (model, "step", f"{role} optimizer step")]
    reward = trainer.experience_maker.reward
    sources = reward.sources if isinstance(reward, CombinedReward) else {"model": (reward, 1.0)}
    methods += [(source, "score", f"reward {name}") for name, (source, _) in sources.items()]
    if engine.ema is not None:
        methods.append((engine.ema, "update", "EMA update"))
    with contextlib.ExitStack() as ranges:
        for owner, method, name in methods:
            ranges.enter_context(_method_marked(owner, method, name))
        yield


@contextlib.contextmanager
def _method_marked(owner, method: str, name: str) -> Iterator[None]:
    """Within this context calls of this method, of an object or of a class, are ranges of this name."""
    own = vars(owner).get(method)  # None where it is inherited
    setattr(owner, method, record_function(name)(getattr(owner, method)))
    try:
        yield
    finally:
        delattr(owner, method)
        if own is not None:
            setattr(owner, method, own)


def set_aside_newer(output_dir: Path, step: int) -> None:
    """Rename this rank's recordings of steps after `step` to *.abandoned, as restart points are: they show a course
    that the run has left, and its own recordings take their names."""
    for file in (output_dir / PROFILE).glob(f"step_*_rank{distributed.rank()}.json.gz"):
        if int(file.name.split("_")[1]) > step:
            file.replace(file.with_name(file.name + ".abandoned"))
