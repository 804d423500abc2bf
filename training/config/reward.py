"""Loads the rewards that a user names, in the form module:name or path/to/file.py:name. The name is that of a function
or of a RewardSource class.

`score_parts` lists the parts of a run's score (the reward model, the functions of --reward_function, the reward
servers), each with its weight and its name in metrics.
"""

import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

from engine.errors import UserError, shortened
from engine.files import refuse_pointers
from engine.reward.base import (
    HELD_OUT,
    IN_CONVERSATIONS,
    LIKELIHOOD,
    OBJECTIVE,
    AgreedReward,
    CombinedReward,
    EnvironmentReward,
    RewardModel,
    RewardSource,
    Standardisation,
)
from engine.reward.built_in import BUILT_IN, BuiltInSettings
from engine.reward.function import FunctionReward, Signature, signature_of
from engine.reward.server import ServerReward
from training.config.models import SCORE, FunctionFlags, ScoreFlags
from training.data.examples import Prompts
from training.reporting.standard_errors import ENDINGS


def load_function(name: str, flag: str = "--reward_function") -> Callable:
    """Import a reward function with the signature in `engine.reward.function`, or a RewardSource class whose
    constructor takes the tokenizer.

    Modules are also searched for in the current directory, after all other places. A file may import modules from its
    own folder.

    Raises: UserError, with the flag in its message, if the module is not found, if its import raises an error, if the
    module lacks the name, or if what it names cannot be called with the arguments of a reward function.
    """
    what = f"{flag} {name}"
    function = load_named(name, what, "function", f", or a built-in one: {' or '.join(BUILT_IN)}")
    _check_parameters(function, what)
    return function


def load_named(name: str, what: str, kind: str, others: str = "") -> Callable:
    """Import what `name` names. what: the flag with its value, for messages. kind: "function" or "class", for messages.
    others: the end of the message about a name without a colon. Raises: UserError."""
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise UserError(f"{what}: give module:{kind} or path/to/file.py:{kind}{others}.")
    module = _imported_file(Path(where), what) if names_file(where) else _imported(where, Path.cwd(), what)
    if not hasattr(module, attribute):
        raise UserError(f"{what}: {_origin(module)} has no {attribute}. Give the name of a {kind} in it.")
    found = getattr(module, attribute)
    if not callable(found):
        raise UserError(
            f"{what}: {attribute} in {_origin(module)} is {shortened(found, 60)}, which cannot be "
            f"called. Give the name of a {kind}."
        )
    return found


def names_file(where: str) -> bool:
    """Whether `where`, the part before the function's name, is the path of a file (with any ending) and not the name of
    a module."""
    return where.endswith(".py") or "/" in where or Path(where).is_file()


def is_source(function: Callable) -> bool:
    """Whether `function` is a RewardSource class, whose objects score rollouts."""
    return isinstance(function, type) and issubclass(function, RewardSource)


def function_source(function: Callable, given: str, tokenizer, rows: Sequence[dict]) -> RewardSource:
    """Make the RewardSource of a value of --reward_function.

    function: what the value names, a RewardSource class or a function of texts and rows. given: the flag's value.
    rows: rows[i] is the row of the data set from which the prompt with index i comes.
    """
    if is_source(function):
        return AgreedReward.made(function, tokenizer, f"the reward source {given}")
    return FunctionReward(function, tokenizer, rows, given)


def _imported_file(path: Path, what: str) -> ModuleType:
    """Import the file as a module. The file may be a link and may have any name, even the name of an installed
    module."""
    if not path.is_file():
        raise UserError(f"{what}: there is no file {path} (relative paths start from {Path.cwd()}).")
    refuse_pointers([path], what)
    path = path.absolute()
    for folder in (path.resolve().parent, path.parent):
        _add_to_path(folder)
    if path.suffix == ".py" and path.stem.isidentifier() and _by_name(path.stem) == path:
        return _imported(path.stem, path.parent, what)  # processes that it starts can import it too
    name = f"given in {path}"  # no import statement can have this name
    if name not in sys.modules:
        loader = SourceFileLoader(name, str(path))
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            loader.exec_module(module)
        except BaseException as error:
            del sys.modules[name]
            if isinstance(error, (Exception, SystemExit)):  # the user's code may raise anything
                raise UserError(_import_failed(error, path.name, what)) from None
            raise
    return sys.modules[name]


def _by_name(name: str) -> Path | None:
    """The file from which `import name` has loaded the module or would load it."""
    if name in sys.modules:
        return Path(getattr(sys.modules[name], "__file__", None) or "/")
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec and spec.origin else None


def _add_to_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    importlib.invalidate_caches()


def _imported(module: str, folder: Path, what: str) -> ModuleType:
    """Import a module, which may be in `folder`. The folder stays in sys.path, because the module may import others
    from it later."""
    _add_to_path(folder)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise UserError(_import_failed(error, module, what)) from None
        raise UserError(
            f"{what}: there is no module {module}, neither installed nor in {folder}. A file is given with its ending."
        ) from None
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise UserError(_import_failed(error, module, what)) from None


def _import_failed(error: BaseException, module: str, what: str) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    place = f"{frames[-1].filename}, line {frames[-1].lineno}"
    if isinstance(error, SyntaxError):
        place = f"{error.filename}, line {error.lineno}"
    return f"{what}: importing {module} raised {type(error).__name__}: {str(error)[:300]} ({place}). Fix the module."


def _check_parameters(function: Callable, what: str) -> None:
    if inspect.isclass(function) and not is_source(function):
        raise UserError(
            f"{what}: it is a class, and calling it scores nothing. Name an object of it, or let it inherit from "
            "engine.reward.base.RewardSource."
        )
    try:
        signature = signature_of(function)
    except ValueError:
        raise UserError(f"{what}: its parameters cannot be read. Give a function that is written in Python.") from None
    called = "the tokenizer alone"
    try:
        if is_source(function):
            signature.bind(None)
            what = f"{what}.score"
            signature = inspect.signature(function.score)
            called = "the rollout alone"
            own = isinstance(inspect.getattr_static(function, "score"), (staticmethod, classmethod))
            signature.bind(*[None] * (1 if own else 2))
            return
        called = "the prompts and the responses, and by name with rows, or columns of the data"
        Signature.of(function)
    except TypeError as error:
        raise UserError(f"{what}: it takes {signature}, but is called with {called} ({error}).") from None


def _origin(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or module.__name__


MODEL = "model"  # the name of the only reward model in metrics
ALONE = "function"  # the name of a function or class that is the only part of the score
SERVER = "server"  # the name of the servers of --reward_url
ENVIRONMENT = "environment"  # the name of the environment's rewards


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the score. The score is the weighted sum of its parts.

    name: the part's name in the metrics reward/NAME and objective/scores_NAME. what: a description for messages. given:
    for a function, the value of --reward_function.
    """

    name: str
    what: str
    weight: float
    given: str | None = None


def score_parts(args: ScoreFlags) -> list[Part]:
    """The parts of a run's score, in this order: the reward models and the functions as given, the reward servers, the
    environment."""
    given, others, models = args.reward_function, args.other_rewards, args.reward_paths
    weights = args.reward_weights or [1.0] * len(others)
    alone = not models and others == given[:1]
    called = model_names(models)
    parts = [
        Part(name, "reward model" if name == MODEL else f"reward model {name}", weight)
        for name, weight in zip(called, args.reward_model_weight or [1.0] * len(models))
    ]
    taken = [*called, ENVIRONMENT] if args.environment else called
    for name, function, weight in zip([ALONE] if alone else names(given, taken), given, weights):
        parts.append(Part(name, _what(name, function), weight, function))
    if args.reward_url:
        hosts = " and ".join(urlsplit(url).netloc for url in args.reward_url)  # paths and queries may hold keys
        parts.append(Part(SERVER, f"reward server {hosts}", weights[len(given)]))
    if args.environment:
        parts.append(Part(ENVIRONMENT, f"environment {args.environment.rpartition(':')[2]}", weights[-1]))
    return parts


def _what(name: str, given: str) -> str:
    """The function's description: its name in metrics, and the flag's value if that differs from the name."""
    own = given.rpartition(":")[2]
    return own if name in (own, ALONE) else f"{name} ({given})"


def check_held_out_number(args: ScoreFlags, flag: str, functions: Mapping[str, Callable], likelihood=False) -> None:
    """Raise UserError if no evaluation has the metric that the flag names.

    functions: the result of `load_functions`. With a RewardSource class every name is allowed, since only its scores
    have the names of its parts. likelihood: whether the score has a part for the likelihood.
    """
    parts = score_parts(args)
    alone = len(parts) == 1 and parts[0].weight == 1.0 and not args.length_penalty
    known = [SCORE, *(f"eval/reward_{part.name}" for part in parts if not alone)]
    given = getattr(args, flag)
    if getattr(args, "keeps_average", False):
        given = given.replace("eval/ema_", "eval/")
    names = [*HELD_OUT, *(IN_CONVERSATIONS if args.environment else []), *([LIKELIHOOD] if likelihood else [])]
    if given not in (*known, *(f"eval/{name}" for name in names)) and not any(map(is_source, functions.values())):
        raise UserError(
            f"{args.word(flag)}: no held-out number here has this name. Of scores there are {', '.join(known)}; "
            "docs/metrics_responses.md lists the others, and what each needs."
        )


def build_reward(
    args: ScoreFlags,
    functions: Mapping[str, Callable],
    reward_models: Sequence[RewardModel],
    tokenizer,
    rows: Sequence[dict],
) -> RewardSource:
    """The source of a run's scores: a reward model, reward function, reward servers or environment, or a weighted sum
    of several of these and the length penalty.

    reward_models: one for each of `args.reward_paths`. functions: the result of `load_functions`. rows: rows[i] is the
    row of the data set from which the prompt with index i comes.
    """
    parts = score_parts(args)
    models = {part.name: model for part, model in zip(parts, reward_models)}
    sources: dict[str, RewardSource] = {**models}
    for part in parts:
        if part.given is not None:
            sources[part.name] = function_source(functions[part.given], part.given, tokenizer, rows)
    if (server := args.reward_server()) is not None:
        sources[SERVER] = ServerReward(server, tokenizer, rows)
    sources[ENVIRONMENT] = EnvironmentReward()
    weighted = {part.name: (sources[part.name], part.weight) for part in parts}
    (alone, weight), *others = weighted.values()
    if not others and weight == 1.0 and not args.length_penalty:
        return alone
    comparable = args.raw_reward_scores or len(models) < 2
    standardised = {
        name: Standardisation(f"the reward model {name}")
        for name, model in models.items()
        if not (comparable or model.normalised)
    }
    return CombinedReward(weighted, length_penalty=args.length_penalty, standardised=standardised)


def load_functions(args: ScoreFlags) -> dict[str, Callable]:
    """Load the functions of a run: {value of --reward_function: function or class}. Raises UserError if one cannot be
    loaded."""
    functions = {name: load_given(name, args) for name in args.reward_function}
    for name, function in functions.items():
        if args.overlap_rewards and is_source(function):
            raise UserError(
                f"--overlap_rewards with --reward_function {name}: that is a class, and only functions are called "
                "early. Leave the flag out, or give a function."
            )
    return functions


def load_given(name: str, args: FunctionFlags, flag: str = "--reward_function") -> Callable:
    """The built-in function of this name, or the user's function. flag: what names it, for messages. Raises UserError
    if it cannot be loaded."""
    if name not in BUILT_IN:
        return load_function(name, flag)
    given = {"answer_column": args.answer_column, "response_format": args.response_format}
    return BUILT_IN[name](BuiltInSettings(**{field: value for field, value in given.items() if value is not None}))


def names(given: Sequence[str], models: Sequence[str] = ()) -> list[str]:
    """The functions' names in metrics, if the score has several parts: each function's own name, with a number appended
    if another function, a reward model or a server already has this name. models: the reward models' names."""
    return _unique([each.rpartition(":")[2] for each in given], models)


def model_names(paths: Sequence[str]) -> list[str]:
    """The reward models' names in metrics: MODEL for one alone; of several, each folder's name, with a number appended
    if another one already has it."""
    return [MODEL] * len(paths) if len(paths) < 2 else _unique([Path(path).name for path in paths])


def _unique(given: Sequence[str], taken: Sequence[str] = ()) -> list[str]:
    found: list[str] = []
    for each in given:
        name = re.sub(r"\W", "_", each)
        others = [*taken, *found]
        found.append(name if _free(name, others) else _numbered(name, others))
    return found


def _numbered(name: str, taken: Collection[str]) -> str:
    number = 2
    while not _free(f"{name}_{number}", taken):
        number += 1
    return f"{name}_{number}"


def _free(name: str, taken: Collection[str]) -> bool:
    """Whether the name is free: no metric with another meaning has it."""
    return name not in (*taken, MODEL, SERVER) and f"scores_{name}" not in OBJECTIVE and not name.endswith(ENDINGS)


def check_columns(functions: Mapping[str, Callable], data: Mapping[str, Prompts]) -> None:
    """Raise UserError if a function asks for a column that was not read, or that the first row of the data lacks.

    functions: {value of --reward_function: function}. data: {the name by which messages call the data: its prompts}.
    """
    for given, function in functions.items():
        if is_source(function):
            continue
        signature = Signature.of(function)
        for where, prompts in data.items():
            asked = (*signature.required, *signature.optional)
            prompts.refuse_unread(asked, f"--reward_function {given} asks {where} for")
            row = prompts.rows[0]
            if missing := signature.missing(row):
                having = ", ".join(name if value is not None else f"{name} (null)" for name, value in row.items())
                absent = " Null counts as absent." if row.get(missing[0], "") is None else ""
                flag = " (--answer_column says which)" if given in BUILT_IN else ""
                raise UserError(
                    f"--reward_function {given} asks for the column {missing[0]}{flag}, which {where} lack: they "
                    f"have {having}.{absent} Add the column, or name one that is there."
                )


def short_names(given: Sequence[str]) -> str | None:
    """The functions' names as checkpoints store them; None if there are no functions. Folders are left out, since files
    may be moved."""
    return " ".join(Path(name).name for name in given) or None
