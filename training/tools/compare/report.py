"""Shows the results of a comparison as a table for the terminal, as JSON, and as a page with all samples."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from training.reporting.standard_errors import with_error
from training.reporting.variety import N
from training.tools.compare.flags import CompareFlags
from training.tools.compare.measures import (
    Interval,
    ModelMeasures,
    PairMeasures,
    Sample,
    Value,
    change,
    histogram,
    of_model,
    of_pair,
)
from training.tools.models import Model
from training.tools.pages.page import (
    Response,
    SampleRow,
    Samples,
    colour,
    columns,
    document,
    dot,
    sample_data,
    sample_section,
)
from training.tools.pages.page import table as page_table


@dataclass(slots=True)
class Comparison:
    """The results of a comparison. The first model is the one that was given first; the others are compared with it.

    prompts: the prompts, in order. samples: {model: its samples}, equally many of each prompt. measures: {model: its
    measurements}. pairs: {(model, reward): comparison with the first model}, for all models but the first.
    """

    args: CompareFlags
    models: Sequence[Model]
    rewards: Sequence[str]
    prompts: Sequence[str]
    samples: dict[str, list[Sample]]
    measures: dict[str, ModelMeasures] = field(init=False)
    pairs: dict[tuple[str, str], PairMeasures] = field(init=False)

    def __post_init__(self):
        each, first = self.args.num_samples_per_prompt, self.samples[self.first]
        self.measures = {name: of_model(samples, each) for name, samples in self.samples.items()}
        self.pairs = {
            (name, reward): of_pair(samples, first, reward, each)
            for name, samples in self.samples.items()
            for reward in self.rewards
            if name != self.first
        }

    @property
    def first(self) -> str:
        """The name of the first model, with which the others are compared."""
        return self.models[0].name

    @property
    def names(self) -> list[str]:
        """The models' names, sorted by the first reward, the best model first."""
        return sorted(self.samples, key=lambda name: -self.measures[name].scores[self.rewards[0]].value)

    def change(self, name: str, reward: str, place: int) -> float:
        """The score of the sample at `place` minus that of the first model's sample at the same place."""
        return change(self.samples[name][place], self.samples[self.first][place], reward)


def verdict(comparison: Comparison, name: str, reward: str) -> str:
    """A sentence that says whether the model `name` is better than the first model, by this reward."""
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
    """The text tables: one for each reward, and one with the other measurements. Each of them has all models, including
    the first, sorted by score."""
    n, each = len(comparison.prompts), comparison.args.num_samples_per_prompt
    samples = f", {each} samples each" if each > 1 else ""
    lines = [f"{n:,} held-out prompts{samples}; ± is one standard error, ranges are two of them to either side"]
    for reward in comparison.rewards:
        rows = [("", reward, f"wins against {comparison.first}", "", "score less that", "")]
        for name in comparison.names:
            score, wins, rate, _, difference, limits = _scores(comparison, name, reward, star=" *", none="  ")
            rows.append((name, score, wins, rate, difference, limits))
        lines += ["", *columns(rows)]
        lines += [f"  {verdict(comparison, name, reward)}" for name in comparison.names if name != comparison.first]
    rows = [("", "KL, nats a response", "nats a token", "tokens", "ended", "repeated", "bigrams")]
    rows += [(name, *_other_measures(comparison, name)) for name in comparison.names]
    lines += ["", *columns(rows)]
    lines += ["", f"KL to {comparison.first}: {_kl_told(comparison.args)}; repeated: {N}-grams within a response"]
    return "\n".join(lines)


def _scores(comparison: Comparison, name: str, reward: str, star: str, none: str = "") -> tuple[str, ...]:
    """The cells of a model's row: its mean score; then, compared with the first model, the win rate with its interval,
    wins / ties / losses, and the difference of scores with its interval.

    star: the text that follows an interval if the difference is significant. none: the text that follows other
    intervals."""
    score = _told(comparison.measures[name].scores[reward])
    if name == comparison.first:
        return score, "", "", "", "", ""
    pair = comparison.pairs[name, reward]
    wins, scores = pair.win_rate, pair.difference
    return (
        score,
        _percent(wins.value),
        f"{_percent(wins.low)} to {_percent(wins.high)}{star if wins.differs else none}",
        f"{pair.wins:,} / {pair.ties:,} / {pair.losses:,}",
        f"{scores.value:+.3f}",
        f"{scores.low:+.3f} to {scores.high:+.3f}{star if scores.differs else none}",
    )


def _other_measures(comparison: Comparison, name: str) -> tuple[str, ...]:
    """The cells of KL per response and per token, tokens, share of ended responses, repetition, and bigrams."""
    found = comparison.measures[name]
    numbers = (_told(found.kl), _told(found.kl_per_token), _told(found.tokens), _percent(found.ended.value))
    return (*numbers, _percent(found.repetition), f"{found.bigrams:.3f}")


def _told(value: Value) -> str:
    return with_error(value.value, value.error)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _kl_told(args: CompareFlags) -> str:
    """Text that says how the KL is estimated."""
    if args.greedy:
        return "log-probs of each greedy response by its model minus those by the first, no estimate of a KL"
    return "the mean of log p(response) - log p_first(response) over the model's own samples (k1)"


def content(comparison: Comparison) -> dict:
    """All results as JSON values."""
    args, each = comparison.args, comparison.args.num_samples_per_prompt

    def interval(found: Interval) -> dict:
        return {**dataclasses.asdict(found), "differs": found.differs}

    def measured(sample: Sample) -> dict:
        found = dataclasses.asdict(sample)
        return found if sample.turns else {name: found[name] for name in found if name != "turns"}

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
            **({"environment": args.environment, "max_turns": args.max_turns} if args.environment else {}),
            "temperature": None if args.greedy else args.temperature,
            "max_prompt_seq_len": args.max_prompt_seq_len,
            "max_answer_seq_len": args.max_answer_seq_len,
            "seed": args.seed,
            "dtype": args.dtype,
            "kl": _kl_told(args),
            "ngram": N,
        },
        "models": [
            {
                "name": model.name,
                "path": model.given,
                **dataclasses.asdict(comparison.measures[model.name]),
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
                "win_rate": interval(pair.win_rate),
                "difference": interval(pair.difference),
            }
            for (name, reward), pair in comparison.pairs.items()
        ],
        "samples": [
            {
                "prompt": prompt,
                "number": number,
                "responses": {
                    name: measured(samples[place * each + number]) for name, samples in comparison.samples.items()
                },
            }
            for place, prompt in enumerate(comparison.prompts)
            for number in range(each)
        ],
    }


def page(comparison: Comparison) -> str:
    """The HTML page of the comparison."""
    shown = _shown(comparison)
    args = comparison.args
    samples = _samples(comparison)
    each = f", {args.num_samples_per_prompt} samples of each" if args.num_samples_per_prompt > 1 else ""
    drawn = "greedy" if args.greedy else f"temperature {args.temperature:g}, seed {args.seed}"
    how = f"{len(comparison.prompts):,} held-out prompts{each}; {drawn}; the same random numbers for all models."
    sections = [_by_reward(comparison, reward) for reward in comparison.rewards]
    body = "\n".join([*sections, _others(comparison), sample_section(samples)])
    title = f"{', '.join(shown[1:])} beside {comparison.first}"
    return document(title, how, body, {"samples": sample_data(samples)}, ["samples.js"])


def _shown(comparison: Comparison) -> list[str]:
    """The models' names: the first model, then the others from best to worst. Columns and colours have this order."""
    return [comparison.first, *(name for name in comparison.names if name != comparison.first)]


def _dot(comparison: Comparison, name: str) -> str:
    return dot(name, _shown(comparison).index(name))


def _colour(comparison: Comparison, name: str) -> str:
    return colour(_shown(comparison).index(name))


def _by_reward(comparison: Comparison, reward: str) -> str:
    """The section of one reward: sentences, table, win rates, distributions of scores."""
    verdicts = []
    for name in _shown(comparison)[1:]:
        said = verdict(comparison, name, reward)
        kind = "better" if " is better" in said else "worse" if " is worse" in said else "even"
        verdicts.append(f'<li class="{kind}">{escape(said)}.</li>')
    wins = (f"wins against {comparison.first}", "interval", "wins / ties / losses")
    head = ("", "mean score", *wins, f"score less {comparison.first}'s", "interval")
    rows = [(_dot(comparison, name), *_scores(comparison, name, reward, star="&nbsp;*")) for name in comparison.names]
    scores = page_table(head, rows, f"scores by {reward}")
    return f"""<section>
<h2>By {escape(reward)}</h2>
<ul class="verdicts">{"".join(verdicts)}</ul>
{scores}
<p class="soft">± is one standard error over prompts; intervals are two to either side. * says that the interval leaves
out "no difference".</p>
<h3>Win rates</h3>
{_win_rates(comparison, reward)}
<h3>Scores of all responses</h3>
{_distributions(comparison, reward)}
</section>"""


def _win_rates(comparison: Comparison, reward: str) -> str:
    lines = []
    for name in [name for name in comparison.names if name != comparison.first]:
        wins = comparison.pairs[name, reward].win_rate
        low, value, high = (100 * share for share in (wins.low, wins.value, wins.high))
        said = f"{_percent(wins.value)}, {_percent(wins.low)} to {_percent(wins.high)}"
        lines.append(
            f'<div class="name">{_dot(comparison, name)}</div>'
            f'<div class="track" role="img" aria-label="{escape(name)} wins {said}" '
            f'style="--c: {_colour(comparison, name)}"><span class="even"></span>'
            f'<span class="range" style="left: {low:.2f}%; width: {high - low:.2f}%"></span>'
            f'<span class="value" style="left: {value:.2f}%"></span></div><div class="number">{said}</div>'
        )
    axis = '<div class="axis" aria-hidden="true"><span>0 %</span><span>even</span><span>100 %</span></div>'
    return f'<div class="chart">{"".join(lines)}<div></div>{axis}<div></div></div>'


def _distributions(comparison: Comparison, reward: str) -> str:
    names = comparison.names
    columns = [[sample.scores[reward] for sample in comparison.samples[name]] for name in names]
    edges, counts = histogram(columns)
    most, span = max(map(max, counts)), edges[-1] - edges[0]
    lines = []
    for name, column, bins in zip(names, columns, counts, strict=True):
        mean = comparison.measures[name].scores[reward]
        bars = "".join(f'<i style="height: {100 * count / most:.1f}%"></i>' for count in bins)
        said = f"scores of {name}: mean {_told(mean)}, from {min(column):.3f} to {max(column):.3f}"
        lines.append(
            f'<div class="name">{_dot(comparison, name)}</div>'
            f'<div class="bars" role="img" aria-label="{escape(said)}" style="--c: {_colour(comparison, name)}">{bars}'
            f'<span class="mean" style="left: {100 * (mean.value - edges[0]) / span:.2f}%"></span></div>'
            f'<div class="number">mean {_told(mean)}</div>'
        )
    ends = f'<div class="axis" aria-hidden="true"><span>{edges[0]:.2f}</span><span>{edges[-1]:.2f}</span></div>'
    return f'<div class="chart">{"".join(lines)}<div></div>{ends}<div></div></div>'


def _others(comparison: Comparison) -> str:
    rows = [(_dot(comparison, name), *_other_measures(comparison, name)) for name in comparison.names]
    head = ("", "KL, nats a response", "nats a token", "tokens", "ended", "repeated", "distinct bigrams a token")
    return f"""<section>
<h2>Distance, length and variety</h2>
{page_table(head, rows, "KL, length and variety")}
<p class="soft">KL to {escape(comparison.first)}: {escape(_kl_told(comparison.args))}. Ended: responses that came to an
end of their own. Repeated: 1 - distinct / all {N}-grams of words within each response. Bigrams: distinct pairs of
neighbouring words over all responses.</p>
</section>"""


def _samples(comparison: Comparison) -> Samples:
    shown, each = _shown(comparison), comparison.args.num_samples_per_prompt
    rows = [
        SampleRow(prompt, place, number, [_response(comparison, name, place * each + number) for name in shown])
        for place, prompt in enumerate(comparison.prompts)
        for number in range(each)
    ]
    return Samples(shown, comparison.rewards, each, rows, "comparison.json")


def _response(comparison: Comparison, name: str, place: int) -> Response:
    sample = comparison.samples[name][place]
    changes = [comparison.change(name, reward, place) for reward in comparison.rewards]
    scores = [sample.scores[reward] for reward in comparison.rewards]
    return Response(sample.response, scores, sample.kl, sample.tokens, sample.ended, changes, sample.turns)
