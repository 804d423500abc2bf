"""Merge: SFT + scale x change of one or several trained models; measure scales on held-out prompts, and save one.

    four-engine-rlhf merge --sft_model_name_or_path sft --trained_model_name_or_path out/actor \\
        --data_path prompts.jsonl --reward_model_name_or_path reward --max_kl 10 --output_dir merged

    deepspeed --num_gpus 8 --module training.tools.merge ...                   # on several ranks, the same flags
    four-engine-rlhf merge ... --scale 1.3 --output_dir merged              # without prompts: merge and save

Writes OUTPUT_DIR/frontier.json, samples/scale_S.jsonl, and model/ if --scale, --choose_by or --max_kl chooses a scale.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import training.runtime.import_errors  # noqa: F401  imported first, to explain imports that fail
from training.runtime.first_look import first_look

if __name__ == "__main__":
    first_look("training.tools.merge.flags:MergeFlags", __doc__)

from engine import distributed
from engine.atomic_files import write_whole
from engine.errors import RunStopped, without_query
from engine.models.checking import check_policy
from training.config.models import SCORE
from training.config.reward import check_held_out_number, load_functions
from training.reporting.evaluation import write_rows
from training.runtime.launch import check_run, leave, run
from training.runtime.output_folder import check_shared
from training.runtime.processes import phase
from training.runtime.ranks import agreed, checked
from training.tools.measuring import check_answering, check_rewards, check_same_tokens, check_scoring, read_held_out
from training.tools.merge.flags import MergeFlags
from training.tools.merge.frontier import Frontier, Point, best_within, table
from training.tools.merge.weights import (
    MODEL,
    SFT,
    TRAINED,
    MergedWeights,
    check_change,
    check_paths,
    check_weights,
    save_merged,
    stored_weights,
)


def main(args: MergeFlags) -> None:
    """Check flags, models and data, measure the scales, choose a scale, and save the merged model."""
    checked(lambda: check(args))
    sft, trained = agreed(lambda: read_weights(args))
    if args.dry_run:
        print(f"{len(trained)} trained, {len(sft)} weights each, all of one kind; a dry run measures and saves nothing")
        return
    check_shared(args.output_dir)
    points = measure(args, sft, trained) if args.data_path else []
    choose_and_save(args, sft, trained, points)


def check(args: MergeFlags) -> None:
    """Check files and models; called by one process. Raises: UserError."""
    check_run(args)
    sft, trusted = args.sft_model_name_or_path, args.trust_remote_code
    check_paths(sft, args.trained_model_name_or_path)
    for name, path in ((SFT, sft), *((TRAINED, path) for path in args.trained_model_name_or_path)):
        check_policy(path, name, trusted)
    for path in args.trained_model_name_or_path:
        why = "Only models that were trained from one model can be merged."
        check_same_tokens((SFT, sft), (TRAINED, path), why, trusted)
    if not args.data_path:
        return
    check_answering(args, sft, SFT)
    check_scoring(args)
    functions = load_functions(args)
    if args.choose_by is not None:
        check_held_out_number(args, "choose_by", functions)


def read_weights(args: MergeFlags) -> tuple[dict, list[dict]]:
    """({name: weight} of the SFT model, [{name: weight} of each trained model]). The numbers are read later.

    Raises: UserError if the models cannot be merged.
    """
    path, trusted = args.sft_model_name_or_path, args.trust_remote_code
    sft = stored_weights(path, SFT, trusted)
    trained = [(other, stored_weights(other, TRAINED, trusted)) for other in args.trained_model_name_or_path]
    check_weights((path, sft), trained, trusted)
    if distributed.is_main():
        check_change(sft, trained)
    return sft, [weights for _, weights in trained]


def measure(args: MergeFlags, sft: dict, trained: Sequence[dict]) -> list[Point]:
    """Measure the merged model at each scale; prints and writes the measurements (all ranks call this)."""
    with phase("reading data"):
        tokenizer = args.read_tokenizer(args.sft_model_name_or_path, SFT)
        held_out = agreed(lambda: read_held_out(args, tokenizer))
        agreed(lambda: check_rewards(args, load_functions(args), held_out))
    with phase("loading models"):
        frontier = Frontier(args, held_out)
    points, folder = [], Path(args.output_dir)
    for scale in args.measured_scales:
        with phase("evaluating"):
            point, rows = frontier.at(MergedWeights(sft, trained, scale, args.method))
        points.append(point)
        write_rows(folder / "samples" / f"scale_{scale:g}.jsonl", rows)
        if distributed.is_main():
            print(f"scale {scale:g}: score {point.score:.3f}, KL {point.kl:.2f} nats a response", flush=True)
            found = {**source(args), "points": [dataclasses.asdict(point) for point in points]}
            write_whole(folder / "frontier.json", json.dumps(found, indent=2) + "\n")
    return points


def source(args: MergeFlags) -> dict[str, object]:
    """{flag: value} of the flags that say what was merged and measured. It goes into the files of results."""
    return {
        "sft": args.sft_model_name_or_path,
        "trained": args.trained_model_name_or_path,
        "method": args.method,
        "prompts": args.eval_data_path or args.data_path,
        "reward_models": args.reward_model_name_or_path,
        "reward_model_weight": args.reward_model_weight,
        "reward_function": args.reward_function,
        "reward_url": list(map(without_query, args.reward_url)),
        "reward_weights": args.reward_weights,
        "length_penalty": args.length_penalty,
        **({"environment": args.environment, "max_turns": args.max_turns} if args.environment else {}),
        "seed": args.seed,
        "choose_by": args.choose_by or SCORE,
        "kl_coef": args.kl_coef,
        "max_kl": args.max_kl,
    }


def choose_and_save(args: MergeFlags, sft: dict, trained: Sequence[dict], points: Sequence[Point]) -> None:
    """Choose a scale, print the table, and save the model merged at this scale (all ranks call this; rank 0 writes).

    Raises: RunStopped if no scale is within --max_kl.
    """
    chooses = args.choose_by is not None or args.max_kl is not None
    best = best_within(points, args.max_kl) if chooses else None
    scale = args.scale if best is None else best.scale
    if distributed.is_main() and points:
        print(f"\n{table(points, scale)}\n{args.output_dir}/frontier.json has it too", flush=True)
        start = next(point for point in points if point.scale == 0.0)
        if best is not None and start.chosen_by > best.chosen_by:
            found = f"{start.chosen_by:.3f}, and at scale {best.scale:g} it is {best.chosen_by:.3f}"
            print(f"warning: {args.choose_by or SCORE} is highest for the SFT model itself: {found}", flush=True)
    if chooses and scale is None:
        raise RunStopped(
            f"no scale but 0 is within {args.word('max_kl')} nats a response, and nothing was saved. Give smaller "
            "--scales, or raise --max_kl."
        )
    if scale is None:
        if distributed.is_main():
            print("nothing is saved: --scale S, --choose_by NUMBER or --max_kl K choose a model", flush=True)
        return
    point = next((point for point in points if point.scale == scale), None)
    measured = point and dataclasses.asdict(point)
    note = {**source(args), "scale": scale, "measured": measured}
    with phase("saving models"):
        saved = checked(
            lambda: save_merged(
                MergedWeights(sft, trained, scale, args.method),
                args.sft_model_name_or_path,
                args.read_tokenizer(args.sft_model_name_or_path, SFT),
                Path(args.output_dir) / MODEL,
                note,
                args.max_shard_size,
                args.trust_remote_code,
            )
        )
    if distributed.is_main():
        print(f"saved: {saved}, SFT + {scale:g} x the {args.method} change of {len(trained)}", flush=True)


def program() -> NoReturn:
    """Run the merge program with the flags of this process's command line, and end the process."""
    leave(run(main, MergeFlags, __doc__))


if __name__ == "__main__":
    program()
