"""Damages models and adapters in some two hundred ways, and tries to train with each: none may be used, each has to end
in one message.

    python scripts/damage_models.py --run 4
    python scripts/damage_models.py --only adapters

Every damage is done to the SFT model and to the reward model of a run of step 3 which would otherwise take seconds: to
whole ones, to adapters that are merged, and to adapters that training goes on with. The runs are made one after the
other in this process, --run of them by `deepspeed --num_gpus 2`. Prints a table of damages and messages. Exit code 1 if
a damaged model was used, or if a run ended otherwise than with one message on stderr and exit code 2.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, it finds the project
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}  # before torch is imported

from transformers.utils import logging

from engine.zero.communication import init
from scripts.harness import adapter_damages, model_damages
from scripts.harness.models import make_adapter, make_causal_lm, make_scorer
from scripts.harness.programs import Result, Tiny, command_line, launch_words, run_caught
from training.runtime.launch import quiet_libraries

WIDTH = 150  # of a message in the table
GOES_ON = {"actor_lora_dim": 4, "critic_lora_dim": 4, "only_optimize_lora": True}


def main() -> int:
    """Try the damages and print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="kinds of damages whose name has this text (default: all)")
    parser.add_argument("--run", type=int, default=0, help="so many of them by DeepSpeed's launcher (default: 0)")
    options = parser.parse_args()
    quiet_libraries()
    logging.disable_progress_bar()
    init()
    failed = tried = 0
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(root / "cache")
        tiny = Tiny(root / "tiny")
        whole, adapters = sound_models(root / "sound"), sound_adapters(root / "sound_adapters")
        of_adapters = adapter_damages.ADAPTERS | adapter_damages.OF_SCORERS
        kinds = [
            ("weights", model_damages.WEIGHTS, whole, {}),
            ("safetensors headers", model_damages.HEADERS, whole, {}),
            ("configuration, tokenizer", model_damages.CONFIGURATIONS, whole, {}),
            ("code", model_damages.CODE, whole, {}),
            ("adapters that are merged", of_adapters, adapters, {}),
            ("adapters that training goes on with", of_adapters, adapters, GOES_ON),
        ]
        for kind, damages, sound, flags in kinds:
            if options.only not in kind:
                continue
            print(f"\n{kind}\n{'damage':38} {'to':7} {'exit':>4}  message")
            for damage, role in ((damage, role) for damage in damages for role in sound if role in roles(damage)):
                run = launch_words if tried < options.run else run_caught
                result = try_damage(damages[damage], role, root, sound, tiny, run, flags)
                ok = is_one_message(result) and not (root / model_damages.RAN).exists()
                tried, failed = tried + 1, failed + (not ok)
                told = f"{'' if ok else 'FAILED '}{shown(result, root)}"
                print(f"{damage:38} {role:7} {result.code:4}  {told}", flush=True)
    print(
        f"\n{tried} damaged models tried: {failed} were used, or ended otherwise than with one message and exit code 2"
    )
    return 1 if failed else 0


def sound_models(root: Path) -> dict[str, Path]:
    """An SFT model and a reward model, by role."""
    return {
        "actor": Path(make_causal_lm(root / "actor")),
        "critic": Path(make_scorer(root / "critic", offset=0.3)),
    }


def sound_adapters(root: Path) -> dict[str, Path]:
    """An adapter of an SFT model and one of a reward model, by role; beside them base/, which their configurations name
    from where they stand."""
    base, found = make_causal_lm(root / "base_of_both"), {}
    for role in ("actor", "critic"):
        found[role] = Path(make_adapter(root / role, base, scorer=role == "critic"))
        adapter_damages.edit_json(found[role] / "adapter_config.json", base_model_name_or_path="../base_of_both")
    return found


def roles(damage: str) -> tuple[str, ...]:
    """The roles whose models have what is damaged."""
    if damage in model_damages.OF_ACTORS:
        return ("actor",)
    return ("critic",) if damage in adapter_damages.OF_SCORERS else ("actor", "critic")


def try_damage(damage, role: str, root: Path, sound: dict[str, Path], tiny: Tiny, run, flags: dict) -> Result:
    """The Result of a run of step 3, with further flags, whose model of this role is damaged."""
    damaged, other = root / "damaged" / "model", sound["critic" if role == "actor" else "actor"]
    shutil.rmtree(root / "damaged", ignore_errors=True)
    shutil.copytree(sound[role], damaged)
    if (base := sound[role].with_name("base_of_both")).is_dir():
        shutil.copytree(base, damaged.with_name("base_of_both"))
    damage(damaged, other)
    models = {f"{name}_model_name_or_path": damaged if name == role else path for name, path in sound.items()}
    shutil.rmtree(root / "out", ignore_errors=True)
    run_flags = tiny.flags(3, **models, output_dir=root / "out", max_steps=1, dtype="fp32", **flags)
    return run(3, command_line(run_flags))


def is_one_message(result: Result) -> bool:
    """Whether it ended as a user's mistake does. A launcher writes lines of its own and gives its own exit code."""
    lines = [line for line in result.stderr.splitlines() if line.startswith(("error: ", "stopped: "))]
    trace = "Traceback" in result.stdout + result.stderr
    return result.code != 0 and len(lines) == 1 and lines[0].startswith("error: ") and not trace


def shown(result: Result, root: Path) -> str:
    """The message as the table has it."""
    lines = [line for line in result.stderr.splitlines() if line.startswith(("error: ", "stopped: "))]
    text = lines[0] if lines else (result.stderr.strip().splitlines() or ["no message"])[-1]
    text = text.removeprefix("error: ").replace(str(root / "damaged"), "DIR")
    return text if len(text) <= WIDTH else text[:WIDTH] + "..."


if __name__ == "__main__":
    sys.exit(main())
