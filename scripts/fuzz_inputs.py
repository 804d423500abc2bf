"""Changes valid inputs at random and runs the programs on them: each has to end with one message, or to succeed.

    python scripts/fuzz_inputs.py --count 500 --seed 0
    python scripts/fuzz_inputs.py --only 137 --seed 0        # that case alone, with all that it prints

Changed are flags, YAML, data files, DeepSpeed JSON, model folders and checkpoints. A message is one line on stderr
that begins with `error: `, with exit code 2; in the output folder nothing may be made or changed, and no case may take
longer than --seconds. Cases run in forks of a process that has everything imported: as dry runs, or, where models are
to be loaded, up to the first step. The last --started of them run by the real command line, to the end.

Exit code 1 if any case ended otherwise; they are listed.
"""

import argparse
import csv
import gzip
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import pyarrow
import yaml
from pyarrow import parquet

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, it finds the project
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}  # before torch is imported

from transformers.utils import logging

from scripts.harness import ROOT
from scripts.harness.mistakes import STALE, message_problem
from scripts.harness.programs import PROGRAMS, Result, Tiny, command_line, run_words, snapshot, start_words
from training.data.files import ENDINGS
from training.supervised import SupervisedTrainer

MEMORY = 16 * 2**30  # bytes of addresses that a case may take beside what is imported
CHAT = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": partial(gzip.compress, mtime=0),
    ".zst": partial(pyarrow.compress, codec="zstd", asbytes=True),
}
DATA = {1: "sft", 2: "pairs", 3: "prompts"}
NOT_SPELT_OUT = ("config", "output_dir", "dry_run", "wandb_project", "data_output_path")
LONG = 5000
TEXTS = (
    "",
    " ",
    "\0",
    "\n",
    "\ud800",
    "é",
    "\U0001f600",
    "\u202e",
    "\x1b[31m",
    "-1",
    "--",
    "~",
    ".",
    "..",
    "*",
    "%s",
    "{0}",
    "null",
    "None",
    "true",
    "nan",
    "inf",
    "1e400",
    "9" * LONG,
    "x" * LONG,
    "a/b/c",
    "://",
    "$(id)",
)
NUMBERS = (
    0,
    -1,
    1,
    2,
    3.5,
    -0.0,
    2**31,
    2**63,
    -(2**63),
    10**30,
    1e-300,
    1e308,
    float("inf"),
    float("-inf"),
    float("nan"),
)


def main() -> int:
    """Try the cases, print what failed; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=500, help="cases (default: 500)")
    parser.add_argument("--seed", type=int, default=0, help="which (default: 0)")
    parser.add_argument("--started", type=int, default=24, help="of them by the real command line (default: 24)")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit for a case in a fork (default: 120)")
    parser.add_argument("--only", type=int, help="this case alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        os.environ["XDG_CACHE_HOME"] = str(root / "cache")  # tokenised data
        (root / "here").mkdir()
        os.chdir(root / "here")  # relative names begin there
        return fuzz(root, options)


def fuzz(root: Path, options: argparse.Namespace) -> int:
    """Make the inputs and try the cases; returns the exit code."""
    logging.disable_progress_bar()
    inputs = FuzzInputs(root, Tiny(root / "tiny"))
    before, started = snapshot(root / "tiny"), time.monotonic()
    failed, ends = [], Counter()
    unchanged = range(len(inputs.kinds) + 1) if options.only is None else []
    numbers = range(options.count) if options.only is None else [options.only]
    for number, change in [*((number, False) for number in unchanged), *((number, True) for number in numbers)]:
        case = inputs.case(options.seed, number, change)
        by_command = options.only is None and number >= options.count - options.started and change
        result, problem = try_case(case, by_command, options.seconds)
        if not change and problem is None and result.code != 0:
            problem = f"was refused before anything in it was changed: {result.stderr[-300:]!r}"
        ends[case.kind, "failed" if problem else "refused" if result.code else "harmless"] += change
        if problem:
            failed.append(number)
            print(f"FAILED {number} {case}\n    {problem}", flush=True)
        if options.only is not None and result:
            print(case, " ".join(case.words), result.stdout, result.stderr, f"exit code {result.code}", sep="\n")
    if snapshot(root / "tiny") != before:
        failed.append(-1)
        print("FAILED: models or data were changed")
    report(ends, time.monotonic() - started)
    return 1 if failed else 0


def try_case(case, by_command: bool, seconds: float) -> tuple:
    """(the Result or None, what is wrong with it or None)."""
    try:
        result = start_words(case.step, case.words) if by_command else run_forked(case, seconds)
    except TimeoutError:
        return None, "it did not end"
    return result, case.problem(result)


def run_forked(case, seconds: float):
    """The Result of the case in a fork of this process; raises TimeoutError."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.setsid()
            for number, stream in ((1, stdout), (2, stderr)):
                os.dup2(stream.fileno(), number)
            _in_child(case)
        end = time.monotonic() + seconds
        while (found := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end:
            time.sleep(0.02)
        if found[0] == 0:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise TimeoutError
        for stream in (stdout, stderr):
            stream.seek(0)
        texts = [stream.read().decode(errors="backslashreplace") for stream in (stdout, stderr)]
        return Result(os.waitstatus_to_exitcode(found[1]), *texts)


def _in_child(case) -> None:
    """Run the program; where models are loaded, up to the first step."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    code = 1
    try:
        with mock.patch("training.step3_rlhf.train", _loaded), mock.patch.object(SupervisedTrainer, "fit", _loaded):
            code = run_words(case.step, case.words)
    except BaseException as error:  # what Python would do with it, were it a process of its own
        traceback.print_exc()
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _loaded(*_) -> None:
    """In place of the training: all was read, and nothing found wrong."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def report(ends: Counter, seconds: float) -> None:
    """Print how the cases of each kind ended."""
    ways = ("refused", "harmless", "failed")
    print(f"\n{'kind':16}" + "".join(f"{way:>10}" for way in ways))
    for kind in dict.fromkeys(kind for kind, _ in ends):
        print(f"{kind:16}" + "".join(f"{ends[kind, way]:10}" for way in ways))
    total = {way: sum(count for (_, end), count in ends.items() if end == way) for way in ways}
    print(f"{'all':16}" + "".join(f"{total[way]:10}" for way in ways))
    print(
        f"{sum(total.values())} inputs in {seconds:.0f} s: {total['refused']} ended with one message and exit code 2, "
        f"{total['harmless']} changes were harmless, {total['failed']} ended otherwise"
    )


@dataclass(frozen=True)
class Fuzzed:
    """One case.

    loads: whether models are to be loaded, and no dry run made. before: what the output folder holds, None where there
    is none. must: what is printed where the case does not end with a message; None where it has to end with one.
    """

    kind: str
    step: int
    words: list[str]
    loads: bool
    output_dir: Path
    before: dict[str, bytes] | None
    changed: str
    must: str | None = ""

    def problem(self, result: Result) -> str | None:
        """What is wrong with how the program ended, or None: one message and exit code 2, or success."""
        printed = result.stdout + result.stderr
        left = snapshot(self.output_dir) if self.output_dir.exists() else None
        if left != self.before and not (result.code == 0 and self.loads):
            return f"something was written into the output folder (exit code {result.code}): {result.stderr[-300:]!r}"
        if result.code == 0 and self.must is None:
            return f"it was used: {result.stdout[-300:]!r}"
        if result.code == 0 and self.must in printed and "Traceback" not in printed and "error: " not in printed:
            return None
        return message_problem(result)

    def __str__(self) -> str:
        return f"{self.kind}, step {self.step}{' (loads)' * self.loads}: {self.changed}"


class FuzzInputs:
    """Valid inputs of every kind, and the changing of one of them."""

    def __init__(self, folder: Path, tiny: Tiny):
        self.tiny, self.place, self.output_dir = tiny, folder / "changed", folder / "out"
        self.kinds: dict[str, Callable[[random.Random], tuple[int, dict, str]]] = {
            "YAML": self._yaml,
            "rows": self._rows,
            "DeepSpeed JSON": self._ds_config,
            "model folder": self._model,
            "chat template": self._chat_template,
            "checkpoint": self._point,
        }

    def case(self, seed: int, number: int, change: bool = True) -> Fuzzed:
        """The case of this number; with change=False as it was before something was changed."""
        rng, self.change = random.Random(f"{seed} {number}"), change
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.rmtree(self.output_dir, ignore_errors=True)
        self.place.mkdir()
        kind = ["flags", *self.kinds][number % (len(self.kinds) + 1)]
        loads = kind in ("DeepSpeed JSON", "model folder", "checkpoint") and rng.random() < 0.5
        self.must = ""
        if kind == "flags":
            step = rng.choice(list(PROGRAMS))
            words = command_line(self._flags(step, rng))
            found = changed_words(words, rng) if change else words
            changed = " ".join(word for word in found if word not in words) or "words gone or elsewhere"
            words = found
        else:
            step, flags, changed = self.kinds[kind](rng)
            words = command_line(flags)
        words += ["--output_dir", str(self.output_dir), *["--dry_run"] * (not loads)]
        if not self.output_dir.exists() and rng.random() < 0.5:
            words.append("--resume=auto")
            for name, text in STALE.items():
                (self.output_dir / name).parent.mkdir(parents=True, exist_ok=True)
                (self.output_dir / name).write_text(text)
        before = snapshot(self.output_dir) if self.output_dir.exists() else None
        return Fuzzed(kind, step, words, loads, self.output_dir, before, repr(changed)[1:-1][:160], self.must)

    def _flags(self, step: int, rng: random.Random, count: int = 12) -> dict:
        """A valid command line with some flags' own defaults spelt out."""
        defaults = {name: value for name, value in asdict(self._parsed(step)).items() if name not in NOT_SPELT_OUT}
        given = [name for name, value in defaults.items() if value not in (None, []) and not isinstance(value, bool)]
        return {name: defaults[name] for name in rng.sample(given, min(count, len(given)))} | self.tiny.flags(step)

    def _parsed(self, step: int):
        from training.config.parsing import parse_flags

        return parse_flags(PROGRAMS[step][1], command_line(self.tiny.flags(step, output_dir="out")), "")

    def _bytes(self, content: bytes, rng: random.Random) -> bytes:
        return changed_bytes(content, rng) if self.change else content

    def _json(self, value: object, rng: random.Random) -> object:
        return changed_json(value, rng) if self.change else value

    def _json_text(self, value: object, rng: random.Random) -> bytes:
        """The value as JSON, changed as a value or as bytes."""
        if rng.random() < 0.3:
            return self._bytes(json.dumps(value, indent=1).encode(), rng)
        return json.dumps(self._json(value, rng), indent=1).encode()

    def _write(self, name: str, content: bytes, before: bytes = b"") -> tuple[Path, str]:
        path = self.place / name
        path.write_bytes(content)
        return path, f"{name}: {_difference(before, content)}"

    def _yaml(self, rng: random.Random) -> tuple[int, dict, str]:
        step = rng.choice(list(PROGRAMS))
        flags = {
            name: value if isinstance(value, (int, float, bool, list)) else str(value)
            for name, value in self._flags(step, rng).items()
        }
        before = yaml.safe_dump(flags).encode()
        content = yaml.safe_dump(self._json(flags, rng)).encode() if rng.random() < 0.7 else self._bytes(before, rng)
        path, changed = self._write("flags.yaml", content, before)
        return step, {"config": path}, changed

    def _rows(self, rng: random.Random) -> tuple[int, dict, str]:
        """A data file of any ending, compressed or not, in which one record or some bytes are others."""
        step, ending, compression = rng.choice(list(PROGRAMS)), rng.choice(ENDINGS), rng.choice(list(COMPRESS))
        rows = [json.loads(line) for line in (self.tiny.folder / f"{DATA[step]}.jsonl").read_text().splitlines()]
        flags, messages = self.tiny.flags(step), step == 1 and ending != ".csv" and rng.random() < 0.5
        if messages:
            flags["model_name_or_path"] = self._chat_model()
            rows = [
                {
                    "messages": [
                        {"role": role, "content": text} for role, text in zip(("user", "assistant"), row.values())
                    ]
                }
                for row in rows
            ]
        compress = COMPRESS[compression]
        before = compress(_file_of(rows, ending))
        if rng.random() < 0.7 and ending.startswith(".json"):
            number = rng.randrange(len(rows))
            rows[number] = self._json(rows[number], rng)
            content = compress(_file_of(rows, ending))
        else:
            content = self._bytes(before, rng)
        path, changed = self._write(f"rows{ending}{compression}", content, before)
        return step, flags | {"data_path": path}, changed

    def _ds_config(self, rng: random.Random) -> tuple[int, dict, str]:
        folder = ROOT / "configs" / "ds"
        file = rng.choice(sorted(folder.glob("zero?.json")))
        step = rng.choice(list(PROGRAMS))
        name = f"{rng.choice(['actor', 'critic', 'reference', 'reward'])}_ds_config" if step == 3 else "ds_config"
        if name in ("reference_ds_config", "reward_ds_config"):
            file = rng.choice([folder / "zero0.json", folder / "zero3.json"])
        value = json.loads(file.read_text())
        path, changed = self._write("ds.json", self._json_text(value, rng), json.dumps(value, indent=1).encode())
        return step, self.tiny.flags(step, dtype="fp32", **{name: path}), changed

    def _model(self, rng: random.Random) -> tuple[int, dict, str]:
        """A folder in which one file was changed; the weights in what their header says, or in their length."""
        step = rng.choice(list(PROGRAMS))
        flag = (
            rng.choice(["actor_model_name_or_path", "critic_model_name_or_path"]) if step == 3 else "model_name_or_path"
        )
        folder = self._copy(Path(self.tiny.flags(step)[flag]))
        file = rng.choice(sorted(path for path in folder.iterdir() if path.is_file()))
        before = file.read_bytes()
        content = (
            self._weights(before, rng) if file.suffix == ".safetensors" else self._json_text(json.loads(before), rng)
        )
        file.write_bytes(content)
        return step, self.tiny.flags(step, **{flag: folder}), f"{file.name}: {_difference(before, content)}"

    def _chat_template(self, rng: random.Random) -> tuple[int, dict, str]:
        """A template in a file of its own or in tokenizer_config.json, and a set of messages to try it on."""
        folder = self._chat_model()
        content = self._bytes(CHAT.encode(), rng)
        (folder / "chat_template.jinja").write_bytes(content)
        if rng.random() < 0.3:
            (folder / "chat_template.jinja").unlink()
            config = json.loads((folder / "tokenizer_config.json").read_text())
            content = json.dumps(config | {"chat_template": self._json({"chat_template": CHAT}, rng)}).encode()
            (folder / "tokenizer_config.json").write_bytes(content)
        rows = [{"messages": [{"role": "user", "content": "w04"}, {"role": "assistant", "content": "w05"}]}] * 40
        path, _ = self._write("rows.jsonl", _file_of(rows, ".jsonl"))
        return 1, self.tiny.flags(1, model_name_or_path=folder, data_path=path), repr(content)

    def _point(self, rng: random.Random) -> tuple[int, dict, str]:
        """The newer of a run's two checkpoints, given by its name or found; it must not be used."""
        shutil.copytree(self._run(), self.output_dir)
        point = self.output_dir / "checkpoints" / "step_000002"
        resume = rng.choice(["auto", self.output_dir, point])
        file = rng.choice(sorted(path for path in point.rglob("*") if path.is_file()))
        before = file.read_bytes()
        way = rng.randrange(4)
        if way == 0 and self.change:
            content = (self.output_dir / "checkpoints" / "step_000001" / file.relative_to(point)).read_bytes()
        elif way == 1 and file.suffix == ".json" and self.change:
            content = self._json_text(json.loads(before), rng)
        elif way == 2 and file.suffix == ".safetensors":
            content = self._weights(before, rng)
        else:
            content = self._bytes(before, rng)
        file.write_bytes(content)
        if content != before and not (file.name == "manifest.json" and _same_json(content, before)):
            self.must = None if resume == point else "PASSED OVER"
        flags = self.tiny.flags(3, max_steps=4, save_steps=1, resume=resume)
        return 3, flags, f"{file.relative_to(point)}: {_difference(before, content)}"

    def _run(self) -> Path:
        """The output folder of a run of two steps, each with a checkpoint; the run is made when first asked for."""
        folder = self.tiny.folder.with_name("run")
        if not folder.exists():
            flags = {"max_steps": 4, "enable_test_mode": True, "test_stop_step": 2, "save_steps": 1}
            result = start_words(3, command_line(self.tiny.flags(3, **flags, output_dir=folder)))
            assert result.code == 0, result.stderr
        return folder

    def _weights(self, content: bytes, rng: random.Random) -> bytes:
        size = int.from_bytes(content[:8], "little")
        header, numbers = content[8 : 8 + size], content[8 + size :]
        way = rng.randrange(3)
        if way == 0:
            header = json.dumps(self._json(json.loads(header), rng)).encode()
        elif way == 1:
            header = self._bytes(header, rng)
        elif self.change:
            return content[: rng.randrange(len(content))] if rng.random() < 0.5 else content + rng.randbytes(9)
        return len(header).to_bytes(8, "little") + header + numbers

    def _copy(self, model: Path) -> Path:
        return Path(shutil.copytree(model, self.place / "model"))

    def _chat_model(self) -> Path:
        folder = self._copy(self.tiny.folder / "sft")
        (folder / "chat_template.jinja").write_text(CHAT)
        return folder


def _file_of(rows: list, ending: str) -> bytes:
    """The rows in a data file; those that are no objects only where it is JSON."""
    if ending == ".jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    if ending == ".json":
        return json.dumps(rows, indent=1).encode()
    if ending == ".csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()
    file = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


def _same_json(one: bytes, other: bytes) -> bool:
    try:
        return json.loads(one) == json.loads(other)
    except (ValueError, RecursionError):
        return False


def _difference(before: bytes, after: bytes) -> str:
    """Where the two first differ, and what stands there now."""
    place = next((n for n, (a, b) in enumerate(zip(before, after)) if a != b), min(len(before), len(after)))
    was, found = (content[max(0, place - 20) : place + 40] for content in (before, after))
    return f"byte {place} of {len(before)} ({len(after)} now): {was!r} -> {found!r}"


def other_value(rng: random.Random) -> object:
    """A JSON value of any kind."""
    return rng.choice([*TEXTS, *NUMBERS, True, False, None, [], {}, [[]], [None], [1, "a"], {"a": {}}, {"": None}])


def nested(value: object, depth: int) -> object:
    """The value within so many lists."""
    for _ in range(depth):
        value = [value]
    return value


def changed_json(value: object, rng: random.Random) -> object:
    """A copy of a JSON value in which one thing is another, gone, doubled, renamed or nested."""
    copy = json.loads(json.dumps(value))
    places = list(_places(copy))
    if not places or rng.random() < 0.03:
        return other_value(rng)
    holder, key = rng.choice(places)
    change = rng.randrange(6)
    if change == 0:
        del holder[key]
    elif change == 1 and isinstance(holder, dict):
        holder[rng.choice([key.upper(), key[:-1], key + "_", *TEXTS])] = holder.pop(key)
    elif change == 2:
        holder[key] = nested(holder[key], rng.choice([1, 1, 2, 50, 300]))
    elif change == 3:
        holder[key] = _near(holder[key], rng)
    elif change == 4:
        other, name = rng.choice(places)
        holder[key] = json.loads(json.dumps(other[name])) if other is not holder or name in _keys(holder) else None
    else:
        holder[key] = other_value(rng)
    return copy


def _near(value: object, rng: random.Random) -> object:
    """A value like this one, of the same kind where there is one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return rng.choice([-value, value + 1, value - 1, value * 10**9, value / 7, str(value), [value]])
    if isinstance(value, str):
        return changed_text(value, rng)
    if isinstance(value, list):
        return rng.choice(
            [value * 2, value[:-1], value[::-1], [*value, other_value(rng)], dict(enumerate(map(str, value)))]
        )
    return list(value.items()) if isinstance(value, dict) else "null"


def _keys(holder) -> list:
    return list(holder) if isinstance(holder, dict) else list(range(len(holder)))


def _places(value: object):
    """(holder, key) of everything inside of the value."""
    if isinstance(value, (dict, list)):
        for key in _keys(value):
            yield value, key
            yield from _places(value[key])


def changed_text(text: str, rng: random.Random) -> str:
    """The text with a part of it gone, doubled or another."""
    start = rng.randrange(len(text) + 1)
    end = min(len(text), start + rng.randrange(1, 9))
    middle = rng.choice(["", text[start:end] * 2, rng.choice(TEXTS), chr(rng.randrange(1, 0x3000))])
    return text[:start] + middle + text[end:]


def changed_bytes(content: bytes, rng: random.Random) -> bytes:
    """The bytes with some flipped, gone, doubled or inserted, or cut off."""
    place = rng.randrange(len(content) + 1)
    size = rng.choice([1, 1, 8, 100])
    changes: list[Callable[[], bytes]] = [
        lambda: content[:place],
        lambda: (
            content[:place]
            + bytes(byte ^ 1 << rng.randrange(8) for byte in content[place : place + 1])
            + content[place + 1 :]
        ),
        lambda: content[:place] + content[place + size :],
        lambda: content[: place + size] + content[place:],
        lambda: (
            content[:place]
            + rng.choice([b"\0", b"\xff", b"\xef\xbb\xbf", b"\n", b'"', b"[", b"{", b"\x80" * 9])
            + content[place:]
        ),
        lambda: content[:place] + rng.randbytes(size) + content[place + size :],
        lambda: b"",
    ]
    return rng.choices(changes, [2, 4, 2, 2, 3, 2, 0.3])[0]()


def changed_words(words: list[str], rng: random.Random) -> list[str]:
    """A command line in which one word is another, gone, doubled or elsewhere."""
    words = list(words)
    place = rng.randrange(len(words))
    change = rng.randrange(6)
    if change == 0:
        del words[place]
    elif change == 1:
        words.insert(place, words[place])
    elif change == 2:
        other = rng.randrange(len(words))
        words[place], words[other] = words[other], words[place]
    elif change == 3 and not words[place].startswith("--"):
        words[place] = str(other_value(rng))
    else:
        words[place] = changed_text(words[place], rng)
    return [word.replace("\0", "\x01") for word in words]  # no system passes NUL on


if __name__ == "__main__":
    sys.exit(main())
