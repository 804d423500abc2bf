"""Whether two versions of this repository compute and say the same: record each, then compare.

    python scripts/same_results.py record OUT/before --tree ../old_clone --models quickstart
    python scripts/same_results.py record OUT/after --models quickstart
    python scripts/same_results.py compare OUT/before OUT/after

`record` writes a folder for each training run: the quickstart's step 3; three steps of every dialect with 1 and 2 ranks
at ZeRO stages 0 and 3 (real partitions: the thresholds below which DeepSpeed keeps small weights gathered are 0); what
no dialect has (`variants`), restarts among it; and steps 1 and 2. And data.json: fingerprints, held-out rows, order and
ids of the quickstart's data, of --data, and of dialogues under two chat templates.

`--models` is a folder of scripts/quickstart_models.sh, the same for both; run both on one machine. What is there is not
recorded again; `--only lora bf16` records what has one of these texts in its name. `--points OUT/before` has restarts
go on from the checkpoint that another version wrote.

`compare` reads metrics.jsonl apart from times and memory, the samples, every weight that was saved, config.json of the
models, dialect and DeepSpeed's configurations in run.json, and data.json. Exit code 1 where something differs.
"""

import argparse
import contextlib
import gc
import hashlib
import importlib
import itertools
import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import load_file
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # behind PYTHONPATH: `inside` runs another version

from engine.algorithms import DIALECTS, get_dialect  # noqa: E402

PROGRAMS = {1: "training/step1_sft.py", 2: "training/step2_reward.py", 3: "training/step3_rlhf.py"}
SECONDS = 600  # for one command line
AT_ONCE = 2
SETTINGS = {
    "openai": ["query_start=", "query_end=", "truncate_token=eos", "truncate_after=0"],
    "grpo": ["samples_per_prompt=4"],
}
MEASURED_ANEW = (
    "time/",
    "speed/",
    "mfu/",
    "memory/",
    "checkpoint/",
    "rollout/tokens_per_second",
)  # differ between two runs of one version
THRESHOLDS = ("stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = (
    "{% for message in messages %}{% if message['role'] == 'user' %}Human: {{ message['content'] }}\n"
    "{% elif message['role'] == 'assistant' %}Assistant: {{ message['content'] }}{{ eos_token }}\n"
    "{% else %}{{ message['content'] }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "plain": PLAIN}


def quickstart(models: Path, out: Path) -> dict:
    """The quickstart's step 3 on two ranks, as scripts/quickstart.sh has it."""
    return step3(
        models,
        out,
        critic_zero_stage=3,
        actor_zero_stage=3,
        num_eval_prompts=256,
        max_answer_seq_len=32,
        per_device_generation_batch_size=64,
        per_device_training_batch_size=64,
        max_steps=60,
        eval_steps=15,
        ppo_epochs=2,
        kl_coef=0.15,
        actor_learning_rate=1.5e-3,
        critic_learning_rate=2e-3,
        lr_scheduler_type="cosine",
        ema_decay=0.95,
        print_answers_interval=20,
        enable_ema=True,
    )


def dialect_run(models: Path, out: Path, dialect: str, ranks: int, stage: int, **changes) -> dict:
    """Three steps of a dialect, with these changes."""
    has_critic = get_dialect(dialect).has_critic
    flags = {"critic_learning_rate": 1e-3, "critic_zero_stage": stage} if has_critic else {}
    if stage == 3:
        roles = ["actor", "reference", "reward", "critic"][: 4 if has_critic else 3]
        if dialect == "trlx":
            roles.remove("reference")  # within the actor's engine
        flags |= {f"{role}_ds_config": out.parent / "zero3.json" for role in roles}
    if dialect in SETTINGS:
        flags["set"] = SETTINGS[dialect]
    return step3(
        models,
        out,
        dialect=dialect,
        actor_zero_stage=stage,
        num_eval_prompts=16,
        max_answer_seq_len=24,
        per_device_generation_batch_size=16 // ranks,
        per_device_training_batch_size=8 // ranks,
        max_steps=3,
        actor_learning_rate=1e-3,
        num_warmup_steps=1,
        print_answers_interval=0,
        **flags | changes,
    )


def step3(models: Path, out: Path, **flags) -> dict:
    """The flags of a step 3 on these models."""
    return {
        "actor_model_name_or_path": models / "sft",
        "critic_model_name_or_path": models / "reward",
        "data_path": models / "data" / "prompts.jsonl",
        "eval_data_path": models / "data" / "eval_prompts.jsonl",
        "data_output_path": out.parent / "cache",
        "max_prompt_seq_len": 12,
        "output_dir": out,
        "dtype": "fp32",
        **flags,
    }


def variants(models: Path, out: Path, points: Path) -> dict[str, tuple[int, int, dict]]:
    """(step, ranks, flags) by name, of what no dialect has by itself."""
    lora = {"actor_lora_dim": 4, "critic_lora_dim": 4, "only_optimize_lora": True}
    trunk = lora | {"share_trunk": True, "critic_model_name_or_path": out / "reward_lora" / "adapter"}
    shared = [f"{role}_ds_config" for role in ("critic", "reference", "reward")]  # of models without their own engine
    rules = {"reward_function": out / "rules.py:odd"}
    point = {"enable_ema": True, "resume": points / "whole" / "checkpoints" / "step_000001"}
    found = {
        "lora": (1, 0, lora),
        "lora_stage3": (2, 3, lora | dict.fromkeys(shared[1:])),
        "lora_and_weights": (1, 0, {"actor_lora_dim": 4, "lora_alpha": 8}),
        "trunk": (1, 0, trunk),
        "trunk_stage3": (2, 3, trunk | dict.fromkeys(shared)),
        "hydra": (1, 0, {"set": ["hydra_layers=1"]}),
        "reference_ema": (1, 0, {"reference": "ema", "ema_decay": 0.5}),
        "reference_refreshed": (1, 0, {"reference_refresh_steps": 1, "reference_mixup_alpha": 0.5}),
        "ema": (1, 0, {"enable_ema": True, "ema_decay": 0.5, "ema_device": "cpu", "eval_steps": 1}),
        "mixed_pretraining": (1, 0, {"unsupervised_dataset_name": out / "texts.jsonl"}),
        "early_stop": (1, 0, {"set": ["early_stop_kl=0.0001"]}),
        "critic_apart": (1, 0, {"set": ["critic_epochs=2", "critic_mini_batches=2", "value_lam=1"]}),
        "critic_pretrained": (1, 0, {"critic_pretrain_steps": 2, "critic_warmup_steps": 1}),
        "rewards": (1, 0, {**rules, "reward_model_name_or_path": models / "reward", "length_penalty": 0.01}),
        "packed": (1, 0, {"packing": "packed", "stop": ["."]}),
        "plain": (1, 0, {"decoding": "plain", "replicas_between_steps": "free"}),
        "bf16": (1, 0, {"dtype": "bf16"}),
        "fp16": (1, 0, {"dtype": "fp16"}),
        "offload": (1, 2, {"offload": True, "actor_gradient_checkpointing": True}),
        "stage1": (2, 1, {}),
        "stage2": (2, 2, {}),
        "zero3_backend": (2, 3, {"rollout_backend": "zero3"}),
        "divided_copies": (2, 3, {"rollout_backend": "replica", "inference_tp_size": 2}),
        "whole": (1, 0, {"enable_ema": True, "save_steps": 1}),
        "resumed": (1, 0, point),
        "resumed_stage3": (2, 3, point),
    }
    for way in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        found[f"correction_{way}"] = (1, 0, {"set": [f"correction={way}", "correction_max=1.001"]})
    runs = {
        name: (3, ranks, dialect_run(models, out / name, "default", ranks, stage, **flags))
        for name, (ranks, stage, flags) in found.items()
    }
    grouped = {"critic_model_name_or_path": None, **rules, "set": ["samples_per_prompt=2", "dynamic_sampling=4"]}
    runs["dynamic_sampling"] = 3, 1, dialect_run(models, out / "dynamic_sampling", "grpo", 1, 0, **grouped)
    stage3 = {"zero_stage": 3, "ds_config": out / "zero3.json"}
    for name, step, ranks, more in (
        ("sft", 1, 1, {"dropout": 0.1}),
        ("sft_lora", 1, 1, {"lora_dim": 4, "lora_dropout": 0.1}),
        ("sft_stage3", 1, 2, {"dropout": 0.1, **stage3}),
        ("reward", 2, 1, {"dropout": 0.1, "normalize_before": True}),
        ("reward_lora", 2, 1, {"lora_dim": 4, "only_optimize_lora": True}),
        ("reward_from_difference", 2, 1, {"pairwise_loss": "from_difference"}),
        ("reward_stage3", 2, 2, {"dropout": 0.1, **stage3}),
    ):
        flags = {
            "model_name_or_path": models / "sft",
            "data_path": models / "data" / ("sft.jsonl" if step == 1 else "pairs.jsonl"),
            "data_output_path": out / "cache",
            "output_dir": out / name,
            "dtype": "fp32",
            "max_seq_len": 48,
            "per_device_train_batch_size": 16 // ranks,
            "held_out": 64,
            "max_steps": 6,
            "learning_rate": 1e-3,
        }
        if step == 2:
            prompts = models / "data" / "prompts.jsonl"
            flags |= {"normalization_data_path": prompts, "normalization_samples": 64}
            flags |= {"max_prompt_seq_len": 12, "max_answer_seq_len": 24}
        runs[name] = step, ranks, flags | more
    return runs


def record_runs(tree: Path, models: Path, out: Path, points: Path, only: list[str]) -> None:
    """Train everything with the version at `tree`; ends the program where a run failed."""
    from scripts.harness.programs import command_line  # not by `inside`, which imports another version

    config = json.loads((ROOT / "configs" / "ds" / "zero3.json").read_text())
    config["zero_optimization"] |= dict.fromkeys(THRESHOLDS, 0)
    (out / "zero3.json").write_text(json.dumps(config, indent=2))
    (out / "rules.py").write_text("def odd(prompts, responses):\n    return [len(text) % 2 for text in responses]\n")
    write_texts(models, out / "texts.jsonl")
    runs = {"quickstart": (3, 2, quickstart(models, out / "quickstart")), **variants(models, out, points)}
    for dialect in DIALECTS:
        for ranks in (1, 2):
            for stage in (0, 3):
                name = f"{dialect}_ranks{ranks}_stage{stage}"
                runs[name] = 3, ranks, dialect_run(models, out / name, dialect, ranks, stage)
    jobs = {
        name: {
            "words": [PROGRAMS[step], *command_line(flags)],
            "ranks": ranks,
            "fp16": name == "fp16",
        }
        for name, (step, ranks, flags) in runs.items()
        if chosen(name, only) and not (out / f"{name}.log").is_file()
    }
    for name in jobs:
        shutil.rmtree(out / name, ignore_errors=True)  # of a recording that failed
    failed = []
    for later in (False, True):  # what goes on from what others have written
        some = {name: job for name, job in jobs.items() if name.startswith(("resumed", "trunk")) == later}
        with working_folder() as folder:
            ended = inside(tree, "programs", {name: job for name, job in some.items() if job["ranks"] == 1}, folder)
        for name, job in some.items():
            result = ended.get(name) or launched(tree, job["ranks"], job["words"])
            printed = result["stdout"] + result["stderr"]
            if result["code"]:
                failed.append(name)
                print(f"{name} FAILED with code {result['code']}:\n{printed[-3000:]}", flush=True)
            else:
                (out / f"{name}.log").write_text(printed)
                print(name, flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def write_texts(models: Path, path: Path) -> list[str]:
    """Texts of the quickstart's step 1, also as a file of mixed pretraining."""
    texts = [row["prompt"] + row["response"] for row in lines(models / "data" / "sft.jsonl")]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def data_jobs(models: Path, data: Path | None, folder: Path) -> dict[str, dict]:
    """What is asked of data sets: by name, a job of `data`."""
    texts = write_texts(models, folder / "texts.jsonl")
    lengths = {"text": "max_length", "pair": "max_length", "prompt": "max_prompt_length"}
    lengths |= {"pretraining text": "block_length"}
    phases = {"text": 1, "pair": 2, "prompt": 3, "pretraining text": 3}
    jobs = {}

    def ask(name: str, form: str, path: Path, template: str | None = None, **rows) -> None:
        rows = {"data_path": str(path), "phase": phases[form], **rows}
        jobs[name] = {"model": str(models / "sft"), "form": form, "template": template, "rows": rows}
        jobs[name]["examples"] = {lengths[form]: 48}  # which cuts some of the dialogues

    for where, source in {"quickstart": models / "data", "data": data}.items():
        files = {"text": "sft", "pair": "pairs", "prompt": "prompts"} if source is not None else {}
        for form, file in files.items():
            ask(f"{where} {form}", form, source / f"{file}.jsonl", held_out=64)
            ask(f"{where} {form}, a part", form, source / f"{file}.jsonl", split="2,4,4", weights=[1.5], held_out=0.05)
    ask("texts", "pretraining text", folder / "texts.jsonl")
    turns = [texts[start : start + 3 + start % 4] for start in range(0, 360, 6)]
    for kind, roles, name, text in (
        ("messages", ("user", "assistant"), "role", "content"),
        ("conversations", ("human", "gpt"), "from", "value"),
    ):
        path = folder / f"{kind}.jsonl"
        rows = [{kind: [{name: roles[at % 2], text: said} for at, said in enumerate(some)]} for some in turns]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        for template in TEMPLATES:
            for form in ("text", "prompt"):
                ask(f"{kind}, {template}, {form}", form, path, TEMPLATES[template], held_out=8)
    return jobs


@contextlib.contextmanager
def working_folder() -> Iterator[Path]:
    """A folder that is removed; its path is always as long, as messages cut what is too long for them."""
    with tempfile.TemporaryDirectory(prefix="records_", ignore_cleanup_errors=True) as name:
        yield Path(name)


def inside(tree: Path, what: str, jobs: dict[str, dict], folder: Path) -> dict[str, dict]:
    """What `programs` or `data` finds of these jobs, in a process that imports the version at `tree`."""
    if not jobs:
        return {}
    files = [folder / "jobs.json", folder / "results.json"]
    files[0].write_text(json.dumps(jobs))
    here = folder / "here"  # where relative names mean nothing
    here.mkdir(exist_ok=True)
    cached = environment(tree) | {"XDG_CACHE_HOME": str(folder / "cache")}
    subprocess.run([sys.executable, __file__, "inside", what, *files], cwd=here, env=cached, check=True)
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


def programs(jobs: dict[str, dict]) -> dict[str, dict]:
    """By name, the exit code and what was printed. A job: {"words": ["training/step3_rlhf.py", "--seed", ...], "fp16":
    whether the CPU is to pass for one that has fp16}."""
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
        sys.argv = [str(Path(os.environ["PYTHONPATH"]) / job["words"][0]), *job["words"][1:]]
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
    """What is defined by this name in training/ or engine/ of the version that is recorded, wherever it stands."""
    tree = Path(os.environ["PYTHONPATH"])
    definition = re.compile(rf"^(class|def) {name}\b", re.MULTILINE)
    for path in (path for folder in ("training", "engine") for path in sorted((tree / folder).rglob("*.py"))):
        if definition.search(path.read_text()):
            return getattr(importlib.import_module(".".join(path.relative_to(tree).with_suffix("").parts)), name)
    raise SystemExit(f"no {name} in {tree}: name in scripts/same_results.py what stands for it")


def data(jobs: dict[str, dict]) -> dict[str, dict]:
    """By name, fingerprints, held-out rows, ids and orders. A job: {"model": folder, "form": its name, "template": chat
    template, "rows": arguments of load_rows, "examples": arguments of the class that makes examples of the rows}."""
    load_rows = named("load_rows")
    batches = named("epoch_batches")
    order = named("PromptOrder")
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


def record(tree: Path, models: Path, out: Path, points: Path, data: Path | None, only: list[str]) -> None:
    """Write into `out` all that is chosen and not there yet."""
    out.mkdir(parents=True, exist_ok=True)
    if data is None:
        print("no --data: only the quickstart's are read")
    if chosen("data", only) and not (out / "data.json").is_file():
        with working_folder() as folder:
            found = inside(tree, "data", data_jobs(models, data, folder), folder)
        (out / "data.json").write_text(json.dumps(found, indent=1).replace(str(folder), "FOLDER"))
        print(f"data: {len(found)} data sets", flush=True)
    record_runs(tree, models, out, points, only)


def chosen(name: str, only: list[str]) -> bool:
    """Whether something with this name is to be recorded."""
    return not only or any(text in name for text in only)


def differences(before: Path, after: Path, last: int = 0) -> list[str]:
    """What two runs' folders hold that is not the same; last: of so many last lines of the metrics, by default all."""
    found = []
    for name, kind in (("metrics.jsonl", metrics), ("samples/before.jsonl", lines), ("samples/after.jsonl", lines)):
        if not (before / name).is_file() or (last and name == "samples/before.jsonl"):
            continue
        a, b = kind(before / name)[-last:], kind(after / name)[-last:]
        if len(a) != len(b):
            found.append(f"{name}: {len(a)} lines and {len(b)}")
        for number, (one, other) in enumerate(zip(a, b, strict=False), start=1):
            keys = sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))
            found += [f"{name}, line {number}: {key} {one.get(key)!r} and {other.get(key)!r}" for key in keys]
    starts = [json.loads((folder / "run.json").read_text())["starts"][-1] for folder in (before, after)]
    found += [f"run.json: {part}" for part in ("dialect", "deepspeed") if starts[0][part] != starts[1][part]]
    for file in sorted(before.rglob("*.safetensors")):
        if "checkpoints" in file.parts:
            continue
        if not (other := after / file.relative_to(before)).is_file():
            found.append(f"{file.relative_to(before)}: missing")
            continue
        a, b = load_file(file), load_file(other)
        for key in sorted(a.keys() | b.keys()):
            if key not in a or key not in b or a[key].dtype != b[key].dtype or not a[key].equal(b[key]):
                found.append(f"{file.relative_to(before)}: {key}")
        for config in file.parent.glob("*config.json"):
            if (other := after / config.relative_to(before)).read_text() != config.read_text():
                found.append(f"{config} and {other}")
    return found


def lines(path: Path) -> list[dict]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def metrics(path: Path) -> list[dict]:
    """The same, without what no two runs have alike."""
    return [{key: value for key, value in row.items() if not key.startswith(MEASURED_ANEW)} for row in lines(path)]


def compare(before: Path, after: Path) -> int:
    """Print which runs and answers differ and where; returns the exit code."""
    runs = sorted(path.parent.name for path in before.glob("*/metrics.jsonl"))
    files = sorted(path.name for path in before.glob("*.json") if path.name != "zero3.json")
    assert runs or files, f"{before} holds no record"
    found = {
        name: differences(before / name, after / name) if (after / name / "metrics.jsonl").is_file() else ["missing"]
        for name in runs
    }
    if "resumed" in runs and not found["resumed"]:
        found["resumed, against the run that was not stopped"] = differences(after / "whole", after / "resumed", last=2)
    for file in files:
        a, b = (json.loads(path.read_text()) if path.is_file() else {} for path in (before / file, after / file))
        found |= {f"{file}, {name}": parts(a.get(name, "missing"), b.get(name, "missing")) for name in a.keys() | b}
    for name in sorted(found):
        if found[name] or name in runs:
            said = (
                f"{len(found[name])} differences, first: {'; '.join(found[name][:4])}" if found[name] else "identical"
            )
            print(f"{name}: {said}")
    differing = sum(map(bool, found.values()))
    print(f"{len(found) - differing} of {len(found)} identical: {len(runs)} runs, the others of {', '.join(files)}")
    return int(differing > 0)


def parts(one: object, other: object, where: str = "") -> list[str]:
    """Where two values of JSON differ; of texts, the first line."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = sorted(one.keys() | other.keys())
        return [text for key in keys for text in parts(one.get(key), other.get(key), f"{where}{key}: ")]
    if one == other:
        return []
    if isinstance(one, str) and isinstance(other, str):
        pairs = itertools.zip_longest(one.splitlines(), other.splitlines())
        one, other = next((pair for pair in pairs if pair[0] != pair[1]), (one, other))
    return [f"{where}{str(one)[:300]!r} and {str(other)[:300]!r}"]


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("out", type=Path)
    recording.add_argument("--tree", type=Path, default=ROOT, help="the version to run (default: this one)")
    recording.add_argument("--models", type=Path, required=True, help="a folder of scripts/quickstart_models.sh")
    recording.add_argument(
        "--data", type=Path, help="a folder with sft.jsonl, pairs.jsonl and prompts.jsonl, to be read"
    )
    recording.add_argument("--points", type=Path, help="a record whose checkpoint is resumed (default: this one's)")
    recording.add_argument("--only", nargs="+", default=[], help="parts and runs whose names hold one of these texts")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "compare":
        return compare(options.before, options.after)
    out, data = options.out.resolve(), options.data and options.data.resolve()
    points = (options.points or out).resolve()
    record(options.tree.resolve(), options.models.resolve(), out, points, data, options.only)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["inside"]:
        what, asked, answered = sys.argv[2:]
        found = {"programs": programs, "data": data}[what](json.loads(Path(asked).read_text()))
        Path(answered).write_text(json.dumps(found, indent=1))
    else:
        sys.exit(main())
