"""What a run prints at its start: its dialect, score, data, steps and engines, and what has changed since a checkpoint.
A dry run prints this too, and then ends, with each engine's DeepSpeed configuration.

The lines about steps say how many steps and epochs there are, and when the run evaluates and writes checkpoints. The
lines about data say how many rows are kept, cut and dropped, give advice if many rows do not fit, and show rows as the
model sees them:

    cut, hh.jsonl, line 7: 256 of 412 tokens
      [156 tokens cut] '\\n\\nHuman: Can you help me?\\n\\nAssistant:' -> ' Of course.</s>'
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine import distributed
from engine.algorithms import NOTES, Dialect
from engine.errors import in_words, shown_command, without_query
from engine.models.checking import is_pretrained_critic
from engine.reward.base import sum_in_words
from training.checkpoints.conditions import Conditions, fingerprints
from training.checkpoints.files import Schedule
from training.checkpoints.resuming import Checkpoint
from training.config.flags import DataFlags, RestartFlags
from training.config.reward import score_parts
from training.config.step3 import RLHFFlags
from training.data.examples import NOTED, FittedRows, place_of
from training.data.sources import DEEPSPEED_CHAT_FILES, is_path, name_and_split, open_source
from training.data.tokens import CUT, DROPPED, EMPTY, EQUAL, WHOLE, Fit
from training.environments import environment_line
from training.reporting.run_record import command_line
from training.runtime.callbacks import Callback
from training.runtime.loop import Planned
from training.runtime.models import adapted_lines, adapted_roles, model_notes, most_tokens
from training.runtime.plan import (
    Plan,
    by_part,
    check_reward_texts,
    check_server,
    make_plan,
    server_lines,
)

POINTS = 3
"""Number of checkpoints before a run's end that a warning advises."""
NO_POINTS = "no checkpoints: a run that dies begins anew (--save_steps, --save_minutes)"


@dataclass(frozen=True, slots=True)
class RunSchedule:
    """Says what a run does after each of its steps, which are counted from 1. It is known before a model is loaded.

    steps: number of steps. epochs: number of passes over the rows in these steps. schedule: when checkpoints are
    written. evaluates: function that says whether held-out rows are evaluated after a step; None if there are none.
    They are always evaluated before step 1 too.
    """

    steps: int
    epochs: float
    schedule: Schedule
    evaluates: Callable[[int], bool] | None = None

    @property
    def evaluations(self) -> int:
        """The number of evaluations, including the one before the first step."""
        return 0 if self.evaluates is None else 1 + sum(map(self.evaluates, range(1, self.steps + 1)))

    @property
    def points(self) -> int:
        """The number of checkpoints that --save_steps causes before the last step. A run that dies can be resumed from
        them."""
        return (self.steps - 1) // self.schedule.steps if self.schedule.steps else 0

    def lines(self) -> list[str]:
        """A line with the schedule, and a warning if checkpoints were asked for but none is due before the end."""
        schedule = self.schedule
        when = []
        if schedule.steps:
            often = "every step" if schedule.steps == 1 else f"every {schedule.steps} steps"
            when.append(f"{_counted(self.points, 'checkpoint')} before the end, {often}")
        if schedule.minutes:
            when.append(f"a checkpoint every {schedule.minutes:g} minutes")
        if schedule.keep_best:
            when.append("one wherever an evaluation finds a better score")
        said = f"{_counted(self.evaluations, 'evaluation')}; {' and '.join(when) or NO_POINTS}"
        epochs = f"{self.epochs:.2f}".rstrip("0").rstrip(".")
        line = f"the run: {_counted(self.steps, 'step')}, {epochs} epoch{'' if epochs == '1' else 's'}; {said}"
        if self.points or schedule.minutes or schedule.keep_best or not schedule.steps:
            return [line]
        why = f"--save_steps {schedule.steps}, and the run has {self.steps}"
        often = max(1, self.steps // (POINTS + 1))
        advice = f"Give --save_steps {often}, or --save_minutes" if self.steps > 1 else "Give --save_minutes"
        return [
            line,
            f"warning: no checkpoint before the last step ({why}): a run that dies begins anew. {advice}.",
        ]


def _counted(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"


ARROW = {
    "texts": "what is learned begins",
    "pairs": "an answer begins",
    "responses": "a response begins",
    "prompts": "the actor goes on",
}


def counted(rows: FittedRows, noun: str, held_out: FittedRows | None, asked: int = 0) -> str:
    """Text that says how many rows there are: "1,834 texts (226 cut: 12.3 %, 8 dropped: 0.4 %), 96 held out".

    asked: the number of held-out rows that a flag asks for, from any data set; 0 without such a flag. (The flag
    --held_out of steps 1 and 2 does not count: it concerns rows of --data_path only, and a run with too few of them
    ends.)
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
    """Returns lines: a warning if many rows are too long, and some rows as the model sees them.

    A dry run shows three rows of each kind. Other runs show one row that is cut, one that is dropped, and one from
    which the tokenizer makes no tokens, if there are such rows.

    flag: the flag that limits the rows' length. models: paths of the models that read the rows. beside: number of
    positions that the models need in addition to the row's.
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
    """A warning if many rows are too long; [] otherwise. Arguments: as in `too_long`."""
    limit = getattr(args, flag.removeprefix("--"))
    return rows.warnings(flag, limit, args.overlong, lambda: most_tokens(args, models, beside))


def first_lines(args: RLHFFlags, plan: Plan) -> str:
    """All first lines of step 3."""
    lines = [dialect_lines(plan.dialect, args.resolved.changed), *score_lines(args, plan.dialect)]
    return "\n".join([*lines, *plan_lines(args, plan), *changes_since(plan)])


def dialect_lines(dialect: Dialect, changed: dict) -> str:
    """Lines with the dialect's name, its differences from its system, and the fields that flags changed.

    changed: {field: (the dialect's value, the given value)}.
    """
    note = f"\n  {NOTES[dialect.name]}" if dialect.name in NOTES else ""
    return f"dialect {dialect.name}{note}" + "".join(
        f"\n  {field} = {given} (given; the dialect's is {'empty' if usual == '' else usual})"
        for field, (usual, given) in changed.items()
    )


def score_lines(args: RLHFFlags, dialect: Dialect) -> list[str]:
    """Lines about the parts of the score, and about the changes that turn the score into a reward; and a warning if the
    critic starts from a reward model that the score does not use."""
    terms = [(part.what, part.weight) for part in score_parts(args)]
    changes = _score_changes(dialect, args.max_answer_seq_len)
    lines = [f"score = {', '.join([sum_in_words(terms, args.length_penalty), *changes])}"]
    if args.environment is not None and changes:
        lines.append("these changes are made to the rest of the score: the environment's rewards stay as they are")
    if len(args.reward_paths) > 1:
        how = "(score - mean) / standard deviation, both of the first responses, unless step 2 normalised the model's"
        lines.append(f"scores of the reward models: {'as they are' if args.raw_reward_scores else how}")
    if dialect.cut_responses == "closed":
        lines.append("a response that was cut ends with EOS for the reward models that read the policy's token ids")
    critic = args.critic_model_name_or_path
    if critic is not None and not args.reward_paths and not is_pretrained_critic(critic):
        lines.append(
            f"WARNING: the score does not use the reward model {critic}, from which the critic starts. To mix it in by "
            f"half, give {args.half_by_model}"
        )
    return lines


def _score_changes(dialect: Dialect, longest: int) -> list[str]:
    """Descriptions of the changes that `Algorithm.process_scores` makes to a score, in the order in which they are
    made. longest: largest number of tokens of a response."""
    scaled = {
        "none": "",
        "running": "divided by the standard deviation of all scores so far",
        "first_batch": "divided by the standard deviation of the first batch's scores",
    }[dialect.score_scaling]
    completed = {
        "none": "",
        "replace": f"replaced by {dialect.missing_end_value:g} where a response has no end",
        "subtract": f"less {dialect.missing_end_value:g} where a response has no end",
    }[dialect.missing_end]
    clipped = f"clipped at {dialect.score_clip:g}" if dialect.score_clip is not None else ""
    changes = [scaled, completed, clipped] if dialect.score_order == "scale_clip" else [clipped, scaled, completed]
    if dialect.overlong_buffer:
        most, buffer = dialect.overlong_penalty, dialect.overlong_buffer
        changes.append(f"less up to {most:g} in the last {buffer:.0%} of {longest} tokens")
    if dialect.likelihood_coef:
        apart = f", clipped at {dialect.score_clip:g} too" if dialect.score_clip is not None else ""
        changes.append(
            f"plus {dialect.likelihood_coef:g} likelihood (mean log-prob by the reference, in standard deviations of "
            f"the first responses, at most {dialect.likelihood_cap:g}{apart})"
        )
    return [change for change in changes if change]


def plan_lines(args: RLHFFlags, plan: Plan) -> list[str]:
    """Lines about data, steps and engines, and examples of prompts that are too long. A dry run shows more examples."""
    stages = ", ".join(
        f"{config.role} {config.stage}{' (offloaded)' if config.offload else ''}" for config in plan.spec.engine_configs
    )
    blocks = f"; {len(plan.texts)} blocks of text for mixed pretraining" if plan.texts else ""
    scorer = ""
    start = args.critic_path or "the SFT model with a new head" if plan.dialect.has_critic else "there is none"
    if args.critic_model_name_or_path is None:
        scorer = f"\nthe critic starts from {start}" if args.reward_paths and plan.dialect.has_critic else ""
    elif plan.dialect.critic_start != "reward_model":
        scorer = f"\n--critic_model_name_or_path names the reward model alone; the critic: {start}"
    pad_token = f"\n{plan.pad_token}" if plan.pad_token else ""
    models = [path for _, path in args.models if path not in args.text_reward_paths]
    responses = args.rows_per_rank * distributed.data_parallel_size()
    return [
        f"{counted(plan.prompts, 'prompts', plan.held_out, args.num_eval_prompts)}{blocks}; "
        f"{in_words(plan.total_steps, 'step')} of {responses} responses on "
        f"{in_words(distributed.world_size(), 'rank')}",
        *run_schedule(args, plan).lines(),
        *dynamic_sampling_line(plan.dialect),
        *pretraining_lines(args),
        *too_long(
            plan.prompts, "prompts", "--max_prompt_seq_len", args, plan.tokenizer, models, args.max_answer_seq_len
        ),
        f"ZeRO stages: {stages}; {args.dtype}{scorer}{pad_token}",
        *model_notes(args, args.models),
        *adapted_lines(adapted_roles(args, plan.dialect)),
        *(f"{what}: no second copy" for what in plan.spec.shared.values()),
        *server_lines(args),
        *environment_line(args),
    ]


def dynamic_sampling_line(dialect: Dialect) -> list[str]:
    """A line that says how many batches of prompts a step may draw; [] for a dialect without dynamic sampling."""
    most = dialect.dynamic_sampling
    if most == 1:
        return []
    return [
        f"dynamic sampling: a step draws up to {most} batches of prompts, until groups whose scores differ fill it; "
        "epochs may pass so many times as fast"
    ]


def pretraining_lines(args: RLHFFlags) -> list[str]:
    """A line about the critic's pretraining; [] if the run has none."""
    steps, responses = args.critic_pretrain_steps, args.rows_per_rank * distributed.data_parallel_size()
    if not steps:
        return []
    how = f"{in_words(steps, 'step')} of {responses} responses of the SFT model"
    return [f"before the first step the critic is pretrained: {how}"]


def run_schedule(args: RLHFFlags, plan: Plan) -> RunSchedule:
    """The schedule of the whole run of step 3, even if this start resumes it."""

    def evaluates(step: int) -> bool:
        return step == plan.last_step or bool(args.eval_steps and step % args.eval_steps == 0)

    drawn = args.per_device_generation_batch_size * args.generation_batches * distributed.data_parallel_size()
    epochs = plan.last_step * drawn / len(plan.prompts)
    return RunSchedule(plan.last_step, epochs, args.schedule(), evaluates if plan.held_out is not None else None)


def changes_since(plan: Planned) -> list[str]:
    """Lines that name the checkpoint from which the run resumes, and each setting that has changed since."""
    if plan.resume is None:
        return []
    return plan.resume.lines() + plan.conditions.changes_since(Conditions.read(plan.resume.state))


# Dry runs: all checks are made that are possible without GPUs and downloads.


def print_report(
    args: RestartFlags,
    plan: Planned | None,
    callbacks: Sequence[Callback],
    checked: Sequence[str],
    unseen: Sequence[str],
    engines: Mapping[str, dict],
) -> None:
    """Print what a dry run has found.

    checked: lines about what was checked. unseen: models and data that were not checked, because they are not on this
    machine. engines: {engine: its DeepSpeed configuration}. callbacks: they may print before the last line.
    """
    print("command\n  " + _command())
    for line in checked:
        print(line)
    for what in unseen:
        print(f"not looked at: {what} (not here: misspelt, or still to be made by an earlier step or downloaded)")
    print("engines, with gradient_accumulation_steps 1: the program itself adds up gradients, as its flag says")
    alike: dict[str, list[str]] = {}
    for role, ds_config in engines.items():
        alike.setdefault(json.dumps(ds_config, indent=2), []).append(role)
    for told, roles in alike.items():
        print(f"engine {' and '.join(roles)}: {told}")
    for callback in callbacks:
        callback.planned(args, plan)
    print("dry run: nothing was loaded or written", flush=True)


def report_dry_run(args: RLHFFlags, checkpoint: Checkpoint | None, callbacks: Sequence[Callback]) -> None:
    """Print the report of a dry run of step 3. checkpoint: the checkpoint from which the run resumes, or None."""
    dialect, changed = args.resolved.dialect, args.resolved.changed
    unseen = unseen_models(args, *(path for _, path in args.models))
    data = [*args.data_path, *args.eval_data_path, *filter(None, [args.unsupervised_dataset_name])]
    unseen += unseen_data(data)
    checked = [dialect_lines(dialect, changed), *score_lines(args, dialect), *opened(data, unseen)]
    plan = None
    if not unseen:
        plan = make_plan(args, checkpoint, fingerprints(args))
        parts = by_part(plan.prompts, plan.held_out)
        texts = check_reward_texts(args, args.reward_paths, plan.tokenizer, parts)
        checked += [*plan_lines(args, plan), *texts, *changes_since(plan)]
        checked += [
            f"{without_query(url)} gives one text the score {score:g}"
            for url, score in check_server(args, plan.tokenizer, parts).items()
        ]
    print_report(args, plan, callbacks, checked, unseen, args.ds_configs)


def opened(data: Sequence[str], unseen: Sequence[str]) -> list[str]:
    """Open each data set that is on this machine; returns a line for each. unseen: the data sets that are not on it.
    Raises UserError if a data set cannot be used."""
    sources = [open_source(path) for path in dict.fromkeys(data) if path not in unseen]
    return [f"data {source.name}: {sum(map(len, source.training or source.held_out))} records" for source in sources]


def unseen_models(args, *paths: str | None) -> list[str]:
    """The paths of those models that are not on this machine, without repetition."""
    return [path for path in dict.fromkeys(paths) if path is not None and not args.looks_at(path)]


def unseen_data(paths: Sequence[str]) -> list[str]:
    """The data sets that are not on this machine: they can only be names on the Hub."""
    return [
        path
        for path in dict.fromkeys(paths)
        if (name := name_and_split(path)[0]) != DEEPSPEED_CHAT_FILES and not is_path(name) and not Path(name).exists()
    ]


def _command() -> str:
    """The command of the dry run: the words after this module's name, or the command that started the program."""
    if Path(sys.argv[0]).name == "dry_run.py":
        return shown_command(sys.argv[1:])
    return command_line([word for word in sys.argv if word != "--dry_run"], os.environ)


# Rows as the model is shown them.

LONGEST = 160  # characters that are shown of one text; a longer text loses its middle
SIDES = ("chosen", "rejected")


def shown_rows(
    rows: FittedRows, tokenizer, each: int, kinds: Sequence[str] = (WHOLE, CUT, DROPPED, EQUAL, EMPTY)
) -> list[str]:
    """Lines that show the first `each` rows (at most NOTED of training/data/examples.py) of each of these kinds."""
    return [
        line
        for kind in kinds
        for number in rows.noted.get(kind, [])[:each]
        for line in _shown_lines(kind, place_of(rows.source, number), rows.fit(rows.source[number]), tokenizer)
    ]


def _shown_lines(kind: str, place: str, fit: Fit, tokenizer) -> list[str]:
    left = len(fit.prompt) + max(map(len, fit.answers), default=0)
    size = {CUT: f"{left:,} of {fit.needed:,} tokens", WHOLE: f"{fit.needed:,} tokens"}.get(kind, fit.reason)
    cut, ends = _cut(fit.gap, fit.lost), fit.ends_lost or [0] * len(fit.answers)
    if kind == EMPTY:
        texts = []
    elif not fit.answers:
        texts = [_marked(fit.prompt, cut, tokenizer) + " ->"]
    elif len(fit.answers) == 1:
        (ids,) = fit.sequences
        texts = [_marked(ids, [*cut, (fit.learned, "->"), *_cut(len(ids), ends[0])], tokenizer)]
    else:
        texts = ["prompt: " + _marked(fit.prompt, cut, tokenizer)] + [
            f"{side}: -> " + _marked(ids, _cut(len(ids), lost), tokenizer, len(fit.prompt))
            for side, ids, lost in zip(SIDES, fit.sequences, ends)
        ]
    return [f"{kind}, {place}: {size}", *(f"  {text}" for text in texts)]


def _cut(position: int, count: int) -> list[tuple[int, str]]:
    return [(position, f"[{count:,} token{'s' * (count > 1)} cut]")] if count else []


def _marked(ids: list[int], marks: list[tuple[int, str]], tokenizer, start: int = 0) -> str:
    """The text of the token ids from position `start` on; the texts of `marks` are inserted at their positions."""
    words, told = [], 0
    for position in sorted({start, *(position for position, _ in marks), len(ids)}):
        text = tokenizer.decode(ids[:position])  # all ids together: in parts, spaces would be lost
        words += [_shortened(text[told:])] * (position > start and len(text) > told)
        words += [word for place, word in marks if place == position]
        told = len(text)
    return " ".join(words)


def _shortened(text: str) -> str:
    if len(text) > LONGEST:
        half = LONGEST // 2
        return f"{text[:half]!r} ... {text[-half:]!r}"
    return repr(text)
