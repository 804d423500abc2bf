"""What millions of rows cost: memory and time of each rank up to the first step and in all steps, cache cold and warm.

    python scripts/trial_many_rows.py                                    # 10,000,000 prompts, pairs and texts
    python scripts/trial_many_rows.py --rows 200000 --steps 3 --kinds jsonl gz parquet

Writes rows of made-up reviews into a scratch folder and runs steps 3, 2 and 1 on them with two ranks and a tiny model:
with an empty cache, where rank 0 tokenises for its node, and again with what the first run has kept. Memory is told as
what the process has for itself (anonymous) and, beside it, pages of mapped files, which the system takes back when it
needs them. Everything is deleted at the end. 10,000,000 rows take 6 GB of disk at most at a time.
"""

import argparse
import functools
import gzip
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

FOLDER, STEP, STARTED = (f"TRIAL_ROWS_{name}" for name in ("FOLDER", "STEP", "STARTED"))  # of a rank
WORDS = """film good bad the a an of and is was very story actor plot scene music end long short fine great poor dull
camera script voice cast light sound first last never always again almost quite rather truly hardly every other"""
PHRASES = 20_000  # of which texts are put together
TRAINED = 20  # steps of a run
TOLD = ("tokenising", "drawing", "waiting", "warning")  # beginnings of a run's lines that are passed on


def main() -> int:
    """Run, and print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000, help="of each file (default: 10,000,000)")
    parser.add_argument("--steps", type=int, nargs="+", default=[3, 2, 1], choices=(1, 2, 3), help="(default: 3 2 1)")
    parser.add_argument("--kinds", nargs="+", default=["jsonl"], choices=("jsonl", "gz", "parquet"), help="of file")
    parser.add_argument("--folder", type=Path, help="scratch folder (default: a new one in $TMPDIR)")
    parser.add_argument("--master_port", type=int, default=29500, help="of the process group (default: 29500)")
    options = parser.parse_args()
    print(
        "| step | rows | cache | rank | memory of its own before the data, MB | most while they are read | at the last "
        "step | mapped, most | data are there, s | first step done, s | order and data of a step, ms | cache, GB |"
    )
    print("| --- " * 12 + "|", flush=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        make_models(Path(folder))
        for step in options.steps:
            for kind in options.kinds:
                data = write_rows(Path(folder), options.rows, step, kind)
                for cache in ("cold", "warm"):
                    if not run(Path(folder), data, step, cache, options):
                        return 1
                data.unlink()
                shutil.rmtree(Path(folder, "cache"))
    return 0


def make_models(folder: Path) -> None:
    """A tiny Llama with a tokenizer of the words, and a reward model."""
    from transformers import LlamaForSequenceClassification

    from training.toy.model import make_model, train_tokenizer

    tokenizer = train_tokenizer([" ".join(WORDS.split()), "Review :"])
    model = make_model(tokenizer, hidden_size=16, num_layers=1, num_heads=2, seed=0)
    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    model.config.num_labels = 1
    tokenizer.save_pretrained(folder / "reward")
    LlamaForSequenceClassification(model.config).save_pretrained(folder / "reward")


def write_rows(folder: Path, count: int, step: int, kind: str) -> Path:
    """A file of so many rows of the step."""
    lines = (json.dumps(row) + "\n" for row in made_up(count, step))
    if kind == "parquet":
        return write_parquet(folder / "rows.parquet", made_up(count, step))
    path = folder / ("rows.jsonl.gz" if kind == "gz" else "rows.jsonl")
    with gzip.open(path, "wt", compresslevel=1) if kind == "gz" else path.open("w") as file:
        file.writelines(lines)
    return path


def write_parquet(path: Path, rows: Iterator[dict]) -> Path:
    """The rows as a Parquet file, written 100,000 at a time."""
    import itertools

    import pyarrow
    from pyarrow import parquet

    batches = iter(lambda: list(itertools.islice(rows, 100_000)), [])
    first = pyarrow.Table.from_pylist(next(batches))
    with parquet.ParquetWriter(path, first.schema) as writer:
        writer.write_table(first)
        for batch in batches:
            writer.write_table(pyarrow.Table.from_pylist(batch))
    return path


def made_up(count: int, step: int) -> Iterator[dict]:
    """Rows of a step: prompts with a number, pairs, or texts."""
    draw = random.Random(0)
    phrases = [" ".join(draw.choices(WORDS.split(), k=draw.randint(2, 6))) for _ in range(PHRASES)]
    for number in range(count):
        one, other, third = (phrases[int(PHRASES * draw.random())] for _ in range(3))
        prompt = f"Review : {one} {other}"
        if step == 3:
            yield {"prompt": prompt, "number": number}
        elif step == 2:
            yield {"prompt": prompt, "chosen": f" {third} good", "rejected": f" {third} bad"}
        else:
            yield {"text": f"{prompt} {third}"}


def run(folder: Path, data: Path, step: int, cache: str, options: argparse.Namespace) -> bool:
    """One run of two ranks; prints their lines. False where it fails."""
    output = folder / "out"
    shutil.rmtree(output, ignore_errors=True)
    command = [str(Path(sys.executable).with_name("deepspeed")), "--log_level", "critical", "--num_gpus", "2"]
    command += ["--master_port", str(options.master_port), __file__]
    for name, value in flags(folder, data, step).items():
        command += [f"--{name}", str(value)]
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", FOLDER: folder, STEP: step, STARTED: time.time()}
    environment = os.environ | {name: str(value) for name, value in environment.items()}
    log = folder / "log"
    with (
        log.open("w") as file,
        subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.PIPE, text=True) as process,
    ):
        for line in process.stderr:
            file.write(line)
            if line.startswith(TOLD):
                print(line, end="", file=sys.stderr, flush=True)
    if process.returncode:
        print(log.read_text()[-3000:], file=sys.stderr)
        return False
    size = sum(file.stat().st_size for file in Path(folder, "cache").iterdir())
    for rank in range(2):
        found = json.loads(Path(folder, f"{rank}.json").read_text())
        cells = [step, f"{options.rows:,} {data.name[5:]}", cache, rank]
        cells += [f"{found[name] / 1e6:,.0f}" for name in ("before", "reading", "last", "mapped")]
        cells += [f"{found['data']:,.1f}", f"{found['first']:,.1f}", f"{found['feeding']:.2f}", f"{size / 1e9:.2f}"]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    return True


def flags(folder: Path, data: Path, step: int) -> dict:
    """Of one of the three programs."""
    model = folder / "model"
    same = {"data_path": data, "data_output_path": folder / "cache", "output_dir": folder / "out"}
    same |= {"max_steps": TRAINED, "save_steps": 0}
    if step == 3:
        return same | {
            "actor_model_name_or_path": model,
            "critic_model_name_or_path": folder / "reward",
            "max_prompt_seq_len": 32,
            "max_answer_seq_len": 4,
            "per_device_generation_batch_size": 16,
            "per_device_training_batch_size": 16,
            "num_eval_prompts": 32,
            "print_answers_interval": 0,
        }
    same |= {"model_name_or_path": model, "max_seq_len": 64, "held_out": 32, "per_device_train_batch_size": 16}
    return same | ({"normalization_samples": 0} if step == 2 else {})


class Memory(threading.Thread):
    """Bytes of this process's own memory and of mapped files, the most of each since `most` was last called."""

    def __init__(self):
        super().__init__(daemon=True)
        self._own = self._mapped = 0
        self.start()

    def run(self) -> None:
        while True:
            self._look()
            time.sleep(0.05)

    def _look(self) -> int:
        told = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        own, mapped = (int(told[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))
        self._own, self._mapped = max(self._own, own), max(self._mapped, mapped)
        return own

    def now(self) -> int:
        """Bytes of its own at this moment; what was most is forgotten."""
        self._own = self._mapped = 0
        return self._look()

    def most(self) -> tuple[int, int]:
        """(own, mapped)."""
        return self._own, self._mapped


def watched() -> None:
    """One rank: the program of a step, whose reading, feeding and first step are timed, and its memory looked at."""
    from training import ppo_trainer, step1_sft, step2_reward, step3_rlhf, supervised
    from training.data import feeds
    from training.program.startup import leave
    from training.program.startup import run as run_program

    program, flag_class = {
        1: (step1_sft, step1_sft.SFTFlags),
        2: (step2_reward, step2_reward.RewardFlags),
        3: (step3_rlhf, step3_rlhf.RLHFFlags),
    }[int(os.environ[STEP])]
    memory, found, feeding = Memory(), {}, []

    def since() -> float:
        return time.time() - float(os.environ[STARTED])

    agreed = program.agreed

    def reading(load: Callable):
        if "before" in found:
            return agreed(load)
        found["before"] = memory.now()
        result = agreed(load)
        found["data"] = since()
        found["reading"], _ = memory.most()
        return result

    def fed(get: Callable) -> Callable:
        @functools.wraps(get)
        def timed(self, step):
            begun = time.perf_counter()
            result = get(self, step)
            feeding.append(time.perf_counter() - begun)
            return result

        return timed

    def stepped(train: Callable) -> Callable:
        @functools.wraps(train)
        def timed(*args):
            result = train(*args)
            found.setdefault("first", since())
            later = sorted(feeding[1:]) or feeding  # the first draws the epoch's order
            found["feeding"] = 1000 * later[len(later) // 2]
            _, found["mapped"] = memory.most()
            found["last"] = memory._look()
            Path(os.environ[FOLDER], f"{os.environ['RANK']}.json").write_text(json.dumps(found))
            return result

        return timed

    program.agreed = reading
    feeds.ShuffledPrompts.prompts = fed(feeds.ShuffledPrompts.prompts)
    supervised.SupervisedTrainer.batches = fed(supervised.SupervisedTrainer.batches)
    ppo_trainer.PPOTrainer.step = stepped(ppo_trainer.PPOTrainer.step)
    supervised.SupervisedTrainer.optimizer_step = stepped(supervised.SupervisedTrainer.optimizer_step)
    leave(run_program(program.main, flag_class, "a step on many rows"))


if __name__ == "__main__":
    if FOLDER in os.environ:
        watched()
    else:
        sys.exit(main())
