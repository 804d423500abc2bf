"""Writes docs/flags.md from the dataclasses of the flags, and docs/dialect_fields.md from the dataclass of the dialect:

python -m training.tools.flag_docs

Programs that have a flag with the same value, default and help text share its row.
"""

import dataclasses
import types
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path

from engine.algorithms import Dialect
from engine.options import LIMITS, REQUIRED, choices_of, default_of
from training.config.algorithm import DIALECT_FLAGS
from training.config.flags import ProgramFlags, by_group
from training.config.parsing import FIRST, STEPS
from training.config.step3 import RLHFFlags
from training.config.supervised import RewardFlags, SFTFlags
from training.tools.audit.flags import AuditFlags
from training.tools.compare.flags import CompareFlags
from training.tools.memory.flags import MemoryFlags
from training.tools.merge.flags import MergeFlags
from training.tools.serve.flags import ServeFlags

HEAD = """# Flags

Search this page for a flag or a word. A program's `--help` shows the flags of the first part, `--help all` all that it
has. `python -m training.tools.flag_docs` makes the page.

The column "of" names commands of `four-engine-rlhf`: sft, reward and ppo are steps 1, 2 and 3. "steps" stands for these
three, "tools" for merge, compare and audit. plan also takes the flags of ppo. The tools write no metrics: there
--report_to and the flags of TensorBoard do nothing.

Every flag can also stand in a YAML file (`--config run.yaml`, keys without dashes, flags on the command line win):

```yaml
output_dir: out/ppo
data_path: [prompts.jsonl]
kl_coef: 0.05
enable_ema: true
```

A switch is given bare (`--offload`) or with `true` or `false`. Flags of [DeepSpeed-Chat](from_deepspeed_chat.md) that
have no effect here are accepted. `--set` takes [the fields of a dialect](dialect_fields.md).
"""
PROGRAMS: dict[str, type[ProgramFlags]] = {
    "sft": SFTFlags,
    "reward": RewardFlags,
    "ppo": RLHFFlags,
    "plan": MemoryFlags,
    "merge": MergeFlags,
    "compare": CompareFlags,
    "audit": AuditFlags,
    "serve": ServeFlags,
}
SHORT = {"sft, reward, ppo": "steps", "merge, compare, audit": "tools"}
DIALECT = """# Fields of a dialect

A [dialect](dialects.md) has a value for each of these fields, which `--set FIELD=VALUE` changes. Where a row names a
[flag](flags.md) of step 3, the flag does the same, and its row says what. Defaults are those of the dialect `default`;
`python -m engine.algorithms` prints the values of all dialects. `python -m training.tools.flag_docs` makes the page.
"""


@dataclasses.dataclass
class Row:
    """A flag of one or several programs."""

    name: str
    group: str
    cells: list[str]
    programs: list[str]

    def __str__(self) -> str:
        of = ", ".join(self.programs)
        for names, short in SHORT.items():
            of = of.replace(names, short)
        return _row(f"`--{self.name}`", of, *self.cells)


def pages() -> dict[str, str]:
    """{file in docs/: its text}."""
    return {"flags.md": flags_page(), "dialect_fields.md": "\n".join([DIALECT, dialect_tables()])}


def flags_page() -> str:
    """The page of flags: those of each task first, then all others by topic."""
    every, steps = rows(), {name for name, program in PROGRAMS.items() if program in STEPS}
    first = {
        task: [row for name in names for row in every if row.name == name and steps & set(row.programs)]
        for task, names in FIRST.items()
    }
    told = [row for found in first.values() for row in found]
    others: dict[str, list[Row]] = {}
    for row in every:
        if row not in told:
            others.setdefault(row.group, []).append(row)
    parts = [HEAD]
    for title, groups in (("The flags that people use first", first), ("All others", others)):
        parts.append(f"## {title}\n")
        for group, found in groups.items():
            parts += _table(group, ("flag", "of", "value", "default", ""), found)
    return "\n".join(parts)


def rows() -> list[Row]:
    """The flags of all programs, by topic."""
    found: dict[tuple, Row] = {}
    for name, program in PROGRAMS.items():
        hints = typing.get_type_hints(program)
        for group, specs in by_group(program).items():
            for spec in specs:
                cells = [_value(spec, hints[spec.name]), _default(spec), _help(spec)]
                row = found.setdefault((spec.name, *cells), Row(spec.name, group, cells, []))
                if name != "plan" or "ppo" not in row.programs:
                    row.programs.append(name)
    return list(found.values())


def dialect_tables() -> str:
    """The fields of a dialect: a table for each group."""
    hints, lines = typing.get_type_hints(Dialect), []
    flags = {field: f"`--{name}`" for name, field in DIALECT_FLAGS.items()}
    for group, specs in by_group(Dialect).items():
        if not group:  # the field with the dialect's name
            continue
        found = []
        for spec in specs:
            value, default = _value(spec, hints[spec.name]), _default(spec) or "none"
            says = flags.get(spec.name) or _help(spec)  # the flag's row has the same help
            found.append(_row(f"`{spec.name}`", value, default, says))
        lines += _table(group, ("field", "value", "default", ""), found, "##")
    return "\n".join(lines)


def _table(group: str, head: Sequence[str], found: Iterable, level: str = "###") -> list[str]:
    return [f"{level} {group[0].upper()}{group[1:]}", "", _row(*head), _row(*["---"] * len(head)), *map(str, found), ""]


def _row(*cells: str) -> str:
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


def _help(spec: dataclasses.Field) -> str:
    return spec.metadata["help"].replace("|", "\\|")


def _value(spec: dataclasses.Field, hint) -> str:
    known = choices_of(spec)
    if known:
        return ", ".join(f"`{choice}`" for choice in known)
    if isinstance(hint, types.UnionType):
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    many = typing.get_origin(hint) in (list, tuple)
    kind = typing.get_args(hint)[0] if many else hint
    names = {str: "text", int: "integer", float: "number", bool: "switch"}
    signs = {"least": "≥", "above": ">", "most": "≤", "below": "<"}
    limits = [f"{signs[key]} {spec.metadata[key]}" for key, *_ in LIMITS if spec.metadata[key] is not None]
    pair = ["two"] if typing.get_origin(hint) is tuple else ["one or more"] if many else []
    return ", ".join([" ".join([names[kind], *limits[:1]]), *limits[1:], *pair])


def _default(spec: dataclasses.Field) -> str:
    value = default_of(spec)
    if value is REQUIRED:
        return "required"
    if spec.metadata.get("field"):
        return f"the dialect's (`{getattr(Dialect(), spec.metadata['field'])}`)"
    if isinstance(value, list):
        value = " ".join(map(str, value)) or None
    return "" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    for file, text in pages().items():
        (Path(__file__).parents[2] / "docs" / file).write_text(text, encoding="utf-8")
