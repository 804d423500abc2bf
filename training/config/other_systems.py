"""Flags of other systems: those of DeepSpeed-Chat that are accepted and have no effect, its defaults, and for all other
flags the row on the system's page, docs/from_*.md, which the refusal quotes.

DeepSpeed-Chat's names and types come from DeepSpeedExamples 83757d9c,
applications/DeepSpeed-Chat/training/step*/main.py, and from the scripts in the same folders.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ALL_STEPS = {
    "deepspeed": bool,
    "num_padding_at_beginning": int,
    "add_eot_token": bool,
    "compute_fp32_loss": bool,
}
SUPERVISED: dict[str, type] = {
    **_ALL_STEPS,
    "disable_dropout": bool,
    "eot_token": str,
    "print_loss": bool,
    "eval_iters": int,
    "no_fused_kernels": bool,
}
STEP3: dict[str, type] = {
    **_ALL_STEPS,
    "enable_hybrid_engine": bool,
    "unpin_actor_parameters": bool,
    "release_inference_cache": bool,
    "tp_gather_partition_size": int,
    "preprocessing_num_workers": int,
    "align_overflow": bool,
    "print_answers": bool,
    "disable_actor_dropout": bool,
    "disable_critic_dropout": bool,
    "actor_dropout": float,
    "critic_dropout": float,
}
"""{flag of DeepSpeed-Chat without effect: type of its value; bool for a flag without a value}."""

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
    counterpart in training step `step` is preferred to one in other steps. Without a row of its own a dotted name
    (`algo.kl.init_coef`) is found by its end, with or without the rest in the row."""
    told = [(row, known) for row in rows() for known in row.names if not row.here.startswith("the same")]
    found = [one for one in told if one[1] == name]
    found = found or [one for one in told if one[1].endswith(f".{name}") or name.endswith(f".{one[1]}")]
    found = [one for one in found if step in HEADINGS[one[0].heading]] or found
    sentences = [
        f"{row.system}'s {known}: {row.heading} {row.here}{f' ({row.remark})' if row.remark else ''}."
        for row, known in found
    ]
    return " ".join(sentences) or None


def rows() -> Iterator[Row]:
    """The rows of all tables with one of the HEADINGS, on all pages."""
    for page in sorted(PAGES.glob("from_*.md")):
        text = re.sub(r"\[([^]]*)\]\(([^)]*)\)", r"\1 (docs/\2)", page.read_text(encoding="utf-8"))
        text = re.sub(r"(\S+) \(docs/\1\)", r"docs/\1", text)  # links whose words are the page's name
        system = text.partition("\n")[0].removeprefix("# From ")
        heading = ""
        column = 0
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
