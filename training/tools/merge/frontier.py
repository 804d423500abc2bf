"""Measures the merged policy at each scale on held-out prompts (score, KL to the SFT model, variety), and presents the
results as a table."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.errors import UserError
from engine.models.weight_files import stored_name
from engine.reward.base import CombinedReward, EnvironmentReward, RewardSource
from training.config.reward import ENVIRONMENT, function_source, load_function, model_names, names, standardised
from training.tools.measuring import HeldOut, Measuring, tell_failures
from training.tools.merge.flags import MergeFlags
from training.tools.merge.weights import MergedWeights


@dataclass(frozen=True, slots=True)
class Point:
    """The measurements at one scale: means over the held-out responses, and the standard errors of the mean score and
    KL.

    kl: KL to the SFT model, in nats per response. bigrams: number of distinct pairs of neighbouring words, divided by
    the number of tokens. rewards: {name of a source of scores: the mean of its scores without their weight}, if there
    are several.
    """

    scale: float
    score: float
    score_se: float
    kl: float
    kl_se: float
    tokens: float
    bigrams: float
    rewards: dict[str, float] = field(default_factory=dict)


class Frontier(Measuring):
    """Holds the engines for measuring: a policy, into which the weights of each scale are loaded; the SFT model; and
    the reward models."""

    def __init__(self, args: MergeFlags, held_out: HeldOut):
        sft = args.sft_model_name_or_path
        super().__init__(args, args.engine_spec(), held_out, [sft])
        self.policy, reward = self.loaded(sft, "actor"), self._reward(args)
        self.names = [name.removeprefix("scores_") for name in reward.weights()]
        self.evaluator = self.evaluator_of(self.policy, sft, reward, self.rollouts_of(self.policy))

    def _reward(self, args: MergeFlags) -> RewardSource:
        """The source of scores: the sum of those of the reward models, of the function and of the environment."""
        models = dict(zip(model_names(args.reward_model_name_or_path), self.rewards, strict=True))
        weights = args.reward_model_weight or [1.0] * len(models)
        sources: dict[str, tuple[RewardSource, float]] = dict(zip(models, zip(self.rewards, weights), strict=True))
        if args.reward_function is not None:
            taken = [*models, ENVIRONMENT] if args.environment else list(models)
            function, (name,) = load_function(args.reward_function), names([args.reward_function], taken)
            source = function_source(function, args.reward_function, self.held_out.tokenizer, self.texts.rows)
            sources[name] = source, 1.0
        if args.environment is not None:
            sources[ENVIRONMENT] = EnvironmentReward(), 1.0
        (alone, weight), *others = sources.values()
        if not others and weight == 1.0:
            return alone
        return CombinedReward(sources, standardised=standardised(models, args.raw_reward_scores))

    def at(self, weights: MergedWeights) -> tuple[Point, list[dict]]:
        """(measurements with these weights, a row for each prompt). All ranks call this and get the same result.

        Raises: UserError if the files lack one of the policy's weights; RunStopped if scores or KL are not finite.
        """
        model = self.policy.module.model
        names = {name: stored_name(name, model, weights) for name, _ in model.named_parameters()}
        if None in names.values():
            raise UserError(
                f"{type(model).__name__}: its files do not hold all weights in the model's own form, so scales cannot "
                "be measured. Leave --data_path out, save a model with --scale, and measure that with "
                "four-engine-rlhf compare."
            )
        self.policy.take(lambda name: weights[names[name]])
        metrics, rows = self.evaluator.run(1)
        point = Point(
            scale=weights.scale,
            score=metrics["eval/score"],
            score_se=metrics.get("eval/score_se", 0.0),
            kl=metrics["eval/kl"],
            kl_se=metrics.get("eval/kl_se", 0.0),
            tokens=metrics["eval/response_length"],
            bigrams=metrics["eval/distinct_bigrams"] / max(sum(row["tokens"] for row in rows), 1),
            rewards={name: metrics[f"eval/reward_{name}"] for name in self.names},
        )
        tell_failures(metrics)
        return point, rows


def best_within(points: Iterable[Point], max_kl: float) -> Point | None:
    """The point with the best score among those with a KL of at most max_kl nats per response and a scale other than 0;
    None if there is none."""
    within = [point for point in points if point.scale != 0.0 and point.kl <= max_kl]
    return max(within, key=lambda point: point.score, default=None)


def table(points: Sequence[Point], chosen: float | None = None) -> str:
    """A text table with a line for each scale; the line of `chosen` is marked."""
    head = ("scale", "score", "", *points[0].rewards, "KL", "", "tokens", "bigrams", "")
    lines = [
        (
            f"{point.scale:g}",
            f"{point.score:.3f}",
            f"± {point.score_se:.3f}",
            *(f"{mean:.3f}" for mean in point.rewards.values()),
            f"{point.kl:.2f}".replace("-0.00", "0.00"),  # the SFT model's KL to itself is 0 up to rounding
            f"± {point.kl_se:.2f}",
            f"{point.tokens:.1f}",
            f"{point.bigrams:.3f}",
            "saved" if point.scale == chosen else "the SFT model" if point.scale == 0.0 else "",
        )
        for point in points
    ]
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    rows = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in (head, *lines)]
    note = "KL: nats a response, to the SFT model; ±: one standard error; bigrams: distinct pairs of words, a token"
    return "\n".join([*(row.rstrip() for row in rows), note])
