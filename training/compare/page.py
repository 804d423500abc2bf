"""The comparison as one page: table, win rates, score distributions, and all samples to look through.

Nothing is fetched: style, script and data stand in the file, and its policy (CSP) forbids any request. What models say
reaches the browser as text alone, never as markup.
"""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from engine.whole_files import write_whole
from training.compare.bootstrap import RESAMPLES, Interval
from training.compare.measures import N, histogram
from training.compare.report import Comparison, kl_told, percent, range_told, told, verdict

HERE = Path(__file__).parent
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
ORDERS = {
    "change": "largest changes",
    "gain": "largest gains",
    "loss": "largest losses",
    "score": "highest scores",
    "kl": "largest KL",
    "length": "longest",
    "prompt": "as in the data",
}
KINDS = {"all": "gains, losses and ties", "gain": "gains", "loss": "losses", "tie": "ties"}


def write_page(path: Path, comparison: Comparison) -> None:
    """Write the page. Raises: OSError."""
    write_whole(path, page(comparison))


def page(comparison: Comparison) -> str:
    """The whole file."""
    shown = _shown(comparison)
    title = f"{', '.join(shown[1:])} beside {comparison.first}"
    sections = [_by_reward(comparison, reward) for reward in comparison.rewards]
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)}</title>
<style>{(HERE / "page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p class="soft">{escape(_how(comparison))}</p>
</header>
<main>
{"".join(sections)}
{_others(comparison)}
{_samples(comparison)}
</main>
<script type="application/json" id="data">{_data(comparison)}</script>
<script>{(HERE / "page.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


def _shown(comparison: Comparison) -> list[str]:
    """The models' names, the first one and then the best ones: columns of samples and colours are in this order."""
    return [comparison.first, *(name for name in comparison.names if name != comparison.first)]


def _how(comparison: Comparison) -> str:
    args, each = comparison.args, comparison.args.num_samples_per_prompt
    drawn = "greedy" if args.greedy else f"temperature {args.temperature:g}, seed {args.seed}"
    samples = f", {each} samples of each" if each > 1 else ""
    return f"{len(comparison.prompts):,} held-out prompts{samples}; {drawn}; the same random numbers for all models."


def _dot(comparison: Comparison, name: str) -> str:
    return f'<span class="dot" style="--c: {_colour(comparison, name)}" aria-hidden="true"></span>{escape(name)}'


def _colour(comparison: Comparison, name: str) -> str:
    return f"var(--c{_shown(comparison).index(name) % 8})"


def _by_reward(comparison: Comparison, reward: str) -> str:
    """What one reward says: sentences, table, win rates, distributions."""
    verdicts = []
    for name in _shown(comparison)[1:]:
        said = verdict(comparison, name, reward)
        kind = "better" if " is better" in said else "worse" if " is worse" in said else "even"
        verdicts.append(f'<li class="{kind}">{escape(said)}.</li>')
    head = ("", "mean score", f"wins against {comparison.first}", "95 % interval", "wins / ties / losses")
    rows = [_row(comparison, name, reward) for name in comparison.names]
    table = _table((*head, f"score less {comparison.first}'s", "95 % interval"), rows, f"scores by {reward}")
    return f"""<section>
<h2>By {escape(reward)}</h2>
<ul class="verdicts">{"".join(verdicts)}</ul>
{table}
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


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    """A table; cells are markup, the head and the caption texts."""
    heads = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = [f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>' for row in rows]
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f'<caption class="hidden">{escape(caption)}</caption><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


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
{_table(head, rows, "KL, length and variety")}
<p class="soft">KL to {escape(comparison.first)}: {escape(kl_told(comparison.args))}. Ended: responses that came to an
end of their own. Repeated: 1 - distinct / all {N}-grams of words within each response. Bigrams: distinct pairs of
neighbouring words over all responses.</p>
</section>"""


def _samples(comparison: Comparison) -> str:
    shown = _shown(comparison)
    models = {"any": "all", **{str(place): name for place, name in enumerate(shown) if place}}
    rewards = {str(place): name for place, name in enumerate(comparison.rewards)}
    nav = (
        '<nav aria-label="{}"><button type="button" data-go="-1">previous</button>'
        '<button type="button" data-go="1">next</button><span id="{}" {}></span></nav>'
    )
    return f"""<section id="samples">
<h2>Samples</h2>
<p class="soft">Words that {escape(comparison.first)} does not have at their place are <mark>marked</mark>; with one
model chosen also <mark class="gone">those</mark> that it left out. Keys: / searches, j and k go from sample to sample,
n and p from page to page.</p>
<form id="controls" role="search" aria-label="samples">
<label>search prompts and responses<input id="search" type="search" autocomplete="off"></label>
{_select("model", f"beside {comparison.first}", models)}
{_select("kind", "show", KINDS)}
{_select("reward", "by reward", rewards)}
<label>change of at least<input id="least" type="number" min="0" step="any" value="0"></label>
{_select("order", "first", ORDERS)}
</form>
{nav.format("pages", "told", 'role="status" aria-live="polite"')}
<div id="list"></div>
{nav.format("pages, below", "told-below", "")}
<noscript>The samples need JavaScript; comparison.json has them, too.</noscript>
</section>"""


def _select(name: str, label: str, options: dict[str, str]) -> str:
    inner = "".join(f'<option value="{value}">{escape(text)}</option>' for value, text in options.items())
    return f'<label>{escape(label)}<select id="{name}">{inner}</select></label>'


def _data(comparison: Comparison) -> str:
    """The samples as JSON that can stand within a script element: without any "<"."""
    shown, each = _shown(comparison), comparison.args.num_samples_per_prompt
    rows = [
        {
            "prompt": prompt,
            "place": place,
            "number": number,
            "responses": [_response(comparison, name, place * each + number) for name in shown],
        }
        for place, prompt in enumerate(comparison.prompts)
        for number in range(each)
    ]
    found = {"names": shown, "rewards": list(comparison.rewards), "each": each, "rows": rows}
    return json.dumps(found, separators=(",", ":")).replace("<", "\\u003c")


def _response(comparison: Comparison, name: str, place: int) -> list:
    """As page.js reads it: text, scores, KL, tokens, whether it ended, and changes against the first model."""
    sample = comparison.samples[name][place]
    changes = [round(comparison.change(name, reward, place), 6) for reward in comparison.rewards]
    scores = [round(sample.scores[reward], 6) for reward in comparison.rewards]
    return [sample.response, scores, round(sample.kl, 4), sample.tokens, sample.ended, changes]
