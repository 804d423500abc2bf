"""How long a step of PPO takes, beside a plain step without DeepSpeed and beside the arithmetic it cannot avoid.

    deepspeed --num_gpus 2 scripts/benchmark_step3.py --size 34m --zero_stage 3
    deepspeed --num_gpus 2 scripts/benchmark_step3.py --size 260k --zero_stage 3 --rollout_backend replica zero3

Our step and the plain one (scripts/benchmark_plain.py) take turns in the same processes, on the same prompts and with
responses of the same length. docs/performance.md explains the numbers.
"""

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for scripts/, which is not installed

from training.runtime.launch import USER_ERROR, leave, quiet_libraries
from training.runtime.models import check_positions
from training.runtime.ranks import checked

quiet_libraries()  # before they are imported

import torch
from transformers.utils import logging

from engine import distributed
from engine.errors import UserError
from engine.experience import PromptBatch
from engine.models.config_and_tokenizer import read_config
from engine.models.loading import DTYPES
from engine.rollout import DECODING, ROLLOUT_BACKENDS
from engine.zero.accelerator import natural_dtype, now
from engine.zero.communication import init
from scripts.benchmark_floor import Rates, Work, floor, peak_memory, reset_peak_memory, slowest, timed
from scripts.benchmark_models import SIZES, make_models, make_scorer
from scripts.benchmark_ours import Ours, Setting, build_ours, compare_backends, decode_seconds, make_prompts, our_step
from scripts.benchmark_plain import Plain
from scripts.benchmark_report import PHASES, Report


def plain_step(plain: Plain, prompts: PromptBatch) -> dict[str, float]:
    """Seconds of each phase of one plain step, of the slowest rank."""
    times = [now()]
    sequences = plain.generate(prompts)
    times.append(now())
    experience = plain.make_experience(sequences)
    times.append(now())
    plain.train(experience)
    times.append(now())
    assert sequences.shape[1] == prompts.input_ids.shape[1] + plain.response_length, "responses are not equally long"
    return {phase: slowest(end - start) for phase, start, end in zip(PHASES, times, times[1:])}


def measured(step: Callable, model: Ours | Plain, prompts: PromptBatch) -> dict[str, float]:
    """One step's seconds by phase and as a whole ("step"), and the most memory that a rank held meanwhile
    ("memory", bytes)."""
    reset_peak_memory()
    seconds, phases = timed(lambda: step(model, prompts))
    return {**phases, "step": seconds, "memory": slowest(peak_memory())}


def measure(setting: Setting, args: argparse.Namespace) -> Report:
    """Our steps and plain ones in turns, the backends in turns, and between the rates at the start and at the end."""
    check_positions(
        read_config(setting.actor, "--model"),
        setting.actor,
        prompt_length=setting.prompt_length,
        response_length=setting.response_length,
    )
    work, dtype = setting.work(), DTYPES[args.dtype]
    rates = Rates(
        work, rows_per_rank=setting.rows, dtype=dtype, tokens=min(args.micro_batch, setting.rows) * work.length
    )
    rates.measure()
    ours = build_ours(setting, args)
    sides = {"ours": (our_step, ours)}
    if not args.no_plain:
        sides["plain"] = (
            plain_step,
            Plain(
                setting.actor,
                setting.critic,
                dtype=dtype,
                micro_batch=args.micro_batch,
                response_length=setting.response_length,
            ),
        )
    steps = {side: [] for side in sides}
    for step in range(-args.warmup, args.steps):
        prompts = make_prompts(setting, step + args.warmup)
        for side in list(sides) if step % 2 == 0 else reversed(sides):
            seconds = measured(*sides[side], prompts)
            if step >= 0:
                steps[side].append(seconds)
    backends, same_tokens = compare_backends(ours, prompts, args) if len(ours.backends) > 1 else ({}, True)
    decode = decode_seconds(ours, setting, prompts, args.steps)
    rates.measure()
    return Report(
        name=setting.name,
        lines=header(setting, work, args),
        prompts=setting.prompts,
        response=setting.response_length,
        floor=floor(work, rates, distributed.world_size()),
        steps=steps,
        backends=backends,
        same_tokens=same_tokens,
        flops={"generate": work.prefill + work.decode, "make_experience": work.experience, "train": work.training},
        matrix_rate=rates.matrix,
        decode_rate=rates.decode,
        copy_rate=rates.copy,
        ranks=distributed.world_size(),
        decode_seconds=decode,
        decode_bytes=work.decode_bytes(setting.rows, dtype.itemsize),
        decoding=ours.trainer.rollouts.decoding_ran,
        fallback=ours.trainer.rollouts.fallback,
        peak_flops=args.peak_tflops and args.peak_tflops * 1e12,
    )


def header(setting: Setting, work: Work, args: argparse.Namespace) -> list[str]:
    """What is measured, in words."""
    critic = "" if work.critic == work.actor else f", of the critic's {work.critic.parameters / 1e6:.3g}"
    return [
        f"{setting.name}: {work.actor.parameters / 1e6:.3g} million numbers in the trunk's matrices{critic}, "
        f"vocabulary {work.actor.vocabulary}",
        f"ranks: {distributed.world_size()} on {distributed.device().type}, threads of each: "
        f"{torch.get_num_threads()}, {args.dtype}, ZeRO stage {args.zero_stage}, rollouts by "
        f"{args.rollout_backend[0]}",
        f"{setting.prompts} prompts of {setting.prompt_length} tokens, {setting.response_length} new tokens each, "
        f"micro-batches of {args.micro_batch}; {args.steps} steps after {args.warmup} of warm-up",
    ]


def settings(args: argparse.Namespace, folder: Path) -> Iterator[Setting]:
    """What is to be measured, one after the other; models are made when their turn comes."""
    for size in [None] if args.model else args.size:
        actor, critic = checked(lambda size=size: models(args, folder / (size or "given"), size))
        yield Setting(
            name=size or args.model,
            actor=actor,
            critic=critic,
            prompts=args.prompts,
            prompt_length=args.prompt_length,
            response_length=args.response_length,
        )


def models(args: argparse.Namespace, folder: Path, size: str | None) -> tuple[str, str]:
    """The folders of the actor and of the critic; what is not given, and not there yet, is made."""
    if size is not None:
        return make_models(folder, size, args.critic_size or size, DTYPES[args.dtype])
    read_config(args.model, "--model")
    return args.model, args.critic or make_scorer(folder, args.model, DTYPES[args.dtype])


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, this process's unless another is given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["260k"], help="Llamas with random weights")
    parser.add_argument("--critic_size", choices=SIZES, help="of critic and reward model (default: the actor's)")
    parser.add_argument("--model", help="an actor's folder or hub name, in place of --size")
    parser.add_argument("--critic", help="its reward model (default: the actor's trunk with a new head)")
    parser.add_argument("--zero_stage", type=int, choices=range(4), default=3)
    parser.add_argument(
        "--rollout_backend",
        nargs="+",
        choices=ROLLOUT_BACKENDS,
        default=["auto"],
        help="the first is the step's; several are compared",
    )
    parser.add_argument("--decoding", choices=DECODING, default="auto", help="ours: as in step 3")
    parser.add_argument(
        "--old_logprobs",
        choices=("auto", "forward", "sampler"),
        default="auto",
        help="ours: from the sampler (auto: in fp32), or by a forward pass, as the plain step has them",
    )
    parser.add_argument("--prompts", type=int, default=32, help="a step, over all ranks")
    parser.add_argument("--prompt_length", type=int, default=32, help="tokens")
    parser.add_argument("--response_length", type=int, default=64, help="tokens")
    parser.add_argument("--micro_batch", type=int, default=16, help="rows in one forward and backward pass of a rank")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2, help="steps before those")
    parser.add_argument(
        "--dtype", choices=("auto", "fp32", "bf16"), default="auto", help="auto: bf16 where a GPU has it"
    )
    parser.add_argument("--no_plain", action="store_true", help="leave out the plain step")
    parser.add_argument("--peak_tflops", type=float, help="of one GPU by its data sheet, to be compared with")
    parser.add_argument("--json", type=Path, help="a file for all numbers")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the launcher gives it
    args = parser.parse_args(argv)
    if args.prompts % distributed.world_size():
        parser.error(f"--prompts {args.prompts} do not divide into {distributed.world_size()} ranks")
    if args.response_length < 2 or min(args.prompts, args.prompt_length, args.micro_batch, args.steps) < 1:
        parser.error("sizes and --steps must be 1 or more, --response_length 2 or more")
    return args


def main(args: argparse.Namespace) -> None:
    """Measure each setting, print what was found."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if args.dtype == "auto":  # fp16 is left out: it needs a loss scale, which the plain step has not
        args.dtype = "bf16" if natural_dtype() == "bf16" else "fp32"
    with tempfile.TemporaryDirectory() as own:
        folder = Path(distributed.broadcast_object(own))
        reports = []
        for setting in settings(args, folder):
            reports.append(measure(setting, args))
            gc.collect()  # engines hold circles
            torch.cuda.empty_cache()
            if distributed.is_main():
                print(*reports[-1].text(), "", sep="\n", flush=True)
        distributed.barrier()  # no rank may still read in the folder
    if distributed.is_main() and args.json:
        args.json.write_text(json.dumps([asdict(report) for report in reports], indent=1))


if __name__ == "__main__":
    try:
        arguments = parse_arguments()
        init()
        main(arguments)
        distributed.shutdown()
        code = 0
    except UserError as error:
        if distributed.is_main():
            print(f"error: {error}", file=sys.stderr)
        code = USER_ERROR
    leave(code)
