"""What a run of step 3 is settled to be before a model is loaded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine import distributed
from engine.algorithms import Dialect, end_token_id, token_id
from engine.engine_spec import EngineSpec
from engine.errors import UserError
from engine.models.reading import pad_token_line, vocabulary_size
from engine.rollout import SamplingConfig
from training.checkpoints.conditions import Conditions
from training.checkpoints.resuming import AUTO, ResumePoint
from training.config.reward import check_columns, load_functions
from training.config.step3 import RLHFFlags
from training.data.examples import Prompts, TextBlocks, prompt_fit
from training.data.forms import PROMPTS, TEXTS
from training.data.rows import load_rows
from training.program.model_files import generation_stops


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that is settled before a model is loaded.

    total_steps: of the whole run, by which learning rates fall; last_step: the one that it ends with. resume: what is
    gone on from, if anything. pad_token: what is said of it.
    """

    dialect: Dialect
    tokenizer: object
    spec: EngineSpec
    reward_functions: Mapping[str, Callable]
    prompts: Prompts
    held_out: Prompts | None
    texts: TextBlocks | None
    sampling: SamplingConfig
    total_steps: int
    last_step: int
    resume: ResumePoint | None
    conditions: Conditions
    pad_token: str

    @property
    def scores_changed(self) -> bool:
        """Whether the run goes on with another reward than it had."""
        return self.resume is not None and self.conditions.scores_changed_since(Conditions.read(self.resume.state))


def make_plan(
    args: RLHFFlags, dialect: Dialect, point: ResumePoint | None, inputs: Mapping[str, str] | None = None
) -> Plan:
    """What this rank reads for itself; raises UserError before any model is loaded.

    inputs: `training.checkpoints.conditions.fingerprints`, by rank 0.
    """
    tokenizer = args.read_tokenizer(args.actor_model_name_or_path, "--actor_model_name_or_path", dialect.pad_token)
    prompts, held_out, fingerprints = read_prompts(args, dialect, tokenizer)
    total_steps = count_steps(args, len(prompts))
    last_step = min(total_steps, args.test_stop_step or total_steps)
    functions = load_functions(args)
    check_columns(functions, by_part(prompts, held_out))
    texts, texts_fingerprints = read_texts(args, tokenizer)
    conditions = Conditions.of(args, dialect, fingerprints + texts_fingerprints, total_steps, tokenizer, inputs)
    if point:
        point.check(conditions, last_step)
    # A command that goes on by itself may name steps that an earlier start has recorded.
    first = point.steps_done + 1 if point and args.resume != AUTO else 1
    check_profile_steps(args.profile_steps, first, last_step)
    return Plan(
        dialect=dialect,
        tokenizer=tokenizer,
        spec=args.engine_spec(dialect),
        reward_functions=functions,
        prompts=prompts,
        held_out=held_out,
        texts=texts,
        sampling=sampling_config(args, dialect, tokenizer),
        total_steps=total_steps,
        last_step=last_step,
        resume=point,
        conditions=conditions,
        pad_token=pad_token_line(tokenizer, dialect, args.actor_model_name_or_path),
    )


def read_prompts(args: RLHFFlags, dialect: Dialect, tokenizer) -> tuple[Prompts, Prompts | None, list[str]]:
    """The prompts, the held-out ones if there are any, and the fingerprints of both."""
    query = tuple(token_id(tokenizer, dialect, field) for field in ("query_start", "query_end"))
    parts = args.load_rows(
        PROMPTS,
        tokenizer,
        prompt_fit(tokenizer, args.max_prompt_seq_len, args.overlong, *query),
        held_out=args.num_eval_prompts,
        eval_limit=args.num_eval_prompts,
        held_out_flag="--num_eval_prompts",
    )
    prompts, held_out = (
        Prompts(rows, tokenizer, args.max_prompt_seq_len, args.overlong, args.cache, *query) if len(rows) else None
        for rows in parts
    )
    return prompts, held_out, [rows.fingerprint for rows in parts]


def by_part(prompts: Prompts, held_out: Prompts | None) -> dict[str, Prompts]:
    """The prompts, and those held out if there are any, by what messages call them."""
    parts = {"the prompts": prompts, "the held-out prompts": held_out}
    return {name: part for name, part in parts.items() if part is not None}


def count_steps(args: RLHFFlags, prompts: int) -> int:
    """How many steps the whole run has; raises UserError if there are too few prompts for one."""
    a_step = args.per_device_generation_batch_size * args.generation_batches * distributed.world_size()
    total = args.max_steps or prompts * args.num_train_epochs // a_step
    if prompts < a_step or total == 0:
        raise UserError(
            f"--data_path {' '.join(args.data_path)}: {prompts} prompts are too few for one step, "
            f"which takes {a_step} over {distributed.world_size()} ranks. Lower the batch sizes or add "
            "prompts."
        )
    return total


def sampling_config(args: RLHFFlags, dialect: Dialect, tokenizer) -> SamplingConfig:
    """How responses are drawn; raises UserError where the dialect names an end that is no token."""
    end_token_id(tokenizer, dialect)
    return SamplingConfig.of(
        dialect,
        generation_stops(args.actor_model_name_or_path, tokenizer, args.trust_remote_code),
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
        these = (
            f"this run trains steps {first} to {last}. Name some of these"
            if first <= last
            else f"this run ends with step {last}, which is done. Leave the flag out"
        )
        raise UserError(f"--profile_steps {' '.join(outside)}: {these}.")


def read_texts(args: RLHFFlags, tokenizer) -> tuple[TextBlocks | None, list[str]]:
    """The texts of mixed pretraining, in blocks as long as prompt and response, and their fingerprint; none without."""
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
