"""Writes docs/flags.md from the dataclasses of the flags and the dataclass of the dialect:

python -m training.tools.flag_docs > docs/flags.md

If several programs have a flag with the same help text, the flag stands in the first section that covers all of these
programs.
"""

import dataclasses
import types
import typing
from collections.abc import Sequence

from engine.algorithms import Dialect
from engine.options import LIMITS, REQUIRED, choices_of, default_of
from training.config.algorithm import DIALECT_FLAGS
from training.config.flags import ProgramFlags, by_group
from training.config.step3 import RLHFFlags
from training.config.supervised import RewardFlags, SFTFlags
from training.tools.audit.flags import AuditFlags
from training.tools.compare.flags import CompareFlags
from training.tools.merge.flags import MergeFlags
from training.tools.serve.flags import ServeFlags

HEAD = """# Flags

Made by `python -m training.tools.flag_docs > docs/flags.md` from the dataclasses of the flags. Every flag can also
stand in a YAML file (`--config run.yaml`, keys without dashes, flags on the command line win):

```yaml
output_dir: out/ppo
data_path: [prompts.jsonl]
kl_coef: 0.05
enable_ema: true
```

A switch is given bare (`--offload`) or with `true` or `false`. Flags of [DeepSpeed-Chat](from_deepspeed_chat.md) that
have no effect here are accepted.
"""
SECTIONS: tuple[tuple[str, Sequence[type[ProgramFlags]]], ...] = (
    ("All three steps", (SFTFlags, RewardFlags, RLHFFlags)),
    ("Steps 1 and 2", (SFTFlags, RewardFlags)),
    ("Step 1, `training/step1_sft.py`", (SFTFlags,)),
    ("Step 2, `training/step2_reward.py`", (RewardFlags,)),
    ("Step 3, `training/step3_rlhf.py`", (RLHFFlags,)),
    ("Merging, comparing and auditing", (MergeFlags, CompareFlags, AuditFlags)),
    ("Comparing and auditing", (CompareFlags, AuditFlags)),
    ("Merging, `four-engine-rlhf merge`", (MergeFlags,)),
    ("Comparing, `four-engine-rlhf compare`", (CompareFlags,)),
    ("Auditing, `four-engine-rlhf audit`", (AuditFlags,)),
    ("Serving, `four-engine-rlhf serve`", (ServeFlags,)),
)
DIALECT = """## Fields of a dialect

[Dialects](dialects.md) are rows of these choices. Each is set by `--set FIELD=VALUE`, some by a flag of step 3, too.
Defaults are those of the dialect `default`; `python -m engine.algorithms` prints everyone's.
"""


def document() -> str:
    """The whole page."""
    parts, told = [HEAD], {}
    for title, programs in SECTIONS:
        parts.append(section(title, programs, told))
    return "\n".join([*parts, DIALECT, dialect_tables()])


def section(title: str, programs: Sequence[type[ProgramFlags]], told: dict[str, list]) -> str:
    """Make a section of the page: a table for each group of flags that all of these programs have with the same help
    text.

    title: the section's heading. told: {table row: (title, programs) of each earlier section with this row}; the
    function adds this section. If the row of a flag already stands in a section for other programs, a line in this
    section names the flag.
    """
    shared = set.intersection(*({row for _, row in rows(program)} for program in programs))
    groups: dict[str, list[str]] = {}
    others: dict[str, list[str]] = {}
    for group, row in rows(programs[0]):
        where = told.setdefault(row, [])
        if row not in shared or any(set(programs) <= set(had) for _, had in where):
            continue
        if where:
            others.setdefault(where[0][0], []).append(row.split()[1])
        else:
            groups.setdefault(group, []).append(row)
        where.append((title, programs))
    lines = [f"## {title}", ""]
    for there, names in others.items():
        lines.append(f'From the section "{there.partition(",")[0]}" it also takes: {", ".join(names)}.\n')
    for group, found in groups.items():
        lines += _table(group, ("flag", "value", "default", ""), found)
    return "\n".join(lines)


def rows(program: type[ProgramFlags]) -> list[tuple[str, str]]:
    """(group, table row) for each flag of a program."""
    hints = typing.get_type_hints(program)
    return [
        (group, _row(f"`--{spec.name}`", _value(spec, hints[spec.name]), _default(spec), _help(spec)))
        for group, specs in by_group(program).items()
        for spec in specs
    ]


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
            says = "" if spec.name in flags else _help(spec)  # the flag's row has the same help
            found.append(_row(f"`{spec.name}`", value, default, flags.get(spec.name, ""), says))
        lines += _table(group, ("field", "value", "default", "flag", ""), found)
    return "\n".join(lines)


def _table(group: str, head: Sequence[str], found: Sequence[str]) -> list[str]:
    return [f"### {group[0].upper()}{group[1:]}", "", _row(*head), _row(*["---"] * len(head)), *found, ""]


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
    print(document(), end="")
