"""Command lines whose exit code and words scripts/same_results.py records: mistakes, damages, faults, dry runs, plans.

Each function of ANSWERS makes what the command lines need in a folder, and gives them by name. What is wrong in them is
listed in this repository; the programs are those of the version that is recorded.
"""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from scripts.damage_models import GOES_ON, roles, sound_adapters, sound_models
from scripts.damage_points import flags as flags_of_points
from scripts.harness import model_damages
from scripts.harness.adapter_damages import ADAPTERS, OF_SCORERS
from scripts.harness.bad_world import BadWorld
from scripts.harness.mistakes import every_mistake
from scripts.harness.point_damages import DAMAGES
from scripts.harness.programs import Tiny, command_line
from scripts.simulation.scaling import configuration

PROGRAMS = {1: "training/step1_sft.py", 2: "training/step2_reward.py", 3: "training/step3_rlhf.py"}
MEASURED = re.compile(
    r"(?<![\w.])\d+(\.\d+)?(?= (s|ms|seconds?)\b)|0x[0-9a-f]{6,}|(?<=pid |ess )\d+|(?<=port )\d+|(?<=since )[\d:]+"
    r"|\d+(?= bytes, and was written)|(?<=written with )\d+"  # a checkpoint's state holds times
)
NUMBERED = re.compile(r"(?<=FOLDER/)((?:out/?)?)\d+")  # how many command lines there are may change
SAID = re.compile(r"^(error|stopped): |the run ends\.$")
RUNNING = re.compile(r"step \d+/\d+ |memory, planned|checkpoint .* waited")  # what a run says that goes well
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Reward functions to which something happens in the second step, in the last rank.
FAULTS = """
import os, signal, time
last, calls = int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1, 0

def second():
    global calls
    calls += 1
    return last and calls == 2

def raises(prompts, responses):
    return [1 / (not second())] * len(responses)

def nan(prompts, responses):
    return [float("nan" if second() else 0)] * len(responses)

def too_few(prompts, responses):
    return [0.0] * (len(responses) - second())

def words(prompts, responses):
    return ["much" if second() else 0.0] * len(responses)

def exits(prompts, responses):
    if second():
        os._exit(3)
    return [0.0] * len(responses)

def signalled(name):
    def score(prompts, responses):
        if second():
            os.kill(os.getpid(), getattr(signal, name))
            time.sleep(1)
        return [0.0] * len(responses)
    return score

killed, stopped, terminated = map(signalled, ("SIGKILL", "SIGSTOP", "SIGTERM"))
"""


def bad_input(folder: Path, tree: Path) -> dict[str, dict]:
    """Every mistake of the lists; how names are misspelt does not depend on what other names there are."""
    world = BadWorld(folder / "bad", Tiny(folder / "tiny"))
    even = SimpleNamespace(randrange=lambda size: size // 2, choice=lambda found: found[len(found[0]) % len(found)])
    jobs = {}
    for number, mistake in enumerate(every_mistake(world, even)):
        flags = world.tiny.flags(mistake.step, **{"output_dir": folder / "out" / str(number), **mistake.changes})
        words = [*command_line(flags), *mistake.words]
        if mistake.yaml is not None:
            settings = folder / f"{number}.yaml"
            settings.write_bytes(mistake.yaml if isinstance(mistake.yaml, bytes) else mistake.yaml.encode())
            words += ["--config", str(settings)]
        wrong = " ".join(repr(word)[1:-1] for word in (*command_line(mistake.changes), *mistake.words))
        told = (wrong or repr(mistake.yaml)).replace(str(folder), "FOLDER")
        name = f"{mistake.kind}, step {mistake.step}: {told[:120]}"
        while name in jobs:
            name += " again"
        jobs[name] = {"words": [PROGRAMS[mistake.step], *words]}
    return jobs


def damaged_models(folder: Path, tree: Path) -> dict[str, dict]:
    """Each damage, of the actor's model and of the critic's."""
    tiny = Tiny(folder / "tiny")
    whole, adapters = sound_models(folder / "sound"), sound_adapters(folder / "sound_adapters")
    m = model_damages
    kinds = {
        "": (m.WEIGHTS | m.HEADERS | m.CONFIGURATIONS | m.CODE, whole, {}),
        "merged adapter": (ADAPTERS | OF_SCORERS, adapters, {}),
        "trained adapter": (ADAPTERS | OF_SCORERS, adapters, GOES_ON),
    }
    jobs = {}
    for kind, (damages, sound, flags) in kinds.items():
        for damage, role in ((damage, role) for damage in damages for role in sound if role in roles(damage)):
            damaged = folder / str(len(jobs)) / "model"
            shutil.copytree(sound[role], damaged)
            if kind:
                shutil.copytree(sound[role].with_name("base_of_both"), damaged.with_name("base_of_both"))
            damages[damage](damaged, sound["critic" if role == "actor" else "actor"])
            models = {f"{name}_model_name_or_path": damaged if name == role else path for name, path in sound.items()}
            words = tiny.flags(3, **models, output_dir=folder / f"out{len(jobs)}", max_steps=1, dtype="fp32", **flags)
            jobs[f"{kind} {role}: {damage}"] = {"words": [PROGRAMS[3], *command_line(words)]}
    return jobs


def damaged_points(folder: Path, tree: Path) -> dict[str, dict]:
    """Each damage of a checkpoint that this version has written on two ranks: resumed by name, and by its run."""
    flags = flags_of_points(Tiny(folder / "tiny"), folder / "run")
    assert launched(tree, 2, [PROGRAMS[3], *command_line(flags)])["code"] == 0
    jobs = {}
    for number, (name, damage) in enumerate(DAMAGES.items()):
        run = folder / str(number)
        older, newest = (run / "checkpoints" / f"step_{step:06d}" for step in (2, 4))
        shutil.copytree(folder / "run" / "checkpoints", run / "checkpoints", symlinks=True)
        damage(newest, older)
        named = newest if newest.exists() else newest.with_name("step_000099")
        for way, resumed in (("by its name", {"resume": named}), ("by its run", {"resume": run, "dry_run": True})):
            words = flags | {"output_dir": run, "per_device_generation_batch_size": 8, **resumed}
            jobs[f"{name}, {way}"] = {"words": [PROGRAMS[3], *command_line(words)]}
    return jobs


def faults(folder: Path, tree: Path) -> dict[str, dict]:
    """What happens in the second step, to one process and to one of two ranks."""
    tiny, jobs = Tiny(folder / "tiny"), {}
    (folder / "rules.py").write_text(FAULTS)
    for ranks, names in (
        (1, ("raises", "nan", "too_few", "words", "exits", "terminated")),
        (2, ("raises", "nan", "killed", "stopped", "terminated")),
    ):
        for name in names:
            out = folder / f"{name}_{ranks}"
            function = {"reward_function": f"{folder}/rules.py:{name}", "reward_model_name_or_path": None}
            flags = tiny.flags(3, output_dir=out, max_steps=3, save_steps=1, num_eval_prompts=0, **function)
            words = [PROGRAMS[3], *command_line(flags)]
            jobs[f"{name}, {ranks} ranks"] = {"words": words, "ranks": ranks}
    return jobs


def launchers(folder: Path, tree: Path) -> dict[str, dict]:
    """--dry_run of every launcher, step and hardware, and the planner's table of its step 3."""
    stand_ins, jobs = folder / "bin", {}
    stand_ins.mkdir()
    for name in ("python", "deepspeed"):
        (stand_ins / name).write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
        (stand_ins / name).chmod(0o755)
    for script in sorted([*(tree / "scripts").glob("opt_*.sh"), *(tree / "scripts").glob("llama2_*.sh")]):
        family, _, size = script.stem.partition("_")
        models, out = folder / script.stem, folder / "out"
        sft = configuration(f"opt-{size}" if family == "opt" else f"llama-2-{size}")
        config(models / "sft", sft)
        config(models / "reward", configuration("opt-350m" if family == "opt" else "llama-2-7b"))
        adapter = {"base_model_name_or_path": str(models / "sft"), "peft_type": "LORA", "task_type": "SEQ_CLS"}
        config(models / "reward" / "adapter", adapter | {"r": 64, "target_modules": LINEAR}, "adapter_config.json")
        told = subprocess.run(["bash", script, "--help"], check=True, capture_output=True, text=True).stdout
        for hardware in re.findall(r"^  (\d+x[\w-]+) ", told, re.MULTILINE):
            count, _, gpu = hardware.partition("x")
            nodes, hosts = max(1, int(count) // 8), models / f"hosts_{hardware}"
            hosts.write_text("".join(f"node{number} slots=8\n" for number in range(nodes)))
            several = {"HOSTFILE": str(hosts)} if nodes > 1 else {}
            for step in PROGRAMS:
                environment = {
                    "PATH": f"{stand_ins}:/usr/bin:/bin",
                    "HARDWARE": hardware,
                    "OUT": str(out),  # where no models are
                    **several,
                }
                command = ["bash", str(script), str(step), "--dry_run"]
                ended = subprocess.run(command, env=environment, text=True, capture_output=True, check=True)
                words = ended.stdout.split("\0")[:-1]
                jobs[f"{script.stem} {step}, {hardware}"] = {"words": words}
            flags = words[next(place for place, word in enumerate(words) if "step3_rlhf" in word) + 1 :]
            machines = ["--gpu", gpu, "--num_gpus", str(min(8, int(count))), "--num_nodes", str(nodes)]
            flags = [*(word.replace(str(out), str(models)) for word in flags if word != "--dry_run"), *machines]
            jobs[f"plan of {script.stem}, {hardware}"] = {"words": ["training/memory_plan.py", *flags, "--json"]}
    return jobs


ANSWERS = {answer.__name__: answer for answer in (bad_input, damaged_models, damaged_points, faults, launchers)}


def recorded(answer: str, tree: Path) -> dict[str, dict]:
    """What the command lines of ANSWERS[answer] end with."""
    with working_folder() as folder:
        jobs = ANSWERS[answer](folder, tree)
        found = inside(tree, "programs", {name: job for name, job in jobs.items() if job.get("ranks", 1) == 1}, folder)
        found |= {name: launched(tree, job["ranks"], job["words"]) for name, job in jobs.items() if name not in found}
        for name, job in jobs.items():
            told = found[name]["stderr"].splitlines()
            if job.get("ranks", 1) > 1:
                told = sorted({line for line in told if SAID.search(line)})
            elif any(line.startswith("Traceback") for line in told):
                told = [line for line in told if not line.startswith(" ")]  # without the code's places
            found[name]["stderr"] = [line for line in told if not RUNNING.match(line)]
            if not {"--dry_run", "--json"} & set(job["words"]):
                del found[name]["stdout"]  # times of what was trained
        text = json.dumps({name: found[name] for name in jobs}).replace(str(folder), "FOLDER")
        return json.loads(NUMBERED.sub(r"\1N", MEASURED.sub("N", text.replace(str(tree), "TREE"))))


@contextlib.contextmanager
def working_folder() -> Iterator[Path]:
    """A folder that is removed; its path is always as long, as messages cut what is too long for them."""
    with tempfile.TemporaryDirectory(prefix="records_", ignore_cleanup_errors=True) as name:
        yield Path(name)


def inside(tree: Path, what: str, jobs: dict[str, dict], folder: Path) -> dict[str, dict]:
    """What scripts/same_results_inside.py finds of these jobs in the version at `tree`."""
    if not jobs:
        return {}
    files = [folder / "jobs.json", folder / "results.json"]
    files[0].write_text(json.dumps(jobs))
    program = Path(__file__).with_name("same_results_inside.py")
    here = folder / "here"  # where relative names mean nothing
    here.mkdir(exist_ok=True)
    cached = environment(tree) | {"XDG_CACHE_HOME": str(folder / "cache")}
    subprocess.run([sys.executable, program, what, *files], cwd=here, env=cached, check=True)
    return json.loads(files[1].read_text())


def launched(tree: Path, ranks: int, words: list[str]) -> dict:
    """How a program of the version ends by DeepSpeed's launcher."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = ["deepspeed", "--log_level", "critical", "--num_gpus", str(ranks), "--master_port", port, *words]
    ended = subprocess.run(command, cwd=tree, env=environment(tree), capture_output=True, text=True)
    return {"code": ended.returncode, "stdout": ended.stdout, "stderr": ended.stderr}


def environment(tree: Path) -> dict[str, str]:
    """What a version's programs run in."""
    fixed = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **fixed, "PYTHONPATH": str(tree)}


def config(folder: Path, content: dict, name: str = "config.json") -> None:
    """A model's folder that holds nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(content))
