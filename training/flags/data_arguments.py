"""The flags by which all three steps name their data."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from training.data.forms import Form
from training.data.rows import Rows, checked_weights, load_rows, parse_split
from training.data.tables import cache_folder
from training.data.tokens import OVERLONG, Fit
from training.flags.arguments import REQUIRED, RunFlags, flag


@dataclass(kw_only=True)
class DataFlags(RunFlags):
    """Which data sets are read, how often each is seen in a pass, and which part of it this step reads."""

    phase: ClassVar[int]  # the step: 1, 2 or 3

    data_path: list[str] = flag(
        REQUIRED,
        "data sets: names on the Hub, folders, or .json, .jsonl, .csv, .parquet files, also as .gz or .zst",
        group="data",
    )
    data_weights: list[float] = flag(
        [], "how often each of them is seen in one pass (2: twice, 0.5: half of it); by default once"
    )
    data_split: str | None = flag(
        None,
        "proportions in which every data set is divided among steps 1, 2 and 3, such "
        "as 2,4,4; by default each step reads all of it",
    )
    eval_data_path: list[str] = flag([], "held-out rows; by default the data set's own test split, or some of its rows")
    overlong: str = flag(
        "cut_prompt",
        "what becomes of rows that are too long: prompts lose their beginning, up to a user's turn where there are "
        "turns (cut_prompt); texts lose their end, and prompts of step 3 are left out (cut_answer); rows are left out "
        "(drop)",
        choices=OVERLONG,
    )
    data_output_path: str | None = flag(
        None, "where tokenised data is kept for the next run; by default ~/.cache/four-engine-rlhf"
    )

    def validate(self) -> None:
        """Raise UserError for values that cannot work."""
        RunFlags.validate(self)
        checked_weights(self.data_weights, self.data_path)
        parse_split(self.data_split)

    @property
    def cache(self) -> Path | None:
        """Where tokenised data is kept; nowhere in a dry run."""
        return None if self.dry_run else cache_folder(self.data_output_path)

    def load_rows(self, form: Form, tokenizer, fit: Callable[[dict], Fit], **held_out) -> tuple[Rows, Rows]:
        """(training rows, held-out rows) of this step; `held_out` as load_rows of training/data/rows.py has it.

        fit: what of a row is shown to the model; held-out rows are counted without those that it drops.
        Raises: UserError for a data set that is not there or cannot be read.
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
