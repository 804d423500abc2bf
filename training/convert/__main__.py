"""Another system's PPO configuration as a YAML file for step 3's --config.

    python -m training.convert trl ppo.yaml --ranks 8 --output run.yaml
    python -m training.convert openrlhf train_ppo.sh --output run.yaml

trl: TRL's PPOConfig, ScriptArguments and ModelConfig. openrlhf: the flags of train_ppo_ray. Both in a YAML or JSON
file, as flags alone, or in a script that calls the program with them. Each line of what is written says where it comes
from; what has no counterpart, or is still to be decided, stands at its end and is printed, what step 3 would refuse and
nothing is lost without at its end alone. An unknown field is an error.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.errors import UserError
from engine.whole_files import write_whole
from training.convert.openrlhf import OPENRLHF
from training.convert.page import page
from training.convert.reading import read_fields
from training.convert.refused import leave_out_refused
from training.convert.translation import System, Translation, translate
from training.convert.trl import TRL
from training.reporting.sample_tables import visible

SYSTEMS: dict[str, System] = {"trl": TRL, "openrlhf": OPENRLHF}


def convert(system: str, path: str, ranks: int | None = None, skip_unknown: bool = False) -> tuple[str, list[str]]:
    """The YAML's text, and what has no counterpart. Raises: UserError for what cannot be read or translated."""
    found = _translated(system, path, ranks, skip_unknown)
    return page(found, SYSTEMS[system], Path(path).name), found.missing


def _translated(system: str, path: str, ranks: int | None, skip_unknown: bool) -> Translation:
    chosen = SYSTEMS[system]
    fields = chosen.named(read_fields(path, chosen.program, chosen.program_name))
    unknown = [name for name in fields if name not in chosen.table] if skip_unknown else []
    found = translate(chosen, fields, ranks, unknown)
    leave_out_refused(found)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Convert by a command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("system", choices=tuple(SYSTEMS), help="whose configuration it is")
    parser.add_argument("config", help="its file")
    parser.add_argument("--output", help="the YAML file to write; by default it is printed")
    parser.add_argument("--ranks", type=int, help="how many processes there are to be: sizes of all ranks need it")
    parser.add_argument("--skip_unknown", action="store_true", help="pass over fields that the table does not have")
    given = parser.parse_args(argv)
    try:
        if given.ranks is not None and given.ranks < 1:
            raise UserError(f"--ranks {given.ranks}: give 1 or more.")
        if given.output is not None and Path(given.output).exists():
            raise UserError(f"--output {given.output}: it is there already. Move it away, or give another name.")
        found = _translated(given.system, given.config, given.ranks, given.skip_unknown)
        text = page(found, SYSTEMS[given.system], Path(given.config).name)
        if given.output is None:
            print(text, end="")
        else:
            _write(given.output, text, found.launcher)
    except UserError as error:
        print(f"error: {visible(str(error))}", file=sys.stderr)
        return 2
    for line in found.missing:
        print(f"no counterpart, or to be decided: {visible(line)}", file=sys.stderr)
    return 0


def _write(output: str, text: str, launcher: str) -> None:
    try:
        write_whole(output, text)
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written ({error.strerror}). Give another place.") from None
    print(f"written: {output}\ntry it: {launcher} training/step3_rlhf.py --config {output} --dry_run")


if __name__ == "__main__":
    sys.exit(main())
