"""Defines `flag`, and the flags that all three steps share: those of the run, the Hub, checkpoints and data. The flags
of a program are the fields of a dataclass:

    size: int = flag(16, "responses in one pass", least=1)

The arguments of `flag` are the flag's default, its help text, its range, and whether a resumed run may change it
(engine/options.py). A class checks its flags in `validate`, after the checks of its base classes. A user's code may
change the working directory; therefore `make_paths_absolute` is called before such code runs.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import PreTrainedTokenizerBase

from engine import distributed
from engine.errors import UserError, in_words, without_query
from engine.files import expanded
from engine.models.attention import IMPLEMENTATIONS, PACKING, Attention
from engine.models.config_and_tokenizer import read_chat_template, read_tokenizer
from engine.models.model_paths import base_of
from engine.options import REQUIRED, default_of, fault, option, unmet
from engine.zero.accelerator import on_gpu, ranks_of_this_machine
from training.checkpoints.files import Schedule
from training.data.record_forms import Form
from training.data.row_selection import Rows, checked_weights, load_rows, parse_split
from training.data.sources import name_and_split
from training.data.token_cache import cache_folder
from training.data.tokens import OVERLONG, Fit
from training.reporting.trackers import TRACKERS


def flag(default, help: str, *, group: str = "", adds_up: bool = False, field: str | None = None, **more):
    """A dataclass field that is a flag. A flag with the default REQUIRED must be given.

    group: the heading of this flag and of the flags after it, until a flag with another heading. adds_up: whether each
    use of the flag appends to its list; if not, only the last use counts. field: the field of the dialect that the flag
    sets. more: see `option`.
    """
    return option(default, help, group=group, adds_up=adds_up, field=field, **more)


def by_group(options: type) -> dict[str, list[dataclasses.Field]]:
    """{heading: fields with this heading} of a class. The headings are in the order of their first fields."""
    groups: dict[str, list[dataclasses.Field]] = {}
    heading = ""
    for spec in dataclasses.fields(options):
        heading = spec.metadata.get("group") or heading
        groups.setdefault(heading, []).append(spec)
    return groups


TEXTS = ("stop", "step_end", "reward_step_end")  # flags whose values may have control characters, as new lines


@dataclass(kw_only=True)
class ProgramFlags:
    """The base class of every program's flags, which can be given on the command line or in a YAML file."""

    old_flags: ClassVar[dict[str, type]] = {}  # flags without effect, and the types of their values

    config: str | None = flag(
        None, "YAML file with flags by name, without dashes; flags on the command line win", group="the run"
    )

    def validate(self) -> None:
        """Raise UserError for values that cannot work or have no effect. Called after parsing."""
        for spec in dataclasses.fields(self):
            if reason := fault(spec, getattr(self, spec.name)):
                raise UserError(f"{self.word(spec.name)}: {reason}")
        for spec in dataclasses.fields(self):
            if getattr(self, spec.name) != default_of(spec) and (missing := unmet(self, spec)):
                needed = " or ".join(self._needed(name, values) for name, values in missing)
                raise UserError(f"{self.word(spec.name)} needs {needed}. Give that, or leave it out.")

    def _needed(self, name: str, values: list[str]) -> str:
        """A needed flag as a message names it: with the values that it may have, or with the value that was given."""
        spec, value = type(self).__dataclass_fields__[name], getattr(self, name)
        given = f" (given: {value})" if value != default_of(spec) and not values else ""
        return f"--{name} {'|'.join(values)}".rstrip() + given

    def word(self, name: str) -> str:
        """A flag with its value, as on a command line. The query part of URLs is removed (`without_query`)."""
        value = getattr(self, name)
        values = [] if value is True else value if isinstance(value, list) else [value]
        return without_query(" ".join([f"--{name}", *map(str, values)]))

    @classmethod
    def no_flag(cls, name: str, value: str) -> str | None:
        """A message about the unknown flag or key `name` if its meaning is known; None if it may be a misspelling."""
        return None

    @classmethod
    def not_overridden(cls, file: Mapping[str, object], given: Mapping[str, object]) -> dict[str, object]:
        """The YAML file's settings, except those that the command line overrides by other flags. file, given: {flag:
        value} of the file and of the command line.

        Flags that stand in both need not be removed: the command line's value replaces the file's value later.
        """
        return dict(file)

    def as_dict(self) -> dict:
        """{name: value} of all flags, as files show them: the query part of URLs is removed (`without_query`)."""
        return {name: _as_shown(value) for name, value in dataclasses.asdict(self).items()}


@dataclass(kw_only=True)
class TokenizerFlags(ProgramFlags):
    """The flags that say how a program reads its tokenizer."""

    trust_remote_code: bool = flag(
        False,
        "run code that comes with a model: classes in its folder (`auto_map`), and code on the Hub that its "
        "config.json names (`attn_implementation`)",
    )
    chat_template: str | None = flag(None, "file with a chat template (Jinja), which replaces the tokenizer's own")

    def validate(self) -> None:
        """Raise UserError for values that cannot work, or have no effect."""
        super().validate()
        if self.chat_template is not None:
            read_chat_template(self.chat_template)

    def read_tokenizer(self, path: str, what: str, pad_token: str = "tokenizer") -> PreTrainedTokenizerBase:
        """Read the tokenizer of the model at `path` with these flags (engine/models/config_and_tokenizer.py)."""
        return read_tokenizer(path, what, pad_token, self.trust_remote_code, self.chat_template)


@dataclass(kw_only=True)
class RunFlags(TokenizerFlags):
    """The flags that all three steps share."""

    output_dir: str = flag(REQUIRED, "folder for models, metrics and checkpoints: new, empty, or that of a resumed run")
    dry_run: bool = flag(
        False,
        "check all that needs no GPU and no download, print the command, some rows as the model sees them, the "
        "engines' configurations and the planned memory, and end",
    )
    preflight: bool = flag(
        False,
        "in steps 1 to 3: start the ranks on all nodes, make the checks that come before models are loaded, and end: "
        "exit code 0 if all nodes are fit, else 2",
    )
    seed: int = flag(1234, "seed of data order, new weights and sampling", least=0, most=2**31 - 1)
    dtype: str | None = flag(
        None,
        "dtype that models compute in; by default bf16 on GPUs that have it, fp16 on other GPUs, fp32 on CPUs",
        choices=("fp32", "fp16", "bf16"),
    )
    attn_implementation: str = flag(
        "auto",
        "code of attention. sdpa: torch's own. eager: the plain code of the model's family. flash_attention_2, "
        "flash_attention_3: the flash-attn packages. flex_attention: torch's compiled one. cudnn: sdpa with cuDNN's "
        "kernels, which are off otherwise. auto: sdpa if the family has it, else eager",
        choices=IMPLEMENTATIONS,
    )
    packing: str = flag(
        "auto",
        "whether rows of a batch are padded to one length (padded) or joined end to end (packed). auto: packed with "
        "flash attention, and with torch's own on most GPUs since A100, in 16 bits, from torch 2.11; else padded",
        choices=PACKING,
    )
    sequence_parallel_size: int = flag(
        1,
        "number of neighbouring ranks of a node that compute each sequence together, a slice of its tokens each "
        "(docs/many_nodes.md). The batch size of a pass is then that of all of them together",
        least=1,
    )
    report_to: list[str] = flag(
        ["tensorboard"],
        "where metrics go besides metrics.jsonl: TensorBoard, or trackers, which pip installs by these names",
        choices=("tensorboard", *TRACKERS, "none"),
    )
    report_project: str = flag("rlhf", "project in which trackers collect runs; in MLflow, the experiment")
    enable_tensorboard: bool = flag(True, "false takes tensorboard out of --report_to")
    tensorboard_path: str | None = flag(
        None,
        "folder in which this run's TensorBoard files get a subfolder; by default they are in OUTPUT_DIR/tensorboard",
    )
    grace_seconds: float = flag(
        25.0,
        "seconds that a run has to finish its step, save and end after TERM, Ctrl-C or the end of its launcher; "
        "launchers kill their processes after 30",
        least=0,
    )
    timeout_minutes: float = flag(
        30.0,
        "end the run after this many minutes in which no rank begins another pass through a model, another call of a "
        "reward or another phase, and none reads, tokenises, loads or writes",
        above=0,
        finite=False,
    )

    def validate(self) -> None:
        """Raise UserError for values that cannot work, or have no effect."""
        for spec in dataclasses.fields(self):
            for value in _texts(getattr(self, spec.name)) if spec.name not in TEXTS else ():
                check_name(spec.name, value)
        super().validate()
        if self.sequence_parallel_size > 1 and self.packing == "padded":
            raise UserError(
                f"{self.word('packing')} with {self.word('sequence_parallel_size')}: several ranks split rows without "
                "padding only. Leave one of them out."
            )
        # RANK is set by the launcher, LOCAL_SIZE also by a dry run; a program that plans for other machines has none.
        if {"RANK", "LOCAL_SIZE"} & os.environ.keys():
            self.check_groups(ranks_of_this_machine())
        if self.preflight and self.dry_run:
            raise UserError("--preflight looks at the nodes of a run, and --dry_run at its flags: give one of them.")

    def check_groups(self, ranks: int) -> None:
        """Raise UserError if the ranks of a node cannot be divided into groups of the size that the flags ask for.
        ranks: number of ranks of a node."""
        refuse_uneven(ranks, "sequence_parallel_size", self.sequence_parallel_size)

    @property
    def reports(self) -> list[str]:
        """TensorBoard and the trackers that get the run's metrics."""
        left_out = {"none"} if self.enable_tensorboard else {"none", "tensorboard"}
        return [name for name in dict.fromkeys(self.report_to) if name not in left_out]

    @property
    def gpus(self) -> int:
        """The number of all GPUs of the run; 0 on CPUs."""
        return distributed.world_size() if on_gpu() else 0

    @property
    def attention(self) -> Attention:
        """The code that computes attention in all models, and whether sequences are packed or padded. Raises UserError
        if the user asks for packing but the run uses the model's outputs at padding positions."""
        reason, ranks = self.counted_padding(), self.sequence_parallel_size
        packing = self.packing if ranks == 1 else "packed"
        if reason is not None and packing == "packed":
            given = "--packing packed" if ranks == 1 else self.word("sequence_parallel_size")
            advice = f"Leave it out{', or give padded' * (ranks == 1)}."
            raise UserError(f"{given}: {reason}, of which there are none then. {advice}")
        return Attention(self.attn_implementation, packing if reason is None else "padded", self.max_length, ranks)

    @property
    def max_length(self) -> int | None:
        """The largest number of tokens that a row may have, prompt and response together; None if no flag says it."""
        parts = (getattr(self, f"max_{part}_seq_len", 0) for part in ("prompt", "answer"))
        return max(getattr(self, "max_seq_len", 0), sum(parts)) or None

    def counted_padding(self) -> str | None:
        """If a setting makes the run use the model's outputs at padding positions, returns a clause that names the
        setting; otherwise None."""
        return None

    def check_attention(self, path: str, kind: str, name: str) -> None:
        """Raise UserError if this machine or the model at `path` lacks the chosen attention code. name: the flag that
        gives the path. kind: LANGUAGE_MODEL or CLASSIFIER."""
        self.attention.check(path, kind, str(self.dtype), name, self.trust_remote_code)

    def read_paths(self) -> dict[str, list[str]]:
        """{flag: the models or data sets that the run reads}."""
        found = {name: value for name, value in self.as_dict().items() if name.endswith(("model_name_or_path", *DATA))}
        return {
            name: [name_and_split(path)[0] for path in (value if isinstance(value, list) else [value]) if path]
            for name, value in found.items()
        }

    def looks_at(self, path: str) -> bool:
        """Whether to read the model at `path`. A dry run reads it only if the model is on this machine; if it is an
        adapter, its base model must be there too."""
        return not self.dry_run or (Path(path).exists() and Path(base_of(path, "model")).exists())


def refuse_uneven(ranks: int, name: str, size: int | None) -> None:
    """Raise UserError if the `ranks` of a node cannot be divided into groups of `size`. name: the flag."""
    if size and ranks % size:
        raise UserError(
            f"--{name} {size}: a node has {in_words(ranks, 'rank')}, which cannot be divided into groups of {size}. "
            f"Give a number that divides {ranks}."
        )


def _texts(value) -> list[str]:
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]


def _as_shown(value):
    if isinstance(value, list):
        return [_as_shown(item) for item in value]
    return without_query(value) if isinstance(value, str) else value


def check_name(name: str, value: str) -> None:
    """Raise UserError for a text that cannot be the name of a file, model or data set."""
    if not value.strip():
        raise UserError(f"--{name} {value!r}: this is blank. Leave the flag out, or give a name.")


WRITTEN = ("output_dir", "tensorboard_path", "data_output_path")
"""Flags of folders that may not exist yet. The value of other flags is a path only if it exists, else a Hub name."""
CODE = ("reward_function", "environment")
"""Flags whose values name something in a file or module, as file.py:NAME."""
READ = ("_path", "_dataset_name", "config", "chat_template", "response_template", "resume", *CODE)
DATA = ("data_path", "dataset_name")


def make_paths_absolute(args: ProgramFlags) -> None:
    """Replace the relative paths in all flags by absolute ones. Links are not resolved. Raises: UserError for a path
    that begins with ~name if no user has this name."""
    for spec in dataclasses.fields(args):
        value = getattr(args, spec.name)
        if spec.name in WRITTEN and value is not None:
            setattr(args, spec.name, _to_be_made(value, spec.name))
        elif spec.name.endswith(READ) and isinstance(value, str):
            setattr(args, spec.name, _if_there(value, spec.name))
        elif spec.name.endswith(READ) and isinstance(value, list):
            setattr(args, spec.name, [_if_there(item, spec.name) for item in value])


def _to_be_made(value: str, name: str) -> str:
    """The absolute path, with each `..` resolved now: after a folder that does not exist yet, it may later lead
    elsewhere."""
    path = expanded(value, f"--{name}").absolute()
    return os.path.realpath(path) if ".." in path.parts else str(path)


def _if_there(value: str, name: str) -> str:
    """Returns the absolute path if `value` names an existing file or folder, or a function or split in one; otherwise
    `value` unchanged."""
    if name == "resume" and value == "auto":
        return value
    parted = name in CODE or (name.endswith(DATA) and name_and_split(value)[1])
    where, colon, within = value.rpartition(":") if parted else (value, "", "")
    path = expanded(where, f"--{name}")
    try:
        there = bool(where) and path.exists() and not (name in (*CODE, "response_template") and path.is_dir())
    except OSError:  # the name is too long, or a folder may not be entered
        there = False
    return f"{path.absolute()}{colon}{within}" if there else value


@dataclass(kw_only=True)
class HubFlags(RunFlags):
    """The flags that say whether the trained model is uploaded to the Hub, and to which repository."""

    push_to_hub: bool = flag(
        False,
        "upload the trained model (step 3: the actor) to the Hugging Face Hub at the run's end, unless the verdict is "
        "BROKEN",
        group="sharing",
        only_with="hub_model_id",
    )
    hub_model_id: str | None = flag(
        None, "repository for --push_to_hub, as OWNER/NAME; created if it does not exist", only_with="push_to_hub"
    )
    hub_private: bool = flag(
        True, "true: a new repository is private, and a public one is refused. false: a new one is public"
    )

    def validate(self) -> None:
        """See ProgramFlags. Also raises UserError for an invalid repository name."""
        super().validate()
        if self.hub_model_id is None:
            return
        given = f"--hub_model_id {self.hub_model_id}"
        try:
            validate_repo_id(self.hub_model_id)
        except HFValidationError as error:
            raise UserError(f"{given}: not a name on the Hub ({error}). Give OWNER/NAME.") from None
        if "/" not in self.hub_model_id:
            raise UserError(f"{given}: the owner is missing. Give OWNER/NAME.")


@dataclass(kw_only=True)
class RestartFlags(RunFlags):
    """The flags that say when checkpoints are written, which are kept, and from which one a run resumes."""

    save_steps: int = flag(0, "steps between checkpoints; 0: none", least=0, group="checkpoints")
    save_minutes: float = flag(0.0, "minutes between checkpoints, also beside --save_steps; 0: none", least=0)
    keep_checkpoints: int = flag(0, "how many of the newest checkpoints are kept; 0: all", least=0)
    keep_best_checkpoint: bool = flag(
        False,
        "also keep the checkpoint with the best held-out score; one is written whenever an evaluation finds a "
        "better score (in step 3 give --eval_steps, too)",
        only_with="keep_checkpoints",
    )
    async_checkpoints: bool = flag(
        True, "go on training while a checkpoint is written from a copy of the state in host memory"
    )
    resume: str | None = flag(
        None,
        "checkpoint to go on from, or a run's output folder, whose newest one is taken. auto: the newest one in "
        "--output_dir; without one the run begins anew",
    )

    def schedule(self) -> Schedule:
        """When checkpoints are written and which are kept."""
        return Schedule(
            steps=self.save_steps,
            minutes=self.save_minutes,
            keep=self.keep_checkpoints,
            keep_best=self.keep_best_checkpoint,
            asynchronous=self.async_checkpoints,
        )


@dataclass(kw_only=True)
class DataFlags(RunFlags):
    """The flags that say which data sets are read, how often each is seen in an epoch, and which part of them this step
    reads."""

    phase: ClassVar[int]  # the step: 1, 2 or 3

    defaults: str | None = flag(
        None,
        "system whose defaults replace those of this step's flags; flags that are given win "
        "(docs/from_deepspeed_chat.md)",
        choices=("deepspeed_chat",),
        group="the run",
    )
    data_path: list[str] = flag(
        REQUIRED,
        "data sets: names on the Hub, folders, or files (.json, .jsonl, .csv, .parquet, also as .gz, .bz2, .xz or "
        ".zst); NAME:SPLIT is one split of a data set",
        group="data",
    )
    data_weights: list[float] = flag(
        [],
        "how often a pass over the data has the rows of each data set of --data_path, one number for each (2: every "
        "row twice; 0.5: half of the rows); by default 1",
        above=0,
        most=1000,
    )
    data_split: str | None = flag(
        None, "shares of each data set for steps 1, 2 and 3, such as 2,4,4; by default each step reads all rows"
    )
    eval_data_path: list[str] = flag(
        [],
        "data sets with held-out rows; by default those of each data set of --data_path: its split test, validation or "
        "eval, else some of its rows",
    )
    overlong: str = flag(
        "cut_prompt",
        "what happens to rows that are too long. cut_prompt: a prompt loses its beginning. cut_answer: a text loses "
        "its end, and step 3 leaves a prompt out. drop: the row is left out",
        choices=OVERLONG,
    )
    data_output_path: str | None = flag(
        None, "folder that keeps tokenised data for later runs; by default ~/.cache/four-engine-rlhf"
    )

    def validate(self) -> None:
        """Raise UserError for values that cannot work."""
        super().validate()
        checked_weights(self.data_weights, self.data_path)
        parse_split(self.data_split)

    @property
    def cache(self) -> Path | None:
        """The folder in which tokenised data is cached; None in a dry run."""
        return None if self.dry_run else cache_folder(self.data_output_path)

    def load_rows(self, form: Form, tokenizer, fit: Callable[[dict], Fit], **held_out) -> tuple[Rows, Rows]:
        """(training rows, held-out rows) of this step. held_out: more arguments of load_rows
        (training/data/row_selection.py).

        fit: row -> the part that the model is shown. Rows that `fit` drops are not held out.
        Raises: UserError for a data set that is missing or cannot be read.
        """
        return load_rows(
            self.data_path,
            form,
            tokenizer,
            phase=self.phase,
            seed=self.seed,
            weights=self.data_weights or None,
            split=self.data_split,
            eval_data_path=self.eval_data_path or None,
            keeps=lambda row: not fit(row).reason,
            **held_out,
        )
