"""What was found, as a table for the terminal and as JSON."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.whole_files import write_whole
from training.compare.bootstrap import LEVEL, RESAMPLES, Interval
from training.compare.flags import CompareFlags
from training.compare.measures import (
    ModelMeasures,
    N,
    PairMeasures,
    Sample,
    Value,
    change,
    histogram,
    of_model,
    of_pair,
)
from training.compare.models import Model
from training.reporting.standard_errors import with_error

DATA, PAGE = "comparison.json", "comparison.html"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Models, best first by the first reward, and what was measured of each and of each beside the first one given.

    prompts: in their order. samples: by model, of each prompt as many. measures: by model. pairs: by (model, reward),
    without the first.
    """

    args: CompareFlags
    models: Sequence[Model]
    rewards: Sequence[str]
    prompts: Sequence[str]
    samples: dict[str, list[Sample]]
    measures: dict[str, ModelMeasures] = field(init=False)
    pairs: dict[tuple[str, str], PairMeasures] = field(init=False)

    def __post_init__(self):
        each, seed = self.args.num_samples_per_prompt, self.args.seed
        first = self.samples[self.first]
        set_once = object.__setattr__
        set_once(self, "measures", {name: of_model(samples, each) for name, samples in self.samples.items()})
        pairs = {
            (name, reward): of_pair(samples, first, reward, each, seed)
            for name, samples in self.samples.items()
            for reward in self.rewards
            if name != self.first
        }
        set_once(self, "pairs", pairs)

    @property
    def first(self) -> str:
        """The name of the model that the others are compared with."""
        return self.models[0].name

    @property
    def names(self) -> list[str]:
        """Of the models, the best first."""
        return sorted(self.samples, key=lambda name: -self.measures[name].scores[self.rewards[0]].value)

    def change(self, name: str, reward: str, place: int) -> float:
        """Of the sample at a place, how its score differs from the first model's there."""
        return change(self.samples[name][place], self.samples[self.first][place], reward)


def verdict(comparison: Comparison, name: str, reward: str) -> str:
    """Whether a model is better than the first by a reward, in a sentence."""
    pair, first = comparison.pairs[name, reward], comparison.first
    wins, scores = pair.win_rate, pair.difference
    if not wins.differs and not scores.differs:
        if not pair.wins + pair.losses:
            return f"{name} and {first} tie on every response"
        return f"{name} and {first} do not differ by more than chance"
    if wins.differs and scores.differs and (wins.value > 0.5) != (scores.value > 0.0):
        often = "wins more often" if wins.value > 0.5 else "wins less often"
        mean = "a higher mean score" if scores.value > 0.0 else "a lower mean score"
        return f"{name} {often} than {first}, and yet has {mean}"
    better = wins.value > 0.5 if wins.differs else scores.value > 0.0
    only = (
        "" if wins.differs and scores.differs else " by its win rate alone" if wins.differs else " in mean score alone"
    )
    return f"{name} is {'better' if better else 'worse'} than {first}{only}"


def table(comparison: Comparison) -> str:
    """A table for each reward, and one of what else was measured; the first model's row comes where its score puts
    it."""
    n, each = len(comparison.prompts), comparison.args.num_samples_per_prompt
    samples = f", {each} samples each" if each > 1 else ""
    lines = [f"{n:,} held-out prompts{samples}; ± is one standard error, ranges are 95 % intervals"]
    for reward in comparison.rewards:
        rows = [("", reward, f"wins against {comparison.first}", "", "score less that", "")]
        rows += [_row(comparison, name, reward) for name in comparison.names]
        lines += ["", *columns(rows)]
        lines += [f"  {verdict(comparison, name, reward)}" for name in comparison.names if name != comparison.first]
    rows = [("", "KL, nats a response", "nats a token", "tokens", "ended", "repeated", "bigrams")]
    for name in comparison.names:
        found = comparison.measures[name]
        numbers = (told(found.kl), told(found.kl_per_token), told(found.tokens), percent(found.ended.value))
        rows.append((name, *numbers, percent(found.repetition), f"{found.bigrams:.3f}"))
    lines += ["", *columns(rows)]
    lines += ["", f"KL to {comparison.first}: {kl_told(comparison.args)}; repeated: {N}-grams within a response"]
    return "\n".join(lines)


def _row(comparison: Comparison, name: str, reward: str) -> tuple[str, ...]:
    score = told(comparison.measures[name].scores[reward])
    if name == comparison.first:
        return name, score, "", "", "", ""
    pair = comparison.pairs[name, reward]
    wins, scores = pair.win_rate, pair.difference
    rate = f"{percent(wins.low)} to {percent(wins.high)}{star(wins)}"
    return name, score, percent(wins.value), rate, f"{scores.value:+.3f}", f"{range_told(scores)}{star(scores)}"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose first row is its head, the first column to the left and numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def told(value: Value) -> str:
    """A mean with its standard error."""
    return with_error(value.value, value.error)


def percent(share: float) -> str:
    """A share as 12.3 %."""
    return f"{100 * share:.1f} %"


def range_told(found: Interval) -> str:
    """The ends of an interval."""
    return f"{found.low:+.3f} to {found.high:+.3f}"


def star(found: Interval) -> str:
    """What marks an interval that leaves out the value of no difference."""
    return " *" if found.differs else "  "


def kl_told(args: CompareFlags) -> str:
    """How KL was estimated."""
    if args.greedy:
        return "log-probs of each greedy response by its model minus those by the first, no estimate of a KL"
    return "the mean of log p(response) - log p_first(response) over the model's own samples (k1)"


def content(comparison: Comparison) -> dict:
    """Everything, for JSON."""
    args, each = comparison.args, comparison.args.num_samples_per_prompt
    scores = {
        reward: histogram([[sample.scores[reward] for sample in comparison.samples[name]] for name in comparison.names])
        for reward in comparison.rewards
    }
    return {
        "first": comparison.first,
        "order": comparison.names,
        "rewards": list(comparison.rewards),
        "how": {
            "prompts": len(comparison.prompts),
            "samples_per_prompt": each,
            "data": args.eval_data_path or args.data_path,
            "reward_models": args.reward_model_name_or_path,
            "reward_functions": args.reward_function,
            "temperature": None if args.greedy else args.temperature,
            "max_prompt_seq_len": args.max_prompt_seq_len,
            "max_answer_seq_len": args.max_answer_seq_len,
            "seed": args.seed,
            "dtype": args.dtype,
            "kl": kl_told(args),
            "ngram": N,
            "resamples": RESAMPLES,
            "level": LEVEL,
        },
        "models": [
            {
                "name": model.name,
                "path": model.given,
                **dataclasses.asdict(comparison.measures[model.name]),
                "histograms": {
                    reward: {"edges": edges, "counts": counts[comparison.names.index(model.name)]}
                    for reward, (edges, counts) in scores.items()
                },
            }
            for model in comparison.models
        ],
        "pairs": [
            {
                "model": name,
                "first": comparison.first,
                "reward": reward,
                "verdict": verdict(comparison, name, reward),
                **dataclasses.asdict(pair),
                "win_rate": _interval(pair.win_rate),
                "difference": _interval(pair.difference),
            }
            for (name, reward), pair in comparison.pairs.items()
        ],
        "samples": [
            {
                "prompt": prompt,
                "number": number,
                "responses": {
                    name: dataclasses.asdict(samples[place * each + number])
                    for name, samples in comparison.samples.items()
                },
            }
            for place, prompt in enumerate(comparison.prompts)
            for number in range(each)
        ],
    }


def _interval(found: Interval) -> dict:
    return {**dataclasses.asdict(found), "differs": found.differs}


def write_json(path: Path, comparison: Comparison) -> None:
    """Write everything. Raises: OSError."""
    write_whole(path, json.dumps(content(comparison), indent=1, ensure_ascii=False) + "\n")
