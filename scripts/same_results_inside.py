"""What scripts/same_results.py runs within the version that it records; PYTHONPATH is its folder.

    python scripts/same_results_inside.py programs JOBS.json RESULTS.json
    python scripts/same_results_inside.py data JOBS.json RESULTS.json

`programs` runs command lines, each in a process of its own that is forked from one in which everything is imported, two
at a time. `data` reads data sets, and says which rows are held out and which ids stand in which batch. Nothing of the
version is imported by the name of a module but the three programs: `named` finds where a class or function stands.
"""

import gc
import hashlib
import importlib
import json
import os
import re
import runpy
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

from transformers import AutoTokenizer

ROOT = Path(os.environ["PYTHONPATH"])
SECONDS = 600  # for one command line
AT_ONCE = 2


def programs(jobs: dict[str, dict]) -> dict[str, dict]:
    """By name, the exit code and what was printed. A job: {"words": ["training/step3_rlhf.py", "--seed", ...] or ["-m",
    module, ...], "fp16": whether the CPU is to pass for one that has fp16}."""
    for step in ("step1_sft", "step2_reward", "step3_rlhf"):
        importlib.import_module(f"training.{step}")
    gc.freeze()
    printed = Path(tempfile.mkdtemp())
    results, running = {}, {}
    waiting = list(jobs.items())
    while waiting or running:
        if waiting and len(running) < AT_ONCE:
            name, job = waiting.pop(0)
            files = [printed / f"{len(waiting)}.{stream}" for stream in ("out", "err")]
            process = os.fork()
            if process == 0:
                _run(job, files)
            running[process] = name, files
            continue
        process, status = os.wait()
        name, files = running.pop(process)
        code = os.waitstatus_to_exitcode(status)
        print(f"{len(results) + 1} of {len(jobs)}, code {code}: {name[:100]}", file=sys.stderr, flush=True)
        stdout, stderr = (file.read_text(errors="backslashreplace") for file in files)
        results[name] = {"code": code, "stdout": stdout, "stderr": stderr}
    shutil.rmtree(printed)
    return results


def _run(job: dict, files: list[Path]) -> None:
    """Be the process of a command line."""
    code = 1
    try:
        os.setsid()
        signal.alarm(SECONDS)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, file in enumerate(files, start=1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
        if job.get("fp16"):
            cpu = importlib.import_module("deepspeed.accelerator.cpu_accelerator").CPU_Accelerator
            cpu.is_fp16_supported = lambda self: True  # which is slow, but right
        warnings.filterwarnings("ignore", module="runpy")  # that it runs what is imported already
        module = job["words"][0] == "-m"
        sys.argv = job["words"][module:]
        if module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv[0] = str(ROOT / sys.argv[0])
            runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def named(name: str):
    """What is defined by this name in training/ or engine/."""
    definition = re.compile(rf"^(class|def) {name}\b", re.MULTILINE)
    for path in (path for folder in ("training", "engine") for path in sorted((ROOT / folder).rglob("*.py"))):
        if definition.search(path.read_text()):
            return getattr(importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts)), name)
    raise SystemExit(f"no {name} in {ROOT}: name in scripts/same_results_inside.py what stands for it")


def data(jobs: dict[str, dict]) -> dict[str, dict]:
    """By name, fingerprints, held-out rows, ids and orders. A job: {"model": folder, "form": its name, "template": chat
    template, "rows": arguments of load_rows, "examples": arguments of the class that makes examples of the rows}."""
    load_rows, batches, order = named("load_rows"), named("epoch_batches"), named("PromptOrder")
    form_class = named("Form")
    found = vars(sys.modules[form_class.__module__]).values()
    forms = {form.name: form for form in found if isinstance(form, form_class)}
    classes = {"text": "SFTExamples", "pair": "PairExamples", "prompt": "Prompts", "pretraining text": "TextBlocks"}
    results = {}
    for name, job in jobs.items():
        tokenizer = AutoTokenizer.from_pretrained(job["model"])
        tokenizer.chat_template = job.get("template")
        parts = load_rows(form=forms[job["form"]], tokenizer=tokenizer, seed=1234, **job["rows"])
        examples = [named(classes[job["form"]])(rows, tokenizer, **job["examples"]) for rows in parts if len(rows)]
        size, visited = len(examples[0]), order(len(examples[0]), 24, 1234)
        results[name] = {
            "fingerprints": [rows.fingerprint for rows in parts],
            "held out": [parts[1].where(index) for index in range(len(parts[1]))],
            "sizes": [len(part) for part in examples],
            "first ids": [part[index] for part in examples for index in range(min(3, len(part)))],
            "all ids": [hashlib.sha256(json.dumps(list(part)).encode()).hexdigest() for part in examples],
            "batches": {
                f"epoch {epoch}, rank {rank} of {world}": _hashed(
                    [list(map(int, ids)) for ids in batches(size, 8 // world, epoch, 1234, rank, world)]
                )
                for epoch in (0, 1)
                for rank, world in ((0, 1), (0, 2), (1, 2))
            },
            "visits": {step: [x.tolist() for x in visited.batch(step)] for step in (0, 1, size // 24, 3 * size // 24)},
        }
    return results


def _hashed(batches: list[list[int]]) -> list:
    """The first batches, how many there are, and a hash of all."""
    return [*batches[:4], len(batches), hashlib.sha256(json.dumps(batches).encode()).hexdigest()]


if __name__ == "__main__":
    what, jobs, results = sys.argv[1:]
    found = {"programs": programs, "data": data}[what](json.loads(Path(jobs).read_text()))
    Path(results).write_text(json.dumps(found, indent=1))
