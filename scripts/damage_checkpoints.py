"""Damages checkpoints in every way of scripts/harness/checkpoint_damages.py, and shows what --resume makes of each.

    python scripts/damage_checkpoints.py                     # of a small run on two ranks, which is made first
    python scripts/damage_checkpoints.py --output_dir out    # on copies of the two newest checkpoints of a run

By its run's folder a damaged checkpoint has to be passed over for the one before it, by its own name it has to be
refused. Three are tried on the whole program. Exit code 1 if one was used, or ended in a
trace.
"""

import argparse
import contextlib
import io
import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, it finds the project
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}  # before torch is imported

from scripts.harness.checkpoint_damages import DAMAGES, tried
from scripts.harness.programs import Tiny, launch
from training.checkpoints.files import checkpoint_folder, checkpoints_in, step_of

WHOLE_PROGRAM = ("flipped bit: actor/rank_00000.safetensors, at 60%", "missing: trainer_state.json", "manifest: null")


def main() -> int:
    """Try all of them and print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, help="of a run with two checkpoints (default: made here)")
    options = parser.parse_args()

    failed = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        tiny = Tiny(root / "tiny") if options.output_dir is None else None
        source = options.output_dir or small_run(tiny, root / "run")
        older, newest = checkpoints_in(source)[-2:]
        print(f"{'damage':64} what is said of it")
        for name, damage in DAMAGES.items():
            copy = root / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            places = [checkpoint_folder(copy, step_of(checkpoint) or 0) for checkpoint in (newest, older)]
            for checkpoint, place in zip((newest, older), places):
                shutil.copytree(checkpoint, place)
            damage(*places)
            with contextlib.redirect_stdout(io.StringIO()):
                outcome = tried(copy, *places)
            failed += [name] * outcome.startswith("FAILED")
            print(f"{name:64} {outcome.replace(str(copy), '')}", flush=True)
            if name in WHOLE_PROGRAM and tiny is not None:
                problem = by_the_program(tiny, copy, places)
                failed += [name] * bool(problem)
                print(
                    f"{'    by the whole program':64} {problem or 'passed over, and refused by its name'}", flush=True
                )
    print(f"\n{len(DAMAGES)} damages, {len(failed)} that failed")
    return 1 if failed else 0


def flags(tiny: Tiny, output_dir: Path) -> dict:
    """Of a run of four steps on two ranks at stage 3."""
    return tiny.flags(
        3,
        output_dir=output_dir,
        max_steps=4,
        save_steps=2,
        num_eval_prompts=0,
        enable_ema=True,
        actor_zero_stage=3,
        critic_zero_stage=3,
    )


def small_run(tiny: Tiny, output_dir: Path) -> Path:
    """A run with two checkpoints."""
    result = launch(3, flags(tiny, output_dir))
    assert result.code == 0, result.stdout + result.stderr
    return output_dir


def by_the_program(tiny: Tiny, output_dir: Path, points: list[Path]) -> str | None:
    """What is wrong with how the program goes on from a damaged checkpoint, by its name and by its run's folder."""
    newest, older = points
    result = launch(3, {**flags(tiny, output_dir), "resume": newest})
    message = result.stderr.replace("\n", " ")
    if (
        result.code != 2
        or "Traceback" in result.stdout + result.stderr
        or "Give the run's output folder" not in message
    ):
        return f"FAILED by its name: exit code {result.code}: {message[-300:]}"
    result = launch(3, {**flags(tiny, output_dir), "resume": "auto"})
    if result.code != 0 or f"goes on from {older}" not in result.stdout or "PASSED OVER" not in result.stdout:
        return f"FAILED: exit code {result.code}: {result.stderr[-300:]}"
    return None


if __name__ == "__main__":
    sys.exit(main())
