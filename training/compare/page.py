"""The comparison as one page: table, win rates, score distributions, and all samples to look through."""

from html import escape
from pathlib import Path

from engine.whole_files import write_whole
from training.compare.bootstrap import RESAMPLES, Interval
from training.compare.measures import N, histogram
from training.compare.report import Comparison, kl_told, percent, range_told, told, verdict
from training.pages.page import Response, SampleRow, Samples, colour, document, dot, sample_data, sample_section, table


def write_page(path: Path, comparison: Comparison) -> None:
    """Write the page. Raises: OSError."""
    write_whole(path, page(comparison))


def page(comparison: Comparison) -> str:
    """The whole file."""
    shown = _shown(comparison)
    title = f"{', '.join(shown[1:])} beside {comparison.first}"
    sections = [_by_reward(comparison, reward) for reward in comparison.rewards]
    samples = _samples(comparison)
    body = "\n".join([*sections, _others(comparison), sample_section(samples)])
    return document(title, _how(comparison), body, {"samples": sample_data(samples)}, ["samples.js"])


def _shown(comparison: Comparison) -> list[str]:
    """The models' names, the first one and then the best ones: columns of samples and colours are in this order."""
    return [comparison.first, *(name for name in comparison.names if name != comparison.first)]


def _how(comparison: Comparison) -> str:
    args, each = comparison.args, comparison.args.num_samples_per_prompt
    drawn = "greedy" if args.greedy else f"temperature {args.temperature:g}, seed {args.seed}"
    samples = f", {each} samples of each" if each > 1 else ""
    return f"{len(comparison.prompts):,} held-out prompts{samples}; {drawn}; the same random numbers for all models."


def _dot(comparison: Comparison, name: str) -> str:
    return dot(name, _shown(comparison).index(name))


def _colour(comparison: Comparison, name: str) -> str:
    return colour(_shown(comparison).index(name))


def _by_reward(comparison: Comparison, reward: str) -> str:
    """What one reward says: sentences, table, win rates, distributions."""
    verdicts = []
    for name in _shown(comparison)[1:]:
        said = verdict(comparison, name, reward)
        kind = "better" if " is better" in said else "worse" if " is worse" in said else "even"
        verdicts.append(f'<li class="{kind}">{escape(said)}.</li>')
    head = ("", "mean score", f"wins against {comparison.first}", "95 % interval", "wins / ties / losses")
    rows = [_row(comparison, name, reward) for name in comparison.names]
    scores = table((*head, f"score less {comparison.first}'s", "95 % interval"), rows, f"scores by {reward}")
    return f"""<section>
<h2>By {escape(reward)}</h2>
<ul class="verdicts">{"".join(verdicts)}</ul>
{scores}
<p class="soft">± is one standard error over prompts. Intervals are paired bootstraps over prompts
({RESAMPLES:,} resamples). * says that the interval leaves out "no difference".</p>
<h3>Win rates, with 95 % intervals</h3>
{_win_rates(comparison, reward)}
<h3>Scores of all responses</h3>
{_distributions(comparison, reward)}
</section>"""


def _row(comparison: Comparison, name: str, reward: str) -> tuple[str, ...]:
    start = (_dot(comparison, name), told(comparison.measures[name].scores[reward]))
    if name == comparison.first:
        return (*start, "", "", "", "", "")
    pair = comparison.pairs[name, reward]
    wins, scores = pair.win_rate, pair.difference
    counts = f"{pair.wins:,} / {pair.ties:,} / {pair.losses:,}"
    rates = (percent(wins.value), f"{percent(wins.low)} to {percent(wins.high)}{_star(wins)}", counts)
    return (*start, *rates, f"{scores.value:+.3f}", f"{range_told(scores)}{_star(scores)}")


def _star(found: Interval) -> str:
    return "&nbsp;*" if found.differs else ""


def _win_rates(comparison: Comparison, reward: str) -> str:
    lines = []
    for name in [name for name in comparison.names if name != comparison.first]:
        wins = comparison.pairs[name, reward].win_rate
        low, value, high = (100 * share for share in (wins.low, wins.value, wins.high))
        said = f"{percent(wins.value)}, {percent(wins.low)} to {percent(wins.high)}"
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
        said = f"scores of {name}: mean {told(mean)}, from {min(column):.3f} to {max(column):.3f}"
        lines.append(
            f'<div class="name">{_dot(comparison, name)}</div>'
            f'<div class="bars" role="img" aria-label="{escape(said)}" style="--c: {_colour(comparison, name)}">{bars}'
            f'<span class="mean" style="left: {100 * (mean.value - edges[0]) / span:.2f}%"></span></div>'
            f'<div class="number">mean {told(mean)}</div>'
        )
    ends = f'<div class="axis" aria-hidden="true"><span>{edges[0]:.2f}</span><span>{edges[-1]:.2f}</span></div>'
    return f'<div class="chart">{"".join(lines)}<div></div>{ends}<div></div></div>'


def _others(comparison: Comparison) -> str:
    rows = []
    for name in comparison.names:
        found = comparison.measures[name]
        numbers = (told(found.kl), told(found.kl_per_token), told(found.tokens), percent(found.ended.value))
        rows.append((_dot(comparison, name), *numbers, percent(found.repetition), f"{found.bigrams:.3f}"))
    head = ("", "KL, nats a response", "nats a token", "tokens", "ended", "repeated", "distinct bigrams a token")
    return f"""<section>
<h2>Distance, length and variety</h2>
{table(head, rows, "KL, length and variety")}
<p class="soft">KL to {escape(comparison.first)}: {escape(kl_told(comparison.args))}. Ended: responses that came to an
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
    return Response(sample.response, scores, sample.kl, sample.tokens, sample.ended, changes)
