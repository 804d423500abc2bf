"""What a run says first of its data: how many rows are kept, cut and dropped, what to do about it, and some of them."""

from collections.abc import Sequence

from engine import distributed
from training.config.flags import DataFlags
from training.config.supervised import SupervisedFlags
from training.data.examples import NOTED, FittedRows
from training.data.tokens import CUT, DROPPED, EMPTY
from training.program.course import Course
from training.program.model_files import model_notes, most_tokens
from training.reporting.shown_rows import shown_rows

ARROW = {"texts": "what is learned begins", "pairs": "an answer begins", "prompts": "the actor goes on"}


def counted(rows: FittedRows, noun: str, held_out: FittedRows | None, asked: int = 0) -> str:
    """ "1,834 texts (226 cut: 12.3 %, 8 dropped: 0.4 %), 96 held out".

    asked: the number of held-out rows that was asked for, wherever they are from; 0 where no flag says one. (That of
    steps 1 and 2, --held_out, is of rows of --data_path alone, and has them or ends the run.)
    """
    if held_out is None:
        return f"{rows.told(noun)}, 0 held out"
    unlike = held_out.cut or held_out.dropped or held_out.empty
    told = held_out.told("held out") if unlike else f"{len(held_out):,} held out"
    fewer = f" (fewer than the {asked} asked for: the held-out data have no more that fit)"
    return f"{rows.told(noun)}, {told}{fewer if len(held_out) < asked else ''}"


def too_long(
    rows: FittedRows,
    noun: str,
    flag: str,
    args: DataFlags,
    tokenizer,
    models: Sequence[str | None],
    beside: int = 0,
) -> list[str]:
    """The warning of rows that are too long, if many are, and some rows as the model is shown them.

    flag: which limits them. models: paths of those that are given the rows, beside which each needs `beside` positions.
    In a dry run three rows of each kind; otherwise one that is cut, one that is dropped and one of which the tokenizer
    makes no tokens, if any is.
    """
    whole = args.dry_run
    examples = shown_rows(rows, tokenizer, NOTED) if whole else shown_rows(rows, tokenizer, 1, (CUT, DROPPED, EMPTY))
    title = f"what the model is shown of the {noun} (at -> {ARROW[noun]}):"
    return [
        *rows.note_lines(),
        *warnings(rows, flag, args, models, beside),
        *([title, *(f"  {line}" for line in examples)] if examples else []),
    ]


def warnings(rows: FittedRows, flag: str, args: DataFlags, models: Sequence[str | None], beside: int = 0) -> list[str]:
    """The warning of rows that are too long, if many are; arguments as of too_long."""
    limit = getattr(args, flag.removeprefix("--"))
    return rows.warnings(flag, limit, args.overlong, lambda: most_tokens(args, models, beside))


def supervised_lines(
    args: SupervisedFlags, noun: str, examples: FittedRows, held_out: FittedRows, tokenizer
) -> list[str]:
    """The first lines of steps 1 and 2, whose examples are called `noun`; in a dry run with more of them shown."""
    return [
        f"{counted(examples, noun, held_out)}; {args.total_steps(len(examples))} steps on "
        f"{distributed.ranks_in_words()}",
        *course(args, len(examples)).lines(),
        *too_long(examples, noun, "--max_seq_len", args, tokenizer, [args.model_name_or_path]),
        *model_notes(args, "model_name_or_path"),
    ]


def course(args: SupervisedFlags, examples: int) -> Course:
    """The steps of a whole run over so many examples, also of one that goes on."""
    total, an_epoch = args.total_steps(examples), args.steps_per_epoch(examples)
    return Course(total, total / an_epoch, args.schedule(), lambda step: args.evaluates(step, examples))
