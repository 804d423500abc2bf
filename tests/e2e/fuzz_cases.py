"""Inputs that were valid until something in them was changed at random.

inputs = FuzzInputs(folder, Tiny(folder / "tiny"))
case = inputs.case(seed=0, number=17)                    # its files are written now; the same numbers, the same case
result = run(case.step, case.words)
assert case.problem(result) is None
"""

import csv
import gzip
import io
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow
import yaml
from pyarrow import parquet

from tests.e2e.bad_input import STALE, message_problem
from tests.e2e.fuzz_mutations import changed_bytes, changed_json, changed_words
from tests.e2e.programs import PROGRAMS, Result, Tiny, command_line, snapshot, start_words
from training.data.records import ENDINGS

CHAT = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": partial(gzip.compress, mtime=0),
    ".zst": partial(pyarrow.compress, codec="zstd", asbytes=True),
}
DATA = {1: "sft", 2: "pairs", 3: "prompts"}
NOT_SPELT_OUT = ("config", "output_dir", "dry_run", "wandb_project", "overwrite_output_dir", "data_output_path")


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
            "restart point": self._point,
        }

    def case(self, seed: int, number: int, change: bool = True) -> Fuzzed:
        """The case of this number; with change=False as it was before something was changed."""
        rng, self.change = random.Random(f"{seed} {number}"), change
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.rmtree(self.output_dir, ignore_errors=True)
        self.place.mkdir()
        kind = ["flags", *self.kinds][number % (len(self.kinds) + 1)]
        loads = kind in ("DeepSpeed JSON", "model folder", "restart point") and rng.random() < 0.5
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
            words.append("--overwrite_output_dir")
            for name, text in STALE.items():
                (self.output_dir / name).parent.mkdir(parents=True, exist_ok=True)
                (self.output_dir / name).write_text(text)
        before = snapshot(self.output_dir) if self.output_dir.exists() else None
        return Fuzzed(kind, step, words, loads, self.output_dir, before, repr(changed)[1:-1][:160], self.must)

    def _flags(self, step: int, rng: random.Random, count: int = 12) -> dict:
        """A valid command line with some flags' own defaults spelt out."""
        defaults = {name: value for name, value in vars(self._parsed(step)).items() if name not in NOT_SPELT_OUT}
        given = [name for name, value in defaults.items() if value not in (None, []) and not isinstance(value, bool)]
        return {name: defaults[name] for name in rng.sample(given, min(count, len(given)))} | self.tiny.flags(step)

    def _parsed(self, step: int):
        from training.flags.parsing import parse_flags

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
        folder = Path(__file__).parents[2] / "configs" / "ds"
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
        """The newer of a run's two restart points, given by its name or found; it must not be used."""
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
        """The output folder of a run of two steps, each with a restart point; the run is made when first asked for."""
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
