"""What a run says of itself before its first step, and what it would take of memory.

First come its dialect, score, data, steps and engines, and changes since a checkpoint. Of its steps: how many, in how
many epochs, and when it evaluates and writes checkpoints. Of its data: how many rows are kept, cut and dropped, what to
do about it, and some of them as the model is shown them:

    cut, hh.jsonl, line 7: 256 of 412 tokens
      [156 tokens cut] '\\n\\nHuman: Can you help me?\\n\\nAssistant:' -> ' Of course.</s>'

Of its memory: the workload that flags describe, this machine, the planner's table, and in the first step on GPUs what
was planned beside what was measured.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import psutil
import torch

from engine import distributed
from engine.algorithms import NOTES, Dialect
from engine.engine_spec import EngineSpec
from engine.errors import UserError
from engine.memory import Cluster, MemoryPlan, Workload
from engine.memory.changes import Setting, what_fits
from engine.memory.copies import UNPLANNED
from engine.memory.memory_plan import gb, table, verdict
from engine.memory.planning import OneModel, plan_one_model
from engine.reward.base import sum_in_words
from engine.rollout import ROLLOUT_BACKENDS
from engine.zero.accelerator import on_gpu, ranks_of_this_machine
from training.checkpoints.conditions import Conditions
from training.checkpoints.files import Schedule
from training.config.flags import DataFlags, RunFlags
from training.config.reward import score_parts
from training.config.step3 import RLHFFlags
from training.config.supervised import RewardFlags, SupervisedFlags
from training.data.examples import NOTED, FittedRows, place_of
from training.data.tokens import CUT, DROPPED, EMPTY, EQUAL, WHOLE, Fit
from training.reporting.step_metrics import phase_memory
from training.runtime.models import adapted_lines, adapted_roles, is_pretrained_critic, model_notes, most_tokens
from training.runtime.plan import Plan, server_lines

POINTS = 3
"""Checkpoints that a run should have before its end: what a warning's advice comes to."""
NO_POINTS = "no checkpoints: a run that dies begins anew (--save_steps, --save_minutes)"


@dataclass(frozen=True, slots=True)
class RunSchedule:
    """The steps of a run, counted from 1, of which no model has to be there to know them.

    steps: how many. epochs: passes over the rows that they come to. schedule: of checkpoints. evaluates: whether
    held-out rows are looked at after a step; None where there are none. Before the first step they are in any case.
    """

    steps: int
    epochs: float
    schedule: Schedule
    evaluates: Callable[[int], bool] | None = None

    @property
    def evaluations(self) -> int:
        """How many, with the one before the first step."""
        return 0 if self.evaluates is None else 1 + sum(map(self.evaluates, range(1, self.steps + 1)))

    @property
    def points(self) -> int:
        """Checkpoints that are due by number, before the last step: what a run that dies goes on from."""
        return (self.steps - 1) // self.schedule.steps if self.schedule.steps else 0

    def lines(self) -> list[str]:
        """All of it in one line; and a warning where checkpoints are asked for and none comes before the end."""
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
        *supervised_schedule(args, len(examples)).lines(),
        *too_long(examples, noun, "--max_seq_len", args, tokenizer, [args.model_name_or_path]),
        *model_notes(args, "model_name_or_path"),
    ]


def supervised_schedule(args: SupervisedFlags, examples: int) -> RunSchedule:
    """The steps of a whole run over so many examples, also of one that goes on."""
    total, an_epoch = args.total_steps(examples), args.steps_per_epoch(examples)
    return RunSchedule(total, total / an_epoch, args.schedule(), lambda step: args.evaluates(step, examples))


def first_lines(args: RLHFFlags, plan: Plan, changed: dict) -> str:
    """All of them; `changed` as dialect_lines has it."""
    lines = [dialect_lines(plan.dialect, changed), *score_lines(args, plan.dialect)]
    return "\n".join([*lines, *plan_lines(args, plan), *changes_since(plan)])


def dialect_lines(dialect: Dialect, changed: dict) -> str:
    """The dialect's name, where it departs from its system, and where flags depart from it.

    changed: {field: (the dialect's value, the given one)}.
    """
    note = f"\n  {NOTES[dialect.name]}" if dialect.name in NOTES else ""
    return f"dialect {dialect.name}{note}" + "".join(
        f"\n  {field} = {given} (given; the dialect's is {usual})" for field, (usual, given) in changed.items()
    )


def score_lines(args: RLHFFlags, dialect: Dialect) -> list[str]:
    """What the score is made of and what is done to it before it enters the rewards; and a warning where the critic
    starts from a reward model that the score does not use."""
    terms = [(part.what, part.weight) for part in score_parts(args)]
    changes = _score_changes(dialect, args.max_answer_seq_len)
    lines = [f"score = {', '.join([sum_in_words(terms, args.length_penalty), *changes])}"]
    critic = args.critic_model_name_or_path
    if critic is not None and args.reward_path is None and not is_pretrained_critic(critic):
        lines.append(
            f"WARNING: the score does not use the reward model {critic}, from which the critic starts. To mix it in by "
            f"half, give {args.half_by_model}"
        )
    return lines


def _score_changes(dialect: Dialect, longest: int) -> list[str]:
    """What `Algorithm.process_scores` does to a score, in its order. longest: tokens that a response may have."""
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
    return [change for change in changes if change]


def plan_lines(args: RLHFFlags, plan: Plan) -> list[str]:
    """What is about to run: data, steps, engines; and prompts that are too long, in a dry run with more examples."""
    stages = ", ".join(f"{config.role} {config.stage}" for config in plan.spec.engine_configs)
    blocks = f"; {len(plan.texts)} blocks of text for mixed pretraining" if plan.texts else ""
    scorer = ""
    if args.critic_model_name_or_path is not None and plan.dialect.critic_start != "reward_model":
        critic = "the SFT model with a new head" if plan.dialect.has_critic else "there is none"
        scorer = f"\n--critic_model_name_or_path names the reward model alone; the critic: {critic}"
    pad_token = f"\n{plan.pad_token}" if plan.pad_token else ""
    models = [args.actor_model_name_or_path, args.critic_model_name_or_path, args.reward_model_name_or_path]
    return [
        f"{counted(plan.prompts, 'prompts', plan.held_out, args.num_eval_prompts)}{blocks}; {plan.total_steps} steps "
        f"of {args.rows_per_rank * distributed.world_size()} responses on {distributed.ranks_in_words()}",
        *run_schedule(args, plan).lines(),
        *dynamic_sampling_line(plan.dialect),
        *pretraining_lines(args),
        *too_long(
            plan.prompts, "prompts", "--max_prompt_seq_len", args, plan.tokenizer, models, args.max_answer_seq_len
        ),
        f"ZeRO stages: {stages}; {args.dtype}{scorer}{pad_token}",
        *model_notes(args, *(f"{role}_model_name_or_path" for role in ("actor", "critic", "reward"))),
        *adapted_lines(adapted_roles(args, plan.dialect)),
        *(f"{what}: no second copy" for what in plan.spec.shared.values()),
        *server_lines(args),
    ]


def dynamic_sampling_line(dialect: Dialect) -> list[str]:
    """What a step may draw beside its own prompts; nothing in a dialect that learns all that is drawn."""
    most = dialect.dynamic_sampling
    if most == 1:
        return []
    return [
        f"dynamic sampling: a step draws up to {most} batches of prompts, until groups whose scores differ fill it; "
        "epochs may pass so many times as fast"
    ]


def pretraining_lines(args: RLHFFlags) -> list[str]:
    """What comes before the first step, if anything does."""
    steps, responses = args.critic_pretrain_steps, args.rows_per_rank * distributed.world_size()
    if not steps:
        return []
    return [f"before the first step the critic is pretrained: {steps} steps of {responses} responses of the SFT model"]


def run_schedule(args: RLHFFlags, plan: Plan) -> RunSchedule:
    """The steps of the whole run, also of one that goes on."""

    def evaluates(step: int) -> bool:
        return step == plan.last_step or bool(args.eval_steps and step % args.eval_steps == 0)

    drawn = args.per_device_generation_batch_size * args.generation_batches * distributed.world_size()
    epochs = plan.last_step * drawn / len(plan.prompts)
    return RunSchedule(plan.last_step, epochs, args.schedule(), evaluates if plan.held_out is not None else None)


def changes_since(plan: Plan) -> list[str]:
    """Which checkpoint the run goes on from, and a line for each setting that has changed since."""
    if plan.resume is None:
        return []
    return plan.resume.lines() + plan.conditions.changes_since(Conditions.read(plan.resume.state))


LONGEST = 160  # characters of one text; what is longer loses its middle
SIDES = ("chosen", "rejected")


def shown_rows(
    rows: FittedRows, tokenizer, each: int, kinds: Sequence[str] = (WHOLE, CUT, DROPPED, EQUAL, EMPTY)
) -> list[str]:
    """Lines on the first `each` rows (at most NOTED of fitted_rows.py) of each of these kinds."""
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
    """The text of the ids from position `start` on, with the words of `marks` put in at their positions."""
    words, told = [], 0
    for position in sorted({start, *(position for position, _ in marks), len(ids)}):
        text = tokenizer.decode(ids[:position], clean_up_tokenization_spaces=False)  # not alone: spaces would be lost
        words += [_shortened(text[told:])] * (position > start and len(text) > told)
        words += [word for place, word in marks if place == position]
        told = len(text)
    return " ".join(words)


def _shortened(text: str) -> str:
    if len(text) > LONGEST:
        half = LONGEST // 2
        return f"{text[:half]!r} ... {text[-half:]!r}"
    return repr(text)


def workload(args: RLHFFlags, dialect: Dialect) -> Workload:
    """Lengths, batches and rollouts of step 3's flags."""
    return Workload(
        prompt=args.max_prompt_seq_len,
        response=args.max_answer_seq_len,
        generated=args.per_device_generation_batch_size * dialect.samples_per_prompt,
        responses=args.rows_per_rank,
        micro_batch=args.per_device_training_batch_size,
        mini_batches=dialect.mini_batches,
        ppo_epochs=dialect.ppo_epochs,
        critic_passes=dialect.critic_passes if dialect.critic_learns_apart else None,
        texts=args.unsupervised_dataset_name is not None,
        backend=args.rollout_backend,
        between_steps=args.replicas_between_steps,
        parts=args.vllm_tensor_parallel_size,
        group=args.inference_tp_size,
        evaluated=args.num_eval_prompts,
    )


def this_cluster() -> Cluster:
    """As many nodes like this machine as the run has ranks for; what a GPU has is known where one is here."""
    gpus = ranks_of_this_machine()
    gpu = torch.cuda.mem_get_info()[1] if on_gpu() else None
    nodes = -(-distributed.world_size() // gpus)
    return Cluster(gpus=gpus, nodes=nodes, gpu=gpu, host=psutil.virtual_memory().total, on_gpu=on_gpu())


def setting_here(args: RLHFFlags, dialect: Dialect) -> Setting:
    """Step 3 on machines like this one."""
    return Setting(args.engine_spec(dialect), workload(args, dialect), this_cluster())


def training_bytes(args: RLHFFlags, dialect: Dialect) -> int | str:
    """What training takes of a rank's memory beyond the loaded engines, as `build_rollouts` asks; or why that is not
    known, as on CPUs, where nothing is planned in a run. Nothing in the planning can end the run."""
    if not on_gpu():
        return UNPLANNED
    try:
        with torch.random.fork_rng(devices=[]):  # the run draws as it would without
            return setting_here(args, dialect).planned().training
    except Exception as error:  # whatever it is, the run can do without
        return f"what training takes is not known ({' '.join(str(error).split()) or type(error).__name__})"


@contextlib.contextmanager
def memory_compared(args: RLHFFlags, dialect: Dialect, resumed: bool, say: Callable[[str], None]) -> Iterator[None]:
    """Count the phases of the step within on the main rank's GPU, and say a line of planned and measured bytes.

    resumed: whether Adam has its moments before the step. Nothing in the planning can end the run. On CPUs, which count
    no peaks, nothing is counted or planned.
    """
    if not distributed.is_main() or not on_gpu():
        yield
        return
    phase_memory.counting = True
    try:
        yield
    finally:
        phase_memory.counting = False
    say(comparison(args, phase_memory.bytes, lambda: setting_here(args, dialect).planned(), resumed))


def comparison(args: RLHFFlags, measured: dict[str, int], make: Callable[[], MemoryPlan], resumed: bool) -> str:
    """The line: GB of a GPU at each phase's peak. measured: bytes by the step's phases."""
    names = {"generate": "generate", "make_experience": "experience", "train": "train"}  # of phases, and the plan's
    counted = {names[phase]: size for phase, size in measured.items() if phase in names}
    try:
        if ROLLOUT_BACKENDS[args.rollout_backend] is not None:
            raise UserError(f"--rollout_backend {args.rollout_backend} is your own")
        with torch.random.fork_rng(devices=[]):  # the run draws as it would without
            plan = make()
    except Exception as error:  # whatever it is, the run has what it needs
        why = " ".join(str(error).split()) or type(error).__name__
        figures = ", ".join(f"{phase} {gb(size)}" for phase, size in counted.items())
        return f"memory, measured GB of rank 0 at each phase's peak: {figures}; not planned: {why}"
    planned = {phase: plan.peak_of(phase).device.total for phase in counted}
    if not resumed:  # Adam has no moments before the first step trains
        planned |= {phase: size - plan.adam for phase, size in planned.items() if phase != "train"}
    figures = ", ".join(f"{phase} {gb(planned[phase])} / {gb(size)}" for phase, size in counted.items())
    beyond = "; --reward_function's own is in what is measured alone" if args.reward_function else ""
    return f"memory, planned / measured GB of rank 0 at each phase's peak: {figures}{beyond}"


def memory_lines(args: RLHFFlags, dialect: Dialect) -> list[str]:
    """The table of step 3 on machines like this one, with what would make it fit; or why there is none."""
    models = (args.actor_model_name_or_path, args.critic_model_name_or_path, args.reward_model_name_or_path)
    setting = setting_here(args, dialect)
    planned = _planned(args, models, setting.planned)
    if isinstance(planned, str):
        return [planned]
    others = "on other machines: training/memory_plan.py --gpu a100-80g --num_gpus 8, with the same flags"
    changes = change_lines(setting) if planned.fits is False else []
    return [table(planned, f"{distributed.ranks_in_words()}, {args.dtype}"), *changes, others]


def memory_of_one_model(args: SupervisedFlags) -> list[str]:
    """The table of step 1 or 2, or why there is none."""
    planned = _planned(args, (args.model_name_or_path,), lambda: planned_model(args))
    return [planned if isinstance(planned, str) else table(planned, f"{distributed.ranks_in_words()}, {args.dtype}")]


def planned_model(args: SupervisedFlags) -> MemoryPlan:
    """The plan of step 1 or 2 on machines like this one; raises UserError as `plan_one_model` does."""
    return plan_one_model(one_model(args), this_cluster())


def one_model(args: SupervisedFlags) -> OneModel:
    """The model of step 1 or 2, and how it trains, of these flags."""
    scorer = isinstance(args, RewardFlags)
    return OneModel(
        path=args.model_name_or_path,
        scorer=scorer,
        engine=args.engine_config(),
        optimizer=args.optimizer(),
        dtype=str(args.dtype),
        rows=args.per_device_train_batch_size * (2 if scorer else 1),  # of a pair both
        length=args.max_seq_len,
        passes=args.gradient_accumulation_steps,
        checkpointing=args.gradient_checkpointing,
        lora=args.lora(),
        trust_remote_code=args.trust_remote_code,
        attention=args.attention,
    )


def _planned(args: RunFlags, models: Sequence[str | None], make: Callable[[], MemoryPlan]) -> MemoryPlan | str:
    """The plan; or a line that says what is missing for one."""
    missing = [path for path in dict.fromkeys(models) if path is not None and not args.looks_at(path)]
    if missing:
        return f"memory plan: none, as the config.json of {' and '.join(missing)} is not on this machine"
    try:
        return make()
    except UserError as error:
        return f"memory plan: none. {error}"


def change_lines(setting: Setting) -> list[str]:
    """What would make a setting fit that does not, the cheapest in speed first."""
    found = what_fits(setting)
    if found is None:
        others = ["more GPUs would (--search gpus)", *_fewer_weights(setting.spec)]
        return [f"no change of batches, stages and offload makes it fit: {', or '.join(others)}"]
    changes, planned = found
    return [
        "it fits with these changes, the cheapest in speed first:",
        *(f"  {change.flags}" for change in changes),
        f"  then {verdict(planned)}",
    ]


def _fewer_weights(spec: EngineSpec) -> list[str]:
    """What holds fewer weights and states than these engines, in words; nothing where LoRA has done its most."""
    lora = spec.actor_lora
    if lora is None:
        flags = "--actor_lora_dim 16 --critic_lora_dim 16 --only_optimize_lora"
        return [f"LoRA ({flags}), which changes what is learned"]
    if not lora.only:
        return ["--only_optimize_lora, by which two trunks are held in place of four, and less is learned"]
    if spec.share_trunk:
        return []
    return ["--share_trunk, by which one trunk is held: the reward model has to be an adapter on the actor's base"]
