"""Score, KL to the SFT model and variety of a policy at each scale, on held-out prompts."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from torch.utils.data import ConcatDataset
from transformers import PreTrainedModel

from engine.algorithms import Algorithm, Dialect, end_token_id
from engine.errors import UserError
from engine.experience_maker import ExperienceMaker
from engine.models.loading import load_policy, load_scorer
from engine.models.reading import vocabulary_size
from engine.reference import EngineReference
from engine.reward.agreed import AgreedReward
from engine.reward.base import RewardSource
from engine.reward.combined import CombinedReward
from engine.reward.function import FunctionReward
from engine.reward.model import RewardModel
from engine.rlhf_engine import frozen_model
from engine.rollout import SamplingConfig, build_rollouts
from engine.zero.communication import init
from engine.zero.engines import FrozenModel
from training.data.forms import PROMPTS, SFT
from training.data.prompts import Prompts, prompt_fit
from training.data.rows import load_rows
from training.flags.user_function import is_source, load_function
from training.merge.flags import MergeFlags
from training.merge.weights import MergedWeights
from training.program.model_files import generation_stops
from training.reporting.evaluation import Evaluator
from training.reporting.variety import distinct_bigrams, known_share, words_of

DIALECT = Dialect(name="merge", critic_start="none", critic_lr=0.0, advantage_estimator="rloo", samples_per_prompt=2)
"""Responses up to EOS, and log-probs at the temperature that they are drawn at. Nothing is learned by its estimator."""


@dataclass(frozen=True, slots=True)
class Point:
    """What was measured at one scale: means over the held-out responses, and standard errors of score and KL.

    kl: nats a response, to the SFT model. bigrams: distinct pairs of words, a token. known: share of the words that
    occur in the prompts or the known texts.
    """

    scale: float
    score: float
    score_se: float
    kl: float
    kl_se: float
    tokens: float
    bigrams: float
    known: float


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The prompts that are answered, the tokenizer, what stands before them for a reward function, known words."""

    prompts: Prompts
    tokenizer: object
    rows: ConcatDataset
    first_index: int
    known: frozenset[str]


def read_held_out(args: MergeFlags, tokenizer) -> HeldOut:
    """The held-out prompts that step 3 has with the same flags of data, and the words that are known.

    Raises: UserError for data that are not there, cannot be read or are too few.
    """
    fit = prompt_fit(tokenizer, args.max_prompt_seq_len, args.overlong)
    parts = args.load_rows(
        PROMPTS,
        tokenizer,
        fit,
        held_out=args.num_eval_prompts,
        eval_limit=args.num_eval_prompts,
        held_out_flag="--num_eval_prompts",
    )
    rest, held_out = (
        Prompts(rows, tokenizer, args.max_prompt_seq_len, args.overlong, args.cache) if len(rows) else None
        for rows in parts
    )
    assert held_out is not None, "load_rows gives as many as are asked for, or says that they are too few"
    known = words_of(row["prompt"] for rows in parts for row in rows)
    for path in args.known_texts_path:
        texts, _ = load_rows(path, SFT, tokenizer, phase=args.phase, seed=args.seed)
        known |= words_of(text for row in texts for text in row.values())
    rows = ConcatDataset([prompts.rows for prompts in (rest, held_out) if prompts is not None])
    return HeldOut(held_out, tokenizer, rows, len(rest) if rest is not None else 0, frozenset(known))


class Measuring:
    """A policy whose weights are exchanged for those of each scale, its SFT model, what scores, and the prompts."""

    def __init__(self, args: MergeFlags, held_out: HeldOut):
        init()
        spec, tokenizer = args.engine_spec(), held_out.tokenizer
        configs = {config.role: config for config in spec.engine_configs}
        self.policy: FrozenModel = frozen_model(load_policy, spec.actor_path, configs["actor"], spec)
        reference = EngineReference(frozen_model(load_policy, spec.actor_path, configs["reference"], spec))
        model = None
        if spec.reward_path is not None:
            model = RewardModel(frozen_model(load_scorer, spec.reward_path, configs["reward"], spec))
        rollouts = build_rollouts(
            "auto",
            self.policy,
            tokenizer,
            others=[*reference.models, *(model.models if model else [])],
            rows_at_once=args.per_device_eval_batch_size,
            row_length=args.max_prompt_seq_len + args.max_answer_seq_len,
        )
        dialect = dataclasses.replace(DIALECT, temperature=args.temperature)
        algorithm = Algorithm(
            dialect, pad_token_id=tokenizer.pad_token_id, end_token_id=end_token_id(tokenizer, dialect)
        )
        maker = ExperienceMaker(
            actor=self.policy,
            critic=None,
            reference=reference,
            reward=reward_of(args, held_out, model),
            algorithm=algorithm,
            micro_batch_size=args.per_device_eval_batch_size,
            exact_sampler=args.dtype == "fp32" and rollouts.computes_as_actor,
            padded=not self.policy.module.packs,
        )
        self.evaluator = Evaluator(
            held_out.prompts,
            rollouts=rollouts,
            experience_maker=maker,
            sampling=SamplingConfig.of(
                dialect,
                generation_stops(spec.actor_path, tokenizer, args.trust_remote_code),
                str(args.dtype),
                max_new_tokens=args.max_answer_seq_len,
                pad_token_id=tokenizer.pad_token_id,
                stop_strings=tuple(args.stop),
                seed=args.seed,
                vocabulary_size=vocabulary_size(tokenizer),
            ),
            tokenizer=tokenizer,
            first_index=held_out.first_index,
        )
        self.known = held_out.known

    def at(self, weights: MergedWeights) -> tuple[Point, list[dict]]:
        """What is measured with these weights, and a row for each prompt, the same on all ranks (all call this).

        Raises: UserError where the policy has a weight that files do not name; RunStopped for scores or KL that are not
        finite.
        """
        names = stored_names(self.policy.module.model, weights)
        self.policy.take(lambda name: weights[names[name]])
        metrics, rows = self.evaluator.run(1)
        responses = [row["response"] for row in rows]
        tokens = max(sum(row["tokens"] for row in rows), 1)
        return (
            Point(
                scale=weights.scale,
                score=metrics["eval/score"],
                score_se=metrics.get("eval/score_se", 0.0),
                kl=metrics["eval/kl"],
                kl_se=metrics.get("eval/kl_se", 0.0),
                tokens=metrics["eval/response_length"],
                bigrams=distinct_bigrams(responses) / tokens,
                known=known_share(responses, self.known),
            ),
            rows,
        )


def stored_names(model: PreTrainedModel, weights: MergedWeights) -> dict[str, str]:
    """By which names the files have a model's parameters. Raises: UserError where they are arranged otherwise."""
    trunk, found = f"{model.base_model_prefix}.", {}
    for name, _ in model.named_parameters():
        names = (name, name.removeprefix(trunk), f"{trunk}{name}")  # as transformers looks for them
        stored = next((other for other in names if other in weights), None)
        if stored is None:
            raise UserError(
                f"{type(model).__name__}: its files do not hold {name} as the model has it, so that a scale cannot be "
                "measured. Leave --data_path out, save a model with --scale, and give that to step 3's evaluation."
            )
        found[name] = stored
    return found


def reward_of(args: MergeFlags, held_out: HeldOut, model: RewardModel | None) -> RewardSource:
    """What scores responses: the reward model, the function, or the sum of both."""
    if args.reward_function is None:
        assert model is not None, "MergeFlags.validate"
        return model
    function = load_function(args.reward_function)
    source: RewardSource
    if is_source(function):
        source = AgreedReward.made(function, held_out.tokenizer, f"the reward source {args.reward_function}")
    else:
        source = FunctionReward(function, held_out.tokenizer, held_out.rows, args.reward_function)
    return source if model is None else CombinedReward({"model": (model, 1.0), "function": (source, 1.0)})


def best_within(points: Iterable[Point], max_kl: float) -> Point | None:
    """The point with the best score within so many nats a response, without the SFT model's; None if there is none."""
    within = [point for point in points if point.scale != 0.0 and point.kl <= max_kl]
    return max(within, key=lambda point: point.score, default=None)
