"""What a restart point's trainer_state.json says: the state, what must be equal in a run that goes on, what may change.

    steps_done, optimizer_steps, samples, kl, score_scale    the state: PPOTrainer.state_dict
    world_size, ema     what the files beside it fit: the number of ranks, and whether there is a moving average
    identity            what must be equal, or the state would have no meaning or another one
    settings            what may change; every change that has an effect is printed

A point of an older version of the program that does not mention a setting which may change is taken as it is.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engine import distributed
from engine.algorithms import Dialect
from engine.errors import UserError
from engine.optim import CONSTANT_SCHEDULES
from training.flags.rlhf_arguments import RLHFFlags

DATA = "the data"  # whose fingerprints say nothing to people
TOTAL_STEPS, MICRO_BATCH = "total steps", "--per_device_training_batch_size"
# Fields of the dialect that must be equal: those that say what the state counts, which models there are, and what a
# score is, as the flags of the score do.
FIXED_FIELDS = (
    "samples_per_prompt",
    "mini_batches",
    "ppo_epochs",
    "critic_start",
    "hydra_layers",
    "optimizer",
    "kl_controller",
    "score_scaling",
    "missing_end",
    "missing_end_value",
)
LATER_FIXED = ("missing_end", "missing_end_value")  # the first restart points do not have these
BEFORE = {"pad_token": "tokenizer", "score_before_pad": False}  # what fields that came later were, in effect
FIXED_FLAGS = (
    "generation_batches",
    "dtype",
    "reward_function",
    "reward_function_weight",
    "reward_model_weight",
    "length_penalty",
    "unsup_coef",
    "max_prompt_seq_len",
    "max_answer_seq_len",
    "overlong_prompts",
    "critic_warmup_steps",
    "stop",
)
MODELS = ("actor_model_name_or_path", "critic_model_name_or_path", "reward_model_name_or_path")


@dataclass(frozen=True, slots=True)
class Conditions:
    """The settings under which a run trains, by name: `identity` must be equal when it goes on, `settings` may change.

    Values are as JSON has them, without tuples. idle: settings that change no number of this run, beyond rounding.
    """

    identity: dict[str, object] = field(default_factory=dict)
    settings: dict[str, object] = field(default_factory=dict)
    idle: frozenset[str] = frozenset()

    @classmethod
    def of(cls, args: RLHFFlags, dialect: Dialect, data: list[str], total_steps: int) -> "Conditions":
        """Those of this run.

        data: fingerprints of the prompts and of the texts. total_steps: of the whole run, by which learning rates fall.
        """
        fields = dataclasses.asdict(dialect)
        identity = {
            "seed": args.seed,
            DATA: data,
            "responses a step and rank": args.rows_per_rank,
            **{name: fields.pop(name) for name in FIXED_FIELDS},
            **{f"--{role}_zero_stage": args.stage(role) for role in ("actor", "critic")},
            **{f"--{name}": getattr(args, name) for name in FIXED_FLAGS},
        }
        settings = {
            **fields,
            **{f"--{name}": getattr(args, name) for name in MODELS},
            TOTAL_STEPS: total_steps,
            MICRO_BATCH: args.per_device_training_batch_size,
        }
        idle = {
            TOTAL_STEPS: dialect.lr_schedule in CONSTANT_SCHEDULES,
            MICRO_BATCH: not dialect.micro_batches_matter,
        }
        return cls(*json.loads(json.dumps([identity, settings])), frozenset(name for name in idle if idle[name]))

    @classmethod
    def read(cls, state: Mapping) -> "Conditions":
        """Those that a state file holds, an older version's too.

        That one had the settings as "choices", the fields for a missing end among them, and a penalty for it beside,
        which was subtracted before all else.

        Raises: UserError where that penalty cannot be said in fields, because something came after it.
        """
        identity = dict(state["identity"])
        settings = dict(state["settings"]) if "settings" in state else BEFORE | state.get("choices", {})
        identity |= {name: settings.pop(name) for name in FIXED_FIELDS if name in settings}
        penalty = identity.pop("--missing_eos_penalty", 0)
        if penalty:
            later = [name for name in ("missing_end", "score_scaling") if identity.get(name, "none") != "none"]
            if later:
                raise UserError(
                    f"--resume: this restart point's run subtracted --missing_eos_penalty {penalty} before "
                    f"{' and '.join(later)} came, which is no longer done. Finish it with the version that began it, "
                    "or begin anew."
                )
            identity |= {"missing_end": "subtract", "missing_end_value": penalty}
        return cls(identity, settings)

    def check(self, written: "Conditions", folder: Path) -> None:
        """Raise UserError if this run differs from the one that wrote the point in `folder` in what must be equal."""
        for name, value in self.identity.items():
            then = written.identity.get(name, value if name in LATER_FIXED else None)
            if then != value and name == DATA:
                raise UserError(
                    f"--resume {folder}: the prompts, the held-out ones or the texts are others than when it "
                    "was written. Give the same data as when the run began."
                )
            if then != value:
                raise UserError(
                    f"--resume {folder}: {name} was {then!r} when it was written and is {value!r} now. Give "
                    "the same flags and data as when the run began."
                )

    def changes_since(self, written: "Conditions") -> list[str]:
        """A line for each setting that has changed since the point was written, where that changes what is computed."""
        return [
            f"changed since the restart point: {name} {then} -> {self.settings[name]}{self._note(name)}"
            for name, then in written.settings.items()
            if name in self.settings and self.settings[name] != then and name not in self.idle
        ]

    def _note(self, name: str) -> str:
        if name == TOTAL_STEPS:
            return " (learning rates go on as in a run of so many steps)"
        if name == MICRO_BATCH:
            return " (losses or advantages of this dialect are a micro-batch's)"
        if name == "kl_coef" and self.identity["kl_controller"] == "adaptive":
            return " (without effect: the adaptive coefficient goes on from where it was)"
        return ""


def state_file(trainer_state: Mapping, conditions: Conditions, with_ema: bool) -> str:
    """The text of trainer_state.json; trainer_state: of PPOTrainer.state_dict."""
    state = {
        **trainer_state,
        "world_size": distributed.world_size(),
        "ema": with_ema,
        "identity": conditions.identity,
        "settings": conditions.settings,
    }
    return json.dumps(state, indent=2) + "\n"


def check_fit(state: Mapping, folder: Path, with_ema: bool) -> None:
    """Raise UserError where the files of the point in `folder` do not fit this run's ranks or its moving average."""
    if state["world_size"] != distributed.world_size():
        raise UserError(
            f"--resume {folder}: written by {state['world_size']} ranks, this run has "
            f"{distributed.world_size()}. DeepSpeed's partitions fit the same number only."
        )
    if state["ema"] != with_ema:
        raise UserError(
            f"--resume {folder}: written {'with' if state['ema'] else 'without'} --enable_ema. "
            "Give the same flags as when the run began."
        )
