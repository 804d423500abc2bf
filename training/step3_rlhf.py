"""Step 3: PPO on four models in four DeepSpeed engines.

    deepspeed --num_gpus 8 training/step3_rlhf.py --actor_model_name_or_path sft --critic_model_name_or_path reward \\
        --data_path prompts.jsonl --output_dir out --actor_zero_stage 3 --critic_zero_stage 3 --dtype bf16

Step 3 writes into the output folder: actor/ (and, depending on the flags, actor_ema/, critic/, critic_pretrained/ and
profile/), metrics.jsonl, tensorboard/, samples/, curves.png and checkpoints/.
"""

import contextlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import training.runtime.import_errors  # noqa: F401  imported first, to explain imports that fail
from training.runtime.first_look import first_look

if __name__ == "__main__":
    first_look("training.config.step3:RLHFFlags", __doc__)

from torch.utils.data import ConcatDataset

from engine import distributed
from engine.models.attention import attention_in_words
from engine.reward.base import CombinedReward, RewardSource
from engine.reward.server import ServerReward
from engine.rlhf_engine import RLHFEngine
from engine.rollout import RolloutBackend, build_rollouts
from training.checkpoints.conditions import BEFORE, FIRST, fingerprints
from training.checkpoints.resuming import ResumePoint, restore, set_aside_newer
from training.checkpoints.saving import last_good_named
from training.config.reward import MODEL, SERVER, function_source, score_parts
from training.config.step3 import RLHFFlags
from training.critic_pretraining import SEED, CriticPretraining
from training.data.order import ShuffledPrompts, ShuffledTexts
from training.ppo_trainer import PPOConfig, PPOTrainer
from training.reporting import step_metrics
from training.reporting.evaluation import Evaluator
from training.reporting.guards import rounding_bound
from training.reporting.standard_errors import without_scores
from training.runtime import dry_run, stopping
from training.runtime.agreement import agreed, checked
from training.runtime.callbacks import Callback, Callbacks
from training.runtime.first_lines import first_lines
from training.runtime.output_folder import begin_output_dir, check_shared
from training.runtime.plan import Plan, check_files, check_server, make_plan
from training.runtime.processes import phase, place
from training.runtime.session import Session, pretrain
from training.runtime.startup import leave, run
from training.runtime.stopping import saved_models_named


def main(args: RLHFFlags, callbacks: Sequence[Callback] = ()) -> None:
    """Check flags and data, build the models, train them, print the result."""
    called = Callbacks(callbacks)
    dialect, changed = args.resolved.dialect, args.resolved.changed
    point = ResumePoint.find(args.resume, args.output_dir, with_ema=args.keeps_average)
    checked(lambda: check_files(args, dialect, point))
    if args.dry_run:
        dry_run.report_rlhf(args, dialect, changed, point, called)
        return
    check_shared(args.output_dir)
    with phase("reading data"):
        inputs = checked(lambda: fingerprints(args))
        plan = agreed(lambda: make_plan(args, dialect, point, inputs))
    if args.reward_url:
        with phase("asking the reward server"):
            agreed(lambda: check_server(args, plan))
    if distributed.is_main():
        print(first_lines(args, plan, changed), flush=True)
    called.planned(args, plan)
    if args.preflight:
        return
    with phase("loading models"):
        models = RLHFEngine.from_pretrained(plan.spec)
    if distributed.is_main():
        print(attention_in_words(models.actor.module), flush=True)
    with phase("starting rollouts"):
        rollouts = choose_rollouts(args, plan, models)
    trainer = build_trainer(args, plan, models, rollouts)
    resume_or_begin(args, plan, trainer)
    train(args, plan, trainer, Session(args, plan, trainer, build_evaluator(plan, trainer), called))


def choose_rollouts(args: RLHFFlags, plan: Plan, models: RLHFEngine) -> RolloutBackend:
    """Choose the backend that draws responses from the actor. Prints which backend was chosen and why."""
    rollouts = build_rollouts(
        args.rollout_backend,
        models.actor,
        models.tokenizer,
        others=models.engines,
        rows_at_once=args.per_device_generation_batch_size * plan.dialect.samples_per_prompt,
        row_length=args.max_prompt_seq_len + args.max_answer_seq_len,
        between_steps=args.replicas_between_steps,
        decoding=args.decoding,
        tensor_parallel=args.vllm_tensor_parallel_size if args.rollout_backend == "vllm" else args.inference_tp_size,
        sampler=args.vllm_sampler,
    )
    if distributed.is_main():
        print(rollouts.why or f"rollouts by {args.rollout_backend}", flush=True)
        if not exact_sampler(args, rollouts) and plan.dialect.takes_sampled_logprobs(exact=False):
            print(
                "old log-probs are the sampler's, as asked (old_logprobs=sampler). They differ slightly from the "
                "actor's: rollout/logprob_gap measures the difference, on one response of each rank",
                flush=True,
            )
    return rollouts


def exact_sampler(args: RLHFFlags, rollouts: RolloutBackend) -> bool:
    """Whether the sampler's log-probs equal those of the actor's forward pass within rounding."""
    return args.dtype == "fp32" and rollouts.computes_as_actor


def build_trainer(args: RLHFFlags, plan: Plan, models: RLHFEngine, rollouts: RolloutBackend) -> PPOTrainer:
    """Build a trainer that has made no step yet."""
    reward = build_reward(args, plan, models)
    if args.overlap_rewards:
        rollouts.finished = reward.begin
    return PPOTrainer(
        models=models,
        rollouts=rollouts,
        dialect=plan.dialect,
        sampling=plan.sampling,
        reward=reward,
        unsupervised=plan.texts
        and ShuffledTexts(plan.texts, per_rank=args.rows_per_rank // args.mini_batches, seed=args.seed),
        config=PPOConfig(
            total_steps=plan.total_steps,
            micro_batch_size=args.per_device_training_batch_size,
            critic_pretrain_steps=args.critic_pretrain_steps,
            critic_warmup_steps=args.critic_warmup_steps,
            unsup_coef=args.unsup_coef,
            max_kl=args.max_kl,
            first_kl_bound=rounding_bound(args.dtype, plan.dialect.logprob_temperature),
            seed=args.seed,
            exact_sampler=exact_sampler(args, rollouts),
            padded=not models.packs,
        ),
    )


def build_reward(args: RLHFFlags, plan: Plan, models: RLHFEngine) -> RewardSource:
    """Build the source of scores: the reward model, reward functions or reward servers, or a weighted sum of several of
    these and the length penalty."""
    parts = score_parts(args)
    sources: dict[str, RewardSource] = {}
    if models.reward is not None:
        sources[MODEL] = models.reward
    # rows[i] is the row of the data set from which the prompt with index i comes.
    rows = ConcatDataset([prompts.rows for prompts in (plan.prompts, plan.held_out) if prompts is not None])
    for part in parts:
        if part.given is not None:
            function = plan.reward_functions[part.given]
            sources[part.name] = function_source(function, part.given, models.tokenizer, rows)
    if (server := args.reward_server()) is not None:
        sources[SERVER] = ServerReward(server, models.tokenizer, rows)
    weighted = {part.name: (sources[part.name], part.weight) for part in parts}
    (alone, weight), *others = weighted.values()
    if not others and weight == 1.0 and not args.length_penalty:
        return alone
    return CombinedReward(weighted, length_penalty=args.length_penalty)


def resume_or_begin(args: RLHFFlags, plan: Plan, trainer: PPOTrainer) -> None:
    """Restore the checkpoint that the run resumes from, if any, and prepare the output folder. Called after the models
    are loaded: a run that fails before then changes nothing there."""
    if plan.resume:
        models = trainer.models
        notes = restore(plan.resume, models.trained, models.ema, models.kept_reference)
        trainer.load_state_dict(plan.resume.state)
        if distributed.is_main() and notes:
            print("\n".join(notes), flush=True)
    begin_output_dir(args, plan.resume is not None and plan.resume.in_output_dir)
    set_aside_newer(Path(args.output_dir), trainer.steps_done)
    step_metrics.set_aside_newer_traces(Path(args.output_dir), trainer.steps_done)


def build_evaluator(plan: Plan, trainer: PPOTrainer) -> Evaluator | None:
    """Build the Evaluator of the held-out prompts; None if there are no held-out prompts."""
    if plan.held_out is None:
        return None
    state = plan.resume.state if plan.resume else {}
    before = state.get(BEFORE)
    return Evaluator(
        plan.held_out,
        rollouts=trainer.rollouts,
        experience_maker=trainer.experience_maker,
        sampling=plan.sampling,
        tokenizer=trainer.models.tokenizer,
        first_index=len(plan.prompts),
        before=without_scores(before) if plan.scores_changed else before,
        first=state.get(FIRST),
    )


def prompt_feed(args: RLHFFlags, plan: Plan, seed: int) -> ShuffledPrompts:
    """Build the feed that gives this rank's prompts, in a random order that depends on `seed`."""
    return ShuffledPrompts(
        plan.prompts,
        per_rank=args.per_device_generation_batch_size * args.generation_batches,
        seed=seed,
        pad_token_id=plan.sampling.pad_token_id,
    )


def train(args: RLHFFlags, plan: Plan, trainer: PPOTrainer, session: Session) -> None:
    """Pretrain the critic if that is asked for, then make all PPO steps, with evaluations and saves."""
    counters = trainer.counters
    profiler = step_metrics.Profiler(args.profile_steps, Path(args.output_dir), say=session.writer.write)
    with (
        saved_models_named(session.saved),
        contextlib.closing(session.writer),  # also if the run stops: write the last steps, end the progress bar
        last_good_named(session.checkpoints, lambda: counters.steps_done if counters.weights_are_whole else None),
    ):
        session.begin()
        if trainer.steps_done < 0:
            pretraining = CriticPretraining(trainer, args.critic_pretrain_learning_rate)
            pretrain(session, pretraining, prompt_feed(args, plan, args.seed ^ SEED))
        session.before_first_step()
        feed = prompt_feed(args, plan, args.seed)
        with stopping.at_borders():
            while trainer.steps_done < plan.last_step:
                place.step = trainer.steps_done + 1
                with phase("between phases"), profiler.record(place.step):
                    report = trainer.step(feed.prompts(counters.prompt_batches), feed)
                session.after_step(report)
        session.checkpoints.wait()
    with saved_models_named(session.saved):
        session.end()
    session.judge()


def program(callbacks: Sequence[Callback] = ()) -> NoReturn:
    """Run step 3 with the flags of this process's command line, and end the process. Scripts that extend the library
    call this too."""
    leave(run(partial(main, callbacks=callbacks), RLHFFlags, __doc__.splitlines()[0]))


if __name__ == "__main__":
    from training.tools import memory

    program(callbacks=(memory.Compared(),))
