"""The loop of steps 1 and 2: epochs over examples, optimizer steps over micro-batches, held-out metrics each epoch."""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from engine import distributed
from engine.errors import RunStopped
from engine.optim import lr_factor
from engine.zero.engines import TrainedModel
from training.data.order import epoch_batches
from training.flags.supervised_arguments import SupervisedFlags
from training.program import model_folders, output_lock
from training.program.output_folder import begin_output_dir, open_writer
from training.program.phases import phase, place
from training.program.unwritten import check_all_written, going_on
from training.reporting.guards import stop_unless_weights_finite
from training.reporting.metrics import Accumulator
from training.reporting.metrics_file import METRICS_FILE
from training.reporting.phase_clock import peak_memory_gb
from training.reporting.run_record import RUN_FILE, write_run_record
from training.reporting.views import View


class SupervisedTrainer:
    """Trains one model on examples.

    Args:
        collate: examples -> a batch with `.to(device)`.
        count: batch -> the number of targets that its loss sums over.
        loss: (batch, metrics) -> the sum of the loss over these targets, a scalar tensor; what is to be logged of a
            training batch is added to the metrics.
        evaluate: (batch, metrics): the same for a held-out batch, of which only the metrics are wanted.
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
        view: View,
        tokenizer,
    ):
        self.model, self.args, self.tokenizer = model, args, tokenizer
        self.saved: dict[str, Path] = {}  # the model's folder, from the last step on
        self.examples, self.held_out = examples, held_out
        self.collate, self.loss, self.count, self.evaluate = collate, loss, count, evaluate
        self.steps_per_epoch = args.steps_per_epoch(len(examples))
        self.total_steps = args.total_steps(len(examples))
        torch.manual_seed(args.seed + 100_003 * distributed.rank())  # of dropout, which every rank draws for itself
        begin_output_dir(args)  # the model is loaded by now: the run will come to something
        self.writer = open_writer(args, total_steps=self.total_steps, view=view)

    @property
    def metrics_path(self) -> Path:
        """The file of the run's metrics."""
        return Path(self.args.output_dir) / METRICS_FILE

    @phase("training")
    def fit(self) -> dict[str, float]:
        """Train all epochs; returns the last held-out metrics."""
        with contextlib.closing(self.writer):  # of a run that stops, too: its last steps are written out, its bar ends
            return self._fit()

    def save(self, edit: Callable[[dict], None] | None = None) -> None:
        """Write the model into the output folder; `edit` may change the weights on the way."""
        output_dir = Path(self.args.output_dir)
        self.saved["."] = model_folders.save(self.model, self.tokenizer, output_dir, ".", edit)
        model_folders.finish(output_dir, self.saved, self.total_steps)

    def end(self, line: str) -> None:
        """Print what came of the run; raises RunStopped if something could not be written."""
        if distributed.is_main():
            print(line, flush=True)
        check_all_written()

    def _fit(self) -> dict[str, float]:
        with going_on(Path(self.args.output_dir) / RUN_FILE):
            write_run_record(
                self.args.output_dir, flags=self.args.as_dict(), ds_configs={"model": self.args.ds_settings()}
            )
        self.writer.hparams(self.args.as_dict())
        found = self.held_out_metrics()
        self.writer.log(0, 0, found)
        step = 0
        for epoch in range(math.ceil(self.total_steps / self.steps_per_epoch)):
            for batches in itertools.islice(self._steps(epoch), self.total_steps - step):
                step += 1
                place.step = step
                metrics = self.optimizer_step(step, batches)
                output_lock.check_held()
                if step == self.total_steps:
                    self.save()  # before the last evaluation, which can fail
                last = step % self.steps_per_epoch == 0 or step == self.total_steps
                if last or (self.args.eval_interval and step % self.args.eval_interval == 0):
                    found = self.held_out_metrics()
                    metrics |= found
                    self.writer.write(
                        (f"epoch {epoch + 1}: " if last else f"step {step}: ")
                        + ", ".join(f"{k} {v:.4g}" for k, v in found.items())
                    )
                self.writer.log(
                    step,
                    step
                    * self.args.per_device_train_batch_size
                    * distributed.world_size()
                    * self.args.gradient_accumulation_steps,
                    metrics,
                )
        return found

    def _steps(self, epoch: int):
        """The micro-batches of each optimizer step of an epoch, as example indices."""
        accumulation = self.args.gradient_accumulation_steps
        batches = epoch_batches(
            len(self.examples),
            self.args.per_device_train_batch_size,
            epoch,
            self.args.seed,
            distributed.rank(),
            distributed.world_size(),
        )
        for start in range(0, self.steps_per_epoch * accumulation, accumulation):
            yield [self._batch(self.examples, indices) for indices in batches[start : start + accumulation]]

    def _batch(self, examples: Sequence, indices: list[int]):
        return self.collate([examples[index] for index in indices]).to(distributed.device())

    def optimizer_step(self, step: int, batches: list) -> dict[str, float]:
        """One optimizer step over micro-batches, normalised by the number of targets over all ranks."""
        started, metrics, total = time.perf_counter(), Accumulator(), 0.0
        self.model.module.train()
        own = torch.tensor(float(sum(self.count(batch) for batch in batches)), device=distributed.device())
        targets = distributed.all_reduce_sum(own)
        for index, batch in enumerate(batches):
            share = self.loss(batch, metrics) / targets
            total = total + share.detach()
            self.model.backward(share, last=index == len(batches) - 1)
        if distributed.any_rank(not torch.isfinite(total)):
            raise RunStopped(
                f"step {step}: the loss is NaN or infinite, so no weight was changed. Look at the "
                "learning rate and the gradient norms of the steps before, and in fp16 the range of the "
                "model.",
                good_until=step - 1,
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
        stepped = self.model.step(lr, overflow)
        if stepped:
            metrics.add("train/grad_norm", self.model.grad_norm, 1)
            stop_unless_weights_finite(step, {"model": self.model})
        if self.model.scales_loss:
            metrics.add("train/skipped", float(overflow), 1)
            metrics.add_max("train/loss_scale", self.model.loss_scale)
        metrics.add_max("train/lr", lr)
        metrics.add_max("time/step", time.perf_counter() - started)
        metrics.add_max("memory/peak_gb", peak_memory_gb())
        return metrics.reduce()

    @phase("evaluating")
    @torch.no_grad()
    def held_out_metrics(self) -> dict[str, float]:
        """`evaluate` over all held-out examples; every rank runs equally many batches, some of them empty."""
        metrics = Accumulator()
        self.model.module.eval()
        for indices in epoch_batches(
            len(self.held_out),
            self.args.per_device_eval_batch_size,
            0,
            self.args.seed,
            distributed.rank(),
            distributed.world_size(),
            drop_last=False,
        ):
            self.evaluate(self._batch(self.held_out, indices or [0]), metrics if indices else Accumulator())
        return metrics.reduce()
