"""What of ZeRO and DeepSpeed two engines and more can have in one run: each feature runs, or is refused by name.

    python scripts/trial_zero_features.py                        # the whole table
    python scripts/trial_zero_features.py --only hpZ offload     # features whose name has one of these in it
    python scripts/trial_zero_features.py --markdown table.md    # written as a table of Markdown too

Each is a run of step 3 of --steps steps on 2 ranks (4 for hpZ) on CPUs, with the tiny models of the tests or those that
--actor, --reward and --data name; ranks are forks of a process that has everything imported. A feature that runs has to
have the numbers of the plain run (stage 0, or the same in its precision): the farthest of all metrics that are no
times, relative, numbers below 0.01 as if they were 0.01. One that is refused has to be so with one message that
names its key, with exit code 2, before a model is loaded. Exit code 1 where one of them does otherwise.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests/, which is not installed
MEASURED_ANEW = ("time/", "speed/", "mfu/", "memory/", "rollout/tokens_per_second")
SMALL = 0.01


@dataclass(frozen=True)
class Outcome:
    """What came of a feature. problem: what is wrong with it, or ""; said: the rest of its line."""

    said: str
    problem: str
    seconds: float
    metrics: list[dict] | None = None


def main() -> int:
    """Try the features, print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], help="features whose name has one of these in it")
    parser.add_argument("--actor", help="the SFT model (default: a tiny Llama)")
    parser.add_argument("--reward", help="the reward model")
    parser.add_argument("--data", help="prompts, as JSON lines")
    parser.add_argument("--steps", type=int, default=3, help="of each run (default: 3)")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit for one run (default: 120)")
    parser.add_argument("--at_once", type=int, default=3, help="runs at a time (default: 3)")
    parser.add_argument("--markdown", help="a file for the table")
    parser.add_argument("--keep", help="a folder for what the runs write and print")
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}  # before torch is imported
    with tempfile.TemporaryDirectory() as folder:
        root = Path(options.keep or folder).resolve()
        root.mkdir(parents=True, exist_ok=True)
        os.environ["XDG_CACHE_HOME"] = str(root / "cache")  # tokenised data
        return try_all(root, options)


def try_all(root: Path, options: argparse.Namespace) -> int:
    """Run every feature and print its line; returns the exit code."""
    from engine.zero.extensions import can_swap
    from scripts.zero_features.features import running
    from scripts.zero_features.refused import refused

    nvme = {"device": "nvme", "nvme_path": str(root / "disk"), "pin_memory": False, "buffer_size": 20_000}
    wanted = running(nvme if can_swap() else None) + refused(nvme, can_swap())
    flags = plain_flags(root, options)
    chosen = [feature for feature in wanted if not options.only or any(part in feature.name for part in options.only)]
    likes = {feature.like for feature in chosen if feature.refused is None}
    chosen = [feature for feature in wanted if feature in chosen or feature.name in likes]
    started = time.monotonic()
    found = outcomes(chosen, flags, root, options)
    wrong = [feature.name for feature in chosen if found[feature.name].problem]
    ran = sum(feature.refused is None for feature in chosen)
    print(
        f"{len(chosen)} features in {time.monotonic() - started:.0f} s: {ran} to run, {len(chosen) - ran} to be refused"
        f"; wrong: {', '.join(wrong) or 'none'}"
    )
    if options.markdown:
        Path(options.markdown).write_text(table(chosen, found))
    return 1 if wrong else 0


def outcomes(chosen: list, flags: dict, root: Path, options: argparse.Namespace) -> dict[str, Outcome]:
    """What came of each feature, by name; some at a time, and none before the one that it is to be like."""
    from scripts.zero_features.forked import import_all
    from tests.engine.zero.inspecting import pretend_cpus_have_fp16

    import_all()
    pretend_cpus_have_fp16()  # ranks are forks; DeepSpeed refuses CPUs without AVX512-FP16
    found: dict[str, Outcome] = {}
    waiting, running = list(chosen), []
    while waiting or running:
        ready = [one for one in waiting if one.refused or one.like in found or one.like == one.name]
        for feature in ready[: max(0, options.at_once - len(running))]:
            waiting.remove(feature)
            folder = root / f"run{chosen.index(feature)}"
            running.append((feature, folder, start(feature, flags, folder, options.seconds)))
        for feature, folder, run in list(running):
            if (ended := run.ended()) is None:
                continue
            running.remove((feature, folder, run))
            found[feature.name] = outcome = judged(feature, ended, folder, found)
            mark = "WRONG" if outcome.problem else "ok"
            said = outcome.problem or outcome.said
            print(f"{mark:5}  {feature.name} (by {feature.by}, {outcome.seconds:.1f} s)  {said}", flush=True)
        time.sleep(0.02)
    return found


def plain_flags(root: Path, options: argparse.Namespace) -> dict:
    """Flags of every run."""
    from tests.e2e.programs import Tiny
    from tests.tiny_models import make_causal_lm, make_scorer

    tiny = Tiny(root / "tiny")
    make_causal_lm(root / "tiny/llama", "llama", seed=0)
    make_scorer(root / "tiny/scorer", "llama", seed=1, offset=-0.3)
    given = {
        "actor_model_name_or_path": options.actor or root / "tiny/llama",
        "critic_model_name_or_path": options.reward or root / "tiny/scorer",
        "data_path": options.data or root / "tiny/prompts.jsonl",
        "num_eval_prompts": 0,
        "max_steps": options.steps,
        "ppo_epochs": 2,
        "num_warmup_steps": 0,
        "actor_learning_rate": 1e-3,
        "critic_learning_rate": 1e-3,
        "dtype": "fp32",
    }
    return tiny.flags(3, **given)


def start(feature, flags: dict, folder: Path, seconds: float):
    """Start a feature's run."""
    from scripts.zero_features.forked import Started
    from tests.e2e.programs import command_line

    folder.mkdir(parents=True, exist_ok=True)
    flags = {**flags, **feature.flags, "output_dir": folder / "out", "overwrite_output_dir": True}
    for name in ("per_device_generation_batch_size", "per_device_training_batch_size"):
        flags[name] = 8 // feature.ranks
    for role, content in feature.files.items():
        path = folder / f"{role}.json"
        path.write_text(json.dumps(content))
        flags[f"{role}_ds_config"] = path
    return Started(command_line(flags), feature.ranks, seconds, folder / "printed")


def judged(feature, ended, folder: Path, found: dict[str, Outcome]) -> Outcome:
    """What came of a feature by how its run ended."""
    said, problem, metrics = (refusal if feature.refused else numbers)(feature, ended, folder, found)
    return Outcome(said, problem, ended.seconds, metrics)


def refusal(feature, ended, folder: Path, found: dict[str, Outcome]) -> tuple[str, str, None]:
    """What is wrong with how a run ended that was to be refused."""
    errors = [line for text in ended.stderr for line in text.splitlines() if line]
    message = errors[0].removeprefix("error: ") if errors else ""
    problem = ""
    if None in ended.codes:
        problem = "hung"
    elif "Traceback" in ended.printed:
        problem = f"a trace: {last_line(ended)}"
    elif set(ended.codes) != {2} or len(errors) != 1 or not errors[0].startswith("error: "):
        problem = f"not refused: exit codes {ended.codes}, {errors[:3]}"
    elif feature.refused not in message or (feature.by == "file" and feature.files and ".json" not in message):
        problem = f"the message does not name {feature.refused} and the file: {message}"
    elif any(ended.stdout) or (folder / "out").exists():
        problem = "refused after the run had begun"
    return f"refused: {message}", problem, None


def numbers(feature, ended, folder: Path, found: dict[str, Outcome]) -> tuple[str, str, list[dict] | None]:
    """How far the metrics of a run are from those that it is to have."""
    if None in ended.codes:
        return "", "hung", None
    if set(ended.codes) != {0} or "Traceback" in ended.printed:
        return "", f"exit codes {ended.codes}: {last_line(ended)}", None
    own = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
    compared = slice(feature.steps)
    reference = own if feature.like == feature.name else found[feature.like].metrics
    if reference is None:
        return "", f"nothing to compare with: {feature.like} failed", own
    if [step.keys() for step in own] != [step.keys() for step in reference]:
        return "", f"other metrics than {feature.like}", own
    distances = [
        (abs(step[name] - other[name]) / max(SMALL, abs(other[name])), name)
        for step, other in zip(own[compared], reference[compared])
        for name in step
        if isinstance(step[name], float) and not name.startswith(MEASURED_ANEW)
    ]
    far, name = max(distances, key=lambda pair: (pair[0] != pair[0], pair[0]))
    said = f"runs; farthest from {feature.like}: {name} by {far:.1e}" if far else f"runs; all equal to {feature.like}"
    return (
        said,
        "" if far <= feature.tolerance else f"{name} is {far:.1e} from {feature.like}, more than {feature.tolerance:g}",
        own,
    )


def last_line(ended) -> str:
    """What a run said last on stderr."""
    lines = [line for text in ended.stderr for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "nothing on stderr"


def table(chosen: list, found: dict[str, Outcome]) -> str:
    """The table as Markdown."""
    rows = ["| feature | by | ranks | result |", "| --- | --- | --- | --- |"]
    for feature in chosen:
        outcome = found[feature.name]
        said = f"**WRONG**: {outcome.problem}" if outcome.problem else outcome.said
        said = re.sub(r"\S*/(\w+\.json)", r"\1", said).replace("|", "\\|")  # files without their folders
        rows.append(f"| {feature.name} | {feature.by} | {feature.ranks} | {said} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
