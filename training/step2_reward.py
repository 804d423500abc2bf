"""Step 2: a reward model, trained on pairs of a better and a worse response; or, with --step_end, a process reward
model, trained on labels of steps.

    deepspeed --num_gpus 8 --module training.step2_reward --model_name_or_path out/sft --data_path pairs.jsonl \\
        --output_dir out/reward

A record has the fields `prompt`, `chosen` and `rejected` (docs/data.md lists all forms). After training, the scores are
normalised: on responses that the SFT model samples, they have mean 0 and variance 1. The saved model can be loaded with
transformers' AutoModelForSequenceClassification. The output of that class lacks the offset: this project adds
`score_offset` of config.json to get the score.

With --step_end a record has `prompt`, `completions` (the steps) and `labels`, and the saved model is a token classifier
with two labels, as TRL's: AutoModelForTokenClassification.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import training.runtime.import_errors  # noqa: F401  imported first, to explain imports that fail
from training.runtime.first_look import first_look

if __name__ == "__main__":
    first_look("training.config.supervised:RewardFlags", __doc__)

import numpy as np
import torch
from torch import Tensor

from engine import distributed
from engine.algo.losses import pairwise_loss, pairwise_loss_from_difference
from engine.algo.masked import mean_and_variance, moments
from engine.distributed import RankGroup
from engine.engine_spec import EngineSpec, OptimizerSpec, frozen_stage
from engine.errors import RunStopped
from engine.experience import position_ids
from engine.models.attention import attention_in_words
from engine.models.checking import check_decoding, check_policy, check_rows, check_trunk, reads_texts
from engine.models.config_and_tokenizer import (
    CLASSIFIER,
    TOKEN_CLASSIFIER,
    classifier_pad_token_id,
    model_class,
    read_tokenizer,
    vocabulary_size,
)
from engine.models.loading import DTYPES, load_policy, new_scorer
from engine.reward.base import RewardModel, decoded
from engine.reward.steps import StepEnds
from engine.rlhf_engine import frozen_model, wrap_trained
from engine.rollout import SamplingConfig, build_rollouts
from engine.zero.config import EngineConfig
from engine.zero.engines import FrozenModel, TrainedModel
from training.checkpoints.resuming import Checkpoint
from training.config.supervised import RewardFlags
from training.data.examples import PairBatch, PairExamples, Prompts, collate_pairs, collate_prompts, pair_fit
from training.data.order import epoch_permutation
from training.data.record_forms import PAIRS, PROMPTS, stepwise
from training.data.row_selection import load_rows
from training.process_rewards import (
    StepsBatch,
    StepsExamples,
    collate_steps,
    held_out_steps,
    measured_steps,
    steps_fit,
)
from training.reporting.best_of import BestOf, K, measures_of
from training.reporting.guards import of_reward
from training.reporting.metrics import Accumulator
from training.reporting.sinks import REWARD_VIEW, ProgressBar
from training.reporting.standard_errors import Estimate, Units, chance_text, change_text, value_text, with_errors
from training.reward_texts import Reader, Texts, check_prompts, text_reward_model
from training.runtime import launch
from training.runtime.callbacks import Callback
from training.runtime.loop import Run
from training.runtime.models import adapted_lines, adapted_model, check_positions, generation_stops, prompt_and_answer
from training.runtime.processes import phase
from training.runtime.start_report import warnings
from training.runtime.stopping import saved_models_named
from training.supervised import (
    HeldOutExamples,
    SupervisedPlan,
    SupervisedTrainer,
    planned,
    supervised_lines,
    tell_result,
    train,
)


def main(args: RewardFlags, callbacks: Sequence[Callback] = ()) -> None:
    """The order of a run, from flags to the saved model. All ranks call this, in their process group."""
    # 1. What can be wrong is found before the model is loaded.
    plan = planned(args, callbacks, check, make_plan, first_lines)
    if plan is None:
        return

    # 2. The engine, and what is learned and measured with it.
    ds_config = args.ds_settings()
    pad = classifier_pad_token_id(plan.tokenizer)
    module = new_scorer(
        args.model_name_or_path,
        DTYPES[args.dtype],
        pad,
        args.seed,
        ds_config,
        "--model_name_or_path",
        args.dropout,
        starting_scale(args, plan.tokenizer, plan.prompts, pad) if args.normalize_before and not plan.resume else 1.0,
        args.trust_remote_code,
        attention=args.attention,
    )
    module.split(RankGroup(args.sequence_parallel_size))
    if distributed.is_main():
        print(attention_in_words(module), flush=True)
    model = wrap_trained(
        module, ds_config, args.engine_config(), args.optimizer(), args.gradient_checkpointing, args.lora()
    )
    module.model.config.score_offset = 0.0

    if args.step_end is not None:
        module.model.config.step_end = args.step_end_text  # with it the model is saved as a token classifier
    learned = pairs_learned(args, model) if args.step_end is None else steps_learned(model)

    def collate(examples):
        return learned.collate(examples, plan.tokenizer.pad_token_id)

    trainer = SupervisedTrainer(model, args=args, plan=plan, collate=collate, loss=learned.loss, count=learned.count)
    held_out = HeldOutExamples(
        model,
        args=args,
        plan=plan,
        collate=collate,
        measure=learned.measure,
        summarize=learned.summarize,
        score=lambda metrics: metrics["eval/accuracy"],
    )

    # 3. The steps, and the normalisation of the scores.
    run = Run(args, plan, trainer, held_out, REWARD_VIEW, callbacks)
    found = train(run, trainer, held_out)
    if args.step_end is not None:
        accuracy = f"{value_text(found, 'eval/accuracy')}{change_text(found, 'eval/accuracy')}"
        line = f"held-out step accuracy {accuracy}; {found['eval/good']:.3g} of the steps are good"
        run.end(partial(tell_result, line=line), of_reward)
        return
    with saved_models_named(run.saved_models):  # if normalisation fails, the message names the saved model
        normalize(args, run, model, plan)
    chance = chance_text(found, "eval/accuracy", 0.5)
    advice = f"{chance}: step 3 would follow noise; docs/metrics.md says what to try" if chance else ""
    accuracy = f"{value_text(found, 'eval/accuracy')}{change_text(found, 'eval/accuracy')}"
    margin = f"{value_text(found, 'eval/margin')} before normalisation{advice}"
    run.end(partial(tell_result, line=f"held-out pair accuracy {accuracy}; margin {margin}"), of_reward)


@dataclass(frozen=True, slots=True)
class Learned:
    """What is learned of a batch and measured on it, as in SupervisedTrainer and HeldOutExamples."""

    collate: Callable
    loss: Callable
    count: Callable
    measure: Callable
    summarize: Callable


def pairs_learned(args: RewardFlags, model: TrainedModel) -> Learned:
    """Pairs of a better and a worse response."""

    def scores_of(batch: PairBatch) -> tuple[Tensor, Tensor]:
        """(scores of all tokens, (2B, S); scores of the sequences, (2B,)). The B chosen responses come first, then the
        B rejected ones."""
        token_scores = model(batch.sequences, batch.attention_mask, position_ids(batch.attention_mask))
        return token_scores, model.module.sequence_scores(token_scores, batch.sequences, batch.attention_mask)

    def loss(batch: PairBatch, metrics: Accumulator) -> Tensor:
        token_scores, scores = scores_of(batch)
        total = pairs_loss(args.pairwise_loss, batch, token_scores, scores)
        add_pairs(metrics, total, scores)
        return total

    return Learned(
        collate=collate_pairs,
        loss=loss,
        count=lambda batch: len(batch.first_difference),
        measure=lambda batch: {"margin": margins_of(scores_of(batch)[1])},
        summarize=held_out_pairs,
    )


def steps_learned(model: TrainedModel) -> Learned:
    """Labels of steps. The scores of the tokens are log-odds."""

    def measured(batch: StepsBatch) -> dict[str, Tensor]:
        return measured_steps(model(batch.sequences, batch.attention_mask, position_ids(batch.attention_mask)), batch)

    def loss(batch: StepsBatch, metrics: Accumulator) -> Tensor:
        found = measured(batch)
        metrics.add("train/step_loss", found["loss"].detach().sum(), found["steps"].sum())
        metrics.add("train/accuracy", found["right"].sum(), found["steps"].sum())
        return found["loss"].sum()

    return Learned(
        collate=collate_steps,
        loss=loss,
        count=lambda batch: int((~batch.labels.isnan()).sum()),
        measure=measured,
        summarize=held_out_steps,
    )


def pairs_loss(form: str, batch: PairBatch, token_scores: Tensor, scores: Tensor) -> Tensor:
    """The sum of the loss over B pairs, a scalar. form: the value of --pairwise_loss. token_scores: (2B, S). scores:
    (2B,). The chosen responses come first."""
    if form == "last_token":
        return pairwise_loss(*scores.chunk(2))
    positions = torch.arange(batch.sequences.shape[1], device=batch.sequences.device)
    either = batch.attention_mask.bool().view(2, -1, len(positions)).any(0)
    counted = either & (positions >= batch.first_difference.unsqueeze(1))
    return pairwise_loss_from_difference(*token_scores.chunk(2), counted)


def add_pairs(metrics: Accumulator, total: Tensor, scores: Tensor) -> None:
    """Add the metrics of B pairs. total: the sum of their loss. scores: (2B,), the chosen responses first."""
    margins = margins_of(scores)
    metrics.add("train/pair_loss", total, len(margins))
    metrics.add("train/accuracy", (margins > 0).sum(), len(margins))
    everywhere = torch.ones_like(margins, dtype=torch.bool)
    metrics.add_moments(margins, everywhere, mean="train/margin", std="train/margin_std")


def margins_of(scores: Tensor) -> Tensor:
    """(B,): for each pair, the score of the chosen response minus the score of the rejected one. scores: (2B,)."""
    return (scores[: len(scores) // 2] - scores[len(scores) // 2 :]).detach()


def held_out_pairs(units: Units, before: Units | None) -> dict[str, float]:
    """The metrics of held-out pairs: the share of margins above 0, the loss -log sigmoid(margin), and the margin. A
    pair's margin is the score of the chosen response minus the score of the rejected one.

    units: the margin of each pair. before: the margins before training, or None.
    """

    def values(units: Units) -> dict[str, np.ndarray]:
        margins = np.asarray(units["margin"])
        with np.errstate(invalid="ignore"):  # a margin may be NaN
            losses = np.logaddexp(0.0, -margins)
        return {"eval/accuracy": margins > 0, "eval/pair_loss": losses, "eval/margin": margins}

    def estimates(units: Units) -> dict[str, Estimate]:
        return {name: Estimate.of(column) for name, column in values(units).items()}

    found = values(units)
    spreads = {"eval/pair_loss_std": found["eval/pair_loss"].std(), "eval/margin_std": found["eval/margin"].std()}
    return with_errors(estimates(units), before and estimates(before)) | {k: float(v) for k, v in spreads.items()}


# Normalisation of the scores.


def normalize(args: RewardFlags, run: Run, model: TrainedModel, plan: SupervisedPlan) -> None:
    """Normalise the scores and save the model again: its head is scaled and `score_offset` is set, so that the scores
    of the SFT model's responses to `plan.prompts` have mean 0 and variance 1. Does nothing without such prompts."""
    if plan.prompts is None:
        return
    mean, variance, responses = score_statistics(args, model, plan.tokenizer, plan.prompts)
    gain, offset = variance**-0.5, -mean * variance**-0.5
    if distributed.is_main():
        print(
            f"scores of {args.normalization_samples} responses of the SFT model: mean {mean:.3f}, standard "
            f"deviation {variance**0.5:.3f}; stored so that their mean becomes 0 and their standard deviation 1",
            *best_lines(responses),
            sep="\n",
            flush=True,
        )
    model.module.model.config.score_offset = offset
    run.save_models(edit=lambda state: state.update({"score.weight": state["score.weight"] * gain}))


def best_lines(responses: Sequence[tuple]) -> list[str]:
    """What the reward model pays for, by the best of K of these responses: (prompt, text, ended, tokens, score) each.
    Returns [] for too few. The K respond to different prompts, which their scores depend on, too."""
    groups = len(responses) // K
    if groups < 2:
        return []
    columns = (np.array(column, dtype=object) for column in zip(*responses[: groups * K], strict=True))
    prompts, texts, ended, tokens, scores = (column.reshape(groups, K) for column in columns)
    found = BestOf({"this reward model": scores.astype(float)}, measures_of(texts, prompts.ravel(), ended, tokens))
    return [
        f"the best of {K} of these responses: {found.told('this reward model')}",
        "four-engine-rlhf audit shows this of several rewards, with the texts (docs/audit.md)",
    ]


def starting_scale(args: RewardFlags, tokenizer, prompts: Prompts, pad_token_id: int | None) -> float:
    """The factor by which to multiply a new head's weights, so that the scores of the SFT model's responses have
    variance 1 before training.

    The mean of the scores is left as it is: the loss uses only the difference of two scores, which an offset does not
    change.

    Source: openai/lm-human-preferences cbfd210b, train_reward.py, `normalize_before`.
    """

    def load(path: str, dtype: torch.dtype, ds_config: dict, what: str, **how):
        return new_scorer(path, dtype, pad_token_id, args.seed, ds_config, what, **how)

    spec = EngineSpec(
        actor_path="",
        critic_path=args.model_name_or_path,
        dtype=args.dtype,
        trust_remote_code=args.trust_remote_code,
        attention=args.attention,
    )
    model = frozen_model(
        load, args.model_name_or_path, EngineConfig("reward", frozen_stage(args.engine_config())), spec
    )
    model.module.split(RankGroup(args.sequence_parallel_size))
    mean, variance, _ = score_statistics(args, model, tokenizer, prompts)
    if distributed.is_main():
        print(
            f"before training: scores of these responses have mean {mean:.3f}, standard deviation "
            f"{variance**0.5:.3f}; the new head is scaled so that this is 1",
            flush=True,
        )
    return variance**-0.5


@phase("normalising")
@torch.no_grad()
def score_statistics(
    args: RewardFlags, model: TrainedModel | FrozenModel, own_tokenizer, prompts: Prompts
) -> tuple[float, float, list[tuple]]:
    """(mean and variance of the scores that `model` gives to responses of the SFT model; these responses), over all
    ranks (all ranks call this). own_tokenizer: the reward model's.

    Raises: RunStopped if all scores are equal: no factor makes their variance 1.
    """
    if distributed.is_main():
        print(
            f"scoring {args.normalization_samples} responses of up to {args.max_answer_seq_len} tokens, to normalise: "
            "--normalization_samples, --max_answer_seq_len",
            flush=True,
        )
    tokenizer = sft_tokenizer(args, own_tokenizer)
    stops = generation_stops(args.sft_path, tokenizer, args.trust_remote_code)
    reward = RewardModel(model)
    if tokenizer is not own_tokenizer:
        texts = Texts.of(
            [prompts],
            tokenizer,
            stops,
            longest=args.max_prompt_seq_len + args.max_answer_seq_len,
            rows_at_once=args.per_device_eval_batch_size,
        )
        reward = text_reward_model(reward, own_tokenizer, texts, args.max_seq_len, "the reward model")
    spec = EngineSpec(
        actor_path=args.sft_path,
        critic_path="",
        dtype=args.dtype,
        actor_optimizer=OptimizerSpec(lr=0.0),
        trust_remote_code=args.trust_remote_code,
        attention=args.attention,
    )
    choice = EngineConfig("reference", frozen_stage(args.engine_config()))
    policy = frozen_model(load_policy, args.sft_path, choice, spec)
    rollouts = build_rollouts(
        "auto",
        policy,
        tokenizer,
        rows_at_once=args.per_device_eval_batch_size,
        row_length=args.max_prompt_seq_len + args.max_answer_seq_len,
    )
    sampling = SamplingConfig(
        max_new_tokens=args.max_answer_seq_len,
        pad_token_id=tokenizer.pad_token_id,
        stop_token_ids=stops,
        temperature=args.temperature,
        seed=args.seed,
        vocabulary_size=vocabulary_size(tokenizer),
    )
    parts, size = distributed.data_parallel_size(), args.per_device_eval_batch_size
    # With one data set the first prompts are taken. Several data sets follow each other in `prompts`, so prompts are
    # then chosen at random, in order not to take them from the first data set alone.
    several = len(args.normalization_data_path or args.data_path) > 1
    order = torch.from_numpy(epoch_permutation(len(prompts), args.seed, 0)) if several else torch.arange(len(prompts))
    totals = torch.zeros(3, dtype=torch.float64, device=distributed.device())
    starts = range(0, args.normalization_samples, size * parts)
    found: dict[int, tuple] = {}
    bar = ProgressBar(len(starts), shown={}, unit="batch") if distributed.is_main() else None
    for done, start in enumerate(starts, start=1):
        by_turns = torch.arange(start, start + size * parts).view(size, parts).T.flatten()  # in turn to the ranks
        numbers = by_turns[distributed.rank_share(size * parts)]
        indices, samples = order[numbers % len(prompts)], numbers // len(prompts)
        batch = collate_prompts([prompts[index] for index in indices.tolist()], indices, samples, sampling.pad_token_id)
        rollout = rollouts.generate(batch.to(distributed.device()), sampling)
        reward.prepare(rollout)
        scores = reward.score(rollout)
        totals += moments(scores, (numbers < args.normalization_samples).to(scores.device))
        measured = rollout.ended.tolist(), rollout.actions.sum(-1).tolist(), scores.tolist()
        rows = zip(*decoded(rollout, tokenizer), *measured, strict=True)
        found |= dict(zip(numbers.tolist(), rows, strict=True))
        if bar:
            bar.log(done, done * size * parts, {})
    if bar:
        bar.close()
    mean, variance = (value.item() for value in mean_and_variance(distributed.data_parallel_sum(totals)))
    if not variance > 0:
        raise RunStopped(
            f"all {args.normalization_samples} responses of the SFT model score {mean:.4g}: nothing can "
            "be normalised. Look at eval/accuracy and the learning rate, or give "
            "--normalization_samples 0."
        )
    every = {number: each for rank in distributed.all_gather_objects(found) for number, each in rank.items()}
    return mean, variance, [every[number] for number in range(args.normalization_samples)]


def sft_tokenizer(args: RewardFlags, own):
    """The tokenizer of the prompts and responses on which scores are normalised: the SFT model's, if the reward model
    gets them as texts; else the reward model's own."""
    if args.sft_model_name_or_path is None:
        return own
    trusted = args.trust_remote_code
    tokenizer = read_tokenizer(args.sft_path, "--sft_model_name_or_path", trust_remote_code=trusted)
    other = reads_texts(tokenizer, args.model_name_or_path, "--model_name_or_path", trusted)
    return tokenizer if other else own


def normalization_prompts(args: RewardFlags, own) -> Prompts:
    """The prompts of the responses on which scores are normalised. own: the reward model's tokenizer. Raises:
    UserError, with file and line of a record that cannot be used."""
    tokenizer = sft_tokenizer(args, own)
    rows, _ = load_rows(
        args.normalization_data_path or args.data_path,
        PROMPTS,
        tokenizer,
        phase=args.phase,
        seed=args.seed,
        split=None if args.normalization_data_path else args.data_split,
    )
    as_texts = tokenizer is not own
    prompts = Prompts(rows, tokenizer, args.max_prompt_seq_len, args.overlong, args.cache, with_dialogues=as_texts)
    if as_texts:
        reader = Reader(own, args.max_seq_len, by_step_2=True)
        check_prompts(prompts, reader, "the prompts", f"--model_name_or_path {args.model_name_or_path}")
    return prompts


# Before a model is loaded: reading data, checks, and the first printed lines.


def make_plan(args: RewardFlags, checkpoint: Checkpoint | None, inputs: Mapping[str, str | None]) -> SupervisedPlan:
    """Read the data and make the run's plan. Raises: UserError; no model is loaded yet.

    inputs: the result of `training.checkpoints.conditions.fingerprints` on rank 0.
    """
    tokenizer = args.read_tokenizer(args.model_name_or_path, "--model_name_or_path")
    answering = args.sft_path if sft_tokenizer(args, tokenizer) is tokenizer else args.model_name_or_path
    stops = generation_stops(answering, tokenizer, args.trust_remote_code)
    how = args.max_seq_len, args.cache, args.overlong, stops
    if args.step_end is None:
        fit = pair_fit(tokenizer, args.max_seq_len, args.overlong, stops)
        parts = args.load_rows(PAIRS, tokenizer, fit, held_out=args.held_out)
        examples = [PairExamples(rows, tokenizer, *how) for rows in parts]
    else:
        ends = StepEnds(tokenizer, args.step_end_text, at_end=True, what="--step_end")
        fit = steps_fit(tokenizer, ends, args.max_seq_len, args.overlong, stops)
        parts = args.load_rows(stepwise(args.step_end_text), tokenizer, fit, held_out=args.held_out)
        examples = [StepsExamples(rows, tokenizer, ends, *how) for rows in parts]
    args.steps_per_epoch(len(examples[0]))  # raises for too few examples, before prompts are read
    prompts = normalization_prompts(args, tokenizer) if args.normalizes else None
    fingerprints_of_rows = [rows.fingerprint for rows in parts]
    return SupervisedPlan.of(args, checkpoint, tokenizer, examples, fingerprints_of_rows, inputs, prompts)


def first_lines(args: RewardFlags, plan: SupervisedPlan) -> list[str]:
    """The lines that a run prints before the model is loaded."""
    lines, prompts = supervised_lines(args, "pairs" if args.step_end is None else "responses", plan), plan.prompts
    if prompts is not None and (prompts.cut or prompts.dropped):
        lines.append(f"{prompts.told('prompts')} to normalise scores on")
        lines += warnings(prompts, "--max_prompt_seq_len", args, [args.sft_path], args.max_answer_seq_len)
    return lines + adapted_lines(adapted_model(args, scorer=True))


def check(args: RewardFlags, checkpoint: Checkpoint | None = None) -> None:
    """Check files, models and machine before anything large is loaded. Raises: UserError."""
    launch.check_run(args, resumed=checkpoint is not None and checkpoint.in_output_dir)
    args.ds_settings()
    if args.looks_at(args.model_name_or_path):
        config = check_trunk(args.model_name_or_path, "--model_name_or_path", args.trust_remote_code)
        check_positions(config, f"--model_name_or_path {args.model_name_or_path}", max_seq_len=args.max_seq_len)
        tokenizer = args.read_tokenizer(args.model_name_or_path, "--model_name_or_path")
        check_rows(tokenizer, config, args.model_name_or_path, "--model_name_or_path")
        if args.step_end is not None:  # the model will be saved as a token classifier
            model_class(config, TOKEN_CLASSIFIER, args.model_name_or_path, "--model_name_or_path with --step_end")
        args.check_attention(args.model_name_or_path, CLASSIFIER, "--model_name_or_path")
        adapted_model(args, scorer=True)
    if args.normalizes and args.looks_at(args.sft_path):
        flag_name = "--sft_model_name_or_path" if args.sft_model_name_or_path else "--model_name_or_path"
        check_decoding(args.sft_path, flag_name, args.trust_remote_code)
        check_positions(
            check_policy(args.sft_path, flag_name, args.trust_remote_code),
            f"{flag_name} {args.sft_path}, whose responses the scores are normalised on (--normalization_samples),",
            **prompt_and_answer(args),
        )


def program(callbacks: Sequence[Callback] = ()) -> NoReturn:
    """Run this step with the flags of this process's command line, and end the process."""
    launch.leave(launch.run(partial(main, callbacks=callbacks), RewardFlags, __doc__))


if __name__ == "__main__":
    from training import tools

    program(tools.callbacks())
