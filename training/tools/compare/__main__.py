"""Compare: which of several models is better, at what, and how sure that is; all answer the same held-out prompts.

    four-engine-rlhf compare --models sft=out/sft ppo=out/ppo ema=out/ppo/actor_ema --data_path prompts.jsonl \\
        --reward_model_name_or_path out/reward --output_dir comparison

    deepspeed --num_gpus 8 --module training.tools.compare ...                   # on several ranks, the same flags

Writes OUTPUT_DIR/comparison.json, and comparison.html, a page that needs no other file.
"""

import contextlib
import gc
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import training.runtime.import_errors  # noqa: F401  imported first, to explain imports that fail
from training.runtime.first_look import first_look

if __name__ == "__main__":
    first_look("training.tools.compare.flags:CompareFlags", __doc__)

import torch

from engine import distributed
from engine.atomic_files import write_whole
from engine.models.config_and_tokenizer import read_config
from engine.zero.accelerator import on_gpu
from engine.zero.engines import FrozenModel
from training.runtime import output_folder
from training.runtime.launch import check_run, leave, run
from training.runtime.models import check_positions, prompt_and_answer
from training.runtime.output_folder import check_shared
from training.runtime.processes import phase
from training.runtime.ranks import agreed, checked
from training.tools.compare.flags import CompareFlags
from training.tools.compare.measures import Sample
from training.tools.compare.report import Comparison, content, page, table
from training.tools.measuring import (
    HeldOut,
    Measuring,
    check_answering,
    check_rewards,
    check_same_tokens,
    check_scoring,
    functions_of,
    read_held_out,
    reward_names,
    tell_failures,
)
from training.tools.models import Model, config_of, exported, located, named

DATA, PAGE = "comparison.json", "comparison.html"
EXPORTED = "exported"


def main(args: CompareFlags) -> None:
    """Check flags, models and data, have each model answer the prompts, compare the models, and write the results."""
    models = checked(lambda: check(args))
    if args.dry_run:
        print(f"{len(models)} models with one tokenizer; a dry run compares and writes nothing")
        return
    check_shared(args.output_dir)
    with folders_of(models, args.output_dir) as folders:
        checked(lambda: check_models(args, folders))
        comparison = measure(args, folders)
    if distributed.is_main():
        report(args, comparison)


def check(args: CompareFlags) -> list[Model]:
    """Check flags, models and data in one process; returns the located models. Raises: UserError."""
    check_run(args)
    models = [located(name, path) for name, path in named(args.models).items()]
    first, *others = [(model.what, config_of(model)) for model in models]
    for other in others:
        why = "Models are compared by what they make of the same tokens: give models with one tokenizer."
        check_same_tokens(first, other, why, args.trust_remote_code)
    check_models(args, models)
    check_scoring(args)
    functions_of(args)
    return models


def check_models(args: CompareFlags, models: Sequence[Model]) -> None:
    """Raise UserError if a model cannot answer the prompts. A checkpoint is checked as far as this is possible before
    it is exported."""
    for model in models:
        if model.is_checkpoint:
            config = read_config(config_of(model), model.what, args.trust_remote_code)
            check_positions(config, f"{model.what} {model.given}", **prompt_and_answer(args))
        else:
            check_answering(args, model.path, model.what)


@contextlib.contextmanager
def folders_of(models: Sequence[Model], output_dir: str) -> Iterator[list[Model]]:
    """Yield the models in a form that can be loaded within this block. Models in checkpoints are exported to folders
    below `output_dir`, which all ranks see. These folders are removed after the block, which all ranks enter."""
    folder = Path(output_dir) / EXPORTED
    if distributed.is_main() and any(model.is_checkpoint for model in models):
        output_folder.remove_with(folder)  # an interrupt ends the process from another thread, without `finally`
    try:
        with phase("saving models"):
            loadable = [exported(model, folder / str(place)) for place, model in enumerate(models)]
        yield loadable
    finally:
        if distributed.is_main():
            shutil.rmtree(folder, ignore_errors=True)


def measure(args: CompareFlags, models: Sequence[Model]) -> Comparison:
    """Have every model answer the prompts, and measure the responses. Prints a line when a model is done (all ranks
    call this)."""
    first = models[0]
    with phase("reading data"):
        tokenizer = args.read_tokenizer(first.path, first.what)
        held_out = agreed(lambda: read_held_out(args, tokenizer))
        agreed(lambda: check_rewards(args, functions_of(args), held_out))
    with phase("loading models"):
        answering = Answering(args, held_out, models)
    samples, prompts = {}, []
    for model in models:
        with phase("evaluating"):
            prompts, samples[model.name] = answering.samples(model)
        if distributed.is_main():
            print(f"{model.name}: {len(samples[model.name]):,} responses to {len(prompts):,} prompts", flush=True)
    return Comparison(args, models, answering.names, prompts, samples)


class Answering(Measuring):
    """Draws every model's responses to the held-out prompts, and computes their scores and their KL to the first model.

    The first model stays in memory, since its log-probs of all other models' responses are needed. The other models are
    loaded one after the other.

    names: those of the rewards, in the order of the flags.
    """

    args: CompareFlags

    def __init__(self, args: CompareFlags, held_out: HeldOut, models: Sequence[Model]):
        self.first, self.names = models[0], reward_names(args)
        super().__init__(args, args.spec_of(self.first.path), held_out, [model.path for model in models])
        self.reward = self.side_by_side(args)

    def samples(self, model: Model) -> tuple[list[str], list[Sample]]:
        """(the prompts; the model's samples, ordered by prompt and then by number). The result is the same on all ranks
        (all ranks call this).

        Raises: RunStopped if scores or KL are not finite.
        """
        policy = self._policy(model)
        evaluator = self.evaluator_of(
            policy,
            model.path,
            self.reward,
            self.rollouts_of(policy, decoding="auto"),
            forward_passes=True,
            greedy=self.args.greedy,
            samples=self.args.num_samples_per_prompt,
        )
        answers = evaluator.answers(1)
        samples = [
            Sample(
                response=row["response"],
                scores={name: row[f"reward_{name}"] for name in self.names},
                kl=row["kl"],
                tokens=row["tokens"],
                ended=ended,
                turns=row.get("turns", ()),
            )
            for row, ended in zip(answers.rows, answers.ended, strict=True)
        ]
        tell_failures(evaluator.counted())
        return [row["prompt"] for row in answers.rows[:: evaluator.samples]], samples

    def _policy(self, model: Model) -> FrozenModel:
        """An engine with this model's weights. The previous model's engine is freed first."""
        self.reference.copy = None  # it holds the weights once more
        gc.collect()
        if on_gpu():
            torch.cuda.empty_cache()
        return self.reference if model == self.first else self.loaded(model.path, "actor")


def report(args: CompareFlags, comparison: Comparison) -> None:
    """Print the table of results, and write comparison.json and comparison.html."""
    folder = Path(args.output_dir)
    write_whole(folder / DATA, json.dumps(content(comparison), indent=1, ensure_ascii=False) + "\n")
    write_whole(folder / PAGE, page(comparison))
    print(f"\n{table(comparison)}\n\n{folder / PAGE} shows it with all responses, {DATA} has all numbers")


def program() -> NoReturn:
    """Run the comparison with the flags of this process's command line, and end the process."""
    leave(run(main, CompareFlags, __doc__))


if __name__ == "__main__":
    program()
