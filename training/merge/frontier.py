"""Score, KL to the SFT model and variety of a policy at each scale, on held-out prompts."""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.errors import UserError
from engine.models.loading import load_policy, load_scorer
from engine.reference import EngineReference
from engine.reward.base import RewardSource
from engine.reward.combined import CombinedReward
from engine.reward.model import RewardModel
from engine.rlhf_engine import frozen_model
from engine.zero.communication import init
from engine.zero.engines import FrozenModel
from training.flags.reward_functions import MODEL, names
from training.flags.user_function import function_source, load_function
from training.measuring import HeldOut, evaluator_of, policy_measures, rollouts_of, stored_names
from training.merge.flags import MergeFlags
from training.merge.weights import MergedWeights


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


class Measuring:
    """A policy whose weights are exchanged for those of each scale, its SFT model, what scores, and the prompts."""

    def __init__(self, args: MergeFlags, held_out: HeldOut):
        init()
        spec = args.engine_spec()
        configs = {config.role: config for config in spec.engine_configs}
        self.policy: FrozenModel = frozen_model(load_policy, spec.actor_path, configs["actor"], spec)
        reference = EngineReference(frozen_model(load_policy, spec.actor_path, configs["reference"], spec))
        model = None
        if spec.reward_path is not None:
            model = RewardModel(frozen_model(load_scorer, spec.reward_path, configs["reward"], spec))
        others = [*reference.models, *(model.models if model else [])]
        rollouts = rollouts_of(args, self.policy, held_out.tokenizer, others)
        reward = reward_of(args, held_out, model)
        self.evaluator = evaluator_of(args, self.policy, reference, reward, held_out, spec.actor_path, rollouts)
        self.known = held_out.known

    def at(self, weights: MergedWeights) -> tuple[Point, list[dict]]:
        """What is measured with these weights, and a row for each prompt, the same on all ranks (all call this).

        Raises: UserError where the policy has a weight that files do not name; RunStopped for scores or KL that are not
        finite.
        """
        model = self.policy.module.model
        names = stored_names(model, weights)
        if names is None:
            raise UserError(
                f"{type(model).__name__}: its files do not hold all weights as the model has them, so that a scale "
                "cannot be measured. Leave --data_path out, save a model with --scale, and give that to python -m "
                "training.compare."
            )
        self.policy.take(lambda name: weights[names[name]])
        metrics, rows = self.evaluator.run(1)
        found = policy_measures(metrics, rows, self.known)
        known, bigrams = found.pop("known_words"), found.pop("distinct_bigrams")
        return Point(scale=weights.scale, bigrams=bigrams, known=known, **found), rows


def reward_of(args: MergeFlags, held_out: HeldOut, model: RewardModel | None) -> RewardSource:
    """What scores responses: the reward model, the function, or the sum of both."""
    if args.reward_function is None:
        assert model is not None, "MergeFlags.validate"
        return model
    function = load_function(args.reward_function)
    source = function_source(function, args.reward_function, held_out.tokenizer, held_out.rows)
    if model is None:
        return source
    return CombinedReward({MODEL: (model, 1.0), names([args.reward_function])[0]: (source, 1.0)})


def best_within(points: Iterable[Point], max_kl: float) -> Point | None:
    """The point with the best score within so many nats a response, without the SFT model's; None if there is none."""
    within = [point for point in points if point.scale != 0.0 and point.kl <= max_kl]
    return max(within, key=lambda point: point.score, default=None)
