"""Audit: what several rewards pay for, and which is the safest to optimise by a judge, before PPO is paid for.

    four-engine-rlhf audit --sft_model_name_or_path out/sft --data_path prompts.jsonl \\
        --reward_model_name_or_path out/reward other/reward --output_dir audit

    deepspeed --num_gpus 8 --module training.tools.audit ...                         # on several ranks, the same flags

Writes OUTPUT_DIR/audit.json, and audit.html, a page that needs no other file.
"""

import json
from pathlib import Path
from typing import NoReturn

import training.runtime.import_errors  # noqa: F401  imported first, to explain imports that fail
from training.runtime.first_look import first_look

if __name__ == "__main__":
    first_look("training.tools.audit.flags:AuditFlags", __doc__)

import numpy as np

from engine import distributed
from engine.atomic_files import write_whole
from training.reporting.best_of import MEASURES, BestOf, measures_of
from training.reporting.evaluation import ENVIRONMENT, POLICY, text_by
from training.runtime.launch import check_run, leave, run
from training.runtime.output_folder import check_shared
from training.runtime.processes import phase
from training.runtime.ranks import agreed, checked
from training.tools.audit.flags import AuditFlags
from training.tools.audit.report import Audit, content, page, table
from training.tools.measuring import (
    Measuring,
    check_answering,
    check_rewards,
    check_scoring,
    functions_of,
    read_held_out,
    reward_names,
    tell_failures,
)

SFT = "--sft_model_name_or_path"
DATA, PAGE = "audit.json", "audit.html"


def main(args: AuditFlags) -> None:
    """Check flags, models and data, have the model answer the prompts, and write what the best by each reward are."""
    checked(lambda: check(args))
    if args.dry_run:
        print(f"{len(reward_names(args))} rewards, the judge included; a dry run audits and writes nothing")
        return
    check_shared(args.output_dir)
    audit = measure(args)
    if distributed.is_main():
        folder = Path(args.output_dir)
        write_whole(folder / DATA, json.dumps(content(audit), indent=1, ensure_ascii=False) + "\n")
        write_whole(folder / PAGE, page(audit))
        print(f"\n{table(audit)}\n\n{folder / PAGE} shows it with the texts, {DATA} has all numbers")


def check(args: AuditFlags) -> None:
    """Check flags, models and functions; called by one process. Raises: UserError."""
    check_run(args)
    check_answering(args, args.sft_model_name_or_path, SFT)
    check_scoring(args)
    functions_of(args)


def measure(args: AuditFlags) -> Audit:
    """Draw the responses, and score and measure them. The result is the same on all ranks (all ranks call this).

    Raises: RunStopped if a score is not finite.
    """
    sft, n = args.sft_model_name_or_path, args.num_samples_per_prompt
    with phase("reading data"):
        tokenizer = args.read_tokenizer(sft, SFT)
        held_out = agreed(lambda: read_held_out(args, tokenizer))
        agreed(lambda: check_rewards(args, functions_of(args), held_out))
    with phase("loading models"):
        measuring = Measuring(args, args.spec_of(sft), held_out, [sft])
        rollouts = measuring.rollouts_of(measuring.reference, decoding="auto")
        reward = measuring.side_by_side(args)
        evaluator = measuring.evaluator_of(measuring.reference, sft, reward, rollouts, samples=n)
    with phase("evaluating"):
        answers = evaluator.answers(0)
    tell_failures(evaluator.counted())

    def by_prompt(values) -> np.ndarray:
        return np.asarray(values, dtype=np.float64).reshape(-1, n)

    rows = answers.rows
    given = reward_names(args)
    names = [f"{name} score" if name in MEASURES else name for name in given]
    texts, prompts = [text_by(POLICY, row) for row in rows], [row["prompt"] for row in rows[::n]]
    measures = measures_of(
        [texts[start : start + n] for start in range(0, len(texts), n)],
        [*prompts, *(text_by(ENVIRONMENT, row) for row in rows)],
        ended=by_prompt(answers.ended),
        tokens=by_prompt([row["tokens"] for row in rows]),
        likelihood=by_prompt(answers.likelihood),
    )
    scores = {name: by_prompt([row[f"reward_{own}"] for row in rows]) for name, own in zip(names, given)}
    judge = names[len(args.reward_model_name_or_path) + len(args.functions) - 1] if args.judge else None
    return Audit(args, prompts, rows, BestOf(scores, measures, judge))


def program() -> NoReturn:
    """Run the audit with the flags of this process's command line, and end the process."""
    leave(run(main, AuditFlags, __doc__))


if __name__ == "__main__":
    program()
