"""Steps 1 and 2: what a run plans and prints at its start, an optimizer step on examples, and evaluations on held-out
examples. training/runtime/loop.py has what stands around the steps.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from engine import distributed
from engine.algo.schedules import lr_factor
from engine.distributed import RankGroup
from engine.errors import RunStopped, in_words
from engine.zero.engines import TrainedModel
from training.checkpoints.conditions import BEFORE, Conditions, fingerprints
from training.checkpoints.resuming import Checkpoint
from training.config.supervised import SupervisedFlags
from training.data.examples import FittedRows, Prompts
from training.data.order import EpochBatches, epoch_batches
from training.data.row_selection import listed
from training.learner import StepReport, accumulate_gradients
from training.reporting.guards import stop_unless_weights_finite
from training.reporting.metrics import Accumulator
from training.reporting.run_record import METRICS_FILE, read_metrics
from training.reporting.standard_errors import Units, gathered, metrics_text
from training.reporting.step_metrics import TrainingArithmetic, peak_memory_gb, phase_memory
from training.reporting.summary import seconds_by_part, time_lines
from training.runtime import model_folders
from training.runtime.callbacks import Callback
from training.runtime.loop import Run
from training.runtime.models import model_notes
from training.runtime.output_folder import check_shared
from training.runtime.processes import phase
from training.runtime.ranks import agreed, checked
from training.runtime.start_report import (
    RunSchedule,
    changes_since,
    counted,
    opened,
    print_report,
    too_long,
    unseen_data,
    unseen_models,
)
from training.runtime.stopping import unwritten_noted


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedPlan:
    """Everything about a run of step 1 or 2 that is decided before the model is loaded.

    prompts: the prompts on which step 2 normalises scores, or None. last_step: the run's last step. resume: the
    checkpoint from which the run resumes, or None.
    """

    tokenizer: PreTrainedTokenizerBase
    examples: FittedRows
    held_out: FittedRows
    prompts: Prompts | None
    last_step: int
    resume: Checkpoint | None
    conditions: Conditions
    ds_configs: Mapping[str, dict]
    dialect: None = None

    @classmethod
    def of(
        cls,
        args: SupervisedFlags,
        checkpoint: Checkpoint | None,
        tokenizer: PreTrainedTokenizerBase,
        parts: Iterable[FittedRows],
        data: list[str],
        inputs: Mapping[str, str | None],
        prompts: Prompts | None = None,
    ) -> "SupervisedPlan":
        """The plan of a run with these data.

        parts: training examples and held-out examples. data: their fingerprints. inputs: as in the `make_plan` of steps
        1 and 2. Raises: UserError if the run cannot resume from the checkpoint.
        """
        examples, held_out = parts
        last_step = args.total_steps(len(examples))
        conditions = Conditions.of(args, data, tokenizer, inputs)
        if checkpoint:
            checkpoint.check(conditions, last_step)
        return cls(
            tokenizer=tokenizer,
            examples=examples,
            held_out=held_out,
            prompts=prompts,
            last_step=last_step,
            resume=checkpoint,
            conditions=conditions,
            ds_configs={"model": args.ds_settings()},
        )


def planned(
    args: SupervisedFlags,
    callbacks: Sequence[Callback],
    check: Callable[[SupervisedFlags, Checkpoint | None], None],
    make_plan: Callable[[SupervisedFlags, Checkpoint | None, Mapping[str, str | None]], SupervisedPlan],
    first_lines: Callable[[SupervisedFlags, SupervisedPlan], list[str]],
) -> SupervisedPlan | None:
    """Check and plan the run, and print its first lines; None if the run ends here, as a dry run or a preflight does.

    check: checks files, models and machine (rank 0 calls it). make_plan: reads the data (all ranks call it).
    """
    checkpoint = Checkpoint.find(args.resume, args.output_dir)
    checked(lambda: check(args, checkpoint))
    if args.dry_run:
        report_dry_run(args, lambda: make_plan(args, checkpoint, fingerprints(args)), first_lines, callbacks)
        return None
    check_shared(args.output_dir)
    inputs = checked(lambda: fingerprints(args))
    plan = agreed(lambda: make_plan(args, checkpoint, inputs))
    if distributed.is_main():
        print(*first_lines(args, plan), sep="\n", flush=True)
    for callback in callbacks:
        callback.planned(args, plan)
    return None if args.preflight else plan


def train(run: Run, trainer: "SupervisedTrainer", held_out: "HeldOutExamples") -> dict[str, float]:
    """Train until the last epoch is done, and save the model; returns the last held-out metrics."""
    with phase("training"), run.kept():
        run.before_first_step()
        phase_memory.begin()  # measure the peak memory of training steps alone, not of loading and evaluation
        run.train(trainer.step, run.plan.last_step, "training")
    return run.found or held_out.evaluate(run.steps_done)  # a resumed run may have had no step left to train


def tell_result(run: Run, line: str) -> None:
    """Print how long the run's phases took, then `line`, which states the run's result (rank 0 calls this)."""
    with unwritten_noted("the time"):
        seconds = seconds_by_part([*read_metrics(run.output_dir / METRICS_FILE), run.writer.take_time()])
        print("\n".join(time_lines(f"{run.steps_done} steps", seconds)), flush=True)
    print(line, flush=True)


@dataclass
class OneModel:
    """The engine of step 1 or 2, as RLHFEngine has those of step 3."""

    trained: dict[str, TrainedModel]
    saved_tokenizer: object
    ema: None = None
    kept_reference: None = None


@dataclass
class Progress:
    """How far a run of step 1 or 2 is. samples: number of examples that the finished steps have learned from, over all
    ranks. weights_are_whole: False while a step changes weights."""

    step_size: int
    steps_done: int = 0
    weights_are_whole: bool = True

    @property
    def samples(self) -> int:
        """The number of examples of all finished steps, over all ranks."""
        return self.steps_done * self.step_size


class SupervisedTrainer:
    """Trains one model on examples.

    Args:
        collate: examples -> a batch with `.to(device)` and an `attention_mask`.
        loss: (batch, metrics) -> the sum of the loss over the batch's targets, a scalar tensor. The function also adds
            the batch's metrics to `metrics`.
        count: batch -> the number of targets in the batch.
    """

    def __init__(
        self,
        model: TrainedModel,
        *,
        args: SupervisedFlags,
        plan: SupervisedPlan,
        collate: Callable,
        loss: Callable,
        count: Callable,
    ):
        self.model = model
        self.args = args
        self.examples = plan.examples
        self.total_steps = plan.last_step
        self.models = OneModel({"model": model}, plan.tokenizer)
        self.collate = collate
        self.loss = loss
        self.count = count
        self.arithmetic = TrainingArithmetic(model)
        self.steps_per_epoch = args.steps_per_epoch(len(plan.examples))
        step_size = args.per_device_train_batch_size * args.gradient_accumulation_steps
        self.counters = Progress(step_size * distributed.data_parallel_size())
        self._epoch_batches = lru_cache(maxsize=1)(self._batches_of_epoch)

    def state_dict(self) -> dict:
        """The state that a checkpoint holds in addition to the model. The order of the examples and the random numbers
        are not stored: they follow from the seed and the number of steps."""
        return {"steps_done": self.counters.steps_done}

    def load_state_dict(self, state: dict) -> None:
        """Restore what `state_dict` returned."""
        self.counters.steps_done = state["steps_done"]

    def step(self) -> StepReport:
        """Make the next step (all ranks call this together)."""
        counters = self.counters
        batches = self.batches(counters.steps_done)
        metrics = self.optimizer_step(counters.steps_done + 1, batches)
        counters.steps_done += 1
        counters.weights_are_whole = True
        return StepReport(counters.steps_done, counters.samples, metrics, batches)

    def batches(self, step: int) -> list:
        """This rank's micro-batches of a step. step: the step's number, counted from 0."""
        epoch, number = divmod(step, self.steps_per_epoch)
        accumulation = self.args.gradient_accumulation_steps
        indices = self._epoch_batches(epoch)[number * accumulation : (number + 1) * accumulation]
        return [batch_of(self.collate, self.examples, part) for part in indices]

    def _batches_of_epoch(self, epoch: int) -> EpochBatches:
        size = self.args.per_device_train_batch_size
        ranks = distributed.data_parallel_rank(), distributed.data_parallel_size()
        return epoch_batches(len(self.examples), size, epoch, self.args.seed, *ranks)

    def optimizer_step(self, step: int, batches: list) -> dict[str, float]:
        """Make one optimizer step; returns its metrics. The loss is divided by the number of targets in the
        micro-batches of all ranks. batches: this rank's micro-batches."""
        started, metrics = time.perf_counter(), Accumulator()
        self._seed_dropout(step)
        self.model.module.train()
        own = torch.tensor(float(sum(self.count(batch) for batch in batches)), device=distributed.device())
        targets, group = distributed.data_parallel_sum(own), self.model.module.group
        parts = [part for batch in batches for part in in_turns(batch, group)]
        losses = (self.loss(part, metrics) / targets for part in parts)
        total = accumulate_gradients(self.model, losses, len(parts)).sum()
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
        self.counters.weights_are_whole = False
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

    def save_models(
        self,
        folder: Path,
        merged: str,
        written: model_folders.Written,
        edit: Callable[[dict], None] | None = None,
    ) -> dict[str, Path]:
        """Write the model into the folder; returns {name: folder} (all ranks call this). edit: called with {name:
        weight} before the weights are written; it may change them."""
        whole = model_folders.merged_wanted(merged, [self.model], folder)
        tokenizer = self.models.saved_tokenizer
        return model_folders.save_forms(self.model, tokenizer, folder, ".", whole, edit, written)


class HeldOutExamples:
    """The evaluations of a run of step 1 or 2 on its held-out examples.

    Args:
        collate: as for SupervisedTrainer.
        measure: a held-out batch -> {name: (B,) tensor with a number for each example}.
        summarize: (what `measure` found for each held-out example, what it found before training or None) -> held-out
            metrics.
        score: held-out metrics -> the score that --keep_best_checkpoint compares; larger is better.
    """

    def __init__(
        self,
        model: TrainedModel,
        *,
        args: SupervisedFlags,
        plan: SupervisedPlan,
        collate: Callable,
        measure: Callable,
        summarize: Callable[[Units, Units | None], dict[str, float]],
        score: Callable[[Mapping[str, float]], float],
    ):
        self.model = model
        self.args = args
        self.plan = plan
        self.collate = collate
        self.measure = measure
        self.summarize = summarize
        self.score = score
        self.before: Units | None = plan.resume.state.get(BEFORE) if plan.resume else None

    def due(self, step: int) -> bool:
        """Whether an evaluation is due after this step."""
        return self.args.evaluates(step, len(self.plan.examples))

    @phase("evaluating")
    @torch.no_grad()
    def evaluate(self, step: int) -> dict[str, float]:
        """The metrics of all held-out examples. All ranks run equally many batches; some batches may be empty."""
        self.model.module.eval()
        examples, batch_size = self.plan.held_out, self.args.per_device_eval_batch_size
        ranks = distributed.data_parallel_rank(), distributed.data_parallel_size()
        batches = epoch_batches(len(examples), batch_size, 0, self.args.seed, *ranks, drop_last=False)
        group = self.model.module.group

        def measured(indices: list[int]) -> Mapping:
            batch = batch_of(self.collate, examples, indices or [0])
            return [self.measure(part) for part in in_turns(batch, group)][group.place]

        units = gathered(len(examples), ((indices, measured(indices)) for indices in batches))
        if step == 0:
            self.before = units
        return self.summarize(units, self.before)

    def text(self, step: int, metrics: Mapping[str, float]) -> str:
        """The line that the run prints about an evaluation."""
        an_epoch = self.args.steps_per_epoch(len(self.plan.examples))
        where = f"step {step}" if step % an_epoch else f"epoch {step // an_epoch}"
        return f"{where}: {metrics_text(metrics)}"

    def scores(self, rows: Sequence[Mapping]) -> dict[int, float]:
        """{step: score} of the evaluations in these rows of metrics.jsonl."""
        return {row["step"]: self.score(row) for row in rows if any(name.startswith("eval/") for name in row)}

    def state_dict(self) -> dict:
        """What was measured before training."""
        return {} if self.before is None else {BEFORE: self.before}


def batch_of(collate: Callable, examples: Sequence, indices: Sequence[int]):
    """The batch of the examples with these indices, on this rank's device."""
    return collate([examples[index] for index in indices]).to(distributed.device())


def in_turns(batch, group: RankGroup) -> list:
    """The passes in which the ranks of a group compute the batches of all of them, one rank's batch after the other's.
    Of the other ranks' passes this rank has a batch without examples."""
    empty = replace(batch, **{column.name: getattr(batch, column.name)[:0] for column in fields(batch)})
    return [batch if turn == group.place else empty for turn in range(group.size)]


# What a run prints at its start.


def supervised_lines(args: SupervisedFlags, noun: str, plan: SupervisedPlan) -> list[str]:
    """The first lines of step 1 or 2. noun: what the lines call the examples. A dry run shows more examples."""
    examples, held_out = plan.examples, plan.held_out
    return [
        *changes_since(plan),
        f"{counted(examples, noun, held_out)}; {in_words(args.total_steps(len(examples)), 'step')} on "
        f"{in_words(distributed.world_size(), 'rank')}",
        *supervised_schedule(args, len(examples)).lines(),
        *too_long(examples, noun, "--max_seq_len", args, plan.tokenizer, [args.model_name_or_path]),
        f"ZeRO stage {args.engine_config().stage}; {args.dtype}",
        *model_notes(args, [("model_name_or_path", args.model_name_or_path)]),
    ]


def supervised_schedule(args: SupervisedFlags, examples: int) -> RunSchedule:
    """The schedule of the whole run, even if this start resumes it. examples: number of training examples."""
    total, an_epoch = args.total_steps(examples), args.steps_per_epoch(examples)
    return RunSchedule(total, total / an_epoch, args.schedule(), lambda step: args.evaluates(step, examples))


def report_dry_run(
    args: SupervisedFlags,
    make_plan: Callable[[], SupervisedPlan],
    first_lines: Callable[[SupervisedFlags, SupervisedPlan], list[str]],
    callbacks: Sequence[Callback],
) -> None:
    """Print the report of a dry run of step 1 or 2. make_plan: function that reads the data. first_lines: function that
    returns the lines that a run would print first."""
    models, data = (
        [path for spec in fields(args) if spec.name.endswith(ending) for path in listed(getattr(args, spec.name))]
        for ending in ("model_name_or_path", "data_path")
    )
    unseen = unseen_models(args, *models) + unseen_data(data)
    checked, plan = opened(data, unseen), None
    if not unseen:
        plan = make_plan()
        checked += first_lines(args, plan)
    print_report(args, plan, callbacks, checked, unseen, {"model": args.ds_settings()})
