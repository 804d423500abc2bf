"""The loop of steps 1 and 2: epochs over examples, optimizer steps over micro-batches, held-out metrics each epoch."""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from engine import distributed
from engine.errors import RunStopped, UserError
from engine.optim import LR_SCHEDULES, lr_factor
from engine.rlhf_engine import OptimizerSpec
from engine.zero.config import EngineConfig, build_ds_config, stage_of_file
from engine.zero.engines import TrainedModel
from training.data.order import epoch_batches
from training.flags import deepspeed_chat
from training.flags.arguments import REQUIRED, OldFlag, flag
from training.flags.data_arguments import DataFlags
from training.program.output_folder import clear_output_dir, open_writer
from training.reporting.metrics import Accumulator
from training.reporting.phase_clock import peak_memory_gb
from training.reporting.run_record import write_run_record
from training.reporting.views import View


@dataclass(kw_only=True)
class SupervisedFlags(DataFlags):
    """What steps 1 and 2 share."""

    old_flags: ClassVar[dict[str, OldFlag]] = deepspeed_chat.SUPERVISED

    held_out: float = flag(
        0.05, "how much of --data_path is held out where nothing else is: a fraction, or a number of rows"
    )
    model_name_or_path: str = flag(REQUIRED, "the model to start from", group="training")
    dropout: float = flag(0.0, "dropout of the model while it is trained")
    max_seq_len: int = flag(512, "longest sequence, in tokens; longer ones lose their end")
    per_device_train_batch_size: int = flag(16, "examples in one forward and backward pass of each rank")
    per_device_eval_batch_size: int = flag(16, "the same, for held-out examples")
    gradient_accumulation_steps: int = flag(1, "passes in one optimizer step")
    num_train_epochs: int = flag(1, "passes over the data")
    max_steps: int | None = flag(None, "optimizer steps to train, instead of --num_train_epochs")
    learning_rate: float = flag(1e-5, "peak learning rate")
    weight_decay: float = flag(0.0, "AdamW's, of matrices")
    lr_scheduler_type: str = flag("linear", "shape of the learning rate", choices=LR_SCHEDULES)
    num_warmup_steps: int = flag(0, "optimizer steps of rising learning rate")
    max_grad_norm: float = flag(1.0, "gradients are clipped to this norm; 0 for no clipping")
    eval_interval: int = flag(0, "optimizer steps between evaluations within an epoch; 0: after each epoch only")
    zero_stage: int | None = flag(None, "ZeRO stage (default 0)", group="engine")
    offload: bool = flag(False, "optimizer states (stage 3: parameters too) in host memory")
    ds_config: str | None = flag(None, "DeepSpeed JSON, instead of one of configs/ds")
    gradient_checkpointing: bool = flag(False, "compute activations again in backward passes")

    def validate(self) -> None:
        """Raise UserError for values that cannot work."""
        DataFlags.validate(self)
        self.at_least(
            1,
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
            "num_train_epochs",
            "max_steps",
        )
        self.at_least(2, "max_seq_len")
        self.at_least(
            0, "learning_rate", "weight_decay", "num_warmup_steps", "max_grad_norm", "dropout", "eval_interval"
        )
        self.above(0, "held_out")
        self.finite("held_out")
        if self.dropout >= 1:
            raise UserError(f"--dropout {self.dropout}: must be less than 1.")
        if self.zero_stage not in (None, 0, 1, 2, 3):
            raise UserError(f"--zero_stage {self.zero_stage}: ZeRO has the stages 0, 1, 2 and 3.")
        if self.offload and self.ds_config is not None:
            raise UserError(
                f"--offload and --ds_config {self.ds_config} contradict each other: say in the file what is offloaded."
            )
        if self.offload and self.choice().stage == 0:
            raise UserError(
                "--offload with --zero_stage 0: there is nothing that could be offloaded. "
                "Offload needs stage 1, 2 or 3."
            )

    def choice(self) -> EngineConfig:
        """The DeepSpeed configuration asked for."""
        stage = self.zero_stage
        if stage is None and self.ds_config is not None:
            stage = stage_of_file(self.ds_config, "model")
        return EngineConfig("model", stage or 0, self.offload, self.ds_config)

    def ds_settings(self) -> dict:
        """The whole DeepSpeed configuration; raises UserError for a contradiction."""
        return build_ds_config(
            self.choice(),
            dtype=self.dtype,
            micro_batch_size=self.per_device_train_batch_size,
            gradient_clipping=self.max_grad_norm,
        )

    def optimizer(self) -> OptimizerSpec:
        """AdamW's settings."""
        return OptimizerSpec(lr=self.learning_rate, weight_decay=self.weight_decay, max_grad_norm=self.max_grad_norm)

    def steps_per_epoch(self, examples: int) -> int:
        """Optimizer steps in one pass over so many examples; raises UserError if they are too few for one."""
        world = distributed.world_size()
        steps = examples // (self.per_device_train_batch_size * world * self.gradient_accumulation_steps)
        if steps == 0:
            raise UserError(
                f"--data_path {' '.join(self.data_path)}: {examples} examples are too few for one "
                f"optimizer step of --per_device_train_batch_size {self.per_device_train_batch_size} on "
                f"{world} ranks, {self.gradient_accumulation_steps} times. Lower the batch size or add "
                "data."
            )
        return steps

    def total_steps(self, examples: int) -> int:
        """Optimizer steps of the whole run; raises UserError as steps_per_epoch does."""
        an_epoch = self.steps_per_epoch(examples)
        return self.max_steps or an_epoch * self.num_train_epochs


class SupervisedTrainer:
    """Trains one model on examples.

    collate: examples -> a batch with `.to(device)`. loss: (batch, metrics or None) -> (sum, count): a scalar tensor and
    the number of targets that it sums over, which for a batch are known before: `count`.
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
    ):
        self.model, self.args = model, args
        self.examples, self.held_out = examples, held_out
        self.collate, self.loss, self.count, self.evaluate = collate, loss, count, evaluate
        self.steps_per_epoch = args.steps_per_epoch(len(examples))
        self.total_steps = args.total_steps(len(examples))
        torch.manual_seed(args.seed + 100_003 * distributed.rank())  # of dropout, which every rank draws for itself
        clear_output_dir(args)  # the model is loaded by now: the run will come to something
        self.writer = open_writer(args, total_steps=self.total_steps, view=view)

    def fit(self) -> dict[str, float]:
        """Train all epochs; returns the last held-out metrics."""
        with contextlib.closing(self.writer):  # of a run that stops, too: its last steps are written out, its bar ends
            return self._fit()

    def _fit(self) -> dict[str, float]:
        write_run_record(self.args.output_dir, flags=self.args.as_dict(), ds_configs={"model": self.args.ds_settings()})
        self.writer.hparams(self.args.as_dict())
        found = self.held_out_metrics()
        self.writer.log(0, 0, found)
        step = 0
        for epoch in range(math.ceil(self.total_steps / self.steps_per_epoch)):
            for batches in itertools.islice(self._steps(epoch), self.total_steps - step):
                step += 1
                metrics = self.optimizer_step(step, batches)
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
                "model."
            )
        overflow = self.model.overflowed()
        if overflow and not self.model.scales_loss:
            raise RunStopped(
                f"step {step}: a gradient is NaN or infinite, so no weight was changed. Look at the "
                "learning rate and the gradient norms of the steps before."
            )
        lr = self.args.learning_rate * lr_factor(
            step - 1, self.total_steps, self.args.num_warmup_steps, self.args.lr_scheduler_type
        )
        stepped = self.model.step(lr, overflow)
        if stepped:
            metrics.add("train/grad_norm", self.model.grad_norm, 1)
        metrics.add_max("train/lr", lr)
        metrics.add_max("time/step", time.perf_counter() - started)
        metrics.add_max("memory/peak_gb", peak_memory_gb())
        return metrics.reduce()

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
