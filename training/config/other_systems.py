"""Lists flags of other systems, and finds this project's counterpart of each.

Some flags of DeepSpeed-Chat have no effect here. These flags are accepted or refused, and a message names what to use
instead. Their names and types come from DeepSpeedExamples 83757d9c, applications/DeepSpeed-Chat/training/step*/main.py,
and from the scripts in the same folders.

Flags of other systems are refused. The message quotes the flag's row on the system's page, docs/from_*.md.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from training.config.flags import OldFlag

ALL_STEPS = {
    "deepspeed": OldFlag(bool, "every engine is DeepSpeed's anyway."),
    "deepspeed_config": OldFlag(
        str,
        "name one file for each engine instead: --ds_config in steps 1 and 2, "
        "--actor_ds_config and its like in step 3.",
        allowed=(),
    ),
    "num_padding_at_beginning": OldFlag(int, "masks and position ids leave out padding tokens, wherever they stand."),
    "add_eot_token": OldFlag(
        bool, "every text ends with the tokenizer's own EOS token anyway; models learn to stop with this token."
    ),
    "compute_fp32_loss": OldFlag(bool, "every loss is computed in float32 anyway."),
}

SUPERVISED = {
    **ALL_STEPS,
    "disable_dropout": OldFlag(bool, "dropout is off anyway; --dropout turns it on."),
    "eot_token": OldFlag(str, "every text ends with the tokenizer's own EOS token."),
    "print_loss": OldFlag(bool, "the progress bar shows the loss anyway."),
    "eval_iters": OldFlag(int, "all held-out rows are evaluated; --held_out gives their number."),
    "no_bf16_to_fp32_loss": OldFlag(bool, "every loss is computed in float32.", allowed=()),
    "no_fused_kernels": OldFlag(bool, "torch's own fused AdamW is used, which needs no kernel to be built."),
}

STEP3 = {
    **ALL_STEPS,
    "enable_hybrid_engine": OldFlag(
        bool, "use --rollout_backend instead: replica gathers the weights once per update."
    ),
    "unpin_actor_parameters": OldFlag(bool, "--rollout_backend zero3 keeps the weights partitioned while generating."),
    "release_inference_cache": OldFlag(bool, "use --replicas_between_steps free instead."),
    "tp_gather_partition_size": OldFlag(int, "weights are gathered in buckets of one size, independent of layers."),
    "preprocessing_num_workers": OldFlag(int, "texts are tokenised once, and kept for later runs."),
    "align_overflow": OldFlag(bool, "actor and critic always skip an overflowing step together."),
    "print_answers": OldFlag(bool, "samples are printed every --print_answers_interval steps anyway."),
    "disable_actor_dropout": OldFlag(bool, "dropout is off anyway."),
    "disable_critic_dropout": OldFlag(bool, "dropout is off anyway."),
    "enable_mixed_precision_lora": OldFlag(
        bool,
        "it rounds frozen weights to 8 bits (ZeRO++), so actor and reference would differ from the given model. Leave "
        "it out: --dtype bf16 or fp16 keeps weights in 16 bits.",
        allowed=(),
    ),
    "per_device_train_batch_size": OldFlag(
        int,
        "use --per_device_generation_batch_size for prompts answered at the same time (as in DeepSpeed-Chat's older "
        "scripts), and --per_device_training_batch_size for responses in one forward and backward pass (as in TRL).",
        allowed=(),
    ),
    "per_device_mini_train_batch_size": OldFlag(int, "renamed: --per_device_training_batch_size.", allowed=()),
    "generation_batch_numbers": OldFlag(int, "renamed: --generation_batches.", allowed=()),
}

_ALL_STEPS_OF_DEEPSPEED_CHAT = {
    "data_path": "Dahoas/rm-static",
    "data_split": "2,4,4",
    "dtype": "fp16",
    "overlong": "cut_answer",  # tokenizer(..., truncation=True); step 3 leaves long prompts out (data_utils.py)
}
_SUPERVISED_OF_DEEPSPEED_CHAT = {**_ALL_STEPS_OF_DEEPSPEED_CHAT, "lr_scheduler_type": "cosine"}
DEFAULTS: dict[str, dict[int, dict[str, object]]] = {
    "deepspeed_chat": {
        1: {**_SUPERVISED_OF_DEEPSPEED_CHAT, "learning_rate": 1e-3, "loss_on": "all"},
        2: {
            **_SUPERVISED_OF_DEEPSPEED_CHAT,
            "learning_rate": 5e-5,
            "pairwise_loss": "from_difference",
            "normalization_samples": 0,
        },
        3: {**_ALL_STEPS_OF_DEEPSPEED_CHAT, "dialect": "deepspeed_chat", "gradient_accumulation_steps": 1},
    }
}
"""{value of --defaults: {step: the flags whose defaults differ there}}. The values are those of the argument parsers in
step*/main.py and, where these have no such flag, of the code (dschat/utils/data/data_utils.py, model/reward_model.py).
docs/from_deepspeed_chat.md lists all defaults of the three parsers."""


# In a wheel the pages docs/from_*.md lie in this folder; in a checkout they lie in docs/.
_INSTALLED = Path(__file__).with_name("pages")
PAGES = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).resolve().parents[2] / "docs"
HEADINGS = {"in step 3": (3,), "in steps 1 and 2": (1, 2), "no counterpart; instead": (1, 2, 3)}
"""{heading of the column with this project's counterparts: the training steps that the table covers}."""


class Row(NamedTuple):
    """A row of a table: the flags in its first cell, the heading of the column of counterparts, this project's
    counterpart, and a remark."""

    system: str
    names: list[str]
    heading: str
    here: str
    remark: str


def flag_of_other_systems(name: str, step: int) -> str | None:
    """A text with this project's counterpart of the flag `name` of another system; None if no page has the flag. A
    counterpart in training step `step` is preferred to one in other steps. A dotted name (`algo.kl.init_coef`) is also
    found by its last part."""
    found = [(row, known) for row in rows() for known in row.names if name in (known, known.rpartition(".")[2])]
    found = [one for one in found if step in HEADINGS[one[0].heading]] or found
    sentences = [
        f"{row.system}'s {known}: {row.heading} {row.here}{f' ({row.remark})' if row.remark else ''}."
        for row, known in found
    ]
    return " ".join(sentences) or None


def rows() -> Iterator[Row]:
    """The rows of all tables with one of the HEADINGS, on all pages."""
    for page in sorted(PAGES.glob("from_*.md")):
        text = re.sub(r"\[[^]]*\]\(([^)]*)\)", r"docs/\1", page.read_text(encoding="utf-8"))
        system, heading, column = text.partition("\n")[0].removeprefix("# From "), "", 0
        for line in text.splitlines():
            cells = [cell.strip() for cell in line.split("|")[1:-1]]
            named = [place for place, cell in enumerate(cells) if cell in HEADINGS]
            if named or not cells:
                column = named[0] if named else 0
                heading = cells[column] if named else ""
            elif column:
                names = re.findall(r"`([\w.]+)", cells[0])
                here, remark = (*(cell.replace("`", "") for cell in cells[column:]), "")[:2]
                yield Row(system, names, heading, here, remark)
