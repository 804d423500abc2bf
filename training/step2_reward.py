"""Step 2: the reward model, from pairs of a better and a worse response.

    deepspeed --num_gpus 8 training/step2_reward.py --model_name_or_path out/sft --data_path pairs.jsonl \\
        --output_dir out/reward

Records hold `prompt`, `chosen` and `rejected` (docs/data.md has all forms). After training, scores are normalised to
mean 0 and variance 1 on responses that the SFT model samples. What is saved opens with
AutoModelForSequenceClassification; its score plus `score_offset` of config.json is ours.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine import distributed
from engine.algo.losses import pairwise_loss, pairwise_loss_from_difference
from engine.algo.masked import mean_and_variance, moments
from engine.errors import RunStopped
from engine.experience import position_ids
from engine.models.checking import check_policy, check_rows, check_trunk, check_vocabularies
from engine.models.loading import DTYPES, load_policy, new_scorer
from engine.models.reading import read_tokenizer, vocabulary_size
from engine.rlhf_engine import EngineSpec, OptimizerSpec, frozen_model, frozen_stage, wrap_trained
from engine.rollout import SamplingConfig, build_rollouts
from engine.zero.config import EngineConfig
from engine.zero.engines import FrozenModel, TrainedModel
from training.data.forms import PAIRS, PROMPTS
from training.data.order import epoch_permutation
from training.data.pair_examples import PairBatch, PairExamples, collate_pairs
from training.data.prompts import Prompts, collate_prompts
from training.data.rows import load_rows
from training.flags.supervised_arguments import RewardFlags
from training.program import dry_run
from training.program.agreement import agreed, checked
from training.program.ending import models_told
from training.program.model_files import check_positions, generation_stops
from training.program.shared_folder import check_shared
from training.program.startup import check_run, leave, run
from training.reporting import views
from training.reporting.metrics import Accumulator
from training.reporting.metrics_file import read_metrics
from training.reporting.verdict import conclude, of_reward
from training.supervised import SupervisedTrainer


def main(args: RewardFlags) -> None:
    """Check, load, train, normalise, save."""
    checked(lambda: check(args))
    if args.dry_run:
        dry_run.report_supervised(args, load_examples)
        return
    check_shared(args.output_dir)
    tokenizer, examples, held_out, prompts = agreed(lambda: load_examples(args))
    ds_config = args.ds_settings()
    pad = None if tokenizer.pad_token_id == tokenizer.eos_token_id else tokenizer.pad_token_id
    module = new_scorer(
        args.model_name_or_path,
        DTYPES[args.dtype],
        pad,
        args.seed,
        ds_config,
        "--model_name_or_path",
        args.dropout,
        starting_scale(args, tokenizer, prompts, pad) if args.normalize_before else 1.0,
        args.trust_remote_code,
    )
    model = wrap_trained(module, ds_config, args.engine_config(), args.optimizer(), args.gradient_checkpointing)
    trainer = RewardTrainer(model, args, examples, held_out, tokenizer)
    if distributed.is_main():
        print(
            f"{len(examples)} pairs ({examples.truncated} truncated, {examples.dropped} dropped), {len(held_out)} "
            f"held out; {trainer.total_steps} steps on {distributed.world_size()} ranks",
            flush=True,
        )
    module.model.config.score_offset = 0.0
    with models_told(trainer.saved):  # what was trained is kept whatever becomes of its normalisation
        found = trainer.fit()
        normalize(args, trainer, prompts)
        trainer.end(
            f"held-out pair accuracy {found['eval/accuracy']:.3f}, margin {found['eval/margin']:.3f} before "
            "normalisation"
        )
    conclude(lambda: of_reward(read_metrics(trainer.metrics_path), len(held_out)), args.output_dir)


def normalize(args: RewardFlags, trainer: "RewardTrainer", prompts: Prompts | None) -> None:
    """Save the model once more, with what makes its scores of the SFT model's responses have mean 0 and variance 1."""
    model, tokenizer = trainer.model, trainer.tokenizer
    if prompts is None:
        return
    mean, variance = score_statistics(args, model, tokenizer, prompts)
    gain, offset = variance**-0.5, -mean * variance**-0.5
    if distributed.is_main():
        print(
            f"scores of {args.normalization_samples} responses of the SFT model: mean {mean:.3f}, standard "
            f"deviation {variance**0.5:.3f}; stored so that they become 0 and 1",
            flush=True,
        )
    model.module.model.config.score_offset = offset
    trainer.save(edit=lambda state: state.update({"score.weight": state["score.weight"] * gain}))


class RewardTrainer(SupervisedTrainer):
    """The supervised loop over pairs."""

    def __init__(
        self, model: TrainedModel, args: RewardFlags, examples: PairExamples, held_out: PairExamples, tokenizer
    ):
        super().__init__(
            model,
            args=args,
            examples=examples,
            held_out=held_out,
            loss=self._loss,
            evaluate=self._evaluate,
            collate=lambda pairs: collate_pairs(pairs, tokenizer.pad_token_id),
            count=lambda batch: len(batch.first_difference),
            view=views.REWARD,
            tokenizer=tokenizer,
        )

    def _scores(self, batch: PairBatch) -> tuple[Tensor, Tensor]:
        """Token scores (2B, S) and sequence scores (2B,), chosen first."""
        token_scores = self.model(batch.sequences, batch.attention_mask, position_ids(batch.attention_mask))
        return token_scores, self.model.module.sequence_scores(token_scores, batch.sequences, batch.attention_mask)

    def _loss(self, batch: PairBatch, metrics: Accumulator) -> Tensor:
        token_scores, scores = self._scores(batch)
        if self.args.pairwise_loss == "last_token":
            total = pairwise_loss(*scores.chunk(2))
        else:
            slots = torch.arange(batch.sequences.shape[1], device=batch.sequences.device)
            either = batch.attention_mask.bool().view(2, -1, len(slots)).any(0)
            total = pairwise_loss_from_difference(
                *token_scores.chunk(2), either & (slots >= batch.first_difference.unsqueeze(1))
            )
        metrics.add("train/loss", total, self.count(batch))
        self._add_margins("train", scores, metrics)
        return total

    def _evaluate(self, batch: PairBatch, metrics: Accumulator) -> None:
        self._add_margins("eval", self._scores(batch)[1], metrics)

    def _add_margins(self, prefix: str, scores: Tensor, metrics: Accumulator) -> None:
        margins = (scores[: len(scores) // 2] - scores[len(scores) // 2 :]).detach()
        metrics.add(f"{prefix}/accuracy", (margins > 0).sum(), len(margins))
        everywhere = torch.ones_like(margins, dtype=torch.bool)
        if prefix == "eval":
            metrics.add_moments(-F.logsigmoid(margins.double()), everywhere, mean="eval/loss", std="eval/loss_std")
        metrics.add_moments(margins, everywhere, mean=f"{prefix}/margin", std=f"{prefix}/margin_std")


def starting_scale(args: RewardFlags, tokenizer, prompts: Prompts, pad_token_id: int | None) -> float:
    """What the new head is multiplied by, so that it scores the SFT model's responses with variance 1 from the start.

    Their mean stays what it is: pairs are compared by differences, which an offset does not change.

    Source: openai/lm-human-preferences cbfd210b, train_reward.py, `normalize_before`.
    """

    def load(path: str, dtype: torch.dtype, ds_config: dict, what: str, trust_remote_code: bool):
        return new_scorer(path, dtype, pad_token_id, args.seed, ds_config, what, trust_remote_code=trust_remote_code)

    spec = EngineSpec(
        actor_path="",
        critic_path=args.model_name_or_path,
        dtype=args.dtype,
        trust_remote_code=args.trust_remote_code,
    )
    model = frozen_model(
        load, args.model_name_or_path, EngineConfig("reward", frozen_stage(args.engine_config())), spec
    )
    mean, variance = score_statistics(args, model, tokenizer, prompts)
    if distributed.is_main():
        print(
            f"before training: scores of these responses have mean {mean:.3f}, standard deviation "
            f"{variance**0.5:.3f}; the new head is scaled so that this is 1",
            flush=True,
        )
    return variance**-0.5


@torch.no_grad()
def score_statistics(
    args: RewardFlags, model: TrainedModel | FrozenModel, tokenizer, prompts: Prompts
) -> tuple[float, float]:
    """Mean and variance of this model's scores of responses that the SFT model samples, over all ranks.

    Raises: RunStopped if all scores are the same, which nothing can scale to variance 1.
    """
    spec = EngineSpec(
        actor_path=args.sft_path,
        critic_path="",
        dtype=args.dtype,
        actor_optimizer=OptimizerSpec(lr=0.0),
        trust_remote_code=args.trust_remote_code,
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
        stop_token_ids=generation_stops(args.sft_path, tokenizer, args.trust_remote_code),
        temperature=args.temperature,
        seed=args.seed,
        vocabulary_size=vocabulary_size(tokenizer),
    )
    world, size = distributed.world_size(), args.per_device_eval_batch_size
    # The first prompts of one data set; of several, which stand one behind the other, some of each.
    several = len(args.normalization_data_path or args.data_path) > 1
    order = torch.from_numpy(epoch_permutation(len(prompts), args.seed, 0)) if several else torch.arange(len(prompts))
    totals = torch.zeros(3, dtype=torch.float64, device=distributed.device())
    for start in range(0, args.normalization_samples, size * world):
        by_turns = torch.arange(start, start + size * world).view(size, world).T.flatten()  # one by one to each rank
        numbers = by_turns[distributed.rank_share(size * world)]
        indices, samples = order[numbers % len(prompts)], numbers // len(prompts)
        batch = collate_prompts([prompts[index] for index in indices.tolist()], indices, samples, sampling.pad_token_id)
        rollout = rollouts.generate(batch.to(distributed.device()), sampling)
        token_scores = model(rollout.sequences, rollout.attention_mask, rollout.position_ids)
        scores = model.module.sequence_scores(token_scores, rollout.sequences, rollout.attention_mask)
        totals += moments(scores, (numbers < args.normalization_samples).to(scores.device))
    mean, variance = (value.item() for value in mean_and_variance(distributed.all_reduce_sum(totals)))
    if not variance > 0:
        raise RunStopped(
            f"all {args.normalization_samples} responses of the SFT model score {mean:.4g}: nothing can "
            "be normalised. Look at eval/accuracy and the learning rate, or give "
            "--normalization_samples 0."
        )
    return mean, variance


def load_examples(args: RewardFlags) -> tuple:
    """Tokenizer, training pairs, held-out ones, and prompts to normalise on (or None).

    Raises UserError before a model is loaded.
    """
    tokenizer = read_tokenizer(
        args.model_name_or_path, "--model_name_or_path", trust_remote_code=args.trust_remote_code
    )
    examples, held_out = (
        PairExamples(rows, tokenizer, args.max_seq_len, args.cache)
        for rows in args.load_rows(PAIRS, tokenizer, held_out=args.held_out)
    )
    args.steps_per_epoch(len(examples))
    return tokenizer, examples, held_out, normalization_prompts(args, tokenizer) if args.normalization_samples else None


def normalization_prompts(args: RewardFlags, tokenizer) -> Prompts:
    """The prompts whose responses normalise the scores; raises UserError with file and line."""
    rows, _ = load_rows(
        args.normalization_data_path or args.data_path,
        PROMPTS,
        tokenizer,
        phase=args.phase,
        seed=args.seed,
        split=None if args.normalization_data_path else args.data_split,
    )
    return Prompts(rows, tokenizer, args.max_prompt_seq_len, cache=args.cache)


def check(args: RewardFlags) -> None:
    """What can be wrong with files, models and machine, before anything large is loaded."""
    check_run(args)
    args.ds_settings()
    if args.looks_at(args.model_name_or_path):
        config = check_trunk(args.model_name_or_path, "--model_name_or_path", args.trust_remote_code)
        check_positions(config, f"--model_name_or_path {args.model_name_or_path}", max_seq_len=args.max_seq_len)
        tokenizer = read_tokenizer(
            args.model_name_or_path, "--model_name_or_path", trust_remote_code=args.trust_remote_code
        )
        check_rows(tokenizer, config, args.model_name_or_path, "--model_name_or_path")
    if args.normalization_samples and args.looks_at(args.sft_path):
        flag_name = "--sft_model_name_or_path" if args.sft_model_name_or_path else "--model_name_or_path"
        check_positions(
            check_policy(args.sft_path, flag_name, args.trust_remote_code),
            f"{flag_name} {args.sft_path}",
            max_prompt_seq_len=args.max_prompt_seq_len,
            max_answer_seq_len=args.max_answer_seq_len,
        )
        if args.looks_at(args.model_name_or_path):
            check_vocabularies(
                read_tokenizer(args.sft_path, flag_name, trust_remote_code=args.trust_remote_code),
                args.model_name_or_path,
                "--model_name_or_path",
                args.trust_remote_code,
            )


if __name__ == "__main__":
    leave(run(main, RewardFlags, __doc__.splitlines()[0]))
