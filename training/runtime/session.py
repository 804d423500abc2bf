"""Everything around the steps of step 3's training: evaluation, metrics, sample tables, checkpoints, saved models, the
summary; and the loop of the critic's pretraining.
"""

import dataclasses
import json
from pathlib import Path
from typing import NoReturn

from engine import distributed
from engine.errors import without_query
from engine.host_memory import give_back_at
from engine.models.checking import PRETRAINING_RECORD
from engine.whole_files import write_whole
from training.checkpoints.conditions import BEFORE, FIRST, OWED
from training.checkpoints.files import config_files
from training.checkpoints.saving import Checkpoints
from training.config.step3 import RLHFFlags
from training.critic_pretraining import CriticPretraining
from training.group_sampling import PromptFeed
from training.ppo_trainer import PPOTrainer, StepReport
from training.reporting.evaluation import Evaluator, sample_rows, write_rows
from training.reporting.guards import conclude, of_ppo
from training.reporting.records import METRICS_FILE, RUN_FILE, read_metrics, write_run_record
from training.reporting.sinks import PPO_VIEW, averaged_view
from training.reporting.standard_errors import comparable_scores
from training.reporting.step_metrics import distributions
from training.reporting.summary import RunSummary, summary_text
from training.runtime import model_folders, output_folder, stopping
from training.runtime.callbacks import Callback
from training.runtime.output_folder import open_writer
from training.runtime.plan import Plan
from training.runtime.processes import phase, place
from training.runtime.stopping import check_all_written, unwritten_noted

SCORE = "eval/score"


class Session:
    """What a run does before, between and after its steps. The methods are called in this order: `begin`,
    `before_first_step`, `after_step` with the report of each step, `end`, `judge`."""

    def __init__(
        self, args: RLHFFlags, plan: Plan, trainer: PPOTrainer, evaluator: Evaluator | None, callbacks: Callback
    ):
        self.callbacks, self.verdict = callbacks, None
        self.args, self.plan, self.trainer, self.evaluator = args, plan, trainer, evaluator
        self.output_dir, self.models = Path(args.output_dir), trainer.models
        self.owed: dict | None = plan.resume.state.get(OWED) if plan.resume else None
        logged = trainer.steps_done - (self.owed is not None)
        goes_on = plan.resume is not None and plan.resume.in_output_dir
        with unwritten_noted(self.output_dir / RUN_FILE):  # written first: it marks the folder as this run's
            write_run_record(
                self.output_dir,
                flags=args.as_dict(),
                dialect=dataclasses.asdict(plan.dialect),
                ds_configs=args.ds_configs,
                resumed=goes_on,
            )
        self.view = averaged_view(PPO_VIEW) if self.models.ema is not None else PPO_VIEW
        self.writer = open_writer(
            args,
            total_steps=plan.last_step,
            view=self.view,
            resume_step=logged if plan.resume else None,
        )
        tokenizer = self.models.saved_tokenizer
        self.checkpoints = Checkpoints(
            self.output_dir,
            args.schedule(),
            models=self.models.trained,
            ema=self.models.ema,
            reference=self.models.kept_reference,
            state=self.state_dict,
            conditions=plan.conditions,
            config_files=config_files(self.models.trained, tokenizer) if distributed.is_main() else {},
            resumed=plan.resume.folder if plan.resume else None,
            scores=held_out_scores(self.output_dir) if goes_on and not plan.scores_changed else {},
            say=self.writer.write,
        )
        self._first = (
            {"objective/reward_changed": 1.0} if plan.scores_changed else {}
        )  # added to the next step's metrics
        self.saved: dict[str, Path] = {}  # {name: folder} of the saved models; filled after the last step

    @property
    def steps_done(self) -> int:
        """How many steps are done; negative until the critic's pretraining is done."""
        return self.trainer.steps_done

    def written(self, name: str, folder: Path) -> None:
        """Called on rank 0 when a model was written into the folder."""
        self.callbacks.saved(name, folder, self)

    def state_dict(self) -> dict:
        """The state that a checkpoint holds in addition to the models."""
        owed = {OWED: self.owed} if self.owed is not None else {}
        before = {BEFORE: self.evaluator.before} if self.evaluator and self.evaluator.before else {}
        first = {FIRST: self.evaluator.first} if self.evaluator and self.evaluator.first else {}
        return self.trainer.state_dict() | owed | before | first

    def begin(self) -> None:
        """Write the run's settings into TensorBoard."""
        self.writer.hparams({**self.args.as_dict(), "resolved_dialect": dataclasses.asdict(self.plan.dialect)})

    def before_first_step(self) -> None:
        """Evaluate before the first step, unless this was done before the run was resumed. If an earlier start ended
        early and left an evaluation to the resumed run, make it here too."""
        pretrained = self.trainer.steps_done == 0 and self.args.critic_pretrain_steps > 0
        if self.evaluator and self.trainer.steps_done == 0 and not (pretrained and self.evaluator.before):
            with phase("evaluating"):
                metrics, rows = self.evaluator.run(0)
            self.write_samples("before", rows)
            if self.models.ema is not None:
                metrics = {**metrics, **_as_average(metrics)}  # the average starts at the actor's weights
            self.writer.log(0, 0, {**(self.owed or {}), **metrics})
            self.owed = None
        if self.owed is not None:
            if self.trainer.steps_done == self.plan.last_step:
                self.saved |= self.save_models()
            self.log_step(self.trainer.steps_done, self.trainer.counters.samples)
        if pretrained:
            self.checkpoints.save_if_due(0)

    def after_step(self, report: StepReport) -> None:
        """Log the step; evaluate, show samples and save if they are due; end the run if a signal asked for it.

        After the last step the models are saved before anything else is done, so that no later error can lose them.
        """
        self.callbacks.after_step(report)
        args, step, last = self.args, report.step, report.step == self.plan.last_step
        self.owed, self._first = {**report.metrics, **self.checkpoints.take_metrics(), **self._first}, {}
        reason = stopping.agreed()
        if reason:
            self.end_early(reason, report)
        if last:
            self.saved |= self.save_models()
            self.checkpoints.save_if_due(step)
        score = self.log_step(step, report.samples)
        if _is_due(step, args.print_answers_interval):
            self.show_samples(report)
        self.checkpoints.save_if_due(step, score)
        stopping.request.saved = self.checkpoints.newest
        give_back_at(step)

    def log_step(self, step: int, samples: int) -> float | None:
        """Evaluate if an evaluation is due, and write the step's metrics. Returns the held-out score if an evaluation
        was due, else None."""
        metrics = dict(self.owed or {})
        try:
            if self.evaluates_after(step):
                metrics |= self.evaluate("after" if step == self.plan.last_step else f"step_{step:06d}")
        finally:  # the step's metrics are written even if its evaluation fails
            self.writer.log(step, samples, metrics)
        self.owed = None
        return metrics.get(SCORE)

    def end_early(self, reason: stopping.Reason, report: StepReport) -> NoReturn:
        """Save a checkpoint and end the run. If an evaluation is due after this step, the resumed run makes the
        evaluation and writes the step's metrics."""
        if not self.evaluates_after(report.step):
            self.log_step(report.step, report.samples)
        point = self.checkpoints.save(report.step, wait=True)
        stopping.end_early(reason, report.step, self.plan.last_step, point)

    def evaluates_after(self, step: int) -> bool:
        """Whether an evaluation is due after this step."""
        asked = step in (0, self.plan.last_step) or (step > 0 and _is_due(step, self.args.eval_steps))
        return self.evaluator is not None and asked

    @phase("evaluating")
    def evaluate(self, name: str) -> dict[str, float]:
        """Evaluate on the held-out prompts, also with the averaged weights if there are any. The samples are written to
        a file. Returns the metrics.

        name: name of the file of samples, without its ending.
        """
        metrics, rows = self.evaluator.run(self.trainer.steps_done)
        self.write_samples(name, rows)
        if self.models.ema is not None:
            with self.models.ema.swapped():
                averaged, rows = self.evaluator.run(self.trainer.steps_done)
            self.write_samples(f"{name}_ema", rows)
            metrics |= _as_average(averaged)
        return metrics

    def write_samples(self, name: str, rows: list[dict]) -> None:
        """Write held-out samples into a file of this name. If the file cannot be written, the run goes on."""
        path = f"samples/{name}.jsonl"
        with unwritten_noted(self.output_dir / path):
            write_rows(self.output_dir / path, rows)

    def show_samples(self, report: StepReport, count: int = 4) -> None:
        """Show some of this step's responses as a table, and write the distributions of scores and lengths. count:
        number of responses."""
        few = report.batch.select(slice(0, count))
        self.writer.samples(report.step, sample_rows(few.rollout, few.scores, few.kl.sum(-1), self.models.tokenizer))
        for tag, values in distributions(report.batch).items():
            self.writer.histogram(report.step, tag, values)

    @phase("saving models")
    def save_models(self) -> dict[str, Path]:
        """`PPOTrainer.save_models` into the output folder; run.json lists the saved models."""
        saved = self.trainer.save_models(self.output_dir, self.args.save_merged, self.written)
        kept = output_folder.PRETRAINED if self.args.critic_pretrain_steps else ()
        model_folders.finish(self.output_dir, saved, self.trainer.steps_done, kept)
        return saved

    def end(self) -> None:
        """Save the models if `after_step` has not saved them, print the summary, judge the run.

        Raises: RunStopped if something could not be written.
        """
        if not self.saved:  # a run that resumes from the checkpoint of its last step makes no step
            self.saved |= self.save_models()
        if distributed.is_main():
            with unwritten_noted("the summary"):
                summary = RunSummary.from_metrics(
                    read_metrics(self.output_dir / METRICS_FILE), since=self.writer.take_time(), saved=self.saved
                )
                page = f"curves and samples as a page to send: python -m training.report {self.output_dir}"
                print(f"\n{summary_text(summary)}\n\n{page}", flush=True)
        prompts, metrics = len(self.evaluator.prompts) if self.evaluator else 0, self.output_dir / METRICS_FILE
        self.verdict = distributed.broadcast_object(
            of_ppo(read_metrics(metrics), prompts) if distributed.is_main() else None
        )
        self.callbacks.ended(self)
        check_all_written()

    def judge(self) -> None:
        """Print the verdict on the run. Raises: RunStopped if the verdict is BROKEN."""
        conclude(self.verdict, self.args.output_dir)


def held_out_scores(output_dir: Path) -> dict[int, float]:
    """{step: held-out score} of a run so far, without scores that come from another reward than the latest score."""
    path = output_dir / METRICS_FILE
    rows = read_metrics(path) if path.is_file() else []
    return {row["step"]: row[SCORE] for row in comparable_scores(rows)}


def _as_average(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics of an evaluation, named as those of the averaged weights."""
    return {key.replace("eval/", "eval/ema_"): value for key, value in metrics.items()}


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


FOLDER = output_folder.PRETRAINED[0]


def pretrain(session: Session, pretraining: CriticPretraining, feed: PromptFeed) -> None:
    """Run the remaining steps of the critic's pretraining, and save the critic.

    The last pretraining step and the evaluation before the first PPO step both have the number 0. Therefore
    `Session.before_first_step` writes the metrics of both together.
    """
    trainer, writer = pretraining.trainer, session.writer
    shown = {"loss": "critic_pretrain/loss", "explained variance": "critic_pretrain/explained_variance"}
    how = {"unit": "critic pretraining step", "below": pretraining.steps}
    writer.count(pretraining.steps, shown=shown, first_step=pretraining.steps_done, **how)
    with stopping.at_borders():
        while trainer.steps_done < 0:
            place.step = trainer.steps_done + 1
            with phase("pretraining the critic"):
                report = pretraining.step(feed.prompts(pretraining.steps_done))
            _after_step(session, pretraining, report)
    writer.count(session.plan.last_step, shown=session.view.bar)


def _after_step(session: Session, pretraining: CriticPretraining, report: StepReport) -> None:
    session.callbacks.after_step(report)
    session.owed = {**report.metrics, **session.checkpoints.take_metrics()}
    if report.step == 0:
        _save(session, pretraining, report.metrics)
    reason = stopping.agreed()
    if reason:
        session.end_early(reason, report)
    if report.step < 0:
        session.log_step(report.step, 0)
        session.checkpoints.save_if_due(report.step)
    stopping.request.saved = session.checkpoints.newest
    give_back_at(report.step)


@phase("saving models")
def _save(session: Session, pretraining: CriticPretraining, metrics: dict[str, float]) -> None:
    """Save the critic as at the end of a run, with a record of its pretraining (all ranks call this)."""
    critic, output_dir = session.models.critic, session.output_dir
    merged = model_folders.merged_wanted(session.args.save_merged, [critic], output_dir)
    tokenizer, written = session.models.saved_tokenizer, session.written
    saved = model_folders.save_forms(critic, tokenizer, output_dir, FOLDER, merged, written=written)
    if not distributed.is_main():
        return
    args, dialect = session.args, session.plan.dialect
    record = {
        "steps": pretraining.steps,
        "learning_rate": args.critic_pretrain_learning_rate or dialect.critic_lr,
        "gamma": dialect.gamma,
        "actor": args.actor_model_name_or_path,
        "critic": args.critic_model_name_or_path,
        "reward_model": args.reward_path,
        "reward_function": args.reward_function,
        "reward_url": list(map(without_query, args.reward_url)),
        **metrics,
    }
    for folder in saved.values():
        with unwritten_noted(folder / PRETRAINING_RECORD):
            write_whole(folder / PRETRAINING_RECORD, json.dumps(record, indent=2) + "\n")
    explained = metrics.get("critic_pretrain/explained_variance")
    told = f", explained variance {explained:.2f}" if explained is not None else ""
    session.writer.write(f"critic pretrained in {pretraining.steps} steps{told}: {', '.join(map(str, saved.values()))}")
