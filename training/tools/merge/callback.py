"""The merge program's part in a run of step 3: at its end, the command that finds the best model on the line."""

import dataclasses
from pathlib import Path
from typing import Any

from engine import distributed
from engine.errors import shown_command
from engine.options import default_of
from engine.zero.accelerator import ranks_of_this_machine
from training.commands import NAME
from training.config.models import SCORE
from training.config.reward import score_parts
from training.config.step3 import RLHFFlags
from training.reporting.health import column, over_optimised_since
from training.reporting.run_record import METRICS_FILE, read_metrics
from training.runtime.callbacks import Callback
from training.runtime.stopping import unwritten_noted
from training.tools.merge.flags import MergeFlags

OF_THE_RUN = {
    *("config", "defaults", "output_dir", "dry_run", "preflight", "sequence_parallel_size", "max_kl"),
    *("kl_coef", "report_to", "report_project", "enable_tensorboard", "tensorboard_path", "grace_seconds"),
    *("timeout_minutes", "overlap_rewards", "reward_model_name_or_path", "temperature", "cut_responses"),
}
"""Flags that step 3 and merging have and that mean something else there, or that the command sets by itself."""


class Line(Callback):
    """Prints the command of `four-engine-rlhf merge` for the run: with its models, rewards, prompts and lengths."""

    def ended(self, run: Any) -> None:
        """Print it, if there are held-out prompts to measure by."""
        trained = run.saved_models.get("actor") or run.saved_models.get("actor_adapter")
        if not (distributed.is_main() and isinstance(run.args, RLHFFlags) and run.args.num_eval_prompts and trained):
            return
        with unwritten_noted("the command of merging"):
            rows = read_metrics(run.output_dir / METRICS_FILE)
            chosen = choice(run.args, run.plan.dialect, rows)
            command = merge_command(run.args, run.plan.dialect, trained, chosen)
            then = "and the best saved" if chosen else "none saved unless you choose by a number or a scale"
            print(
                f"models between the SFT model and this one, measured, {then} (docs/kl.md):\n{command}",
                flush=True,
            )


def merge_command(args: RLHFFlags, dialect: Any, trained: Path, chosen: list[str]) -> str:
    """The command that measures models on the line from the SFT model through `trained`. chosen: from `choice`."""
    ranks = ranks_of_this_machine()
    partitioned = args.stage("actor") == 3 and ranks > 1
    ranked = ["deepspeed", "--num_gpus", str(ranks), "--module", "training.tools.merge"]
    words = ranked if partitioned else [NAME, "merge"]
    words += ["--sft_model_name_or_path", args.actor_model_name_or_path]
    words += ["--trained_model_name_or_path", str(trained)]
    if args.reward_paths:
        words += ["--reward_model_name_or_path", *args.reward_paths]
    for spec in dataclasses.fields(MergeFlags):
        value = getattr(args, spec.name, default_of(spec))
        if spec.name not in OF_THE_RUN and value != default_of(spec):
            values = value if isinstance(value, list) else [str(value).lower() if isinstance(value, bool) else value]
            single = len(values) == 1 and str(values[0]).startswith("-")  # bare it would be taken for a flag
            words += [f"--{spec.name}={values[0]}"] if single else [f"--{spec.name}", *map(str, values)]
    words += ["--temperature", str(dialect.temperature), "--cut_responses", dialect.cut_responses]
    words += ["--zero_stage", "3"] if partitioned else []
    return shown_command([*words, *chosen, "--output_dir", str(Path(args.output_dir) / "merged")])


def choice(args: RLHFFlags, dialect: Any, rows: list[dict]) -> list[str]:
    """The flags that choose the scale: by a reward that PPO did not see; else within the KL beyond which the run was
    over-optimised; else by what PPO maximised, if that is the score less KL."""
    judges = [part.name for part in score_parts(args) if part.weight == 0.0]
    if judges:
        return ["--choose_by", f"eval/reward_{judges[0]}"]
    if since := over_optimised_since(rows):
        return since.bound.split()
    coefficients = column(rows, "objective/kl_coef")
    if not coefficients or dialect.score_scaling != "none" or dialect.likelihood_coef:
        return []
    return ["--choose_by", SCORE, "--kl_coef", f"{coefficients[-1]:.3g}"]
