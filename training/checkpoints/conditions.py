"""The content of a checkpoint's trainer_state.json: the training state, the settings that must be the same in a resumed
run, and the settings that may change.

steps_done, optimizer_steps, samples, prompt_batches, kl, score_scale    the training state (PPOTrainer.state_dict);
                    steps_done is negative while the critic is pretrained
held_out_..., metrics_without_evaluation    the keys BEFORE, FIRST and OWED below; each is present only if it is needed
models              step counts and loss scales of each model (TrainedModel.scalars)
ema                 whether the checkpoint has a moving average
identity            settings that must be the same in the resumed run: with other values the state would be meaningless
settings            settings that may change; every change that has an effect is printed

Models and reward functions may be moved to other paths. The settings also hold fingerprints of their contents, by which
they are recognised.
"""

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from engine import distributed
from engine.algo.schedules import depends_on_total
from engine.algorithms import Dialect
from engine.errors import UserError, without_query
from engine.models.checking import fingerprint, frozen_fingerprint
from engine.options import SAME, TOLD, with_resume
from engine.reward.built_in import BUILT_IN
from training.config.models import LoraFlags
from training.config.reward import load_function, names_file, short_names
from training.config.step3 import RLHFFlags
from training.config.supervised import SupervisedFlags

MODELS = ("actor_model_name_or_path", "critic_model_name_or_path", "reward_model_name_or_path")
FUNCTION = "reward_function"
BASE = "base of "  # prefix of a flag's name: the model's frozen weights, to which LoRA factors are added


def fingerprints(args: RLHFFlags) -> dict[str, str]:
    """{flag: fingerprint} of those models and reward functions' sources that are on this machine. With LoRA, it also
    has the fingerprint of each model's base, which is another model if the model is an adapter."""
    found = {}
    for name in MODELS:
        path = getattr(args, name)
        if path is not None and args.looks_at(path):
            found[f"--{name}"] = fingerprint(path, f"--{name}")
            if any(map(args.lora, args.lora_models)):
                found[f"{BASE}--{name}"] = frozen_fingerprint(path, f"--{name}")
    if args.reward_function:
        found[f"--{FUNCTION}"] = sources_fingerprint(args.reward_function)
    return {name: value for name, value in found.items() if value is not None}


def sources_fingerprint(names: Sequence[str]) -> str | None:
    """A hash of the source files of all functions. For a single function, it is the function's `source_fingerprint`.
    None if there are no files."""
    found = [each for name in names if name not in BUILT_IN if (each := source_fingerprint(name)) is not None]
    return found[0] if len(found) == 1 else hashlib.sha256(" ".join(found).encode()).hexdigest() if found else None


def source_fingerprint(name: str) -> str | None:
    """A hash of two files: the one that `name`, a value of --reward_function, names, and the one that defines the
    function or class. None if there are no such files. Files that these files import are not hashed."""
    function, where = load_function(name), name.rpartition(":")[0]
    files = {where if names_file(where) else getattr(sys.modules[where], "__file__", None), _written_in(function)}
    texts = [Path(file).read_bytes() for file in sorted(filter(None, {_resolved(file) for file in files}))]
    return hashlib.sha256(b"\0".join(texts)).hexdigest() if texts else None


def changed_models(now: Mapping[str, object], then: Mapping[str, object], contents: Callable[[str], str]) -> list[str]:
    """The flags of the models whose content has changed between `then` and `now`, but whose path has not.

    contents: function from a flag to the settings' key for the fingerprint of that model's content.
    """
    return [
        flag
        for flag in (f"--{name}" for name in MODELS)
        if now.get(flag) == then.get(flag)
        and None not in (now.get(contents(flag)), then.get(contents(flag)))
        and now[contents(flag)] != then[contents(flag)]
    ]


def _written_in(function: Callable) -> str | None:
    for candidate in (inspect.unwrap(function), type(function)):
        try:
            return inspect.getsourcefile(candidate)
        except TypeError:  # a callable object, or a built-in function
            continue
    return None


def _resolved(file: str | None) -> str | None:
    return None if file is None or not Path(file).is_file() else str(Path(file).resolve())


OWED = "metrics_without_evaluation"
"""Key of the state: the last step's metrics, if the checkpoint was written before the evaluation whose results belong
to them."""
BEFORE = "held_out_before_training"
"""Key of the state: what was measured on each held-out unit before the first step, for comparison with later
measurements."""
FIRST = "held_out_first_responses"
"""Key of the state: the responses to the held-out prompts before the first step. Later, words that do not occur in them
count as new."""
DATA = "the data"  # its value is a fingerprint, which messages do not show
URL = "--reward_url"  # an address, which may change
SERVED = "the reward server"
TEMPLATE = "the chat template"  # a hash of it
FROZEN = "frozen weights of the "
CONTENTS = "contents of "  # prefix of a flag's name: a fingerprint, which messages do not show
TOTAL_STEPS, MICRO_BATCH, RANKS = "total steps", "--per_device_training_batch_size", "ranks"


def shared_identity(args: LoraFlags, data: list[str], tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """The part of the identity that all three training steps share: data, chat template, adapters, and the flags that
    are defined with resume=SAME."""
    specs = {model: args.lora(model) for model in args.lora_models}
    return {
        DATA: data,
        TEMPLATE: hashlib.sha256(json.dumps(tokenizer.chat_template).encode()).hexdigest(),
        **{name if name == "seed" else f"--{name}": value for name, value in with_resume(args, SAME)},
        **{
            f"--{model}lora_dim and its like": spec
            and {name: getattr(spec, name) for name in ("dim", "alpha", "targets", "dropout", "only")}
            for model, spec in specs.items()
        },
    }


def shared_settings(args: LoraFlags, total_steps: int) -> dict[str, object]:
    """The settings that may change in a resumed run, for all three training steps."""
    specs = {model: args.lora(model) for model in args.lora_models}
    return {
        **{f"--{name}": value for name, value in with_resume(args, TOLD)},
        TOTAL_STEPS: total_steps,
        RANKS: distributed.world_size(),
        **{f"--{model}lora_learning_rate": spec and spec.lr for model, spec in specs.items()},
    }


def _as_json(*parts: Mapping) -> list[dict]:
    return json.loads(json.dumps(parts))


@dataclass(frozen=True, slots=True)
class Conditions:
    """The settings under which a run trains. identity: {name: value} of the settings that a resumed run must have in
    common with its checkpoint. settings: {name: value} of the settings that may change.

    Values are JSON values, without tuples. idle: names of settings that change this run's results by rounding at most.
    ranks_matter: whether another number of ranks changes the results (`Dialect.ranks_matter`).
    """

    identity: dict[str, object] = field(default_factory=dict)
    settings: dict[str, object] = field(default_factory=dict)
    idle: frozenset[str] = frozenset()
    ranks_matter: bool = False

    @classmethod
    def of(
        cls,
        args: RLHFFlags,
        data: list[str],
        total_steps: int,
        tokenizer: PreTrainedTokenizerBase,
        inputs: Mapping[str, str] | None = None,
    ) -> "Conditions":
        """The conditions of this run of step 3.

        data: fingerprints of the prompts and of the texts. total_steps: number of steps of the whole run; the learning
            rates' schedule depends on it.
        tokenizer: the tokenizer, whose chat template must stay the same. inputs: {flag: fingerprint} of models and
            reward functions.
        """
        dialect, weights, inputs = args.resolved.dialect, args.reward_weights, inputs or {}
        identity = {
            **shared_identity(args, data, tokenizer),
            "responses a step": args.rows_per_rank * distributed.data_parallel_size(),
            **dict(with_resume(dialect, SAME)),
            "--reward_function": short_names(args.reward_function),
            "--reward_weights": weights if any(weight != 1.0 for weight in weights) else None,
            SERVED: "given" if args.reward_url else None,
            **frozen_identity(_start_flags(args, dialect), inputs, args),
            **args.moving_reference(),
        }
        urls = without_query(" ".join(args.reward_url))
        settings = {
            **dict(with_resume(dialect, TOLD)),
            **shared_settings(args, total_steps),
            **{_contents(flag): value for flag, value in inputs.items() if not flag.startswith(BASE)},
            **({URL: urls, f"{URL}_form": args.reward_url_form} if urls else {}),
            **{f"--{role}_zero_stage": args.stage(role) for role in ("actor", "critic")},
        }
        return cls(*_as_json(identity, settings), _idle(dialect), dialect.ranks_matter)

    @classmethod
    def of_trainer(cls, dialect: Dialect, config) -> "Conditions":
        """The conditions that a PPOTrainer knows. config: its PPOConfig."""
        identity = {"seed": config.seed, **dict(with_resume(dialect, SAME))}
        settings = dict(with_resume(dialect, TOLD)) | {TOTAL_STEPS: config.total_steps, RANKS: distributed.world_size()}
        return cls(*_as_json(identity, settings), _idle(dialect), dialect.ranks_matter)

    @classmethod
    def read(cls, state: Mapping) -> "Conditions":
        """The conditions that are stored in a checkpoint's state."""
        return cls(dict(state["identity"]), dict(state["settings"]))

    def check(self, written: "Conditions", folder: Path) -> None:
        """Raise UserError if this run's identity differs from that of the run that wrote the checkpoint in `folder`."""
        others = [name for name in self.identity.keys() ^ written.identity.keys() if not name.startswith(FROZEN)]
        if others:
            raise UserError(
                f"--resume {folder}: it was written by another version of this program, or by another step of the "
                f"three (only one of the two has {', '.join(sorted(others))}). Go on with that version, or begin anew."
            )
        # The data are compared last: if a seed, a length or --overlong has changed, other rows are held out, and the
        # message has to name this cause.
        for name, value in sorted(self.identity.items(), key=lambda item: item[0] == DATA):
            then = written.identity.get(name)
            if name.startswith(FROZEN) and None in (then, value):
                continue  # the model is a Hub name and was not downloaded yet
            if then != value and name.startswith(FROZEN):
                raise UserError(
                    f"--resume {folder}: the {name} are others than when it was written, and the factors in it belong "
                    "to those. Give the model that the run began with; its folder may have moved."
                )
            if then != value and name == TEMPLATE:
                raise UserError(
                    f"--resume {folder}: the chat template is another than when it was written. Give the same "
                    "--chat_template as when the run began, or the model with the same tokenizer."
                )
            if then != value and name == DATA:
                raise UserError(
                    f"--resume {folder}: the data, those held out included, are others than when it was "
                    "written. Give the same data as when the run began."
                )
            if (then or None) != (value or None):  # a flag that is off equals one that is not given
                remedy = "Give the same flags and data as when the run began."
                if name.endswith(" a step"):
                    remedy = "Ranks times batch size has to be what it was: change one with the other."
                raise UserError(
                    f"--resume {folder}: {name} was {_said(then)} when it was written and is {_said(value)} now. "
                    f"{remedy}"
                )
        for flag in changed_models(self.settings, written.settings, _contents):
            raise UserError(
                f"--resume {folder}: {flag} {self.settings[flag]} holds another model than when it was written. The KL "
                "to it, or its scores, would jump. Put the old one back; or give the new one by another path, if it is "
                "meant to be another."
            )

    def changes_since(self, written: "Conditions") -> list[str]:
        """A line for each setting that has changed since the checkpoint was written and affects the computation."""
        changed = [
            (name, then)
            for name, then in written.settings.items()
            if name in self.settings and self.settings[name] != _shown(name, then) and name not in self.idle
        ]
        lines = [
            f"changed since the checkpoint: {name} {_shown(name, then)} -> {self.settings[name]}"
            f"{self._note(name, written)}"
            for name, then in changed
            if not name.startswith(CONTENTS)
        ]
        if _contents(f"--{FUNCTION}") in dict(changed):
            name = self.identity[f"--{FUNCTION}"]
            lines.append(
                f"changed since the checkpoint: the source of --{FUNCTION} {name} (scores are its own from here on)"
            )
        return lines

    def scores_changed_since(self, written: "Conditions") -> bool:
        """Whether a reward function or the reward model has changed since the checkpoint was written.

        A function or model whose contents and path are both unknown counts as unchanged. A reward server always counts
        as unchanged: the same server may have another address now.
        """
        function = _contents(f"--{FUNCTION}")
        functions = {conditions.settings.get(function) for conditions in (self, written)} - {None}
        (path, model), (path_then, model_then) = self._reward_model(), written._reward_model()
        return len(functions) > 1 or (model != model_then if None not in (model, model_then) else path != path_then)

    def _reward_model(self) -> tuple[object, object]:
        """(the reward model's path, the fingerprint of its contents). Each is None if it is unknown or there is no
        reward model."""
        flag = "--reward_model_name_or_path"
        others = (f"--{FUNCTION}", SERVED)
        if self.settings.get(flag) is None and all(self.identity.get(name) is None for name in others):
            flag = "--critic_model_name_or_path"
        return self.settings.get(flag), self.settings.get(_contents(flag))

    def _note(self, name: str, written: "Conditions") -> str:
        if name.removeprefix("--") in MODELS:
            now, then = (conditions.settings.get(_contents(name)) for conditions in (self, written))
            return "" if None in (now, then) else " (the same weights)" if now == then else " (other weights)"
        if name == URL:
            return " (taken for the same server at another address)"
        if name == TOTAL_STEPS:
            return " (learning rates go on as in a run of so many steps)"
        if name == RANKS and self.ranks_matter:
            return " (the state is the same to the last bit; this dialect computes by rank, and goes on otherwise)"
        if name == RANKS or name.endswith("_zero_stage"):
            return " (the state is the same to the last bit; from here on sums are rounded otherwise)"
        if name == MICRO_BATCH:
            return " (losses or advantages of this dialect are a micro-batch's)"
        if name == "kl_coef" and self.identity["kl_controller"] == "adaptive":
            return " (without effect: the adaptive coefficient goes on from where it was)"
        return ""


def _idle(dialect: Dialect) -> frozenset[str]:
    total = () if depends_on_total(dialect.lr_schedule) else (TOTAL_STEPS,)
    return frozenset(total if dialect.micro_batches_matter else (*total, MICRO_BATCH))


def frozen_identity(flags: Mapping[str, str], inputs: Mapping[str, str], args: LoraFlags) -> dict[str, object]:
    """{name: fingerprint} of each model's frozen weights, to which LoRA factors are added; the fingerprint is None if
    the model has no LoRA, or if it is not known.

    flags: {prefix of the model's "lora_dim" flag: the flag of the model's path}. inputs: {flag: fingerprint}.
    """
    return {
        f"{FROZEN}{model.rstrip('_') or 'model'}": inputs.get(f"{BASE}{flag}") if args.lora(model) else None
        for model, flag in flags.items()
    }


def _start_flags(args: RLHFFlags, dialect: Dialect) -> dict[str, str]:
    """{prefix of the model's "lora_dim" flag: flag of the model from which it starts}, for actor and critic."""
    flags = {"actor_": "--actor_model_name_or_path"}
    if dialect.has_critic:
        own = dialect.critic_start == "reward_model" and args.critic_model_name_or_path is not None
        flags["critic_"] = "--critic_model_name_or_path" if own else flags["actor_"]
    return flags


def _shown(name: str, value: object) -> object:
    return without_query(str(value)) if name == URL else value


def _said(value: object) -> str:
    return "not given" if value is None or value is False or value == [] else repr(value)


def _contents(flag: str) -> str:
    """The settings' key for the fingerprint of the model or source that a flag names."""
    return CONTENTS + flag


def state_file(trainer_state: Mapping, scalars: Mapping, conditions: Conditions, with_ema: bool) -> str:
    """The text of trainer_state.json.

    trainer_state: the state_dict() of the training loop, such as PPOTrainer; it has the key steps_done. scalars: {name
    of the model: its TrainedModel.scalars}.
    """
    state = {
        **trainer_state,
        "models": scalars,
        "ema": with_ema,
        "identity": conditions.identity,
        "settings": conditions.settings,
    }
    return json.dumps(state, indent=2) + "\n"


MODEL = "--model_name_or_path"


def supervised_conditions(
    args: SupervisedFlags, data: list[str], total_steps: int, tokenizer: PreTrainedTokenizerBase
) -> Conditions:
    """The conditions of a run of step 1 or 2. data: fingerprints of the training rows and of the held-out rows.

    The examples of an optimizer step are drawn for all ranks together. Therefore the number of examples in an optimizer
    step, over all ranks, must stay the same.
    """
    examples = args.per_device_train_batch_size * args.gradient_accumulation_steps * distributed.data_parallel_size()
    identity = {
        **shared_identity(args, data, tokenizer),
        "examples a step": examples,
        **frozen_identity({"": MODEL}, _bases(args), args),
    }
    settings = {**shared_settings(args, total_steps), "--zero_stage": args.engine_config().stage}
    idle = () if depends_on_total(args.lr_scheduler_type) else (TOTAL_STEPS,)
    return Conditions(*_as_json(identity, settings), frozenset(idle))


def _bases(args: SupervisedFlags) -> dict[str, str]:
    """{flag: fingerprint} of the model's frozen weights, to which LoRA factors are added; {} without LoRA, or if the
    fingerprint is not known."""
    path = args.model_name_or_path
    found = frozen_fingerprint(path, MODEL) if args.lora() is not None and args.looks_at(path) else None
    return {f"{BASE}{MODEL}": found} if found else {}
