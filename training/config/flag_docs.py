"""Writes docs/flags.md from the dataclasses of the flags:

python -m training.config.flag_docs > docs/flags.md
"""

import dataclasses
import types
import typing

from engine.algorithms import Dialect
from training.config.algorithm import DIALECT_FLAGS
from training.config.flags import REQUIRED, ProgramFlags
from training.config.step3 import RLHFFlags
from training.config.supervised import RewardFlags, SFTFlags
from training.tools.compare.flags import CompareFlags
from training.tools.merge.flags import MergeFlags
from training.tools.serve.flags import ServeFlags

HEAD = """# Flags

Made by `python -m training.config.flag_docs > docs/flags.md` from the dataclasses of the flags. Every flag can also
stand in a YAML file (`--config run.yaml`, keys without dashes, flags on the command line win):

```yaml
output_dir: out/ppo
data_path: [prompts.jsonl]
kl_coef: 0.05
enable_ema: true
```

A flag that is off or on is given bare (`--offload`) or with `true` or `false`.
"""
STEPS = (
    ("Step 1, `training/step1_sft.py`", SFTFlags),
    ("Step 2, `training/step2_reward.py`", RewardFlags),
    ("Step 3, `training/step3_rlhf.py`", RLHFFlags),
    ("Merging, `python -m training.merge`", MergeFlags),
    ("Comparing, `python -m training.compare`", CompareFlags),
    ("Serving, `python -m training.serve`", ServeFlags),
)


def document() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(section(title, flags_class) for title, flags_class in STEPS)])


def section(title: str, flags_class: type[ProgramFlags]) -> str:
    """The flags of one program: a table for each group, and one of those that have nothing left to do."""
    hints = typing.get_type_hints(flags_class)
    lines = [f"## {title}"]
    for spec in dataclasses.fields(flags_class):
        if spec.metadata["group"]:
            lines += [
                "",
                f"### {spec.metadata['group'].capitalize()}",
                "",
                "| flag | value | default | |",
                "| --- | --- | --- | --- |",
            ]
        lines.append(
            f"| `--{spec.name}` | {_value(spec, hints[spec.name])} | {_default(spec)} | "
            f"{_escaped(spec.metadata['help'])} |"
        )
    if not flags_class.old_flags:
        return "\n".join(lines) + "\n"
    lines += [
        "",
        "### DeepSpeed-Chat's flags that have nothing left to do",
        "",
        "| flag | accepted | |",
        "| --- | --- | --- |",
    ]
    for name, old in flags_class.old_flags.items():
        accepted = "yes" if old.allowed is None else ", ".join(map(str, old.allowed)) or "no"
        lines.append(f"| `--{name}` | {accepted} | {_escaped(old.instead)} |")
    return "\n".join(lines) + "\n"


def _value(spec: dataclasses.Field, hint) -> str:
    if spec.metadata["choices"]:
        return ", ".join(f"`{choice}`" for choice in spec.metadata["choices"])
    if isinstance(hint, types.UnionType):
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    many = typing.get_origin(hint) is list
    kind = typing.get_args(hint)[0] if many else hint
    names = {str: "text", int: "whole number", float: "number", bool: "true or false"}
    return names[kind] + (", one or more" if many else "")


def _default(spec: dataclasses.Field) -> str:
    if spec.default is REQUIRED and spec.default_factory is REQUIRED:
        return "required"
    if spec.name in DIALECT_FLAGS and spec.default is None:
        return f"the dialect's (`{getattr(Dialect(), DIALECT_FLAGS[spec.name])}`)"
    value = spec.default if spec.default is not REQUIRED else spec.default_factory()
    return "" if value is None or value == [] else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(document(), end="")
