"""Step 1: supervised fine-tuning of a causal language model.

    deepspeed --num_gpus 8 --module training.step1_sft --model_name_or_path base --data_path sft.jsonl \\
        --output_dir out/sft

A record has either the field `text`, or a prompt and a response (docs/data.md lists all forms). If a record has a
prompt, the loss covers the response only, unless --loss_on all is given.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NoReturn

import training.runtime.import_errors  # noqa: F401  imported first, to explain imports that fail
from training.runtime.first_look import first_look

if __name__ == "__main__":
    first_look("training.config.supervised:SFTFlags", __doc__)

from engine import distributed
from engine.algo.masked import masked_sum
from engine.distributed import RankGroup
from engine.errors import UserError
from engine.experience import position_ids
from engine.models.attention import attention_in_words
from engine.models.checking import check_decoding, check_policy, check_rows
from engine.models.config_and_tokenizer import LANGUAGE_MODEL, vocabulary_size
from engine.models.loading import DTYPES, load_policy
from engine.rlhf_engine import wrap_trained
from training.checkpoints.resuming import Checkpoint
from training.config.supervised import SFTFlags
from training.data.examples import SFTBatch, SFTExamples, collate_sft, sft_fit
from training.data.record_forms import SFT
from training.reporting.guards import of_sft
from training.reporting.metrics import Accumulator
from training.reporting.sinks import SFT_VIEW
from training.reporting.standard_errors import Estimate, Units, change_text, value_text, with_errors
from training.runtime import launch
from training.runtime.callbacks import Callback
from training.runtime.loop import Run
from training.runtime.models import adapted_lines, adapted_model, check_positions, generation_stops
from training.supervised import (
    HeldOutExamples,
    SupervisedPlan,
    SupervisedTrainer,
    planned,
    supervised_lines,
    tell_result,
    train,
)


def main(args: SFTFlags, callbacks: Sequence[Callback] = ()) -> None:
    """The order of a run, from flags to the saved model. All ranks call this, in their process group."""
    # 1. What can be wrong is found before the model is loaded.
    plan = planned(args, callbacks, check, make_plan, first_lines)
    if plan is None:
        return

    # 2. The engine, and what is learned and measured with it.
    ds_config = args.ds_settings()
    module = load_policy(
        args.model_name_or_path,
        DTYPES[args.dtype],
        ds_config,
        "--model_name_or_path",
        args.dropout,
        args.trust_remote_code,
        attention=args.attention,
    )
    module.split(RankGroup(args.sequence_parallel_size))
    if distributed.is_main():
        print(attention_in_words(module), flush=True)
    model = wrap_trained(
        module, ds_config, args.engine_config(), args.optimizer(), args.gradient_checkpointing, args.lora()
    )

    def logprobs(batch: SFTBatch):
        return model(
            batch.sequences,
            batch.attention_mask,
            position_ids(batch.attention_mask),
            response_length=batch.loss_mask.shape[1],
        )[0]

    def loss(batch: SFTBatch, metrics: Accumulator):
        total = -masked_sum(logprobs(batch), batch.loss_mask)
        metrics.add("train/loss", total, batch.loss_mask.sum())
        return total

    def measure(batch: SFTBatch) -> dict:
        nats = -masked_sum(logprobs(batch).double(), batch.loss_mask, dim=-1)
        return {"nats": nats, "tokens": batch.loss_mask.sum(-1)}

    def collate(rows) -> SFTBatch:
        return collate_sft(rows, plan.tokenizer.pad_token_id)

    def count(batch: SFTBatch) -> int:
        return int(batch.loss_mask.sum())

    trainer = SupervisedTrainer(model, args=args, plan=plan, collate=collate, loss=loss, count=count)
    held_out = HeldOutExamples(
        model,
        args=args,
        plan=plan,
        collate=collate,
        measure=measure,
        summarize=held_out_loss,
        score=lambda metrics: -metrics["eval/loss"],
    )

    # 3. The steps.
    run = Run(args, plan, trainer, held_out, SFT_VIEW, callbacks)
    found = train(run, trainer, held_out)
    perplexity = f"{value_text(found, 'eval/perplexity')} a token{change_text(found, 'eval/perplexity')}"
    vocabulary = vocabulary_size(plan.tokenizer)
    run.end(partial(tell_result, line=f"held-out perplexity {perplexity}"), lambda rows: of_sft(rows, vocabulary))


def held_out_loss(units: Units, before: Units | None) -> dict[str, float]:
    """The metrics of held-out texts: the loss per token, and the perplexity, which is the exponential of this loss.

    units: the loss in nats and the number of tokens of each text. before: `units` as measured before training, or None.
    """

    def estimates(units: Units) -> dict[str, Estimate]:
        loss = Estimate.of(units["nats"], units["tokens"])
        return {"eval/loss": loss, "eval/perplexity": loss.exp()}

    return with_errors(estimates(units), before and estimates(before))


def make_plan(args: SFTFlags, checkpoint: Checkpoint | None, inputs: Mapping[str, str | None]) -> SupervisedPlan:
    """Read the data and make the run's plan. Raises: UserError; no model is loaded yet.

    inputs: the result of `training.checkpoints.conditions.fingerprints` on rank 0.
    """
    tokenizer = args.read_tokenizer(args.model_name_or_path, "--model_name_or_path")
    stops = generation_stops(args.model_name_or_path, tokenizer, args.trust_remote_code)
    fit = sft_fit(tokenizer, args.max_seq_len, args.loss_on, args.overlong, stops)
    parts = args.load_rows(SFT, tokenizer, fit, held_out=args.held_out, undivided=args.sft_only_data_path)
    examples = [
        SFTExamples(rows, tokenizer, args.max_seq_len, args.loss_on, args.cache, args.overlong, stops) for rows in parts
    ]
    return SupervisedPlan.of(args, checkpoint, tokenizer, examples, [rows.fingerprint for rows in parts], inputs)


def first_lines(args: SFTFlags, plan: SupervisedPlan) -> list[str]:
    """The lines that a run prints before the model is loaded."""
    lines = supervised_lines(args, "texts", plan)
    return lines + adapted_lines(adapted_model(args, scorer=False)) + decoding_lines(args)


def decoding_lines(args: SFTFlags) -> list[str]:
    """A warning if steps 2 and 3 could not draw responses from the model with their own sampler."""
    try:
        check_decoding(args.model_name_or_path, "--model_name_or_path", args.trust_remote_code)
    except UserError as error:
        return [f"WARNING: step 3 can draw with vLLM only, and step 2 cannot normalise with this model. {error}"]
    return []


def check(args: SFTFlags, checkpoint: Checkpoint | None = None) -> None:
    """Check files, model and machine before anything large is loaded. Raises: UserError."""
    launch.check_run(args, resumed=checkpoint is not None and checkpoint.in_output_dir)
    args.ds_settings()
    if args.looks_at(args.model_name_or_path):
        config = check_policy(args.model_name_or_path, "--model_name_or_path", args.trust_remote_code)
        check_positions(config, f"--model_name_or_path {args.model_name_or_path}", max_seq_len=args.max_seq_len)
        tokenizer = args.read_tokenizer(args.model_name_or_path, "--model_name_or_path")
        check_rows(tokenizer, config, args.model_name_or_path, "--model_name_or_path")
        args.check_attention(args.model_name_or_path, LANGUAGE_MODEL, "--model_name_or_path")
        adapted_model(args, scorer=False)


def program(callbacks: Sequence[Callback] = ()) -> NoReturn:
    """Run this step with the flags of this process's command line, and end the process."""
    launch.leave(launch.run(partial(main, callbacks=callbacks), SFTFlags, __doc__))


if __name__ == "__main__":
    from training import tools

    program(tools.callbacks())
