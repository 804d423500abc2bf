"""What a run of step 3 prints first: its dialect, score, data, steps and engines, and changes since a restart point."""

from engine import distributed
from engine.algorithms import NOTES, Dialect
from engine.reward.base import sum_in_words
from training.checkpoints.conditions import Conditions
from training.config.reward import score_parts
from training.config.step3 import RLHFFlags
from training.program.adapted_models import adapted_lines, adapted_roles
from training.program.course import Course
from training.program.data_lines import counted, too_long
from training.program.model_files import is_pretrained_critic, model_notes
from training.program.plan import Plan
from training.program.reward_server import server_lines


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
        *course(args, plan).lines(),
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


def course(args: RLHFFlags, plan: Plan) -> Course:
    """The steps of the whole run, also of one that goes on."""

    def evaluates(step: int) -> bool:
        return step == plan.last_step or bool(args.eval_steps and step % args.eval_steps == 0)

    drawn = args.per_device_generation_batch_size * args.generation_batches * distributed.world_size()
    epochs = plan.last_step * drawn / len(plan.prompts)
    return Course(plan.last_step, epochs, args.schedule(), evaluates if plan.held_out is not None else None)


def changes_since(plan: Plan) -> list[str]:
    """Which restart point the run goes on from, and a line for each setting that has changed since."""
    if plan.resume is None:
        return []
    return plan.resume.lines() + plan.conditions.changes_since(Conditions.read(plan.resume.state))
