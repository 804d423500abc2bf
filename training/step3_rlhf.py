"""Step 3: PPO on four models in four DeepSpeed engines.

    deepspeed --num_gpus 8 --module training.step3_rlhf --actor_model_name_or_path sft \\
        --critic_model_name_or_path reward --data_path prompts.jsonl --output_dir out --actor_zero_stage 3

Step 3 writes into the output folder: actor/ (and, depending on the flags, actor_ema/, critic/, critic_pretrained/ and
profile/), metrics.jsonl, tensorboard/, samples/ and checkpoints/.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import training.runtime.import_errors  # noqa: F401  imported first, to explain imports that fail
from training.runtime.first_look import first_look

if __name__ == "__main__":
    first_look("training.config.step3:RLHFFlags", __doc__)

from engine import distributed
from engine.models.attention import attention_in_words
from engine.rlhf_engine import RLHFEngine
from engine.rollout import RolloutBackend, build_rollouts
from training.checkpoints.conditions import BEFORE, FIRST, fingerprints
from training.checkpoints.resuming import Checkpoint
from training.config.reward import build_reward
from training.config.step3 import RLHFFlags
from training.critic_pretraining import SEED, CriticPretraining, pretrain
from training.data.order import ShuffledPrompts, ShuffledTexts
from training.environments import conversations
from training.ppo_trainer import PPOConfig, PPOTrainer, StepReport
from training.reporting import step_metrics
from training.reporting.evaluation import Evaluator, PromptEvaluations, sample_rows
from training.reporting.guards import of_ppo, rounding_bound
from training.reporting.health import scores_clipped
from training.reporting.sinks import PPO_VIEW, averaged_view
from training.reporting.standard_errors import without_scores
from training.reporting.summary import tell_result
from training.reward_texts import Texts, reward_source
from training.runtime import launch
from training.runtime.callbacks import Callback
from training.runtime.loop import Run
from training.runtime.output_folder import check_shared
from training.runtime.plan import Plan, by_part, check_files, check_reward_texts, check_server, make_plan
from training.runtime.processes import phase
from training.runtime.ranks import agreed, checked
from training.runtime.start_report import first_lines, report_dry_run


def main(args: RLHFFlags, callbacks: Sequence[Callback] = ()) -> None:
    """The order of a run, from flags to saved models. All ranks call this, in their process group."""
    # 1. What can be wrong is found before a model is loaded. Rank 0 reads files, all ranks end with its message.
    checkpoint = Checkpoint.find(args.resume, args.output_dir, with_ema=args.keeps_average)
    checked(lambda: check_files(args, checkpoint))
    if args.dry_run:
        report_dry_run(args, checkpoint, callbacks)
        return
    check_shared(args.output_dir)
    with phase("reading data"):
        inputs = checked(lambda: fingerprints(args))
        plan = agreed(lambda: make_plan(args, checkpoint, inputs))
    parts = by_part(plan.prompts, plan.held_out)
    if args.reward_url:
        with phase("asking the reward server"):
            agreed(lambda: check_server(args, plan.tokenizer, parts))
    texts = args.reward_paths and checked(lambda: check_reward_texts(args, args.reward_paths, plan.tokenizer, parts))
    if distributed.is_main():
        print(first_lines(args, plan), *texts, sep="\n", flush=True)
    for callback in callbacks:
        callback.planned(args, plan)
    if args.preflight:
        return

    # 2. Four engines, what draws responses from the actor, and the trainer of one step.
    with phase("loading models"):
        models = RLHFEngine.from_pretrained(plan.spec)
    if distributed.is_main():
        print(attention_in_words(models.actor.module), flush=True)
    with phase("starting rollouts"):
        rollouts = choose_rollouts(args, plan, models)
    trainer = build_trainer(args, plan, models, rollouts)
    evaluator = build_evaluator(plan, trainer)

    # 3. The steps.
    best = args.keep_best_by, args.keep_best_max_kl
    evaluations = PromptEvaluations(
        evaluator, models.ema, Path(args.output_dir), plan.last_step, args.eval_steps, *best
    )
    view = PPO_VIEW if models.ema is None else averaged_view(PPO_VIEW)
    run = Run(args, plan, trainer, evaluations, view, callbacks)
    train(args, plan, trainer, run)
    held_out = len(plan.held_out or ())
    run.end(
        lambda run: tell_result(run.output_dir, run.saved_models, run.writer.take_time()),
        lambda rows: of_ppo(rows, held_out),
    )


def train(args: RLHFFlags, plan: Plan, trainer: PPOTrainer, run: Run) -> None:
    """Pretrain the critic if that is asked for, then make all PPO steps."""
    counters = trainer.counters
    profiler = step_metrics.Profiler(args.profile_steps, run.output_dir, say=run.writer.write)
    feed = prompt_feed(args, plan, args.seed)
    first = max(counters.steps_done, 0) + 1

    def step() -> StepReport:
        with profiler.record(counters.step):
            report = trainer.step(feed.prompts(counters.prompt_batches), feed)
        if plan.scores_changed and report.step == first:
            report.metrics["objective/reward_changed"] = 1.0
        return report

    with run.kept():
        if trainer.steps_done < 0:
            pretraining = CriticPretraining(trainer, args.critic_pretrain_learning_rate)
            pretrain(run, pretraining, prompt_feed(args, plan, args.seed ^ SEED))
        run.before_first_step()
        if args.critic_pretrain_steps and counters.steps_done == 0:
            run.checkpoints.save_if_due(0)
        run.train(step, plan.last_step, "between phases", partial(show, run, args.print_answers_interval))


def show(run: Run, every: int, report: StepReport) -> None:
    """After the first step: say if many scores are clipped, which need not wait for the run's end. After every so many
    steps: show samples."""
    if report.step == 1 and (clipped := scores_clipped([report.metrics])) is not None:
        run.writer.write(f"WARNING: {clipped.text}")
    show_samples(run, every, report)


def show_samples(run: Run, every: int, report: StepReport, count: int = 4) -> None:
    """After every so many steps: show some of this step's responses as a table, and write the distributions of scores
    and lengths. count: number of responses."""
    if not every or report.step % every:
        return
    few = report.batch.select(slice(0, count))
    run.writer.samples(report.step, sample_rows(few.rollout, few.scores, few.kl.sum(-1), run.models.tokenizer))
    for tag, values in step_metrics.distributions(report.batch).items():
        run.writer.histogram(report.step, tag, values)


def prompt_feed(args: RLHFFlags, plan: Plan, seed: int) -> ShuffledPrompts:
    """Build the feed that gives this rank's prompts, in a random order that depends on `seed`."""
    return ShuffledPrompts(
        plan.prompts,
        per_rank=args.per_device_generation_batch_size * args.generation_batches,
        seed=seed,
        pad_token_id=plan.sampling.pad_token_id,
    )


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
        prefix_cache=plan.environments is not None,
    )
    if distributed.is_main():
        print(rollouts.why or f"rollouts by {args.rollout_backend}", flush=True)
        if not exact_sampler(args, rollouts) and plan.dialect.takes_sampled_logprobs(exact=False):
            print(
                "old log-probs are the sampler's, as asked (old_logprobs=sampler). They differ slightly from the "
                "actor's: rollout/logprob_gap measures the difference, on one response of each rank",
                flush=True,
            )
    return conversations(args, rollouts, plan.environments)


def exact_sampler(args: RLHFFlags, rollouts: RolloutBackend) -> bool:
    """Whether the sampler's log-probs equal those of the actor's forward pass within rounding."""
    return args.dtype == "fp32" and rollouts.computes_as_actor


def build_trainer(args: RLHFFlags, plan: Plan, models: RLHFEngine, rollouts: RolloutBackend) -> PPOTrainer:
    """Build a trainer that has made no step yet."""
    prompts = [prompts for prompts in (plan.prompts, plan.held_out) if prompts is not None]
    texts = Texts.of(
        prompts,
        models.tokenizer,
        stops=plan.sampling.stop_token_ids,
        cut_responses=plan.dialect.cut_responses,
        longest=args.max_prompt_seq_len + args.max_answer_seq_len,
        rows_at_once=args.per_device_training_batch_size,
        trust_remote_code=args.trust_remote_code,
    )
    scorers = [
        reward_source(model, path, texts, args.max_reward_seq_len, args.reward_step_end)
        for model, path in zip(models.rewards, args.reward_paths, strict=True)
    ]
    reward = build_reward(args, plan.reward_functions, scorers, models.tokenizer, texts.rows)
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


def program(callbacks: Sequence[Callback] = ()) -> NoReturn:
    """Run step 3 with the flags of this process's command line, and end the process. Scripts that extend the library
    call this too."""
    launch.leave(launch.run(partial(main, callbacks=callbacks), RLHFFlags, __doc__))


if __name__ == "__main__":
    from training import tools

    program(tools.callbacks())
