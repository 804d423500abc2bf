"""The content of a checkpoint's trainer_state.json: the training state, and the conditions of the run that wrote it.

steps_done, optimizer_steps, samples, prompt_batches, kl, score_scale, likelihood_scale, reward    the training
                    state (PPOTrainer.state_dict); steps_done is negative while the critic is pretrained
held_out_..., metrics_without_evaluation    the keys BEFORE, FIRST and UNLOGGED below; each only if it is needed
models              step counts and loss scales of each model (TrainedModel.scalars)
ema                 whether the checkpoint has a moving average
settings            flags and fields of the dialect. A resumed run may change those in MAY_CHANGE, and prints each
                    change; any other difference is refused
contents            fingerprints of data, chat template, models and reward functions, which may be moved

A fingerprint is None if it is not known: the model is a name on the Hub of which nothing is on this machine yet. A flag
that takes several models has a list of fingerprints, in the order of the models.
"""

import dataclasses
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from engine import distributed
from engine.algorithms import Dialect
from engine.errors import UserError
from engine.models.checking import fingerprint, own_tokenizer
from engine.options import REQUIRED, default_of
from engine.reward.built_in import BUILT_IN
from training.config.algorithm import FIELDS_OF_FLAGS
from training.config.reward import load_named, names_file, short_names
from training.config.step3 import RLHFFlags
from training.config.supervised import SupervisedFlags

MAY_CHANGE = """
num_train_epochs max_steps total_steps enable_test_mode test_stop_step max_kl grace_seconds timeout_minutes
eval_steps eval_interval print_answers_interval profile_steps per_device_eval_batch_size
report_to report_project enable_tensorboard tensorboard_path push_to_hub hub_model_id hub_private
save_steps save_minutes keep_checkpoints keep_best_checkpoint keep_best_by keep_best_max_kl
async_checkpoints save_merged
data_path eval_data_path sft_only_data_path normalization_data_path unsupervised_dataset_name
unsupervised_dataset_config_name data_output_path chat_template trust_remote_code
ranks per_device_generation_batch_size generation_batches per_device_training_batch_size
per_device_train_batch_size gradient_accumulation_steps
attn_implementation packing sequence_parallel_size rollout_backend decoding replicas_between_steps inference_tp_size
vllm_tensor_parallel_size vllm_sampler environment_timeout environment_threads response_template
zero_stage actor_zero_stage critic_zero_stage offload offload_reference_model offload_reward_model ds_config
actor_ds_config critic_ds_config reference_ds_config reward_ds_config gradient_checkpointing
actor_gradient_checkpointing critic_gradient_checkpointing enable_ema ema_device
reward_url reward_url_form reward_url_batch_size reward_url_timeout reward_url_patience overlap_rewards
learning_rate weight_decay lr_scheduler_type num_warmup_steps max_grad_norm lora_learning_rate
actor_lora_learning_rate critic_lora_learning_rate actor_lr critic_lr actor_weight_decay critic_weight_decay
lr_schedule warmup_steps kl_coef kl_target kl_horizon clip_range clip_range_high value_clip_range value_factor
early_stop_kl ratio_limit ema_decay unsup_coef
"""
"""What a resumed run may change: its length, intervals, trackers, folders, how ranks and memory are used (the rows of a
step stay), learning rates, and the numbers that hold an update in check."""

NOT_COMPARED = ("config", "defaults", "output_dir", "dry_run", "preflight", "resume", "dialect", "set")
"""Flags that are no conditions, or whose effect is compared as fields of the dialect."""

MODEL = "model_name_or_path"  # ending of the flags of models
FUNCTION = "--reward_function"
ENVIRONMENT = "--environment"
SOURCES = (FUNCTION, ENVIRONMENT)  # a resumed run may have an edited source of these
DATA = "the data"
TEMPLATE = "the chat template"
READING = "the chat template or the tokenizer of a reward model"

UNLOGGED = "metrics_without_evaluation"
"""Key of the state: the last step's metrics, if the checkpoint was written before the evaluation whose results belong
to them."""
BEFORE = "held_out_before_training"
"""Key of the state: what was measured on each held-out unit before the first step, for comparison with later
measurements."""
FIRST = "held_out_first_responses"
"""Key of the state: the responses to the held-out prompts before the first step. Later, words that do not occur in them
count as new."""


Fingerprints = str | None | list[str | None]


@dataclass(frozen=True, slots=True)
class Conditions:
    """The conditions under which a run trains. settings: {name: JSON value} of the flags and of the dialect's fields.
    contents: {name: fingerprint, or list of fingerprints}, where the name is that of a flag, DATA or TEMPLATE.
    defaults: {name: JSON value}, the flags' and fields' own defaults; no checkpoint has them."""

    settings: dict[str, Any] = field(default_factory=dict)
    contents: dict[str, Fingerprints] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        args: RLHFFlags | SupervisedFlags,
        data: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        inputs: Mapping[str, Fingerprints],
    ) -> "Conditions":
        """The conditions of a run of one of the three steps.

        data: fingerprints of all rows and texts, training and held out. tokenizer: the tokenizer, whose chat template
        must stay the same. inputs: the result of `fingerprints`.
        """
        flags = {f"--{name}": value for name, value in args.as_dict().items() if name not in NOT_COMPARED}
        if isinstance(args, RLHFFlags):
            settings = {name: value for name, value in flags.items() if name[2:] not in FIELDS_OF_FLAGS}
            settings |= _fields(args.resolved.dialect)
            settings |= {name: short_names(given) for name, given in _sources(args).items()}
            settings |= {"a reward server": bool(args.reward_url)}
            settings |= {"--reward_model_weight": []} if set(args.reward_model_weight) == {1.0} else {}
            rows = args.rows_per_rank
        else:
            settings, rows = flags, args.per_device_train_batch_size * args.gradient_accumulation_steps
        settings |= {"rows a step": rows * distributed.data_parallel_size(), "ranks": distributed.world_size()}
        template = hashlib.sha256(json.dumps(tokenizer.chat_template).encode()).hexdigest()
        defaults = _defaults(args, "--") | _defaults(Dialect)
        return cls(_as_json(settings), {**inputs, TEMPLATE: template, DATA: " ".join(data)}, defaults)

    @classmethod
    def of_trainer(cls, dialect: Dialect, config) -> "Conditions":
        """The conditions that a PPOTrainer knows. config: its PPOConfig."""
        settings = {"--seed": config.seed, "total_steps": config.total_steps, "ranks": distributed.world_size()}
        return cls(_as_json(settings | _fields(dialect)), defaults=_defaults(Dialect))

    @classmethod
    def read(cls, state: Mapping) -> "Conditions":
        """The conditions that are stored in a checkpoint's state."""
        return cls(dict(state["settings"]), dict(state["contents"]))

    def check(self, written: "Conditions", folder: Path) -> None:
        """Raise UserError if a run with these conditions may not resume from the checkpoint in `folder`, which was
        `written` under others.

        A setting that the checkpoint does not know, and that has its own default now, is no difference: an earlier
        version, which did not have it, computed the same."""
        default = {name for name, now in self.settings.items() if name in self.defaults and now == self.defaults[name]}
        only_one_has = (self.settings.keys() ^ written.settings.keys()) - default
        if others := [name for name in only_one_has if name.removeprefix("--") not in MAY_CHANGE.split()]:
            raise UserError(
                f"--resume {folder}: it was written by another version of this program, or by another step of the "
                f"three (only one of the two has {', '.join(sorted(others))}). Go on with that version, or begin anew."
            )
        for name, then, now in self._changed(written):
            if not self._may_change(name, written):
                raise UserError(
                    f"--resume {folder}: {name} was {_said(then)} when it was written and is {_said(now)} now. Give "
                    "what the run began with."
                )
        for name, now in self.contents.items():  # after the flags that decide which rows are read
            if name not in SOURCES and differ(now, written.contents.get(name)):
                what = f"the model of {name}" if name.endswith(MODEL) else name
                raise UserError(
                    f"--resume {folder}: {what} changed after it was written. Give what the run began with; it may "
                    "stand elsewhere."
                )

    def _changed(self, written: "Conditions") -> Iterator[tuple[str, Any, Any]]:
        """(name, value then, value now) of each setting that differs."""
        for name, now in self.settings.items():
            if name in written.settings and written.settings[name] != now:
                yield name, written.settings[name], now

    def _may_change(self, name: str, written: "Conditions") -> bool:
        if name.endswith(MODEL):  # a model may move
            now = self.contents.get(name)
            return now == written.contents.get(name) and None not in (now if isinstance(now, list) else [now])
        return name.removeprefix("--") in MAY_CHANGE.split()

    def changes_since(self, written: "Conditions") -> list[str]:
        """A line for each setting that has changed since the checkpoint was written."""
        fixed = self.settings.get("kl_controller") == "adaptive"
        notes = {"kl_coef": " (without effect: the adaptive coefficient goes on from where it was)" if fixed else ""}
        lines = [
            f"changed since the checkpoint: {name} {then} -> {now}{notes.get(name, '')}"
            for name, then, now in self._changed(written)
        ]
        lines += [
            f"changed since the checkpoint: the source of {name} {self.settings[name]} (later scores are its own)"
            for name in SOURCES
            if differ(self.contents.get(name), written.contents.get(name))
        ]
        return lines

    def scores_changed_since(self, written: "Conditions") -> bool:
        """Whether the source of a reward function or of the environment has changed since the checkpoint."""
        return any(differ(self.contents.get(name), written.contents.get(name)) for name in SOURCES)


def differ(now: Fingerprints, then: Fingerprints) -> bool:
    """Whether the fingerprints show that the contents differ. An unknown fingerprint shows nothing."""
    if isinstance(now, list) and isinstance(then, list):
        return len(now) != len(then) or any(map(differ, now, then))
    return None not in (now, then) and now != then


def fingerprints(args: RLHFFlags | SupervisedFlags) -> dict[str, Fingerprints]:
    """{flag: fingerprint, or list of fingerprints} of the run's models, of what reward models read texts by, and of the
    reward functions' sources."""

    def of(path: str, flag: str) -> str | None:
        return fingerprint(path, flag) if args.looks_at(path) else None

    found: dict[str, Fingerprints] = {}
    for name, given in dataclasses.asdict(args).items():
        flag = f"--{name}"
        if name.endswith(MODEL) and given is not None:
            found[flag] = [of(path, flag) for path in given] if isinstance(given, list) else of(given, flag)
    if isinstance(args, RLHFFlags) and args.text_reward_paths:
        found[READING] = [_reading(path, args.trust_remote_code) for path in args.text_reward_paths]
    if isinstance(args, RLHFFlags):
        found |= {name: sources_fingerprint(given) for name, given in _sources(args).items() if given}
        if args.response_template and Path(args.response_template).is_file():
            found["--response_template"] = hashlib.sha256(Path(args.response_template).read_bytes()).hexdigest()
    return found


def _sources(args: RLHFFlags) -> dict[str, list[str]]:
    return {FUNCTION: args.reward_function, ENVIRONMENT: [args.environment] if args.environment else []}


def _reading(path: str, trust_remote_code: bool) -> str:
    """A hash of the chat template and the tokens of a reward model that reads texts."""
    own: Any = own_tokenizer(path, "--reward_model_name_or_path", trust_remote_code)
    read_by = [own.chat_template, own.special_tokens_map, sorted(own.get_vocab().items())]
    return hashlib.sha256(json.dumps(read_by, default=str).encode()).hexdigest()


def sources_fingerprint(names: Sequence[str]) -> str | None:
    """A hash of the files in which these reward functions or environments are written: for each the file that its name,
    a value of the flag, names, and the file that defines the function or class. None if there are no such files.
    Files that these files import are not hashed."""
    files = [file for name in names if name not in BUILT_IN for file in sorted(_source_files(name))]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest() if files else None


def _source_files(name: str) -> set[Path]:
    function, where = load_named(name, name, "function"), name.rpartition(":")[0]
    files = (where if names_file(where) else getattr(sys.modules[where], "__file__", None), _written_in(function))
    return {Path(file).resolve() for file in files if file is not None and Path(file).is_file()}


def _written_in(function: Callable) -> str | None:
    for candidate in (inspect.unwrap(function), type(function)):
        try:
            return inspect.getsourcefile(candidate)
        except TypeError:  # a callable object, or a built-in function
            continue
    return None


def _fields(dialect: Dialect) -> dict[str, object]:
    return {spec.name: getattr(dialect, spec.name) for spec in dataclasses.fields(dialect) if spec.name != "name"}


def _defaults(options: Any, prefix: str = "") -> dict[str, Any]:
    """{prefix + name: default} of the options of a class, or of an object of it, that need not be given."""
    found = {prefix + spec.name: default_of(spec) for spec in dataclasses.fields(options)}
    return _as_json({name: value for name, value in found.items() if value is not REQUIRED})


def _as_json(settings: Mapping[str, object]) -> dict[str, Any]:
    """The settings as a state file has them, with lists in place of tuples."""
    return json.loads(json.dumps(settings))


def _said(value: object) -> str:
    return "not given" if value is None or value is False or value == [] else repr(value)


def state_file(trainer_state: Mapping, scalars: Mapping, conditions: Conditions, with_ema: bool) -> str:
    """The text of trainer_state.json.

    trainer_state: the state_dict() of the training loop, such as PPOTrainer; it has the key steps_done. scalars: {name
    of the model: its TrainedModel.scalars}.
    """
    compared = {"settings": conditions.settings, "contents": conditions.contents}
    state = {**trainer_state, "models": scalars, "ema": with_ema, **compared}
    return json.dumps(state, indent=2) + "\n"
