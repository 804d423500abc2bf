"""What is compared: a dialect, a variant of one with other fields or flags, or TRL's own PPO; and the command of a run.

    default                                          a dialect
    default:lam=1.0,kl_in=loss                       with other fields
    default:gamma=1.0,--critic_pretrain_steps=20     and other flags of step 3
    trl                                              TRL's PPO, by the Python that TRL_PYTHON names
    default+line, trl+line                           the same runs, read on the line from the SFT model to their ends

All are given the task's responses: drawn at temperature 1 until EOS, which a task's models end with, at most
LARGEST_GROUP to a prompt. The rest is the dialect's own.
"""

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from engine.algorithms import Dialect, get_dialect, parse_settings
from engine.errors import UserError
from scripts.comparison.tasks import Task

TRL = "trl"
LINE = "+line"
SEARCHED = ("actor_lr", "critic_lr", "--actor_learning_rate", "--critic_learning_rate")
OWN_FLAGS = ("--critic_learning_rate", "--output_dir", "--num_samples_per_prompt", "--set", "--temperature")
LARGEST_GROUP = 8  # responses to one prompt: theirs are made for steps of thousands of responses
WARMUP_SHARE = 10  # a dialect's warm-up is cut to this part of a run's optimizer steps: theirs are made for long runs


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the comparison.

    dialect: its name, or TRL. fields: FIELD=VALUE; flags: words for step 3, both as the label has them.
    """

    label: str
    dialect: str
    fields: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    @classmethod
    def parsed(cls, label: str) -> "Entry":
        """An entry from its label; raises UserError for a dialect or field that does not exist, and for a learning
        rate, which the search chooses."""
        name, _, rest = label.removesuffix(LINE).partition(":")
        if name == TRL:
            if rest:
                raise UserError(f"{label}: TRL's own PPO has no variants here. Leave out {rest!r}.")
            return cls(label, name)
        words = re.split(r",(?=-{0,2}\w+=)", rest) if rest else []
        flags = tuple(word for word in words if word.startswith("--"))
        fields = tuple(word for word in words if not word.startswith("--"))
        settings = parse_settings(fields)
        for given in (*flags, *settings):
            if given.partition("=")[0] in SEARCHED:
                raise UserError(f"{label}: {given} is what the search chooses. Leave it out, or give other --rates.")
        get_dialect(name).replaced(**settings)
        split = [part for word in flags for part in word.split("=", 1)]
        return cls(label, name, fields, tuple(split))

    @property
    def line(self) -> bool:
        """Whether it is read by models between the SFT model and its last one, and not by those that it came by."""
        return self.label.endswith(LINE)

    @property
    def folder(self) -> str:
        """The label as a name of a folder; however it is read, its runs are the same."""
        return re.sub(r"[^\w.=-]+", "_", self.label.removesuffix(LINE))

    def resolved(self) -> Dialect:
        """The dialect with the label's fields."""
        return get_dialect(self.dialect).replaced(**parse_settings(self.fields))


def settings(entry: Entry, steps: int) -> dict[str, str]:
    """The fields that a run is given, {field: value}: what makes responses the task's, and what the label says."""
    dialect = entry.resolved()
    wanted: dict[str, object] = {"temperature": 1.0, "pad_token": "tokenizer", "query_start": "", "query_end": ""}
    if dialect.sampling == "fixed":  # what stands behind EOS is no response
        wanted |= {"truncate_token": "eos", "truncate_after": 0}
    optimizer_steps = steps * (dialect.ppo_epochs * dialect.mini_batches if dialect.lr_per == "optimizer_step" else 1)
    wanted["samples_per_prompt"] = min(dialect.samples_per_prompt, LARGEST_GROUP)
    wanted["warmup_steps"] = min(dialect.warmup_steps, optimizer_steps // WARMUP_SHARE)
    found = {name: str(value) for name, value in wanted.items() if getattr(dialect, name) != value}
    return found | dict(field.split("=", 1) for field in entry.fields)


def step3_words(entry: Entry, task: Task, models: Path, *, rate: float, seed: int, steps: int) -> list[str]:
    """The command of a run, without its output folder.

    Raises: UserError where a step's responses cannot be divided into groups of samples_per_prompt.
    """
    if entry.dialect == TRL:
        return trl_words(task, models, rate=rate, seed=seed, steps=steps)
    dialect, given = entry.resolved(), settings(entry, steps)
    group = int(given.get("samples_per_prompt", dialect.samples_per_prompt))
    prompts, rest = divmod(task.responses, group)
    if rest:
        raise UserError(
            f"{entry.label}: the {task.responses} responses of a step are no multiple of its "
            f"samples_per_prompt {group}. Set another number, or give other --responses."
        )
    words = ["training/step3_rlhf.py", "--dialect", entry.dialect, *task.words(models)]
    if dialect.length_rule == "row" or dialect.sampling == "without_eos":  # what follows an end is learned, too
        words[words.index("--max_answer_seq_len") + 1] = str(task.fixed_positions)
    words += ["--actor_learning_rate", f"{rate:g}"]
    if dialect.critic_start != "none":
        words += ["--critic_learning_rate", f"{rate:g}"]
    if given:
        words += ["--set", *(f"{name}={value}" for name, value in given.items())]
    sizes = {
        "per_device_generation_batch_size": prompts,
        "per_device_training_batch_size": task.responses,
        "max_steps": steps,
        "save_steps": task.every,
        "num_eval_prompts": 0,
        "print_answers_interval": 0,
        "enable_tensorboard": "false",
        "seed": seed,
        "dtype": "fp32",
    }
    words += [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    own = next((flag for flag in entry.flags if flag.startswith("--") and flag in (*words, *OWN_FLAGS)), None)
    if own is not None:
        raise UserError(f"{entry.label}: {own} is the comparison's own, the same for all entries. Leave it out.")
    return [*words, *entry.flags]


def trl_words(task: Task, models: Path, *, rate: float, seed: int, steps: int) -> list[str]:
    """The command of a run of TRL's PPO."""
    flags = dict(zip(*[iter(task.words(models))] * 2, strict=True))
    taken = {
        "sft": flags["--actor_model_name_or_path"],
        "reward": flags["--critic_model_name_or_path"],
        "prompts": flags["--data_path"],
        "max_prompt_length": flags["--max_prompt_seq_len"],
        "response_length": flags["--max_answer_seq_len"],
        "responses": task.responses,
        "steps": steps,
        "every": task.every,
        "rate": f"{rate:g}",
        "seed": seed,
    }
    return [
        "-m",
        "scripts.comparison.trl_ppo",
        *(str(word) for name, value in taken.items() for word in (f"--{name}", value)),
    ]


def program(entry: Entry) -> list[str]:
    """What a run's words are given to; raises UserError where TRL's Python is not named."""
    if entry.dialect != TRL:
        return [sys.executable]
    if not os.environ.get("TRL_PYTHON"):
        raise UserError(
            f"{entry.label}: set TRL_PYTHON to a Python that has trl with its PPO (1.12 is the last that has "
            "trl.experimental.ppo), torch and transformers."
        )
    return [os.environ["TRL_PYTHON"]]
