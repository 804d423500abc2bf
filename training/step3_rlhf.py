"""Step 3: PPO on four models in four DeepSpeed engines.

    deepspeed --num_gpus 8 training/step3_rlhf.py --actor_model_name_or_path sft --critic_model_name_or_path reward \\
        --data_path prompts.jsonl --output_dir out --actor_zero_stage 3 --critic_zero_stage 3 --dtype bf16

Writes out/actor (and out/actor_ema, out/critic), metrics.jsonl, tensorboard/, samples/, curves.png, checkpoints/ and
profile/.
"""

import contextlib
from pathlib import Path

from torch.utils.data import ConcatDataset

from engine import distributed
from engine.reward.base import RewardSource
from engine.reward.combined import CombinedReward
from engine.reward.function import FunctionReward
from engine.rlhf_engine import RLHFEngine
from engine.rollout import build_rollouts
from training.data.feeds import ShuffledPrompts, ShuffledTexts
from training.flags.rlhf_arguments import RLHFFlags
from training.ppo_trainer import PPOConfig, PPOTrainer
from training.program.plan import (
    Plan,
    changes_since,
    check_files,
    choices,
    dialect_lines,
    goes_on,
    make_plan,
    plan_lines,
    print_dry_run,
)
from training.program.session import Session
from training.program.startup import agreed, checked, clear_output_dir, leave, run
from training.reporting import profiling
from training.reporting.evaluation import Evaluator
from training.restarts import checkpoint


def main(args: RLHFFlags) -> None:
    """Check everything, build the engines, train, report."""
    dialect, changed = args.resolved_dialect()
    checked(lambda: check_files(args, dialect))
    if args.dry_run:
        print_dry_run(args, dialect, changed)
        return
    plan = agreed(lambda: make_plan(args, dialect, changed))
    output_dir = Path(args.output_dir)
    if distributed.is_main():
        since = changes_since(plan.resume[1], choices(args, dialect)) if plan.resume else []
        print(dialect_lines(dialect, changed), plan_lines(args, plan), *since, sep="\n", flush=True)
    engine = RLHFEngine.from_pretrained(plan.spec)
    rollouts = build_rollouts(
        args.rollout_backend,
        engine.actor,
        engine.tokenizer,
        others=engine.models,
        rows_at_once=args.per_device_generation_batch_size * dialect.samples_per_prompt,
        row_length=args.max_prompt_seq_len + args.max_answer_seq_len,
        between_steps=args.replicas_between_steps,
        decoding=args.decoding,
    )
    if distributed.is_main():
        print(rollouts.why, flush=True)
    trainer = PPOTrainer(
        engine=engine,
        rollouts=rollouts,
        dialect=plan.dialect,
        sampling=plan.sampling,
        reward=build_reward(args, plan, engine),
        unsupervised=plan.texts and ShuffledTexts(args, plan.texts),
        config=PPOConfig(
            total_steps=plan.total_steps,
            micro_batch_size=args.per_device_training_batch_size,
            critic_warmup_steps=args.critic_warmup_steps,
            unsup_coef=args.unsup_coef,
            seed=args.seed,
        ),
    )
    if plan.resume:
        folder, state = plan.resume
        checkpoint.load(folder, engine, state)
        trainer.load_state_dict(state)
    if plan.resume and goes_on(args, plan.resume[0]):
        checkpoint.set_aside_newer(output_dir, trainer.steps_done)
        profiling.set_aside_newer(output_dir, trainer.steps_done)
    else:
        clear_output_dir(args)  # not before the models are loaded: until then the new run may come to nothing
    evaluator = (
        None
        if plan.held_out is None
        else Evaluator(
            plan.held_out,
            rollouts=rollouts,
            maker=trainer.maker,
            sampling=plan.sampling,
            tokenizer=engine.tokenizer,
            first_index=len(plan.prompts),
        )
    )
    session = Session(args, plan, trainer, evaluator, output_dir)
    profiler = profiling.Profiler(args.profile_steps, trainer, output_dir, say=session.writer.write)
    with contextlib.closing(session.writer):  # of a run that stops, too: its last steps are written out, its bar ends
        session.begin()
        feed = ShuffledPrompts(args, plan.prompts, plan.sampling.pad_token_id)
        while trainer.steps_done < plan.last_step:
            with profiler.record(trainer.steps_done + 1):
                report = trainer.step(feed.prompts(trainer.steps_done))
            session.after_step(report)
    session.end()


def build_reward(args: RLHFFlags, plan: Plan, engine: RLHFEngine) -> RewardSource:
    """What scores responses: the reward model, a function, or both, with penalties."""
    sources = {}
    if engine.reward is not None:
        sources["model"] = (engine.reward, args.reward_model_weight)
    if plan.reward_function is not None:
        rows = ConcatDataset([prompts.rows for prompts in (plan.prompts, plan.held_out) if prompts is not None])
        sources["function"] = (
            FunctionReward(plan.reward_function, engine.tokenizer, rows, args.reward_function),
            args.reward_function_weight,
        )
    return CombinedReward(sources, length_penalty=args.length_penalty, missing_eos_penalty=args.missing_eos_penalty)


if __name__ == "__main__":
    leave(run(main, RLHFFlags, __doc__.splitlines()[0]))
