"""The training loop of steps 1 and 2: epochs over the examples, optimizer steps, and evaluations on held-out
examples."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch

from engine import distributed
from engine.algo.schedules import lr_factor
from engine.errors import RunStopped
from engine.host_memory import give_back_at
from engine.zero.engines import TrainedModel
from training.checkpoints.conditions import BEFORE, OWED, Conditions
from training.checkpoints.files import config_files
from training.checkpoints.resuming import ResumePoint, restore, set_aside_newer
from training.checkpoints.saving import Checkpoints, last_good_named
from training.config.supervised import SupervisedFlags
from training.data.order import EpochBatches, epoch_batches
from training.learner import accumulate_gradients
from training.ppo_trainer import StepReport
from training.reporting.guards import Verdict, stop_unless_weights_finite
from training.reporting.metrics import Accumulator
from training.reporting.records import METRICS_FILE, RUN_FILE, read_metrics, write_run_record
from training.reporting.sinks import View
from training.reporting.standard_errors import Units, gathered, metrics_text
from training.reporting.step_metrics import TrainingArithmetic, peak_memory_gb, phase_memory
from training.reporting.summary import seconds_by_part, time_lines
from training.runtime import model_folders, stopping
from training.runtime.callbacks import Callback
from training.runtime.output_folder import begin_output_dir, open_writer
from training.runtime.processes import phase, place
from training.runtime.stopping import check_all_written, unwritten_noted


class SupervisedTrainer:
    """Trains one model on examples.

    Args:
        collate: examples -> a batch with `.to(device)` and an `attention_mask`.
        loss: (batch, metrics) -> the sum of the loss over the batch's targets, a scalar tensor. The function also adds
            the batch's metrics to `metrics`.
        count: batch -> the number of targets in the batch.
        evaluate: a held-out batch -> {name: (B,) tensor with a number for each example}.
        summarize: (what `evaluate` measured on each held-out example, what it measured before training or None) ->
            held-out metrics.
        held_out_score: held-out metrics -> the score that --keep_best_checkpoint compares; larger is better.
        view: the metrics that the charts show.
        conditions: the data and settings that a resumed run must have in common with its checkpoint.
        point: the checkpoint to resume from, or None.
        judge: the rows of metrics.jsonl -> the verdict on the run.
    """

    def __init__(
        self,
        model: TrainedModel,
        *,
        args: SupervisedFlags,
        examples: Sequence,
        held_out: Sequence,
        collate: Callable,
        loss: Callable,
        count: Callable,
        evaluate: Callable,
        summarize: Callable[[Units, Units | None], dict[str, float]],
        held_out_score: Callable[[Mapping[str, float]], float],
        view: View,
        tokenizer,
        conditions: Conditions,
        point: ResumePoint | None,
        callbacks: Callback,
        judge: Callable[[list[dict]], Verdict],
    ):
        self.callbacks, self.judge = callbacks, judge
        self.verdict: Verdict | None = None
        self.model, self.args, self.tokenizer, self.point = model, args, tokenizer, point
        self.saved: dict[str, Path] = {}  # folders of the saved model, after the last step
        self.arithmetic = TrainingArithmetic(model)
        self.examples, self.held_out = examples, held_out
        self.collate, self.loss, self.count, self.held_out_score = collate, loss, count, held_out_score
        self.evaluate, self.summarize, self.before = evaluate, summarize, None
        self.steps_per_epoch = args.steps_per_epoch(len(examples))
        self.total_steps = args.total_steps(len(examples))
        self.output_dir = Path(args.output_dir)
        self.steps_done, self.weights_are_whole = 0, True  # weights_are_whole is False while a step changes weights
        self.owed: dict | None = None
        self._epoch_batches = lru_cache(maxsize=1)(self._batches_of_epoch)
        self._resume_or_begin(conditions)
        with unwritten_noted(self.output_dir / RUN_FILE):  # written first: it marks the folder as this run's
            write_run_record(
                self.output_dir,
                flags=args.as_dict(),
                ds_configs={"model": args.ds_settings()},
                resumed=point is not None and point.in_output_dir,
            )
        self.writer = open_writer(
            args,
            total_steps=self.total_steps,
            view=view,
            resume_step=self.steps_done - (self.owed is not None) if point else None,
        )
        self.checkpoints = Checkpoints(
            self.output_dir,
            args.schedule(),
            models={"model": model},
            state=self.state_dict,
            conditions=conditions,
            config_files=config_files({"model": model}, tokenizer) if distributed.is_main() else {},
            resumed=point.folder if point else None,
            scores=self._scores_so_far() if point and point.in_output_dir else {},
            say=self.writer.write,
        )

    @property
    def metrics_path(self) -> Path:
        """The path of metrics.jsonl."""
        return self.output_dir / METRICS_FILE

    def state_dict(self) -> dict:
        """The state that a checkpoint holds in addition to the model. The order of the examples and the random numbers
        are not stored: they follow from the seed and the number of steps."""
        found = {"steps_done": self.steps_done, OWED: self.owed, BEFORE: self.before}
        return {name: value for name, value in found.items() if value is not None}

    def _resume_or_begin(self, conditions: Conditions) -> None:
        """Restore the checkpoint that the run resumes from, if any, and prepare the output folder. This is done only
        here: the model is loaded, so the start of the run will hardly fail any more."""
        if self.point:
            restore(self.point, {"model": self.model})
            if distributed.is_main():
                changes = conditions.changes_since(Conditions.read(self.point.state))
                print("\n".join([*self.point.lines(), *changes]), flush=True)
            self.steps_done, state = self.point.steps_done, self.point.state
            self.owed, self.before = state.get(OWED), state.get(BEFORE)
        begin_output_dir(self.args, self.point is not None and self.point.in_output_dir)
        set_aside_newer(self.output_dir, self.steps_done)

    def _scores_so_far(self) -> dict[int, float]:
        rows = read_metrics(self.metrics_path) if self.metrics_path.is_file() else []
        return {row["step"]: self.held_out_score(row) for row in rows if any(name.startswith("eval/") for name in row)}

    @phase("training")
    def fit(self) -> dict[str, float]:
        """Train until the last epoch is done; returns the last held-out metrics."""
        with (
            contextlib.closing(self.writer),  # also if the run stops: write the last steps, end the progress bar
            last_good_named(self.checkpoints, lambda: self.steps_done if self.weights_are_whole else None),
        ):
            return self._fit()

    @phase("saving models")
    def save(self, edit: Callable[[dict], None] | None = None) -> None:
        """Write the model into the output folder. edit: called with {name: weight} before the weights are written; it
        may change them."""
        merged = model_folders.merged_wanted(self.args.save_merged, [self.model], self.output_dir)
        self.saved |= model_folders.save_forms(
            self.model, self.tokenizer, self.output_dir, ".", merged, edit, self.written
        )
        model_folders.finish(self.output_dir, self.saved, self.total_steps)

    def written(self, name: str, folder: Path) -> None:
        """Called on rank 0 when the model was written into the folder."""
        self.callbacks.saved(name, folder, self)

    def end(self, line: str) -> None:
        """Print how long the run's phases took, then `line`, which states the run's result; judge the run. Raises:
        RunStopped if a file could not be written."""
        if distributed.is_main():
            with unwritten_noted("the time"):
                seconds = seconds_by_part([*read_metrics(self.metrics_path), self.writer.take_time()])
                print("\n".join(time_lines(f"{self.total_steps} steps", seconds)), flush=True)
            print(line, flush=True)
        self.verdict = distributed.broadcast_object(
            self.judge(read_metrics(self.metrics_path)) if distributed.is_main() else None
        )
        self.callbacks.ended(self)
        check_all_written()

    def _fit(self) -> dict[str, float]:
        self.writer.hparams(self.args.as_dict())
        found = None
        if self.steps_done == 0:
            found = self.held_out_metrics()
            self.writer.log(0, 0, found)
        elif self.owed is not None:
            if self.steps_done == self.total_steps:
                self.save()
            found = self.log_step()
        phase_memory.begin()  # measure the peak memory of training steps alone, not of loading and evaluation
        with stopping.at_borders():
            while self.steps_done < self.total_steps:
                place.step = self.steps_done + 1
                batches = self.batches(self.steps_done)
                metrics = self.optimizer_step(self.steps_done + 1, batches)
                self.steps_done += 1
                self.weights_are_whole = True
                found = self.after_step(StepReport(self.steps_done, self.samples, metrics, batches)) or found
        self.checkpoints.wait()
        if not self.saved:
            self.save()
        return found or self.held_out_metrics()  # a resumed run may have had no step left to train

    @property
    def samples(self) -> int:
        """How many examples the finished steps have learned from, over all ranks."""
        size = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        return self.steps_done * size * distributed.data_parallel_size()

    def after_step(self, report: StepReport) -> dict[str, float] | None:
        """Log the step, evaluate and save if they are due, and end the run if a signal asked for it. Returns the
        held-out metrics if an evaluation was due, else None."""
        self.callbacks.after_step(report)
        self.owed = {**report.metrics, **self.checkpoints.take_metrics()}
        reason = stopping.agreed()
        if reason:
            self.end_early(reason)
        if self.steps_done == self.total_steps:  # save before the last evaluation, which can fail
            self.save()
            self.checkpoints.save_if_due(self.steps_done)
        found = self.log_step()
        self.checkpoints.save_if_due(self.steps_done, self.held_out_score(found) if found else None)
        stopping.request.saved = self.checkpoints.newest
        give_back_at(self.steps_done)
        return found

    def log_step(self) -> dict[str, float] | None:
        """Evaluate if an evaluation is due, and write the step's metrics. Returns the held-out metrics if an evaluation
        was due, else None."""
        found = self.held_out_metrics() if self.evaluates() else None
        if found:
            epoch = f"epoch {self.steps_done // self.steps_per_epoch}"
            where = epoch if self.steps_done % self.steps_per_epoch == 0 else f"step {self.steps_done}"
            self.writer.write(f"{where}: {metrics_text(found)}")
        self.writer.log(self.steps_done, self.samples, {**(self.owed or {}), **(found or {})})
        self.owed = None
        return found

    def evaluates(self) -> bool:
        """Whether an evaluation is due after this step."""
        return self.args.evaluates(self.steps_done, len(self.examples))

    def end_early(self, reason: stopping.Reason) -> NoReturn:
        """Save a checkpoint and end the run. If an evaluation is due after this step, the resumed run makes the
        evaluation and writes the step's metrics."""
        if not self.evaluates():
            self.log_step()
        point = self.checkpoints.save(self.steps_done, wait=True)
        stopping.end_early(reason, self.steps_done, self.total_steps, point)

    def batches(self, step: int) -> list:
        """This rank's micro-batches of a step. step: the step's number, counted from 0."""
        epoch, number = divmod(step, self.steps_per_epoch)
        accumulation = self.args.gradient_accumulation_steps
        indices = self._epoch_batches(epoch)[number * accumulation : (number + 1) * accumulation]
        return [self._batch(self.examples, part) for part in indices]

    def _batches_of_epoch(self, epoch: int) -> EpochBatches:
        size = self.args.per_device_train_batch_size
        ranks = distributed.data_parallel_rank(), distributed.data_parallel_size()
        return epoch_batches(len(self.examples), size, epoch, self.args.seed, *ranks)

    def _batch(self, examples: Sequence, indices: list[int]):
        return self.collate([examples[index] for index in indices]).to(distributed.device())

    def optimizer_step(self, step: int, batches: list) -> dict[str, float]:
        """Make one optimizer step; returns its metrics. The loss is divided by the number of targets in the
        micro-batches of all ranks. batches: this rank's micro-batches."""
        started, metrics = time.perf_counter(), Accumulator()
        self._seed_dropout(step)
        self.model.module.train()
        own = torch.tensor(float(sum(self.count(batch) for batch in batches)), device=distributed.device())
        targets = distributed.data_parallel_sum(own)
        losses = (self.loss(batch, metrics) / targets for batch in batches)
        total = accumulate_gradients(self.model, losses, len(batches)).sum()
        if distributed.any_rank(~total.isfinite()):
            raise RunStopped(
                f"step {step}: the loss is NaN or infinite, so no weight was changed. Look at the "
                "learning rate and the gradient norms of the steps before, and in fp16 the range of the "
                "model.",
                good_until=step - 2,  # the last update may be the cause
            )
        overflow = self.model.overflowed()
        if overflow and not self.model.scales_loss:
            raise RunStopped(
                f"step {step}: a gradient is NaN or infinite, so no weight was changed. Look at the "
                "learning rate and the gradient norms of the steps before.",
                good_until=step - 1,
            )
        lr = self.args.learning_rate * lr_factor(
            step - 1, self.total_steps, self.args.num_warmup_steps, self.args.lr_scheduler_type
        )
        self.weights_are_whole = False
        stepped = self.model.step(lr, overflow)
        if stepped:
            metrics.add("train/grad_norm", self.model.grad_norm, 1)
            stop_unless_weights_finite(step, {"model": self.model})
        if self.model.scales_loss:
            metrics.add("train/skipped", float(overflow), 1)
            metrics.add_max("train/loss_scale", self.model.loss_scale)
        metrics.add_max("train/lr", lr)
        seconds = time.perf_counter() - started
        metrics.add_max("time/step", seconds)
        self.arithmetic.add_to(metrics, seconds, [batch.attention_mask for batch in batches], own)
        metrics.add_max("memory/peak_gb", peak_memory_gb())
        return metrics.reduce()

    def _seed_dropout(self, step: int) -> None:
        """Seed the dropout masks from the run's seed, the step and the rank only, so that a resumed run draws the same
        masks."""
        key = np.random.SeedSequence((self.args.seed, step, distributed.rank()))
        torch.manual_seed(int(key.generate_state(1, np.uint64)[0] >> 1))

    @phase("evaluating")
    @torch.no_grad()
    def held_out_metrics(self) -> dict[str, float]:
        """The metrics of all held-out examples. All ranks run equally many batches; some batches may be empty."""
        self.model.module.eval()
        size, batch_size = len(self.held_out), self.args.per_device_eval_batch_size
        ranks = distributed.data_parallel_rank(), distributed.data_parallel_size()
        batches = epoch_batches(size, batch_size, 0, self.args.seed, *ranks, drop_last=False)
        measured = ((indices, self.evaluate(self._batch(self.held_out, indices or [0]))) for indices in batches)
        units = gathered(size, measured)
        if self.steps_done == 0:
            self.before = units
        return self.summarize(units, self.before)
