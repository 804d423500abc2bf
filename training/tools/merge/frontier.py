"""Measures the merged policy at each scale on held-out prompts (score, KL to the SFT model, variety), and presents the
results as a table."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.errors import UserError
from engine.models.weight_files import stored_name
from engine.reward.base import CombinedReward, RewardModel, RewardSource
from training.config.reward import MODEL, function_source, load_function, names
from training.tools.measuring import HeldOut, Measuring
from training.tools.merge.flags import MergeFlags
from training.tools.merge.weights import MergedWeights


@dataclass(frozen=True, slots=True)
class Point:
    """The measurements at one scale: means over the held-out responses, and the standard errors of the mean score and
    KL.

    kl: KL to the SFT model, in nats per response. bigrams: number of distinct pairs of neighbouring words, divided by
    the number of tokens.
    """

    scale: float
    score: float
    score_se: float
    kl: float
    kl_se: float
    tokens: float
    bigrams: float


class Frontier(Measuring):
    """Holds the engines for measuring: a policy, into which the weights of each scale are loaded; the SFT model; and
    the reward model if there is one."""

    def __init__(self, args: MergeFlags, held_out: HeldOut):
        super().__init__(args, args.engine_spec(), held_out)
        sft = args.sft_model_name_or_path
        self.policy = self.loaded(sft, "actor")
        self.evaluator = self.evaluator_of(self.policy, sft, self._reward(args), self.rollouts_of(self.policy))

    def _reward(self, args: MergeFlags) -> RewardSource:
        """The source of scores: the reward model, the function, or the sum of both."""
        model = RewardModel(self.scorers[0]) if self.scorers else None
        if args.reward_function is None:
            assert model is not None, "MergeFlags.validate"
            return model
        function, held_out = load_function(args.reward_function), self.held_out
        source = function_source(function, args.reward_function, held_out.tokenizer, held_out.rows)
        if model is None:
            return source
        return CombinedReward({MODEL: (model, 1.0), names([args.reward_function])[0]: (source, 1.0)})

    def at(self, weights: MergedWeights) -> tuple[Point, list[dict]]:
        """(measurements with these weights, a row for each prompt). All ranks call this and get the same result.

        Raises: UserError if the files lack one of the policy's weights; RunStopped if scores or KL are not finite.
        """
        model = self.policy.module.model
        names = {name: stored_name(name, model, weights) for name, _ in model.named_parameters()}
        if None in names.values():
            raise UserError(
                f"{type(model).__name__}: its files do not hold all weights in the model's own form, so scales cannot "
                "be measured. Leave --data_path out, save a model with --scale, and measure that with python -m "
                "training.compare."
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
        )
        return point, rows


def best_within(points: Iterable[Point], max_kl: float) -> Point | None:
    """The point with the best score among those with a KL of at most max_kl nats per response and a scale other than 0;
    None if there is none."""
    within = [point for point in points if point.scale != 0.0 and point.kl <= max_kl]
    return max(within, key=lambda point: point.score, default=None)


def table(points: Sequence[Point], chosen: float | None = None) -> str:
    """A text table with a line for each scale; the line of `chosen` is marked."""
    head = ("scale", "score", "", "KL", "", "tokens", "bigrams", "")
    lines = [
        (
            f"{point.scale:g}",
            f"{point.score:.3f}",
            f"± {point.score_se:.3f}",
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
