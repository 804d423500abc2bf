"""Has a run go on, from checkpoints, on other numbers of ranks and at other ZeRO stages, and compares.

    python scripts/change_layout.py                                    2 ranks at ZeRO-3, 1 at ZeRO-2, 3 at ZeRO-3
    python scripts/change_layout.py --layouts 1:0 2:1 2:3 --dtype bf16

At each change every number of the state that was loaded has to be that of the checkpoint, bit by bit, and the step
that is trained again has to draw the same responses, with losses within 1e-5 (in fp32; in 16 bits as they round). Tiny
models on the CPU. Exit code 1 if anything is not so.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, it finds the project

from scripts.harness import ROOT, step3_rlhf
from scripts.harness.programs import (
    PIPES,
    Tiny,
    begun,
    by_deepspeed,
    command_line,
    ended,
    metric_lines,
    write_partitioned,
)
from scripts.harness.step3_rlhf import write_watch
from training.checkpoints.files import ShardFiles, point_folder

LIMIT = {"fp32": 1e-5, "bf16": 1e-1}
RESPONSES = 12  # a step, over all ranks
LOSSES = ("policy/loss", "value/loss")


def main() -> int:
    """Run the layouts, print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", nargs="+", default=["2:3", "1:2", "3:3"], metavar="RANKS:STAGE")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    options = parser.parse_args()
    layouts = [Layout(*map(int, words.split(":"))) for words in options.layouts]
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"  # tokenised data
        trial = RelayoutTrial(Tiny(Path(folder) / "tiny"), Path(folder) / "runs", options.dtype)
        print(
            "| from | to | state | bit by bit | the module's weights | losses apart | other responses |\n"
            "| --- | --- | --- | --- | --- | --- | --- |"
        )
        for change in trial.changes(layouts):
            print(
                f"| {change.before} | {change.after} | {change.tensors} tensors, {change.numbers} numbers | "
                f"{_verdict(change.different)} | {_verdict(change.modules)} | {change.losses:.1e} | "
                f"{change.other_responses} of 12 |",
                flush=True,
            )
            far = change.losses > LIMIT[options.dtype] or (options.dtype == "fp32" and change.other_responses)
            failed = failed or far or bool(change.different or change.modules)
    return int(failed)


def _verdict(different: list[str]) -> str:
    return "equal" if not different else f"NOT EQUAL: {', '.join(different[:3])}"


@dataclass(frozen=True)
class Layout:
    """ranks: their number, a divisor of RESPONSES. stage: of actor and critic."""

    ranks: int
    stage: int

    def __str__(self) -> str:
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}, ZeRO-{self.stage}"


@dataclass(frozen=True)
class Change:
    """A restart in another layout.

    tensors, numbers: of the training state. different: tensors that are not bit by bit the checkpoint's; modules:
    weights of the modules that are not its master weights in their dtype. losses: how far those of the repeated step
    are apart, the largest difference. other_responses: how many of the repeated step's are not token by token the same.
    """

    before: Layout
    after: Layout
    tensors: int
    numbers: int
    different: list[str]
    modules: list[str]
    losses: float
    other_responses: int


class RelayoutTrial:
    """Runs on tiny models, in `folder`.

    Of each run all but the last step is kept: the next one goes on from there and trains that step again.
    """

    def __init__(self, tiny: Tiny, folder: Path, dtype: str = "fp32"):
        self.folder = folder
        folder.mkdir(parents=True)
        self.flags = tiny.flags(
            3,
            max_steps=20,
            save_steps=1,
            enable_ema=True,
            enable_test_mode=True,
            num_eval_prompts=0,
            ppo_epochs=2,
            dtype=dtype,
            actor_learning_rate=1e-3,
            critic_learning_rate=1e-3,
        )

    def changes(self, layouts: Sequence[Layout]) -> Iterator[Change]:
        """Run all layouts, one after the other; an item for each change."""
        runs = [self._run(0, layouts[0], first=0)]
        for number, (before, after) in enumerate(itertools.pairwise(layouts), start=1):
            runs.append(self._run(number, after, first=number + 1))
            yield self._compared(before, after, *runs[-2:], step=number + 1)

    def _run(self, number: int, layout: Layout, first: int) -> Path:
        """Train two steps, or three in the first run, from the checkpoint `first` of the run before."""
        output_dir = self.folder / f"run_{number}"
        config = ROOT / "configs" / "ds" / f"zero{layout.stage}.json"
        if layout.stage == 3:
            config = write_partitioned(self.folder / "zero3.json")
        flags = self.flags | {
            "output_dir": output_dir,
            "resume": point_folder(self.folder / f"run_{number - 1}", first) if first else None,
            "test_stop_step": first + 2 if first else 3,
            "per_device_generation_batch_size": RESPONSES // layout.ranks,
            "actor_zero_stage": layout.stage,
            "critic_zero_stage": layout.stage,
            "actor_ds_config": config,
            "critic_ds_config": config,
        }
        watched = write_watch(Path(f"{output_dir}.watch"), records=True)
        command = by_deepspeed(step3_rlhf.__file__, command_line(flags), layout.ranks)
        result = ended(begun(command, layout.ranks, watched, **PIPES))
        if result.code:
            raise RuntimeError(f"exit code {result.code}:\n{result.stdout[-3000:]}{result.stderr[-3000:]}")
        return output_dir

    @staticmethod
    def _compared(before: Layout, after: Layout, left: Path, gone_on: Path, step: int) -> Change:
        """The run `gone_on` went on from the checkpoint after `step` of `left`, and both trained the step behind it."""
        point, recorded = point_folder(left, step), Path(f"{gone_on}.watch")
        tensors, numbers, different, modules = 0, 0, [], []
        for model in ("actor", "critic", "ema"):
            expected, got = ShardFiles(point / model), ShardFiles(recorded / "state" / model)
            assert expected.shapes() == got.shapes()
            for name in expected.shapes():
                tensors, numbers = tensors + 1, numbers + expected.whole(name).numel()
                if not torch.equal(expected.whole(name), got.whole(name)):
                    different.append(f"{model}: {name}")
            if model != "ema":
                weights = load_file(recorded / "modules" / f"{model}.safetensors")
                modules += [
                    f"{model}: {name}"
                    for name, weight in weights.items()
                    if not torch.equal(weight, expected.whole(f"weights/model.{name}").to(weight.dtype))
                ]
        one, other = (metrics_of(run, step + 1) for run in (left, gone_on))
        losses = max(abs(one[name] - other[name]) for name in LOSSES)
        drawn, again = responses_of(left, step + 1), responses_of(gone_on, step + 1)
        assert len(drawn) == len(again) == RESPONSES
        other_responses = sum(again.get(key) != tokens for key, tokens in drawn.items())
        return Change(before, after, tensors, numbers, different, modules, losses, other_responses)


def metrics_of(run: Path, step: int) -> dict:
    """A step's line of metrics.jsonl."""
    return next(line for line in metric_lines(run) if line["step"] == step)


def responses_of(run: Path, step: int) -> dict[tuple[int, int], list[int]]:
    """The tokens that all ranks drew in a step, by prompt and sample."""
    lines = [
        json.loads(line)
        for path in Path(f"{run}.watch").glob("responses.*.jsonl")
        for line in path.read_text().splitlines()
    ]
    return {(prompt, sample): tokens for at, prompt, sample, tokens in lines if at == step}


if __name__ == "__main__":
    sys.exit(main())
