"""How a tool takes part in a run: by a callback, an object whose methods the run calls.

    class Seconds(Callback):
        def after_step(self, report):
            report.metrics["own/seconds"] = time.monotonic()

    step3_rlhf.program(callbacks=(Seconds(),))

As transformers' TrainerCallback, `Callback` has all methods, and they do nothing: a subclass defines those that it
needs.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import RunStopped


class Callback:
    """What a run calls, in this order, each method of several callbacks in theirs. A method that raises ends the run.

    run: the run (training/runtime/loop.py), of which callbacks read
        args: its flags.
        output_dir: its output folder, a Path.
        steps_done: how many steps are done.
        saved_models: {name: folder} of the trained models that are saved; {} before the last step.
        verdict: the Verdict on the run (training/reporting/guards.py), on all ranks; None before `ended`.
        writer: its MetricWriter; `writer.write(line)` prints a line below which a progress bar goes on.
    """

    def planned(self, args: Any, plan: Any) -> None:
        """Called when all that can be wrong was checked, before a model is loaded: on all ranks of a run; in a dry run
        (args.dry_run) on rank 0 alone.

        plan: what was decided, as the Plan of step 3 (training/runtime/plan.py). None in a dry run on a machine that
        lacks the models or data. Raises: UserError, which ends the run; on all ranks, if on any (`checked`, `agreed`).
        """

    def after_step(self, report: Any) -> None:
        """Called on all ranks after each step, before its metrics are written.

        report: the StepReport (training/learner.py): step, samples, metrics, batch. What is added to
        `report.metrics` is written with the step's metrics; it has to be a number, or a tensor with one number.
        """

    def saved(self, name: str, folder: Path, run: Any) -> None:
        """Called on rank 0 alone, when a model was written into `folder`. Files that are added there belong to the
        model. What is raised here is printed; the run goes on, and ends with an error when all is saved.

        name: the model's name, "actor" or "." for example. The folder gets its final name, `run.output_dir / name`,
        after this call; there an earlier save of this model may stand until then.
        """

    def ended(self, run: Any) -> None:
        """Called on all ranks after the last model was saved and the summary was printed. A broken model ends the run
        with an error after this call: see `run.verdict`."""


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics as floats. Raises: RunStopped for one that is not a number; callbacks can add such."""
    found = {}
    for name, value in metrics.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise RunStopped(
                f"the metric {name} is {value!r}, which is not a number. See `Callback.after_step`."
            ) from None
    return found
