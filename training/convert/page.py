"""A translation as a YAML file: a line a flag, each with a comment that says where it comes from."""

from collections.abc import Iterable, Iterator

import yaml

from training.convert.translation import Line, System, Translation
from training.reporting.sample_tables import visible


def page(found: Translation, system: System, name: str) -> str:
    """The text; name: of the file that was translated."""
    lines = [
        f"# Made from {_one_line(name)} by python -m training.convert.",
        f"# The table is of {system.source}. Behind each line: what it was made from.",
        *_flags([line for line in found.lines if line.flag != "set"]),
    ]
    settings = [line for line in found.lines if line.flag == "set"]
    if settings:
        lines += ["set:", *(f"- {_value(line.value)}  # {_one_line(line.why)}" for line in settings)]
    lines += _listed("No counterpart, or to be decided:", found.missing)
    lines += _listed("Nothing to translate:", found.idle)
    return "\n".join(lines) + "\n"


def _flags(lines: Iterable[Line]) -> Iterator[str]:
    for line in lines:
        yield f"{line.flag}: {_value(line.value)}  # {_one_line(line.why)}"


def _value(value: object) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()
    return text.removesuffix("...").strip()


def _listed(head: str, lines: Iterable[str]) -> list[str]:
    told = [f"#   {_one_line(line)}" for line in lines]
    return ["", f"# {head}", *told] if told else []


def _one_line(text: str) -> str:
    return visible(" ".join(text.split()))  # YAML takes no control characters, not even in comments
