"""What step 2 scales scores by: their mean and variance on responses that the SFT model samples."""

import torch

from engine import distributed
from engine.algo.masked import mean_and_variance, moments
from engine.engine_spec import EngineSpec, OptimizerSpec, frozen_stage
from engine.errors import RunStopped
from engine.models.loading import load_policy, new_scorer
from engine.models.reading import vocabulary_size
from engine.rlhf_engine import frozen_model
from engine.rollout import SamplingConfig, build_rollouts
from engine.zero.config import EngineConfig
from engine.zero.engines import FrozenModel, TrainedModel
from training.config.supervised import RewardFlags
from training.data.examples import Prompts, collate_prompts
from training.data.forms import PROMPTS
from training.data.order import epoch_permutation
from training.data.rows import load_rows
from training.reporting.sinks import ProgressBar
from training.runtime.models import generation_stops
from training.runtime.processes import phase


def starting_scale(args: RewardFlags, tokenizer, prompts: Prompts, pad_token_id: int | None) -> float:
    """What the new head is multiplied by, so that it scores the SFT model's responses with variance 1 from the start.

    Their mean stays what it is: pairs are compared by differences, which an offset does not change.

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
    mean, variance = score_statistics(args, model, tokenizer, prompts)
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
    args: RewardFlags, model: TrainedModel | FrozenModel, tokenizer, prompts: Prompts
) -> tuple[float, float]:
    """Mean and variance of this model's scores of responses that the SFT model samples, over all ranks.

    Raises: RunStopped if all scores are the same, which nothing can scale to variance 1.
    """
    if distributed.is_main():
        print(
            f"scoring {args.normalization_samples} responses of up to {args.max_answer_seq_len} tokens, to normalise: "
            "--normalization_samples, --max_answer_seq_len",
            flush=True,
        )
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
        training=0,
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
    starts = range(0, args.normalization_samples, size * world)
    bar = ProgressBar(len(starts), shown={}, unit="batch") if distributed.is_main() else None
    for done, start in enumerate(starts, start=1):
        by_turns = torch.arange(start, start + size * world).view(size, world).T.flatten()  # one by one to each rank
        numbers = by_turns[distributed.rank_share(size * world)]
        indices, samples = order[numbers % len(prompts)], numbers // len(prompts)
        batch = collate_prompts([prompts[index] for index in indices.tolist()], indices, samples, sampling.pad_token_id)
        rollout = rollouts.generate(batch.to(distributed.device()), sampling)
        token_scores = model(rollout.sequences, rollout.attention_mask, rollout.position_ids)
        scores = model.module.sequence_scores(token_scores, rollout.sequences, rollout.attention_mask)
        totals += moments(scores, (numbers < args.normalization_samples).to(scores.device))
        if bar:
            bar.log(done, done * size * world, {})
    if bar:
        bar.close()
    mean, variance = (value.item() for value in mean_and_variance(distributed.all_reduce_sum(totals)))
    if not variance > 0:
        raise RunStopped(
            f"all {args.normalization_samples} responses of the SFT model score {mean:.4g}: nothing can "
            "be normalised. Look at eval/accuracy and the learning rate, or give "
            "--normalization_samples 0."
        )
    return mean, variance


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
    return Prompts(rows, tokenizer, args.max_prompt_seq_len, args.overlong, args.cache)
