"""Runs on two ranks at ZeRO-3 that are killed at a random instant of a phase, gone on with, and compared.

trial = KillTrial(tiny, folder, steps=4, **flags_of_lora(tiny, "trunk"))
print(trial.kill(Instant("train", step=2, share=0.5), "a"))
"""

import itertools
import json
import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from scripts.harness import ROOT, step3_rlhf
from scripts.harness.models import make_adapter
from scripts.harness.programs import TIMEOUT, Tiny, begun, by_deepspeed, command_line, differences, write_partitioned
from scripts.harness.ranks import ForkedProgram
from scripts.harness.step3_rlhf import WRITING, write_watch
from training.checkpoints.files import checkpoints_in

PHASES = ("evaluating", WRITING, "train", "generate", "make_experience", "saving models", "loading models")


@dataclass(frozen=True)
class Instant:
    """When a run is killed: in which phase of which step (0 before the first), and after which share of it."""

    phase: str
    step: int
    share: float


@dataclass(frozen=True)
class Outcome:
    """phase: what rank 0 was in when it was killed, and what was written beside. seconds: after the start. resumed: the
    checkpoint that was gone on from. different: what is not as in the uninterrupted run, to the last bit."""

    instant: Instant
    phase: str
    seconds: float
    resumed: str
    different: list[str]


def random_instants(count: int, steps: int, seed: int) -> list[Instant]:
    """Each phase comes in turn; its step and its share are drawn."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        phase = PHASES[number % len(PHASES)]
        step = {"loading models": 0, "saving models": steps, "evaluating": steps}.get(phase, rng.randint(1, steps))
        found.append(Instant(phase, step, rng.random()))
    return found


def flags_of_lora(tiny: Tiny, kind: str) -> dict:
    """Flags of step 3 with LoRA in none of its models ("none"), in two whose frozen roles they play ("pairs"), or in
    one trunk of all four ("trunk"), with a reward model that is made for it."""
    if kind == "none":
        return {}
    flags = {"actor_lora_dim": 4, "critic_lora_dim": 4, "only_optimize_lora": True, "lora_alpha": 8}
    if kind == "pairs":
        return flags
    reward = make_adapter(tiny.folder / "reward_lora", str(tiny.folder / "sft"), scorer=True)
    return flags | {"share_trunk": True, "critic_model_name_or_path": reward, "critic_ds_config": None}


class KillTrial:
    """The uninterrupted run, and those that are killed.

    forked: without DeepSpeed's launcher, which is killed with its ranks. flags: further ones of step 3.
    """

    def __init__(self, tiny: Tiny, folder: Path, steps: int = 4, forked: bool = False, **flags):
        self.folder = folder
        self.steps = steps
        self.forked = forked
        folder.mkdir(parents=True, exist_ok=True)
        config = write_partitioned(folder / "zero3.json")
        own = {
            "max_steps": steps,
            "save_steps": 1,
            "enable_ema": True,
            "actor_ds_config": config,
            "critic_ds_config": config,
            "actor_zero_stage": 3,
            "critic_zero_stage": 3,
            "ppo_epochs": 2,
            "set": "kl_controller=adaptive",
            "actor_learning_rate": 1e-3,
            "critic_learning_rate": 1e-3,
        }
        self.flags = tiny.flags(3, **(own | flags))

    @cached_property
    def whole(self) -> Path:
        """The folder of the uninterrupted run."""
        run = Run(self, self.folder / "whole")
        run.ended()
        return run.output_dir

    @cached_property
    def seconds(self) -> dict[tuple[str, int], float]:
        """How long each phase of rank 0 took, by name and step."""
        lines = [line for line in Run.phases_of(self.whole) if line["rank"] == 0]
        found: dict[tuple[str, int], float] = {}
        for group in (
            [line for line in lines if line["phase"].startswith(WRITING)],
            [line for line in lines if not line["phase"].startswith(WRITING)],
        ):
            for line, following in itertools.pairwise(group):
                found[line["phase"], line["step"]] = following["time"] - line["time"]
        return found

    def kill(self, instant: Instant, name: str) -> Outcome:
        """Kill a run there, go on from its newest checkpoint, and compare."""
        wait = instant.share * self.seconds[instant.phase, instant.step]
        run = Run(self, self.folder / name)
        seconds, phase = run.killed(instant, wait)
        points = checkpoints_in(run.output_dir)
        again = Run(self, run.output_dir, resume="auto")
        again.ended()
        said = [line for line in again.stdout.splitlines() if line.startswith("goes on from ")]
        resumed = said[0].partition("checkpoints/")[2] if said else "the beginning"
        assert bool(said) == bool(points), (said, points)
        return Outcome(instant, phase, seconds, resumed, differences(self.whole, run.output_dir))


class Run:
    """One launch of step 3 on two ranks that say which phase they are in."""

    def __init__(self, trial: KillTrial, output_dir: Path, **flags):
        self.output_dir, self.log = output_dir, Path(f"{output_dir}.log")
        self.stdout = ""
        watched = write_watch(Path(f"{output_dir}.watch"), phases=True)
        Path(f"{output_dir}.watch/phases").unlink(missing_ok=True)
        words = command_line({**trial.flags, "output_dir": output_dir, **flags})
        self.log.write_text("")
        self.process: ForkedProgram | subprocess.Popen
        if trial.forked:
            given = {"stdout": self.log, "stderr": self.log, "environment": watched}
            self.process = ForkedProgram(step3_rlhf.__file__, words, **given)
        else:
            with self.log.open("ab") as log:
                command = by_deepspeed(step3_rlhf.__file__, words)
                self.process = begun(command, 2, watched, cwd=ROOT, stdout=log, stderr=log)
        self.started = time.time()

    @staticmethod
    def phases_of(output_dir: Path) -> list[dict]:
        """What was announced so far; not the line that is being written."""
        path = Path(f"{output_dir}.watch/phases")
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def ended(self) -> None:
        """Wait for its end; raises AssertionError where that is not a good one."""
        try:
            code = self.process.wait(TIMEOUT)
        finally:
            self._kill()
        self.stdout = self.log.read_text()
        assert code == 0, self.stdout[-4000:]

    def killed(self, instant: Instant, wait: float) -> tuple[float, str]:
        """Kill all processes so long after rank 0 entered the phase; returns when that was, and where it was."""
        deadline = time.time() + TIMEOUT
        entered = None
        while entered is None:
            assert self.process.poll() is None and time.time() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.001)
            wanted = (instant.phase, instant.step, 0)
            lines = self.phases_of(self.output_dir)
            entered = next((at["time"] for at in lines if (at["phase"], at["step"], at["rank"]) == wanted), None)
        time.sleep(max(0.0, entered + wait - time.time()))
        self._kill()
        lines = [line for line in self.phases_of(self.output_dir) if line["rank"] == 0]
        main = [line for line in lines if not line["phase"].startswith(WRITING)]
        beside = [line["phase"] for line in lines if line["phase"].startswith(WRITING)][-1:]
        place = f"{main[-1]['phase']}, step {main[-1]['step']}"
        return time.time() - self.started, place + f"; {WRITING}" * (beside == [WRITING])

    def _kill(self) -> None:
        if isinstance(self.process, ForkedProgram):
            self.process.kill()
            return
        pids = {line["pid"] for line in self.phases_of(self.output_dir)}
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()
        for pid in pids:
            while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
                time.sleep(0.01)
