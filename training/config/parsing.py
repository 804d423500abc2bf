"""Parses a command line, and the YAML file that it names, into a dataclass of flags (`parse_flags`).

The YAML file is one mapping without repeated keys, and is read with the safe loader. If an unknown flag or key belongs
to another step or another system, the error says what to use instead; otherwise it names the most similar flag.
"""

import argparse
import dataclasses
import functools
import re
import reprlib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.algorithms import Dialect
from engine.errors import UserError, nearest_names, without_query
from engine.files import read_text
from engine.options import REQUIRED, choices_of, default_of
from training.commands import running_command
from training.config.flags import ProgramFlags, by_group, check_name
from training.config.other_systems import DEFAULTS, flag_of_other_systems
from training.config.step3 import RLHFFlags
from training.config.supervised import RewardFlags, SFTFlags
from training.runtime.environment import visible


def read_yaml(path: str) -> dict:
    """The mapping in the file. Raises UserError if the file does not hold a mapping."""
    import yaml

    class UniqueKeys(yaml.SafeLoader):
        """A YAML loader that raises an error if a key occurs twice, instead of taking the later value."""

        def construct_mapping(self, node, deep=False):
            seen = set()
            for key_node, _ in node.value:
                if key_node.value in seen if isinstance(key_node.value, str) else False:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key_node.value} occurs twice", key_node.start_mark
                    )
                seen.add(str(key_node.value))
            return super().construct_mapping(node, deep)

    try:
        found = yaml.load(read_text(path), UniqueKeys)
    except (OSError, ValueError) as error:
        raise UserError(f"--config {path}: cannot be read ({getattr(error, 'strerror', None) or error}).") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = visible(getattr(error, "problem", None) or str(error))
        raise UserError(f"--config {path}{where}: no valid YAML ({problem}).") from None
    if not isinstance(found, dict):
        raise UserError(
            f"--config {path}: found {'nothing' if found is None else reprlib.repr(found)}; needed lines "
            "like `output_dir: out`."
        )
    return found


STEPS = {SFTFlags: 1, RewardFlags: 2, RLHFFlags: 3}

FIRST = {
    "models and data": (
        *("model_name_or_path", "actor_model_name_or_path", "critic_model_name_or_path", "reward_model_name_or_path"),
        *("data_path", "eval_data_path", "data_split"),
    ),
    "starting": ("output_dir", "config", "dry_run", "seed", "dtype"),
    "lengths and batches": (
        *("max_seq_len", "max_prompt_seq_len", "max_answer_seq_len", "per_device_train_batch_size"),
        *("per_device_generation_batch_size", "generation_batches", "per_device_training_batch_size"),
        "gradient_accumulation_steps",
    ),
    "how long, how fast": (
        *("num_train_epochs", "max_steps", "learning_rate", "actor_learning_rate", "critic_learning_rate"),
        *("lr_scheduler_type", "num_warmup_steps"),
    ),
    "choosing the algorithm": ("dialect", "set", "kl_coef", "ppo_epochs", "num_samples_per_prompt"),
    "scores besides a reward model": ("reward_function", "reward_url", "environment"),
    "fitting into memory": (
        *("zero_stage", "actor_zero_stage", "critic_zero_stage", "offload"),
        *("gradient_checkpointing", "actor_gradient_checkpointing", "critic_gradient_checkpointing"),
    ),
    "training adapters": ("lora_dim", "actor_lora_dim", "critic_lora_dim", "only_optimize_lora"),
    "evaluating, saving, resuming": ("num_eval_prompts", "eval_steps", "save_steps", "resume"),
}
"""{task: flags of the steps that people use first}. --help and docs/flags.md begin with them."""


def first_by_task(arguments_class: type[ProgramFlags]) -> dict[str, list[dataclasses.Field]]:
    """{task: flags} of FIRST that the program has, after its other required flags and those that no step has."""
    known = {spec.name: spec for spec in dataclasses.fields(arguments_class)}
    tasks = {task: [known[name] for name in names if name in known] for task, names in FIRST.items()}
    told = [spec for specs in tasks.values() for spec in specs]
    own = [
        spec
        for spec in known.values()
        if spec not in told
        and (default_of(spec) is REQUIRED or not any(spec.name in step.__dataclass_fields__ for step in STEPS))
    ]
    return {task: specs for task, specs in {"this program": own, **tasks}.items() if specs}


# {flag: what to use instead, in the steps that do not have the flag}.
IN_STEP_3 = {
    "held_out": "here --num_eval_prompts says how many prompts are held out",
    "max_seq_len": "here --max_prompt_seq_len and --max_answer_seq_len say how long a prompt and its answer may be",
    "per_device_train_batch_size": "here --per_device_generation_batch_size says how many prompts are answered at the "
    "same time, and --per_device_training_batch_size how many responses a forward and backward pass has",
    "learning_rate": "here --actor_learning_rate and --critic_learning_rate are given apart",
    "model_name_or_path": "here --actor_model_name_or_path and --critic_model_name_or_path are given apart",
}
IN_STEPS_1_AND_2 = {
    "num_eval_prompts": "here --held_out says how many rows are held out",
    "actor_learning_rate": "here it is --learning_rate",
    "actor_model_name_or_path": "here it is --model_name_or_path",
}


def step_of(arguments_class: type[ProgramFlags]) -> int | None:
    """The number of the training step whose flags these are; None for the flags of another program."""
    return next((step for known, step in STEPS.items() if issubclass(arguments_class, known)), None)


def flag_of_other_steps(arguments_class: type[ProgramFlags], name: str) -> str | None:
    """A text with the steps that have the flag `name`, and what to use in its place in this step; None if no other step
    has the flag."""
    steps = [str(step) for other, step in STEPS.items() if name in other.__dataclass_fields__]
    if not steps or name in arguments_class.__dataclass_fields__:
        return None
    counterparts = IN_STEP_3 if issubclass(arguments_class, RLHFFlags) else IN_STEPS_1_AND_2
    instead = f"; {counterparts[name]}" if name in counterparts else ""
    return f"It is a flag of step{'s' if len(steps) > 1 else ''} {' and '.join(steps)}{instead}."


UNTOLD = ("local_rank", "help")
"""Flags that every program has. They are never suggested in place of a misspelt flag."""


VALUE = re.compile(r"---|--?[^-a-z]|-(inf|nan)$", re.IGNORECASE)
"""A word that begins with a dash but is a value: a negative number, or a text such as "---" that no flag is called."""


class _Parser(argparse.ArgumentParser):
    flags: type[ProgramFlags]

    def error(self, message: str):
        name = next(iter(re.findall(r"^argument --(\w+)", message)), "")
        old = name in self.flags.old_flags  # perhaps with another system's value: --deepspeed zero3
        told = flag_of_other_systems(name, step_of(self.flags)) if old else None
        raise UserError(f"{_shortened(message)}. {told or '--help all lists the flags.'}")


def parse_flags(
    arguments_class: type[ProgramFlags],
    argv: Sequence[str],
    description: str,
    say: Callable[[str], None] = lambda line: None,
    validate: bool = True,
):
    """Fill a dataclass of flags from a command line and from the YAML file that the command line names, and validate
    it.

    say: function that is called with a line for each flag that has no effect, and with one for --defaults. Raises:
    UserError for an unknown flag or key (the message names the most similar flag), a required flag that is missing, a
    value of the wrong type, or, if it validates, a value that asks for a feature that is missing here.
    """
    parser = _parser(arguments_class)
    known = [spec.name for spec in dataclasses.fields(arguments_class)] + list(arguments_class.old_flags)
    _refuse_unknown(arguments_class, argv, known)
    asked = next((place for place, word in enumerate(argv) if word in ("-h", "--help")), None)
    if asked is not None:
        print(help_text(arguments_class, description, list(argv[asked + 1 : asked + 2]) == ["all"]), end="")
        raise SystemExit(0)
    words = _with_defaults(arguments_class, [*_file_words(arguments_class, argv, known), *argv], say)
    found, stray = parser.parse_known_args(words)
    if stray:
        raise UserError(f"{_shortened(stray[0])!r} belongs to no flag. --help all lists the flags.")
    values = vars(found)
    del values["local_rank"]
    for name in arguments_class.old_flags:
        value = values.pop(name)
        if value is not None and value is not False:
            say(f"--{name}: without effect here (docs/from_deepspeed_chat.md)")
    args = arguments_class(**values)
    if validate:
        args.validate()
    return args


def help_text(arguments_class: type[ProgramFlags], description: str, every: bool) -> str:
    """What --help prints: every flag of the program by topic, or those that people use first by task."""
    parser = _parser(arguments_class, groups=None if every else first_by_task(arguments_class))
    specs = dataclasses.fields(arguments_class)
    required = "".join(f" --{spec.name} ..." for spec in specs if default_of(spec) is REQUIRED)
    parser.usage = f"%(prog)s{required} [--FLAG VALUE ...]"
    parser.description = description
    parser.epilog = None if every else f"--help all lists all {len(specs)} flags; docs/flags.md has every program's."
    parser.formatter_class = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=30)
    return parser.format_help()


def _parser(arguments_class: type[ProgramFlags], defaults: bool = True, groups: Mapping | None = None) -> _Parser:
    """The parser of the flags. defaults: whether the parser fills in defaults and demands required flags. groups:
    {heading: flags} if not all flags are wanted."""
    parser = _Parser(prog=running_command(), allow_abbrev=False, argument_default=argparse.SUPPRESS, add_help=False)
    parser.flags = arguments_class
    parser._negative_number_matcher = VALUE  # argparse's own knows negative numbers without an exponent
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)  # given by the launcher
    hints = typing.get_type_hints(arguments_class)
    for heading, specs in (by_group(arguments_class) if groups is None else groups).items():
        group = parser.add_argument_group(heading)
        for spec in specs:
            options = _argparse_options(spec, hints[spec.name], defaults, short=groups is not None)
            group.add_argument(f"--{spec.name}", **options)
    if groups is None and arguments_class.old_flags:
        group = parser.add_argument_group("DeepSpeed-Chat's flags that have nothing left to do")
        for name, kind in arguments_class.old_flags.items():
            options = _TRUTH if kind is bool else {"type": kind}
            group.add_argument(f"--{name}", default=None if defaults else argparse.SUPPRESS, **options)
    return parser


def _shortened(text: str) -> str:
    """The text, shortened to one line, with terminal control characters escaped."""
    line = visible(without_query(text))
    return line if len(line) <= 400 else f"{line[:300]} ... {line[-97:]}"


def _refuse_unknown(arguments_class: type[ProgramFlags], argv: Sequence[str], known: Sequence[str]) -> None:
    unknown = []
    step = step_of(arguments_class)
    for place, word in enumerate(argv):
        name, sign, value = word.partition("=")
        dotted = sign and "." in name and step and flag_of_other_systems(name, step)  # verl's flags have no dashes
        if dotted or (name.startswith("--") and name[2:] not in (*known, *UNTOLD) and not VALUE.match(word)):
            following = argv[place + 1] if place + 1 < len(argv) else "--"
            value = value if sign else "VALUE" if following.startswith("--") else following
            hint = _hint(arguments_class, name.removeprefix("--"), value, known, "--")
            unknown.append(f"unknown flag {_shortened(name)}.{hint}")
    if unknown:
        raise UserError(*unknown)


def _hint(arguments_class: type[ProgramFlags], name: str, value: str, names: Sequence[str], dashes: str) -> str:
    """A text on what the user should do about the unknown flag or key `name`."""
    sentence = arguments_class.no_flag(name, _shortened(value)) or flag_of_other_steps(arguments_class, name)
    step = step_of(arguments_class)
    if not sentence and step is not None:
        sentence = flag_of_other_systems(name, step)
    if sentence:
        return f" {sentence}"
    current = [known for known in names if known not in arguments_class.old_flags]
    near = " or ".join(f"{dashes}{known}" for known in nearest_names(name, current))
    return f" Did you mean {near}?" if near else " --help all lists the flags."


def _file_words(arguments_class: type[ProgramFlags], argv: Sequence[str], known: Sequence[str]) -> list[str]:
    """The settings of the YAML file as words of a command line. Each setting is parsed on its own first, so that an
    error can name its key."""
    parser = _parser(arguments_class, defaults=False)
    given = vars(parser.parse_known_args(argv)[0])
    path = given.get("config")
    if path is None:
        return []
    check_name("config", path)
    settings = read_yaml(path)
    for key, value in settings.items():
        if key == "config" or key not in known:
            text = value if isinstance(value, str) else reprlib.repr(value)
            raise UserError(
                f"{path}: unknown key {_shortened(str(key))}.{_hint(arguments_class, str(key), text, known, '')}"
            )
        try:
            stray = parser.parse_known_args(_words(path, key, value))[1]
        except UserError as error:
            raise UserError(f"{path}, key {key}: {error}") from None
        if stray:
            raise UserError(
                f"{path}, key {key}: {reprlib.repr(value)} is more than one value. --help all lists the flags."
            )
    kept = arguments_class.not_overridden(settings, given)
    return [word for key, value in kept.items() for word in _words(path, key, value)]


def _with_defaults(arguments_class: type[ProgramFlags], words: list[str], say: Callable[[str], None]) -> list[str]:
    """The words of the command line and the file, after those of the defaults that --defaults names."""
    given = vars(_parser(arguments_class, defaults=False).parse_known_args(words)[0])
    if "defaults" not in given:
        return words
    values = DEFAULTS[given["defaults"]][arguments_class.phase]
    known = arguments_class.__dataclass_fields__.keys() - given  # a tool lacks some flags of step 3
    kept = {name: value for name, value in arguments_class.not_overridden(values, given).items() if name in known}
    taken = [f"--{name}={value}" for name, value in kept.items()]
    say(f"--defaults {given['defaults']}: {' '.join(taken).replace('=', ' ')}")
    return [*taken, *words]


def _words(path: str, key: str, value) -> list[str]:
    values = value if isinstance(value, list) else [value]
    for item in values:
        if not isinstance(item, (str, int, float, bool, type(None))) or (item is None and isinstance(value, list)):
            raise UserError(
                f"{path}, key {key}: {reprlib.repr(value)} is not a text, number, truth value or list of these."
            )
    if value is None:
        return []
    texts = [str(item).lower() if isinstance(item, bool) else str(item) for item in values]
    if len(texts) == 1:
        return [f"--{key}={texts[0]}"]
    if any(text.startswith("--") and not VALUE.match(text) for text in texts):
        raise UserError(f"{path}, key {key}: a value that begins with -- cannot be in a list.")
    return [f"--{key}", *texts]


def _argparse_options(spec: dataclasses.Field, hint, defaults: bool, short: bool) -> dict[str, Any]:
    """How argparse is told of a flag. short: whether the first sentence of its help is enough."""
    required = default_of(spec) is REQUIRED
    default = None if required else default_of(spec)
    shown = "" if default in (None, [], False) else f" (default: {default})"
    if field := spec.metadata.get("field"):
        shown = f" ({getattr(Dialect(), field)} in the dialect default)"
    text, known = spec.metadata["help"], choices_of(spec)
    names = ", ".join(map(str, known or ()))
    many = len(names) > 50  # argparse would put them on one line
    if many:
        shown = f". One of {names}{shown}"
    options = {
        "help": ((text.partition(". ")[0] if short else text) + shown).replace("%", "%%"),
        "default": default if defaults else argparse.SUPPRESS,
        "required": defaults and required,
    }
    if isinstance(hint, types.UnionType):
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    kind = typing.get_args(hint)[0] if typing.get_origin(hint) is list else hint
    if many or not known:
        options["metavar"] = {str: "TEXT", int: "INTEGER", float: "NUMBER"}.get(kind)
    if hint is bool:
        # Without a value the flag means true. With the value false it can undo what a file or a script has set.
        return options | _TRUTH
    if typing.get_origin(hint) is list:
        return options | {
            "type": kind,
            "choices": known,
            "nargs": "+",
            "action": "extend" if spec.metadata["adds_up"] else "store",
        }
    return options | {"type": kind, "choices": known}


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


_TRUTH = {"type": _truth, "metavar": "true|false", "nargs": "?", "const": True}
