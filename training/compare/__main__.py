"""Compare: which of several models is better, at what, and how sure that is; all answer the same held-out prompts.

    python -m training.compare --models sft=out/sft ppo=out/ppo ema=out/ppo/actor_ema --data_path prompts.jsonl \\
        --reward_model_name_or_path out/reward --output_dir comparison

    deepspeed --num_gpus 8 --module training.compare ...                      # on several ranks, the same flags

Writes OUTPUT_DIR/comparison.json and comparison.html, a page that needs nothing beside it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import training.program.import_errors  # noqa: F401  before what may not be there
from engine import distributed
from engine.models.reading import read_config
from training.compare.answering import Answering, functions_of
from training.compare.flags import CompareFlags
from training.compare.models import Model, config_of, exported, located, named
from training.compare.page import write_page
from training.compare.report import DATA, PAGE, Comparison, table, write_json
from training.flags.reward_functions import check_columns
from training.measuring import check_answering, check_same_tokens, check_scoring, read_held_out
from training.program.agreement import agreed, checked
from training.program.model_files import check_positions
from training.program.phases import phase
from training.program.shared_folder import check_shared
from training.program.startup import check_run, leave, run


def main(args: CompareFlags) -> None:
    """Check everything, have each model answer, compare, write."""
    models = checked(lambda: check(args))
    if args.dry_run:
        print(f"{len(models)} models with one tokenizer; a dry run compares and writes nothing")
        return
    check_shared(args.output_dir)
    with phase("saving models"), exported(models, args.output_dir) as folders:
        checked(lambda: check_models(args, folders))
        comparison = measure(args, folders)
    if distributed.is_main():
        report(args, comparison)


def check(args: CompareFlags) -> list[Model]:
    """Where the models stand, after a look at all that can be wrong; by one process. Raises: UserError."""
    check_run(args)
    models = [located(name, path) for name, path in named(args.models).items()]
    first, *others = [(model.what, config_of(model)) for model in models]
    for other in others:
        why = "Models are compared by what they make of the same tokens: give models with one tokenizer."
        check_same_tokens(first, other, why, args.trust_remote_code)
    check_models(args, models)
    check_scoring(args, args.read_tokenizer(first[1], first[0]))
    functions_of(args)
    return models


def check_models(args: CompareFlags, models: Sequence[Model]) -> None:
    """Raise UserError where one cannot answer; of a restart point only what can be seen before it is exported."""
    for model in models:
        if model.is_point:
            config = read_config(config_of(model), model.what, args.trust_remote_code)
            check_positions(config, f"{model.what} {model.given}", **args.lengths)
        else:
            check_answering(args, model.path, model.what)


def measure(args: CompareFlags, models: Sequence[Model]) -> Comparison:
    """Every model's responses, and what they say of it; a line for each as it comes (all ranks call this)."""
    first = models[0]
    with phase("reading data"):
        tokenizer = args.read_tokenizer(first.path, first.what)
        held_out = agreed(lambda: read_held_out(args, tokenizer))
        checked(lambda: check_columns(functions_of(args), {"the held-out prompts": held_out.prompts}))
    with phase("loading models"):
        answering = Answering(args, held_out, first)
    samples, prompts = {}, []
    for model in models:
        with phase("evaluating"):
            prompts, samples[model.name] = answering.samples(model)
        if distributed.is_main():
            print(f"{model.name}: {len(samples[model.name]):,} responses to {len(prompts):,} prompts", flush=True)
    return Comparison(args, models, answering.rewards, prompts, samples)


def report(args: CompareFlags, comparison: Comparison) -> None:
    """Print the table and write the files."""
    folder = Path(args.output_dir)
    write_json(folder / DATA, comparison)
    write_page(folder / PAGE, comparison)
    print(f"\n{table(comparison)}\n\n{folder / PAGE} shows it with all responses, {DATA} has all numbers")


def program() -> NoReturn:
    """Compare by this process's command line, and end the process."""
    leave(run(main, CompareFlags, __doc__.splitlines()[0]))


if __name__ == "__main__":
    program()
