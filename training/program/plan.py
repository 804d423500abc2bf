"""What a run of step 3 is settled to be before a model is loaded, and all that can be wrong with it by then."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine import distributed
from engine.algorithms import NOTES, Dialect, check, end_token_id, token_id
from engine.errors import UserError
from engine.models.checking import check_policy, check_scorer, check_trunk, check_vocabularies
from engine.models.hydra import check_hydra
from engine.models.reading import read_config, read_tokenizer, vocabulary_size
from engine.rlhf_engine import EngineSpec
from engine.rollout import SamplingConfig
from engine.rollout.families import check_attention
from training.data.blocks import TextBlocks
from training.data.examples import Prompts
from training.data.forms import PROMPTS, TEXTS
from training.data.mixture import load_rows
from training.flags.dialect_flags import given_fields
from training.flags.rlhf_arguments import RLHFFlags
from training.flags.user_function import load_function
from training.program import dry_run
from training.program.startup import check_positions, check_run, generation_stops
from training.restarts import checkpoint


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is settled before a model is loaded."""

    dialect: Dialect
    changed: dict
    spec: EngineSpec
    reward_function: Callable | None
    prompts: Prompts
    held_out: Prompts | None
    texts: TextBlocks | None
    sampling: SamplingConfig
    total_steps: int
    last_step: int
    resume: tuple[Path, dict] | None
    identity: dict[str, object]


def make_plan(args: RLHFFlags, dialect: Dialect, changed: dict) -> Plan:
    """What this rank reads for itself; raises UserError before any model is loaded."""
    tokenizer = read_tokenizer(args.actor_model_name_or_path, "--actor_model_name_or_path")
    parts = args.load_rows(
        PROMPTS,
        tokenizer,
        held_out=args.num_eval_prompts,
        eval_limit=args.num_eval_prompts,
        held_out_flag="--num_eval_prompts",
    )
    query = tuple(token_id(tokenizer, dialect, field) for field in ("query_start", "query_end"))
    prompts, held_out = (
        Prompts(rows, tokenizer, args.max_prompt_seq_len, args.overlong_prompts, args.cache, *query)
        if len(rows)
        else None
        for rows in parts
    )
    a_step = args.per_device_generation_batch_size * args.generation_batches * distributed.world_size()
    total_steps = args.max_steps or len(prompts) * args.num_train_epochs // a_step
    if len(prompts) < a_step or total_steps == 0:
        raise UserError(
            f"--data_path {' '.join(args.data_path)}: {len(prompts)} prompts are too few for one step, "
            f"which takes {a_step} over {distributed.world_size()} ranks. Lower the batch sizes or add "
            "prompts."
        )
    function = load_function(args.reward_function) if args.reward_function else None
    blocks, fingerprints = texts(args, tokenizer)
    identity = args.identity(dialect, [*(rows.fingerprint for rows in parts), *fingerprints])
    resume = checkpoint.find(args.resume) if args.resume else None
    last_step = min(total_steps, args.test_stop_step or total_steps)
    if resume:
        checkpoint.check_identity(*resume, identity)
        if resume[1]["steps_done"] > last_step:
            raise UserError(
                f"--resume {resume[0]}: it stands at step {resume[1]['steps_done']}, behind the run's last "
                f"step {last_step}. Raise --max_steps or --num_train_epochs."
            )
    check_profile_steps(args.profile_steps, resume[1]["steps_done"] + 1 if resume else 1, last_step)
    return Plan(
        dialect,
        changed,
        args.engine_spec(dialect),
        function,
        prompts,
        held_out,
        blocks,
        sampling_config(args, dialect, tokenizer),
        total_steps,
        last_step,
        resume,
        identity,
    )


def sampling_config(args: RLHFFlags, dialect: Dialect, tokenizer) -> SamplingConfig:
    """How responses are drawn; raises UserError where the dialect names an end that is no token."""
    end_token_id(tokenizer, dialect)
    return SamplingConfig.of(
        dialect,
        generation_stops(args.actor_model_name_or_path, tokenizer),
        args.dtype,
        max_new_tokens=args.max_answer_seq_len,
        pad_token_id=tokenizer.pad_token_id,
        stop_strings=tuple(args.stop),
        seed=args.seed,
        vocabulary_size=vocabulary_size(tokenizer),
    )


def check_profile_steps(steps: list[int], first: int, last: int) -> None:
    """Raise UserError for steps outside of those that the run trains."""
    outside = [str(step) for step in steps if not first <= step <= last]
    if outside:
        told = (
            f"this run trains steps {first} to {last}. Name some of these"
            if first <= last
            else f"this run ends with step {last}, which is done. Leave the flag out"
        )
        raise UserError(f"--profile_steps {' '.join(outside)}: {told}.")


def texts(args: RLHFFlags, tokenizer) -> tuple[TextBlocks | None, list[str]]:
    """The texts of mixed pretraining, cut into blocks as long as prompt and response, and their fingerprints; none
    without."""
    if args.unsupervised_dataset_name is None:
        return None, []
    rows, _ = load_rows(
        args.unsupervised_dataset_name,
        TEXTS,
        tokenizer,
        phase=args.phase,
        seed=args.seed,
        config_name=args.unsupervised_dataset_config_name,
    )
    blocks = TextBlocks(rows, tokenizer, args.max_prompt_seq_len + args.max_answer_seq_len, args.cache)
    needed = args.rows_per_rank // args.mini_batches * distributed.world_size()
    if len(blocks) < needed:
        raise UserError(
            f"--unsupervised_dataset_name {args.unsupervised_dataset_name}: {len(blocks)} blocks of text "
            f"are fewer than the {needed} of an optimizer step. Give more text, or lower the batch sizes."
        )
    return blocks, [rows.fingerprint]


def check_files(args: RLHFFlags, dialect: Dialect) -> None:
    """What can be wrong with files, models and machine, looked at by one process."""
    resume = checkpoint.find(args.resume) if args.resume else None
    if resume is not None:
        checkpoint.check_ema(*resume, wanted=args.enable_ema)
    check_run(args, resumed=resume is not None and goes_on(args, resume[0]))
    args.engine_configs(dialect)
    if args.reward_function is not None:
        load_function(args.reward_function)
    check_dialect(args, dialect)
    check_models(args, dialect)


def check_dialect(args: RLHFFlags, dialect: Dialect) -> None:
    """Whether the dialect's choices go together with the run's sizes and the actor."""
    layers, path = None, args.actor_model_name_or_path
    if args.looks_at(path):
        layers = read_config(path, "--actor_model_name_or_path").get_text_config().num_hidden_layers
    check(
        dialect,
        samples_per_prompt=dialect.samples_per_prompt,
        rows_per_rank=args.rows_per_rank,
        mini_batches=dialect.mini_batches,
        micro_batch_size=args.per_device_training_batch_size,
        ranks=distributed.world_size(),
        layers=layers,
        given=given_fields(args),
    )


def check_models(args: RLHFFlags, dialect: Dialect) -> None:
    """Whether the models are what the flags say, and fit each other."""
    names = [
        name
        for name in ("actor_model_name_or_path", "critic_model_name_or_path", "reward_model_name_or_path")
        if getattr(args, name) is not None and args.looks_at(getattr(args, name))
    ]
    tokenizer = None
    for name in names:
        path = getattr(args, name)
        if name == "actor_model_name_or_path":
            tokenizer = read_tokenizer(path, f"--{name}")
            check_policy(path, f"--{name}")
            check_attention(path, f"--{name}")
            if dialect.hydra_layers:
                check_hydra(path, dialect.hydra_layers, f"--{name}")
            starts_anew = dialect.critic_start == "zero_head" or args.critic_model_name_or_path is None
            if dialect.has_critic and starts_anew:
                check_trunk(path, f"--{name}")
        else:
            check_scorer(path, f"--{name}")
            if tokenizer is not None:
                check_vocabularies(tokenizer, path, f"--{name}")
        check_positions(
            read_config(path, f"--{name}"),
            f"--{name} {path}",
            max_prompt_seq_len=args.max_prompt_seq_len,
            max_answer_seq_len=args.max_answer_seq_len,
        )


def goes_on(args: RLHFFlags, point: Path) -> bool:
    """Whether the run that the restart point belongs to stands in --output_dir, where its curves then go on."""
    return point.resolve().parent.parent == Path(args.output_dir).resolve()


def dialect_lines(dialect: Dialect, changed: dict) -> str:
    """The dialect's name, where it departs from its system, and where flags depart from it."""
    note = f"\n  {NOTES[dialect.name]}" if dialect.name in NOTES else ""
    return f"dialect {dialect.name}{note}" + "".join(
        f"\n  {field} = {given} (given; the dialect's is {usual})" for field, (usual, given) in changed.items()
    )


def choices(args: RLHFFlags, dialect: Dialect) -> dict:
    """What may be changed when a run goes on, and is then told, as a state file has it (no tuples)."""
    models = {
        f"--{name}": getattr(args, name)
        for name in ("actor_model_name_or_path", "critic_model_name_or_path", "reward_model_name_or_path")
    }
    return json.loads(json.dumps({**dataclasses.asdict(dialect), **models}))


def changes_since(state: dict, now: dict) -> list[str]:
    """Which choices are others than when the restart point with this state was written."""
    steered = " (without effect: the adaptive coefficient goes on from where it was)"
    return [
        f"changed since the restart point: {name} {then} -> {now[name]}"
        + (steered if name == "kl_coef" and now["kl_controller"] == "adaptive" else "")
        for name, then in state.get("choices", {}).items()
        if name in now and now[name] != then
    ]


def plan_lines(args: RLHFFlags, plan: Plan) -> str:
    """What is about to run: data, steps, engines."""
    stages = ", ".join(f"{choice.role} {choice.stage}" for choice in plan.spec.choices)
    blocks = f"; {len(plan.texts)} blocks of text for mixed pretraining" if plan.texts else ""
    scorer = ""
    if args.critic_model_name_or_path is not None and plan.dialect.critic_start != "reward_model":
        critic = "the SFT model with a new head" if plan.dialect.has_critic else "there is none"
        scorer = f"\n--critic_model_name_or_path names the reward model alone; the critic: {critic}"
    return (
        f"{len(plan.prompts)} prompts ({plan.prompts.truncated} truncated, {plan.prompts.dropped} dropped), "
        f"{len(plan.held_out) if plan.held_out else 0} held out{blocks}; {plan.total_steps} steps of "
        f"{args.rows_per_rank * distributed.world_size()} responses on {distributed.world_size()} ranks\n"
        f"ZeRO stages: {stages}; {args.dtype}{scorer}"
    )


def print_dry_run(args: RLHFFlags, dialect: Dialect, changed: dict) -> None:
    """What --dry_run reports."""
    unseen = dry_run.unseen_models(
        args, args.actor_model_name_or_path, args.critic_model_name_or_path, args.reward_model_name_or_path
    )
    data = [*args.data_path, *args.eval_data_path, *filter(None, [args.unsupervised_dataset_name])]
    unseen += dry_run.unseen_data(data)
    checked = [dialect_lines(dialect, changed), *dry_run.opened(data, unseen)]
    if not unseen:
        checked.append(plan_lines(args, make_plan(args, dialect, changed)))
    dry_run.report(checked, unseen, args.engine_configs(dialect))
