"""Damages models in some seventy ways, and tries to train with each: none may be used, each has to end in one message.

    python scripts/damage_models.py --run 4

Every damage is done to the SFT model and to the reward model of a run of step 3 which would otherwise take seconds. The
runs are made one after the other in this process, --run of them by `deepspeed --num_gpus 2`. Prints a table of damages
and messages. Exit code 1 if a damaged model was used, or if a run ended otherwise than with one message on stderr and
exit code 2.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests/, which is not installed

WIDTH = 150  # of a message in the table


def main() -> int:
    """Try the damages and print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=int, default=0, help="so many of them by DeepSpeed's launcher (default: 0)")
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}  # before torch is imported
    from transformers.utils import logging

    from engine.zero.communication import init
    from tests.e2e.programs import Tiny, launch_words, run_caught
    from tests.engine.models import model_damages
    from training.program.startup import quiet_libraries

    quiet_libraries()
    logging.disable_progress_bar()
    init()
    kinds = {
        "weights": model_damages.WEIGHTS,
        "safetensors headers": model_damages.HEADERS,
        "configuration, tokenizer": model_damages.CONFIGURATIONS,
        "code": model_damages.CODE,
    }
    failed = tried = 0
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(root / "cache")
        tiny = Tiny(root / "tiny")
        sound = sound_models(root)
        for kind, damages in kinds.items():
            print(f"\n{kind}\n{'damage':38} {'to':7} {'exit':>4}  message")
            for damage in damages:
                for role in sound if damage not in model_damages.OF_ACTORS else ("actor",):
                    run = launch_words if tried < options.run else run_caught
                    result = try_damage(damages[damage], role, root, sound, tiny, run)
                    ok = is_one_message(result) and not (root / model_damages.RAN).exists()
                    tried, failed = tried + 1, failed + (not ok)
                    print(
                        f"{damage:38} {role:7} {result.code:4}  {'' if ok else 'FAILED '}{shown(result, root)}",
                        flush=True,
                    )
    print(
        f"\n{tried} damaged models tried: {failed} were used, or ended otherwise than with one message and exit code 2"
    )
    return 1 if failed else 0


def sound_models(root: Path) -> dict[str, Path]:
    """An SFT model and a reward model, by role."""
    from tests.tiny_models import make_causal_lm, make_scorer

    return {
        "actor": Path(make_causal_lm(root / "sound" / "actor")),
        "critic": Path(make_scorer(root / "sound" / "critic", offset=0.3)),
    }


def try_damage(damage, role: str, root: Path, sound: dict[str, Path], tiny, run):
    """The Result of a run of step 3 whose model of this role is damaged."""
    from tests.e2e.programs import command_line

    damaged, other = root / "damaged" / "model", sound["critic" if role == "actor" else "actor"]
    shutil.rmtree(root / "damaged", ignore_errors=True)
    shutil.copytree(sound[role], damaged)
    damage(damaged, other)
    models = {f"{name}_model_name_or_path": damaged if name == role else path for name, path in sound.items()}
    shutil.rmtree(root / "out", ignore_errors=True)
    return run(3, command_line(tiny.flags(3, **models, output_dir=root / "out", max_steps=1, dtype="fp32")))


def is_one_message(result) -> bool:
    """Whether it ended as a user's mistake does. A launcher writes lines of its own and gives its own exit code."""
    lines = [line for line in result.stderr.splitlines() if line.startswith(("error: ", "stopped: "))]
    trace = "Traceback" in result.stdout + result.stderr
    return result.code != 0 and len(lines) == 1 and lines[0].startswith("error: ") and not trace


def shown(result, root: Path) -> str:
    """The message as the table has it."""
    lines = [line for line in result.stderr.splitlines() if line.startswith(("error: ", "stopped: "))]
    text = lines[0] if lines else (result.stderr.strip().splitlines() or ["no message"])[-1]
    text = text.removeprefix("error: ").replace(str(root / "damaged"), "DIR")
    return text if len(text) <= WIDTH else text[:WIDTH] + "..."


if __name__ == "__main__":
    sys.exit(main())
