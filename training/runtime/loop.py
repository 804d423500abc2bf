"""What stands around the steps of a run, the same for all three programs: restoring, metrics, evaluations, checkpoints,
stops, saved models, the verdict.

    run = Run(args, plan, trainer, evaluations, view, callbacks)      # restores the checkpoint, begins the folder
    with run.kept():                                                  # a run that stops leaves what it has
        run.before_first_step()
        run.train(lambda: trainer.step(...), plan.last_step, "between phases")
    run.end(tell, judge)
"""

import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from engine import distributed
from engine.algorithms import Dialect
from engine.host_memory import release_freed_memory
from training.checkpoints.conditions import UNLOGGED, Conditions
from training.checkpoints.files import checkpoint_folder, config_files
from training.checkpoints.resuming import Checkpoint, restore, set_aside_newer
from training.checkpoints.saving import CheckpointWriter, last_good_named
from training.config.flags import RestartFlags
from training.learner import StepReport
from training.reporting.guards import Verdict, conclude
from training.reporting.run_record import METRICS_FILE, RUN_FILE, read_metrics, write_run_record
from training.reporting.sinks import View
from training.runtime import model_folders, stopping
from training.runtime.callbacks import Callback, numbers
from training.runtime.output_folder import begin_output_dir, open_writer
from training.runtime.processes import phase, place
from training.runtime.stopping import check_all_written, note_unwritten, saved_models_named, unwritten_noted


class Planned(Protocol):
    """What a Run reads of a plan: the checkpoint from which it resumes, or None; the conditions under which it trains;
    its last step; the DeepSpeed configuration of each engine; step 3's dialect."""

    resume: Checkpoint | None
    conditions: Conditions
    last_step: int
    ds_configs: Mapping[str, Mapping]
    dialect: Dialect | None


class Progress(Protocol):
    """How far a trainer is. samples: the number of responses or examples of all finished steps, over all ranks.
    weights_are_whole: False while a step changes weights."""

    steps_done: int
    samples: int
    weights_are_whole: bool


class Trainer(Protocol):
    """What makes the steps of a Run: PPOTrainer or SupervisedTrainer. models: the engines, as RLHFEngine has them
    (trained, ema, kept_reference, saved_tokenizer)."""

    models: Any
    counters: Progress

    def state_dict(self) -> dict:
        """The state that a checkpoint holds in addition to the models."""

    def load_state_dict(self, state: dict) -> None:
        """Restore what `state_dict` returned."""

    def save_models(self, folder: Path, merged: str, written: model_folders.Written) -> dict[str, Path]:
        """Write the trained models below the folder; returns {name: folder} (all ranks call this)."""


class Evaluations(Protocol):
    """The evaluations of a run on what was held out."""

    def due(self, step: int) -> bool:
        """Whether an evaluation is due after this step; of step 0: whether there is anything to evaluate on."""

    def evaluate(self, step: int) -> dict[str, float]:
        """The metrics of the weights after this step (all ranks call this)."""

    def score(self, metrics: Mapping[str, float]) -> float | None:
        """The number by which checkpoints are compared; larger is better. None if this one is never the best."""

    def text(self, step: int, metrics: Mapping[str, float]) -> str:
        """A line to print about these metrics of an evaluation after this step; "" for none."""

    def scores(self, rows: list[dict]) -> dict[int, float]:
        """{step: score} of the rows of metrics.jsonl."""

    def state_dict(self) -> dict:
        """What a checkpoint holds of the evaluation before the first step."""


class Run:
    """A run, from its loaded models to its verdict. All ranks call all methods, in the order of the example above.

    view: the metrics that the progress bar and the charts show.
    """

    def __init__(
        self,
        args: RestartFlags,
        plan: Planned,
        trainer: Trainer,
        evaluations: Evaluations,
        view: View,
        callbacks: Sequence[Callback],
    ):
        self.args = args
        self.plan = plan
        self.trainer = trainer
        self.evaluations = evaluations
        self.view, self.callbacks = view, callbacks
        self.output_dir = Path(args.output_dir)
        self.models = trainer.models
        self.counters = trainer.counters
        self.saved_models: dict[str, Path] = {}
        self.verdict: Verdict | None = None
        self.found: dict[str, float] | None = None
        """The metrics of the latest evaluation; None before the first one of this start."""
        self.unlogged: dict | None = None
        """The metrics of a step whose line is not written yet. A run that ends early leaves a line that lacks an
        evaluation to the resumed run."""

        # The models are loaded, so the start of the run will hardly fail any more. A run that fails before this point
        # changes nothing in the output folder.
        self._restore()
        goes_on = plan.resume is not None and plan.resume.in_output_dir
        begin_output_dir(args, goes_on)
        set_aside_newer(self.output_dir, self.steps_done)

        # What the run writes: run.json, metrics, checkpoints.
        dialect = dataclasses.asdict(plan.dialect) if plan.dialect is not None else None
        with unwritten_noted(self.output_dir / RUN_FILE):  # written first: it marks the folder as this run's
            write_run_record(
                self.output_dir, flags=args.as_dict(), dialect=dialect, ds_configs=plan.ds_configs, resumed=goes_on
            )
        logged = self.steps_done - (self.unlogged is not None)
        self.writer = open_writer(
            args, total_steps=plan.last_step, view=view, resume_step=logged if plan.resume else None
        )
        self.writer.hparams(args.as_dict() | ({} if dialect is None else {"resolved_dialect": dialect}))
        files = config_files(self.models.trained, self.models.saved_tokenizer) if distributed.is_main() else {}
        self.checkpoints = CheckpointWriter(
            self.output_dir,
            args.schedule(),
            models=self.models.trained,
            ema=self.models.ema,
            reference=self.models.kept_reference,
            state=self.state_dict,
            conditions=plan.conditions,
            config_files=files,
            resumed=plan.resume.folder if plan.resume else None,
            scores=self._scores_so_far() if goes_on else {},
            say=self.writer.write,
        )

    def _restore(self) -> None:
        """Restore the checkpoint, if there is one."""
        checkpoint = self.plan.resume
        if checkpoint is None:
            return
        notes = restore(checkpoint, self.models.trained, self.models.ema, self.models.kept_reference)
        self.trainer.load_state_dict(checkpoint.state)
        self.unlogged = checkpoint.state.get(UNLOGGED)
        if distributed.is_main() and notes:
            print("\n".join(notes), flush=True)

    def _scores_so_far(self) -> dict[int, float]:
        path = self.output_dir / METRICS_FILE
        return self.evaluations.scores(read_metrics(path) if path.is_file() else [])

    @property
    def steps_done(self) -> int:
        """How many steps are done; negative until the critic's pretraining is done."""
        return self.counters.steps_done

    def state_dict(self) -> dict:
        """The state that a checkpoint holds in addition to the models."""
        unlogged = {UNLOGGED: self.unlogged} if self.unlogged is not None else {}
        return self.trainer.state_dict() | unlogged | self.evaluations.state_dict()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """The block that makes the steps. At its end the last checkpoint is whole, and the models are saved. If the run
        stops within it, the metrics so far are written, and the message names the last good checkpoint, and models that
        are saved already."""
        counters = self.counters
        with (
            saved_models_named(self.saved_models),
            contextlib.closing(self.writer),  # also if the run stops: write the last steps, end the progress bar
            last_good_named(self.checkpoints, lambda: counters.steps_done if counters.weights_are_whole else None),
        ):
            yield
            self.checkpoints.wait()
            if not self.saved_models:  # a run that resumes from the checkpoint of its last step makes no step
                self.save_models()

    def before_first_step(self) -> None:
        """Evaluate before the first step, unless this was done before the run was resumed. If an earlier start ended
        early and left an evaluation to this one, make it here too."""
        if self.steps_done == 0 and self.evaluations.due(0) and not self.evaluations.state_dict():
            self.found = self.evaluations.evaluate(0)
            self.writer.log(0, 0, {**(self.unlogged or {}), **self.found})
            self.unlogged = None
        if self.unlogged is not None:
            if self.steps_done == self.plan.last_step:
                self.save_models()
            self.log_step(self.steps_done, self.counters.samples)

    def train(
        self,
        step: Callable[[], StepReport],
        until: int,
        named: str,
        show: Callable[[StepReport], None] = lambda report: None,
    ) -> None:
        """Make steps until `until` are done. named: the phase in which a step is made. show: called after each step
        when its metrics are written."""
        with stopping.at_borders():
            while self.steps_done < until:
                place.step = self.steps_done + 1
                with phase(named):
                    report = step()
                self.after_step(report, show)

    def after_step(self, report: StepReport, show: Callable[[StepReport], None]) -> None:
        """Write the step's metrics; evaluate, show samples and save if they are due; end the run if a signal asked for
        it.

        After the last step the models are saved before it is evaluated, so that no later error can lose them. The
        critic's last pretraining step and the evaluation before the first PPO step both have the number 0, so
        `before_first_step` writes the metrics of both together.
        """
        step = report.step
        for callback in self.callbacks:
            callback.after_step(report)
        self.unlogged = {**numbers(report.metrics), **self.checkpoints.take_metrics()}
        reason = stopping.agreed()
        if reason:
            self.end_early(reason, report)
        if step != 0:
            if step == self.plan.last_step:
                self.save_models()
                self.checkpoints.save_if_due(step)
            score = self.log_step(step, report.samples)
            show(report)
            self.checkpoints.save_if_due(step, score)
        stopping.request.newest = self.checkpoints.newest
        release_freed_memory(step)

    def log_step(self, step: int, samples: int) -> float | None:
        """Evaluate if an evaluation is due, and write the step's metrics. Returns the held-out score if an evaluation
        was due, else None."""
        found: dict[str, float] = {}
        try:
            if self.evaluations.due(step):
                found = self.found = self.evaluations.evaluate(step)
                if text := self.evaluations.text(step, found):
                    self.writer.write(text)
        finally:  # the step's metrics are written even if its evaluation fails
            self.writer.log(step, samples, {**(self.unlogged or {}), **found})
        self.unlogged = None
        return self.evaluations.score(found) if found else None

    def end_early(self, reason: stopping.Reason, report: StepReport) -> NoReturn:
        """Save a checkpoint and end the run. If an evaluation is due after this step, the resumed run makes the
        evaluation and writes the step's metrics."""
        if not self.evaluations.due(report.step):
            self.log_step(report.step, report.samples)
        checkpoint = self.checkpoints.save(report.step, wait=True)
        stopping.end_early(reason, report.step, self.plan.last_step, checkpoint)

    def written(self, name: str, folder: Path) -> None:
        """Called on rank 0 when a model was written into this folder. What callbacks raise here spoils no model: it is
        noted, and ends the run with an error when all is saved."""
        try:
            for callback in self.callbacks:
                callback.saved(name, folder, self)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            note_unwritten(f"what callbacks add to the model {name}", error)

    @phase("saving models")
    def save_models(self, **how) -> None:
        """Save the trained models into the output folder; run.json lists them. how: more arguments of the trainer's
        `save_models`."""
        self.saved_models |= self.trainer.save_models(self.output_dir, self.args.save_merged, self.written, **how)
        model_folders.finish(self.output_dir, self.saved_models, self.steps_done)

    def end(self, tell: Callable[["Run"], None], judge: Callable[[list[dict]], Verdict]) -> None:
        """Print the result and the verdict.

        tell: prints the result (rank 0 calls it). judge: the rows of metrics.jsonl -> the verdict. Raises: RunStopped
        if something could not be written, or if training broke the model.
        """
        with saved_models_named(self.saved_models):
            if distributed.is_main():
                tell(self)
                if (best := self.checkpoints.best_step()) is not None:
                    folder = checkpoint_folder(self.output_dir, best)
                    print(f"the best checkpoint, as a model: four-engine-rlhf export {folder} FOLDER", flush=True)
            rows = read_metrics(self.output_dir / METRICS_FILE) if distributed.is_main() else []
            self.verdict = distributed.broadcast_object(judge(rows) if distributed.is_main() else None)
            for callback in self.callbacks:
                callback.ended(self)
            check_all_written()
        conclude(self.verdict, self.args.output_dir)
