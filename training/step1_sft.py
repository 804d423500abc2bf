"""Step 1: supervised fine-tuning of a causal language model.

    deepspeed --num_gpus 8 training/step1_sft.py --model_name_or_path base --data_path sft.jsonl --output_dir out/sft

A record has either the field `text`, or a prompt and a response (docs/data.md lists all forms). If a record has a
prompt, the loss covers the response only, unless --loss_on all is given.
"""

import training.runtime.import_errors  # noqa: F401  imported first, to explain imports that fail
from training.runtime.first_look import first_look

if __name__ == "__main__":
    first_look("training.config.supervised:SFTFlags", __doc__)

from engine import distributed
from engine.algo.masked import masked_sum
from engine.errors import UserError
from engine.experience import position_ids
from engine.models.attention import attention_in_words
from engine.models.checking import check_attention, check_policy, check_rows
from engine.models.loading import DTYPES, load_policy
from engine.models.reading import LANGUAGE_MODEL, vocabulary_size
from engine.rlhf_engine import wrap_trained
from training.checkpoints.conditions import Conditions, fingerprints
from training.checkpoints.resuming import ResumePoint
from training.config.supervised import SFTFlags
from training.data.examples import SFTBatch, SFTExamples, collate_sft, sft_fit
from training.data.forms import SFT
from training.reporting.guards import conclude, of_sft
from training.reporting.metrics import Accumulator
from training.reporting.records import read_metrics
from training.reporting.sinks import SFT_VIEW
from training.reporting.standard_errors import Estimate, Units, change_text, value_text, with_errors
from training.runtime import dry_run
from training.runtime.agreement import agreed, checked
from training.runtime.first_lines import supervised_lines
from training.runtime.hub import check_hub, push
from training.runtime.models import adapted_lines, adapted_model, check_positions, generation_stops
from training.runtime.output_folder import check_shared
from training.runtime.startup import check_run, leave, run
from training.runtime.stopping import saved_models_named
from training.supervised import SupervisedTrainer


def main(args: SFTFlags) -> None:
    """Check flags and data, load the model, train it, save it."""
    point = ResumePoint.find(args.resume, args.output_dir)
    checked(lambda: check(args, point))
    if args.dry_run:
        dry_run.report_supervised(args, lambda: first_lines(args, *load_examples(args)))
        return
    check_shared(args.output_dir)
    tokenizer, examples, held_out, data = agreed(lambda: load_examples(args))
    total_steps = args.total_steps(len(examples))
    conditions = Conditions.of(args, data, tokenizer, checked(lambda: fingerprints(args)))
    if point:
        agreed(lambda: point.check(conditions, total_steps))
    if args.preflight:
        return
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

    def evaluate(batch: SFTBatch) -> dict:
        nats = -masked_sum(logprobs(batch).double(), batch.loss_mask, dim=-1)
        return {"nats": nats, "tokens": batch.loss_mask.sum(-1)}

    trainer = SupervisedTrainer(
        model,
        args=args,
        examples=examples,
        held_out=held_out,
        loss=loss,
        evaluate=evaluate,
        held_out_score=lambda metrics: -metrics["eval/loss"],
        summarize=held_out_loss,
        collate=lambda rows: collate_sft(rows, tokenizer.pad_token_id),
        count=lambda batch: int(batch.loss_mask.sum()),
        view=SFT_VIEW,
        tokenizer=tokenizer,
        conditions=conditions,
        point=point,
    )
    if distributed.is_main():
        print(*first_lines(args, tokenizer, examples, held_out), attention_in_words(module), sep="\n", flush=True)
    with saved_models_named(trainer.saved):
        found = trainer.fit()
        trainer.end(
            f"held-out perplexity {value_text(found, 'eval/perplexity')} a token{change_text(found, 'eval/perplexity')}"
        )
    vocabulary = vocabulary_size(tokenizer)
    conclude(lambda: of_sft(read_metrics(trainer.metrics_path), vocabulary), args.output_dir)
    push(args, trainer.saved)


def held_out_loss(units: Units, before: Units | None) -> dict[str, float]:
    """The metrics of held-out texts: the loss per token, and the perplexity, which is the exponential of this loss.

    units: the loss in nats and the number of tokens of each text. before: `units` as measured before training, or None.
    """

    def estimates(units: Units) -> dict[str, Estimate]:
        loss = Estimate.of(units["nats"], units["tokens"])
        return {"eval/loss": loss, "eval/perplexity": loss.exp()}

    return with_errors(estimates(units), before and estimates(before))


def load_examples(args: SFTFlags) -> tuple:
    """(tokenizer, training examples, held-out examples, fingerprints of both).

    Raises: UserError for data that cannot be used; no model is loaded yet.
    """
    tokenizer = args.read_tokenizer(args.model_name_or_path, "--model_name_or_path")
    stops = generation_stops(args.model_name_or_path, tokenizer, args.trust_remote_code)
    fit = sft_fit(tokenizer, args.max_seq_len, args.loss_on, args.overlong, stops)
    parts = args.load_rows(SFT, tokenizer, fit, held_out=args.held_out, undivided=args.sft_only_data_path)
    examples, held_out = (
        SFTExamples(rows, tokenizer, args.max_seq_len, args.loss_on, args.cache, args.overlong, stops) for rows in parts
    )
    args.steps_per_epoch(len(examples))
    return tokenizer, examples, held_out, [rows.fingerprint for rows in parts]


def first_lines(args: SFTFlags, tokenizer, examples: SFTExamples, held_out: SFTExamples, *_) -> list[str]:
    """The lines that a run prints about the data and the adapter. The arguments after `args` are the results of
    load_examples."""
    lines = supervised_lines(args, "texts", examples, held_out, tokenizer)
    return lines + adapted_lines(adapted_model(args, scorer=False)) + recurrent_lines(args)


def recurrent_lines(args: SFTFlags) -> list[str]:
    """A warning if steps 2 and 3 could not draw responses from the model."""
    try:
        check_attention(args.model_name_or_path, "--model_name_or_path", args.trust_remote_code)
    except UserError as error:
        return [f"WARNING: step 3 will refuse this model, and step 2 cannot normalise with it. {error}"]
    return []


def check(args: SFTFlags, point: ResumePoint | None = None) -> None:
    """Check files, model and machine before anything large is loaded. Raises: UserError."""
    check_run(args, resumed=point is not None and point.in_output_dir)
    check_hub(args)
    args.ds_settings()
    if args.looks_at(args.model_name_or_path):
        config = check_policy(args.model_name_or_path, "--model_name_or_path", args.trust_remote_code)
        check_positions(config, f"--model_name_or_path {args.model_name_or_path}", max_seq_len=args.max_seq_len)
        tokenizer = args.read_tokenizer(args.model_name_or_path, "--model_name_or_path")
        check_rows(tokenizer, config, args.model_name_or_path, "--model_name_or_path")
        args.check_attention(args.model_name_or_path, LANGUAGE_MODEL, "--model_name_or_path")
        adapted_model(args, scorer=False)


if __name__ == "__main__":
    leave(run(main, SFTFlags, __doc__.splitlines()[0]))
