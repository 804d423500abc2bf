"""Measures the merged policy at each scale on held-out prompts (score, KL to the SFT model, variety), and presents the
results as a table."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.errors import UserError
from engine.models.weight_files import stored_name
from training.config.models import SCORE
from training.config.reward import build_reward, load_functions
from training.reporting.evaluation import held_out_number
from training.tools.measuring import HeldOut, Measuring, tell_failures
from training.tools.merge.flags import MergeFlags
from training.tools.merge.weights import MergedWeights
from training.tools.pages.page import columns


@dataclass(frozen=True, slots=True)
class Point:
    """The measurements at one scale: means over the held-out responses, and the standard errors of the mean score and
    KL.

    kl: KL to the SFT model, in nats per response. bigrams: number of distinct pairs of neighbouring words, divided by
    the number of tokens. chosen_by: the number by which a scale is chosen. rewards, rewards_se: {name of a source of
    scores: the mean of its scores without their weight, and its standard error}, if there are several.
    """

    scale: float
    score: float
    score_se: float
    kl: float
    kl_se: float
    tokens: float
    bigrams: float
    chosen_by: float
    rewards: dict[str, float] = field(default_factory=dict)
    rewards_se: dict[str, float] = field(default_factory=dict)


class Frontier(Measuring):
    """Holds the engines for measuring: a policy, into which the weights of each scale are loaded; the SFT model; and
    the reward models."""

    def __init__(self, args: MergeFlags, held_out: HeldOut):
        sft = args.sft_model_name_or_path
        super().__init__(args, args.spec_of(sft), held_out, [sft])
        self.choose_by, self.kl_coef = args.choose_by or SCORE, args.kl_coef
        self.policy = self.loaded(sft, "actor")
        reward = build_reward(args, load_functions(args), self.rewards, held_out.tokenizer, self.texts.rows)
        self.names = [name.removeprefix("scores_") for name in reward.weights()]
        rollouts = self.rollouts_of(self.policy)
        if args.overlap_rewards:
            rollouts.finished = reward.begin
        self.evaluator = self.evaluator_of(self.policy, sft, reward, rollouts)

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
            chosen_by=held_out_number(metrics, self.choose_by) - self.kl_coef * metrics["eval/kl"],
            rewards={name: metrics[f"eval/reward_{name}"] for name in self.names},
            rewards_se={name: metrics.get(f"eval/reward_{name}_se", 0.0) for name in self.names},
        )
        tell_failures(metrics)
        return point, rows


def best_within(points: Iterable[Point], max_kl: float | None) -> Point | None:
    """The point with the largest `chosen_by` among those with a KL of at most max_kl nats per response, if that is not
    None, and a scale other than 0; None if there is none."""
    within = [point for point in points if point.scale != 0.0 and (max_kl is None or point.kl <= max_kl)]
    return max(within, key=lambda point: point.chosen_by, default=None)


def table(points: Sequence[Point], chosen: float | None = None) -> str:
    """A text table with a line for each scale; the line of `chosen` is marked."""
    names = points[0].rewards
    head = ("scale", "score", "", *(cell for name in names for cell in (name, "")), "KL", "", "tokens", "bigrams", "")
    lines = [
        (
            f"{point.scale:g}",
            f"{point.score:.3f}",
            f"± {point.score_se:.3f}",
            *(cell for name in names for cell in (f"{point.rewards[name]:.3f}", f"± {point.rewards_se[name]:.3f}")),
            f"{point.kl:.2f}".replace("-0.00", "0.00"),  # the SFT model's KL to itself is 0 up to rounding
            f"± {point.kl_se:.2f}",
            f"{point.tokens:.1f}",
            f"{point.bigrams:.3f}",
            "saved" if point.scale == chosen else "the SFT model" if point.scale == 0.0 else "",
        )
        for point in points
    ]
    note = "KL: nats a response, to the SFT model; ±: one standard error; bigrams: distinct pairs of words, a token"
    return "\n".join([*columns([head, *lines]), note])
