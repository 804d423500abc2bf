"""Step 3: PPO on four models in four DeepSpeed engines.

    deepspeed --num_gpus 8 training/step3_rlhf.py --actor_model_name_or_path sft --critic_model_name_or_path reward \\
        --data_path prompts.jsonl --output_dir out --actor_zero_stage 3 --critic_zero_stage 3 --dtype bf16

Writes out/actor (and out/actor_ema, out/critic), metrics.jsonl, tensorboard/, samples/, curves.png and checkpoints/.
"""
import contextlib
import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path

from engine import distributed
from engine.dialects import Dialect
from engine.ds_config import build_ds_config
from engine.ds_engine import TrainedModel, full_state
from engine.errors import UserError
from engine.experience import PromptBatch
from engine.model_files import (check_policy, check_scorer, check_vocabularies, read_config, read_tokenizer,
                                save_model, vocabulary_size)
from engine.rlhf_engine import EngineSpec, RLHFEngine
from engine.rollout import SamplingConfig, build_rollouts
from training import checkpoint
from training.data import Prompts, collate_prompts
from training.evaluation import Evaluator, sample_rows, write_rows
from training.order import PromptOrder
from training.ppo_trainer import PPOConfig, PPOTrainer, StepReport
from training.program import (agreed, check_positions, check_precision, checked, clear_output_dir, generation_stops,
                              leave, prepare_output_dir, run)
from training.report import RunSummary, plot_curves, read_metrics, summary_text
from training.rlhf_arguments import RLHFFlags
from training.rows import PROMPT_COLUMNS, read_rows, split_held_out
from training.sinks import METRICS_FILE, MetricWriter


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is settled before a model is loaded."""
    dialect: Dialect
    changed: dict
    spec: EngineSpec
    prompts: Prompts
    held_out: Prompts | None
    sampling: SamplingConfig
    total_steps: int
    resume: tuple[Path, dict] | None
    identity: dict[str, object]


def main(args: RLHFFlags) -> None:
    """Check everything, build the engines, train, report."""
    dialect, changed = args.resolved_dialect()
    checked(lambda: check_files(args, dialect))
    plan = agreed(lambda: make_plan(args, dialect, changed))
    output_dir = Path(args.output_dir)
    print_plan(args, plan)
    engine = RLHFEngine.from_pretrained(plan.spec)
    rollouts = build_rollouts(args.rollout_backend, engine.actor, engine.tokenizer)
    trainer = PPOTrainer(
        engine=engine, rollouts=rollouts, dialect=plan.dialect, sampling=plan.sampling,
        config=PPOConfig(total_steps=plan.total_steps, mini_batches=args.mini_batches,
                         micro_batch_size=args.per_device_training_batch_size,
                         samples_per_prompt=args.num_samples_per_prompt,
                         critic_warmup_steps=args.critic_warmup_steps, seed=args.seed))
    if plan.resume:
        folder, state = plan.resume
        checkpoint.load(folder, engine, state)
        trainer.load_state_dict(state)
    if plan.resume and goes_on(args, plan.resume[0]):
        checkpoint.set_aside_newer(output_dir, trainer.steps_done)
    else:
        clear_output_dir(args.output_dir)  # not before the models are loaded: until then the new run may come to nothing
    evaluator = None if plan.held_out is None else Evaluator(
        plan.held_out, rollouts=rollouts, maker=trainer.maker, sampling=plan.sampling, tokenizer=engine.tokenizer,
        batch_size=args.per_device_generation_batch_size * args.num_samples_per_prompt)
    session = Session(args, plan, trainer, evaluator, output_dir)
    with contextlib.closing(session.writer):  # of a run that stops, too: its last steps are written out, its bar ends
        session.begin()
        for report in trainer.fit(ShuffledPrompts(args, plan)):
            session.after_step(report)
    session.end()


def make_plan(args: RLHFFlags, dialect: Dialect, changed: dict) -> Plan:
    """What this rank reads for itself; raises UserError before any model is loaded."""
    tokenizer = read_tokenizer(args.actor_model_name_or_path, "--actor_model_name_or_path")
    rows = read_rows(args.data_path, PROMPT_COLUMNS)
    held_out = None
    if args.num_eval_prompts and args.eval_data_path:
        held_out = read_rows(args.eval_data_path, PROMPT_COLUMNS)[:args.num_eval_prompts]
    elif args.num_eval_prompts:
        if args.num_eval_prompts >= len(rows):
            raise UserError(f"--data_path {args.data_path}: it has {len(rows)} rows, of which --num_eval_prompts "
                            f"{args.num_eval_prompts} would be held out. Lower that, give --eval_data_path, or add "
                            "prompts.")
        rows, held_out = split_held_out(rows, args.num_eval_prompts, args.seed)
    prompts = Prompts(rows, tokenizer, args.max_prompt_seq_len)
    a_step = args.per_device_generation_batch_size * args.generation_batches * distributed.world_size()
    total_steps = args.max_steps or len(prompts) * args.num_train_epochs // a_step
    if len(prompts) < a_step or total_steps == 0:
        raise UserError(f"--data_path {args.data_path}: {len(prompts)} prompts are too few for one step, which takes "
                        f"{a_step} over {distributed.world_size()} ranks. Lower the batch sizes or add prompts.")
    sampling = SamplingConfig(
        max_new_tokens=args.max_answer_seq_len, pad_token_id=tokenizer.pad_token_id,
        stop_token_ids=generation_stops(args.actor_model_name_or_path, tokenizer), temperature=dialect.temperature,
        stop_strings=tuple(args.stop), seed=args.seed, vocabulary_size=vocabulary_size(tokenizer))
    identity = args.identity(dialect, len(prompts), len(held_out or []))
    resume = checkpoint.find(args.resume) if args.resume else None
    if resume:
        checkpoint.check_identity(*resume, identity)
    return Plan(dialect, changed, args.engine_spec(dialect), prompts,
                held_out and Prompts(held_out, tokenizer, args.max_prompt_seq_len), sampling, total_steps, resume,
                identity)


def check_files(args: RLHFFlags, dialect: Dialect) -> None:
    """What can be wrong with files, models and machine, looked at by one process."""
    check_precision(args.dtype)
    resume = checkpoint.find(args.resume) if args.resume else None
    if resume is not None:
        checkpoint.check_ema(*resume, wanted=args.enable_ema)
    prepare_output_dir(args.output_dir, args.overwrite_output_dir,
                       resumed=resume is not None and goes_on(args, resume[0]))
    read_rows(args.data_path, PROMPT_COLUMNS)
    if args.num_eval_prompts and args.eval_data_path:
        read_rows(args.eval_data_path, PROMPT_COLUMNS)
    spec = args.engine_spec(dialect)
    for choice, trained in ((spec.actor, True), (spec.critic, True), (spec.reference, False), (spec.reward, False)):
        build_ds_config(choice, dtype=args.dtype, micro_batch_size=1, trained=trained)
    tokenizer = read_tokenizer(args.actor_model_name_or_path, "--actor_model_name_or_path")
    check_policy(args.actor_model_name_or_path, "--actor_model_name_or_path")
    for name in ("critic_model_name_or_path", "reward_model_name_or_path"):
        if getattr(args, name) is not None:
            check_scorer(getattr(args, name), f"--{name}")
            check_vocabularies(tokenizer, getattr(args, name), f"--{name}")
    for name in ("actor_model_name_or_path", "critic_model_name_or_path", "reward_model_name_or_path"):
        if getattr(args, name) is not None:
            check_positions(read_config(getattr(args, name), f"--{name}"), f"--{name} {getattr(args, name)}",
                            max_prompt_seq_len=args.max_prompt_seq_len, max_answer_seq_len=args.max_answer_seq_len)


def goes_on(args: RLHFFlags, point: Path) -> bool:
    """Whether the run that the restart point belongs to stands in --output_dir, where its curves then go on."""
    return point.resolve().is_relative_to(Path(args.output_dir).resolve())


def print_plan(args: RLHFFlags, plan: Plan) -> None:
    """Say what is about to run, and which flags depart from the dialect."""
    if not distributed.is_main():
        return
    print(f"dialect {plan.dialect.name}" + "".join(
        f"\n  {field} = {given} (given; the dialect's is {usual})" for field, (usual, given) in plan.changed.items()))
    print(f"{len(plan.prompts)} prompts ({plan.prompts.truncated} truncated), "
          f"{len(plan.held_out) if plan.held_out else 0} held out; {plan.total_steps} steps of "
          f"{args.rows_per_rank * distributed.world_size()} responses on {distributed.world_size()} ranks")
    stages = ", ".join(f"{choice.role} {choice.stage}" for choice in
                       (plan.spec.actor, plan.spec.critic, plan.spec.reference, plan.spec.reward))
    print(f"ZeRO stages: {stages}; {args.dtype}; rollouts by {args.rollout_backend}", flush=True)


class ShuffledPrompts:
    """This rank's share of the prompts, in an order drawn from the seed alone."""

    def __init__(self, args: RLHFFlags, plan: Plan):
        self.prompts, self.batches_per_step = plan.prompts, args.generation_batches
        self.share = args.per_device_generation_batch_size * args.generation_batches
        self.order = PromptOrder(len(plan.prompts), self.share * distributed.world_size(), args.seed)
        self.pad_token_id = plan.sampling.pad_token_id

    def batches(self, step: int) -> list[PromptBatch]:
        """The generation batches of a step, counted from 0."""
        own = slice(distributed.rank() * self.share, (distributed.rank() + 1) * self.share)
        indices, visits = (column[own].chunk(self.batches_per_step) for column in self.order.batch(step))
        return [collate_prompts([self.prompts[index] for index in chosen.tolist()], chosen, visit, self.pad_token_id)
                for chosen, visit in zip(indices, visits)]


class Session:
    """What surrounds the training loop: evaluation, metrics, tables, restart points, models, the summary."""

    def __init__(self, args: RLHFFlags, plan: Plan, trainer: PPOTrainer, evaluator: Evaluator | None,
                 output_dir: Path):
        self.args, self.plan, self.trainer, self.evaluator = args, plan, trainer, evaluator
        self.output_dir, self.engine = output_dir, trainer.engine
        self.writer = MetricWriter(output_dir, total_steps=plan.total_steps,
                                   resume_step=trainer.steps_done if plan.resume else None)
        self.pending: dict[str, float] = {}  # measured after a step's line was written: goes into the next

    def begin(self) -> None:
        """Settings into TensorBoard; held-out scores before the first step."""
        self.writer.hparams({**self.args.as_dict(), "resolved_dialect": dataclasses.asdict(self.plan.dialect)})
        if self.evaluator and self.trainer.steps_done == 0:
            metrics, rows = self.evaluator.run()
            write_rows(self.output_dir / "samples" / "before.jsonl", rows)
            self.writer.log(0, 0, metrics)

    def after_step(self, report: StepReport) -> None:
        """Log the step; evaluate, show samples and save where it is time to."""
        args, step, last = self.args, report.step, report.step == self.plan.total_steps
        metrics = {**report.metrics, **self.pending}
        self.pending = {}
        if self.evaluator and (last or _is_due(step, args.eval_steps)):
            metrics |= self.evaluate("after" if last else f"step_{step:06d}")
        self.writer.log(step, report.samples, metrics)
        if _is_due(step, args.print_answers_interval):
            self.show_samples(report)
        if _is_due(step, args.save_steps):
            started = time.perf_counter()
            checkpoint.save(self.output_dir, self.engine,
                            {**self.trainer.state_dict(), "identity": self.plan.identity})
            self.pending["time/checkpoint"] = time.perf_counter() - started

    def evaluate(self, name: str) -> dict[str, float]:
        """Answer the held-out prompts, with the averaged weights too if there are any; samples go to a file."""
        metrics, rows = self.evaluator.run()
        write_rows(self.output_dir / "samples" / f"{name}.jsonl", rows)
        if self.engine.ema is not None:
            with self.engine.ema.swapped():
                averaged, rows = self.evaluator.run()
            write_rows(self.output_dir / "samples" / f"{name}_ema.jsonl", rows)
            metrics |= {key.replace("eval/", "eval/ema_"): value for key, value in averaged.items()}
        return metrics

    def show_samples(self, report: StepReport, count: int = 4) -> None:
        """A few of this step's responses as a table, and the distributions of scores and lengths."""
        experience = report.experience
        few = experience.select(slice(0, count))
        self.writer.samples(report.step, sample_rows(few.rollout, few.scores, few.kl.sum(-1), self.engine.tokenizer))
        self.writer.histogram(report.step, "objective/scores_histogram", experience.scores)
        self.writer.histogram(report.step, "rollout/length_histogram", experience.rollout.response_mask.sum(-1).float())

    def end(self) -> None:
        """Save the models, draw the curves, print the summary."""
        saved = {"actor": self.save(self.engine.actor, "actor"), "critic": self.save(self.engine.critic, "critic")}
        if self.engine.ema is not None:
            with self.engine.ema.swapped():
                saved["actor_ema"] = self.save(self.engine.actor, "actor_ema")
        if distributed.is_main():
            curves = self.output_dir / "curves.png"
            plot_curves(self.output_dir / METRICS_FILE, curves)
            rows = read_metrics(self.output_dir / METRICS_FILE)
            print("\n" + summary_text(RunSummary.from_metrics(rows, saved=saved, curves=curves)), flush=True)

    def save(self, model: TrainedModel, name: str) -> Path:
        """Write a model as a Hugging Face folder (all ranks call this)."""
        state = full_state(model.module.model)
        if distributed.is_main():
            save_model(model.module, state, self.engine.tokenizer, self.output_dir / name)
        distributed.barrier()
        return self.output_dir / name


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


if __name__ == "__main__":
    leave(run(main, RLHFFlags, __doc__.splitlines()[0]))
