"""Makes the report of one or several runs: an HTML page with held-out metrics, health, curves, samples and settings.

    page(read_runs([Path("out/ppo")]))

`read_runs` reads metrics.jsonl, the samples, and run.json, the record of how a run was started.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path

from engine.algorithms import get_dialect
from engine.errors import UserError
from engine.files import parsed_json, without_links
from training.reporting.health import health
from training.reporting.run_record import METRICS_FILE, RUN_FILE, read_metrics, read_run_record
from training.reporting.sinks import PPO_VIEW, REWARD_VIEW, SFT_VIEW, View, averaged_view
from training.reporting.standard_errors import ENDINGS, cell, change_cell, evaluations, noisy, scored_otherwise
from training.reporting.summary import PART
from training.tools.pages.page import Response, SampleRow, Samples, document, dot, sample_data, sample_section, table

NUMBER = int | float
SHOWN = {"prompt": str, "response": str, "score": NUMBER, "kl": NUMBER, "tokens": NUMBER}  # fields of a sample
BEFORE, AFTER = "before", "after"
VIEWS = {"step 1": SFT_VIEW, "step 2": REWARD_VIEW, "step 3": averaged_view(PPO_VIEW)}
POINTS = 1500  # largest number of points of a curve; few screens have more pixels in a row
SEVERITIES = {"alarm": "worse", "look": "even", "fine": "better"}


@dataclass(frozen=True, slots=True)
class Run:
    """A run. kind: which training step's run it is, a key of VIEWS. rows: the rows of metrics.jsonl. starts: the
    entries of run.json, one for each start, the latest last. samples: {name of a file of samples, without its ending:
    its rows}, in the order of steps. missing: descriptions of files that the folder lacks."""

    name: str
    folder: Path
    kind: str
    rows: Sequence[Mapping]
    starts: Sequence[Mapping]
    samples: Mapping[str, Sequence[Mapping]] = field(default_factory=dict)
    missing: Sequence[str] = ()

    @property
    def start(self) -> Mapping:
        """The latest start; {} without run.json."""
        return self.starts[-1] if self.starts else {}

    @property
    def flags(self) -> Mapping:
        """{name: value} of the latest start's flags."""
        return self.start.get("flags") or {}

    @property
    def view(self) -> View:
        """The View that lists the metrics of the run's charts. Each part of the score, and the likelihood if it
        is one, has a held-out chart."""
        view, names = VIEWS[self.kind], {name: None for row in self.rows if "eval/score" in row for name in row}
        parts = [name for name in names if name.startswith(PART) and not name.endswith(ENDINGS)]
        charts = {f"reward {name.removeprefix(PART)}, held out": name for name in parts}
        if "eval/likelihood" in names:
            charts["likelihood, nats a token, held out"] = "eval/likelihood"
        return replace(view, held_out=view.held_out | ({"parts of the score": charts} if charts else {}))

    @property
    def steps(self) -> int:
        """The last step in metrics.jsonl."""
        return max((row["step"] for row in self.rows), default=0)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read the run in each folder. A run's name is the last part of its folder's path, or as many last parts as make
    all names differ.

    Raises: UserError if a folder has no run, if a folder is given twice, or if the runs are of different training
    steps.
    """
    resolved = [without_links(folder) for folder in folders]
    if len(set(resolved)) < len(resolved):
        twice = next(str(folder) for folder, path in zip(folders, resolved) if resolved.count(path) > 1)
        raise UserError(f"{twice} is given twice. Give each run once.")
    runs = [read_run(folder, name) for folder, name in zip(folders, _told_apart(resolved), strict=True)]
    if len({run.kind for run in runs}) > 1:
        kinds = ", ".join(f"{run.name} of {run.kind}" for run in runs)
        raise UserError(f"the runs are of different steps ({kinds}). Give runs of one step.")
    return runs


def kind_of(rows: Sequence[Mapping]) -> str:
    """The training step whose program wrote these metrics, a key of VIEWS."""
    names = {name for row in rows for name in row}
    if any(name.startswith(("objective/", "critic_pretrain/")) for name in names) or "eval/kl" in names:
        return "step 3"
    return "step 2" if {"train/pair_loss", "eval/pair_loss", "train/step_loss", "eval/step_loss"} & names else "step 1"


def _told_apart(paths: Sequence[Path]) -> list[str]:
    """A name for each path: its last n parts, with the smallest n for which all names differ."""
    count = 1
    while len({path.parts[-count:] for path in paths}) < len(paths):
        count += 1
    return ["/".join(path.parts[-count:]) for path in paths]


def read_run(folder: Path, name: str) -> Run:
    """The run in a folder. Raises: UserError if there is no metrics.jsonl with a step."""
    metrics = folder / METRICS_FILE
    if not metrics.is_file():
        raise UserError(f"{folder}: holds no {METRICS_FILE}. Give the --output_dir of a run.")
    rows = read_metrics(metrics)
    if not rows:
        raise UserError(f"{metrics}: holds no step yet. Wait for the first one.")
    bare = next((row["step"] for row in rows if "samples" not in row), None)
    if bare is not None:
        raise UserError(f"{metrics}: step {bare} does not say after how many samples. Remove its line.")
    missing = []
    record = folder / RUN_FILE
    starts = read_run_record(record) if record.is_file() else []
    if not starts:
        missing.append(f"{RUN_FILE}: it is not known how the run was started")
    samples = read_samples(folder / "samples")
    if any("eval/score" in row for row in rows):
        missing += [f"samples/{each}.jsonl" for each in (BEFORE, AFTER) if each not in samples]
    return Run(name, folder, kind_of(rows), rows, starts, samples, missing)


def read_samples(folder: Path) -> dict[str, list[dict]]:
    """{file name without its ending: rows} of the held-out samples: before, the steps in between, after. Raises:
    UserError."""
    found = {path.stem: path for path in sorted(folder.glob("*.jsonl")) if path.is_file()}
    order = [BEFORE, *(name for name in found if re.fullmatch(r"step_\d+", name, re.ASCII)), AFTER]
    return {name: _sample_rows(found[name]) for name in order if name in found}


def _sample_rows(path: Path) -> list[dict]:
    """The fields SHOWN of each line, and its turns if it has them. A last line without a newline is left out, since it
    is still being written."""
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break
        try:
            row = parsed_json(line)
            if not all(isinstance(row[name], kind) for name, kind in SHOWN.items()):
                raise TypeError
            if not isinstance(row.get("turns", []), list):
                raise TypeError
            rows.append({name: row[name] for name in (*SHOWN, "turns") if name in row})
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}, line {number}: is no sample. Correct the file, or move it away.") from None
    return rows


def named(name: str) -> str:
    """The text with which the page names a file of samples."""
    return f"step {int(name.removeprefix('step_')):,}" if name.startswith("step_") else name


def scored_as_first(run: Run, name: str) -> bool:
    """Whether the samples in the file `name` were scored by the same reward as the run's first samples."""
    step = int(name.removeprefix("step_")) if name.startswith("step_") else 0 if name == BEFORE else run.steps
    rows = [row for row in run.rows if "eval/score" in row and row["step"] <= step]
    return not (rows and scored_otherwise(rows[-1]))


def page(runs: Sequence[Run]) -> str:
    """The HTML page. runs: at least one, all of one training step."""
    charts = list(_charts(runs))
    samples = _samples(runs)
    body = [_missing(runs), _held_out(runs), _health(runs), _curves(charts)]
    data: dict[str, object] = {"curves": [chart["data"] for chart in charts]}
    scripts = ["charts.js"]
    if samples is not None:
        body.append(sample_section(samples))
        data["samples"] = sample_data(samples)
        scripts.append("samples.js")
    body += [_choices(runs), _origin(runs)]
    title = f"Report: {', '.join(run.name for run in runs)}"
    told = "; ".join(
        f"{run.name}: {run.kind}, {run.steps:,} steps, {run.rows[-1]['samples']:,} samples" for run in runs
    )
    return document(title, told, "\n".join(filter(None, body)), data, scripts)


def _missing(runs: Sequence[Run]) -> str:
    lines = [f"<li>{escape(run.name)}: missing: {escape(each)}</li>" for run in runs for each in run.missing]
    return f'<ul class="verdicts">{"".join(lines)}</ul>' if lines else ""


def _measured(run: Run) -> list[tuple[str, str]]:
    """(title, metric) for each metric that is measured on held-out examples."""
    return [(title, metric) for charts in run.view.held_out.values() for title, metric in charts.items()]


def _held_out(runs: Sequence[Run]) -> str:
    """A table with each run's held-out metrics before and after training, and their changes."""
    rows = []
    for title, metric in _measured(runs[0]):
        if metric.endswith("_change"):
            continue
        for place, run in enumerate(runs):
            first, last = evaluations(run.rows, [metric for _, metric in _measured(run)])
            if metric not in last and metric not in first:
                continue
            if metric.startswith(("eval/score", PART)) and scored_otherwise(last):  # by other rewards
                first = {}
            change = change_cell(first, last, metric) + " (noise)" * noisy(last, metric)
            cells = [cell(first, metric), cell(last, metric), change]
            name = [dot(run.name, place + 1)] if len(runs) > 1 else []
            rows.append([escape(title), *name, *cells, f"{last.get('step', 0):,}"])
    if not rows:
        return "<section><h2>Held out</h2><p>Nothing was held out, or nothing was measured yet.</p></section>"
    head = ["", *(["run"] if len(runs) > 1 else []), "before", "after", "change", "at step"]
    return f"""<section>
<h2>Held out, before and after</h2>
{table(head, rows, "held-out metrics before and after")}
<p class="soft">± is one standard error; that of a change is paired, example by example. (noise): the change is within
two standard errors.</p>
</section>"""


def _health(runs: Sequence[Run]) -> str:
    """The health findings of PPO runs: what the metrics show, and what to try."""
    if runs[0].kind != "step 3":
        return ""
    lines = [
        f'<li class="{SEVERITIES[finding.severity]}">'
        f"{f'{escape(run.name)}: ' if len(runs) > 1 else ''}<strong>{escape(finding.severity)}</strong> "
        f"{escape(finding.text)}</li>"
        for run in runs
        for finding in health(run.rows)
    ]
    return f'<section><h2>Health</h2><ul class="verdicts">{"".join(lines)}</ul></section>' if lines else ""


def _charts(runs: Sequence[Run]) -> Iterator[dict]:
    """The section, title and data of each chart for which one of the runs has values."""
    view = runs[0].view
    held_out = {section: {t: (metric,) for t, metric in charts.items()} for section, charts in view.held_out.items()}
    for section, charts in {**held_out, **view.charts}.items():
        for title, metrics in charts.items():
            lines = list(_lines(runs, metrics))
            if lines:
                yield {"section": section, "title": title, "data": {"title": title, "lines": lines}}


def _lines(runs: Sequence[Run], metrics: Sequence[str]) -> Iterator[dict]:
    """The lines of a chart. With several runs, a line's colour shows the run and its dashes show the metric; with one
    run, the colour shows the metric."""
    for place, run in enumerate(runs):
        for number, metric in enumerate(metrics):
            points = [
                (row["step"], row[metric], row.get(f"{metric}_se"))
                for row in run.rows
                if math.isfinite(row.get(metric, math.nan))
            ]
            if points:
                one = len(runs) == 1
                label = metric if one else run.name if len(metrics) == 1 else f"{run.name}, {metric}"
                colours = number + 1 if one else place + 1
                yield {"label": label, "color": colours % 8, "dash": 0 if one else number, "points": thinned(points)}


def thinned(points: Sequence[tuple]) -> list[tuple]:
    """About POINTS of the points at most, evenly spaced and always including the last one."""
    every = -(-len(points) // POINTS)
    kept = list(points[::every])
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def _curves(charts: Sequence[Mapping]) -> str:
    sections: dict[str, list[str]] = {}
    for number, chart in enumerate(charts):
        made = f'<div id="chart-{number}"><h4>{escape(chart["title"])}</h4></div>'
        sections.setdefault(chart["section"], []).append(made)
    made = "".join(
        f'<h3>{escape(name)}</h3><div class="charts">{"".join(each)}</div>' for name, each in sections.items()
    )
    return f"""<section>
<h2>Curves</h2>
<p class="soft">Drag over a part of a curve to zoom in. When a curve has the focus, arrow keys read its values, + and -
zoom, and 0 shows all. Bars are two standard errors to either side. metrics.jsonl has all numbers.</p>
{made}
<noscript>The curves need JavaScript. metrics.jsonl has their numbers.</noscript>
</section>"""


Answers = Mapping[tuple[str, int], Mapping]
"""Samples in the form that `_by_prompt` returns."""


def _samples(runs: Sequence[Run]) -> Samples | None:
    """The responses to the held-out prompts, side by side. Each response shows how its score differs from that of its
    run's first response to the same prompt, unless another reward scored that first response. None if there are no two
    files of samples with common prompts."""
    columns = list(_one_runs_columns(runs[0]) if len(runs) == 1 else _last_columns(runs))
    shared = [key for key in next(iter(columns), ("", {}, None))[1] if all(key in rows for _, rows, _ in columns)]
    if len(columns) < 2 or not shared:
        return None
    rows = []
    for place, key in enumerate(shared):
        responses = []
        for _, answers, start in columns:
            row, first = answers[key], (start or {}).get(key)
            change = None if first is None else row["score"] - first["score"]
            numbers = row["kl"], row["tokens"], True, [change]
            responses.append(Response(row["response"], [row["score"]], *numbers, row.get("turns", ())))
        rows.append(SampleRow(key[0], place, 0, responses))
    return Samples([name for name, _, _ in columns], ["score"], 1, rows, f"samples/{AFTER}.jsonl")


def _one_runs_columns(run: Run) -> Iterator[tuple[str, Answers, Answers | None]]:
    """For each file of a run's samples: its name, its responses, and the responses with which their scores are
    compared."""
    first = _by_prompt(next(iter(run.samples.values()), []))
    for name, rows in run.samples.items():
        yield named(name), _by_prompt(rows), first if scored_as_first(run, name) else None


def _last_columns(runs: Sequence[Run]) -> Iterator[tuple[str, Answers, Answers | None]]:
    """The columns for several runs. The first has samples from before training, of the first run that has any; the
    others have the latest samples of each run. They have the form of `_one_runs_columns`."""
    start = next((_by_prompt(run.samples[BEFORE]) for run in runs if BEFORE in run.samples), None)
    if start is not None:
        yield (BEFORE if BEFORE not in {run.name for run in runs} else f"{BEFORE} training"), start, start
    for run in runs:
        *_, last = ("", *run.samples)
        if last not in ("", BEFORE):
            own = _by_prompt(run.samples[BEFORE]) if BEFORE in run.samples and scored_as_first(run, last) else None
            yield run.name, _by_prompt(run.samples[last]), own


def _by_prompt(rows: Sequence[Mapping]) -> dict[tuple[str, int], Mapping]:
    """{(prompt, number of earlier rows with the same prompt): row}. Data may contain a prompt several times."""
    seen: Counter[str] = Counter()
    found = {}
    for row in rows:
        found[row["prompt"], seen[row["prompt"]]] = row
        seen[row["prompt"]] += 1
    return found


def departures(resolved: Mapping) -> list[tuple[str, object, object]]:
    """(field, the named dialect's value, the run's value) for each field in which the run differs from the dialect that
    it names."""
    try:
        usual = get_dialect(str(resolved.get("name")))
    except UserError:  # a dialect that the run's own script defined
        return []
    plain = {name: getattr(usual, name) for name in resolved if hasattr(usual, name)}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}
    return [(name, plain[name], value) for name, value in resolved.items() if name in plain and plain[name] != value]


def _choices(runs: Sequence[Run]) -> str:
    """The section of settings: the fields in which a run differs from its dialect, the differences between several
    runs, and, folded, all flags."""
    made = []
    for place, run in enumerate(runs):
        dialect = run.start.get("dialect")
        if dialect:
            rows = [[escape(name), _value(usual), _value(own)] for name, usual, own in departures(dialect)]
            made.append(f"<h3>{dot(run.name, place + 1)}: dialect {escape(str(dialect.get('name')))}</h3>")
            made.append(
                table(["field", "the dialect's", "this run's"], rows, "departures") if rows else "<p>as it is</p>"
            )
    if len(runs) > 1:
        rows = [
            [escape(name), *(_value(flat(run).get(name)) for run in runs)]
            for name in dict.fromkeys(name for run in runs for name in flat(run))
            if len({_value(flat(run).get(name)) for run in runs}) > 1
        ]
        made.append("<h3>What differs between the runs</h3>")
        made.append(table(["", *(run.name for run in runs)], rows, "differences") if rows else "<p>Nothing.</p>")
    for run in runs:
        rows = [[escape(name), _value(value)] for name, value in flat(run).items()]
        made.append(
            f"<details><summary>all flags and fields of {escape(run.name)}</summary>"
            f"{table(['', 'value'], rows, f'flags and fields of {run.name}')}</details>"
        )
    return f'<section class="wrap"><h2>Configuration</h2>{"".join(made)}</section>'


def flat(run: Run) -> dict[str, object]:
    """{name: value} of all flags, and of the dialect's fields as `dialect/NAME`."""
    fields = {f"dialect/{name}": value for name, value in (run.start.get("dialect") or {}).items()}
    return {**run.flags, **fields}


def _value(value: object) -> str:
    return "-" if value is None else escape(str(value))


def _origin(runs: Sequence[Run]) -> str:
    """The section with the command, commit, versions and machine of each start."""
    made = []
    for run in runs:
        for number, start in enumerate(run.starts, 1):
            again = f", start {number} of {len(run.starts)}" if len(run.starts) > 1 else ""
            git = start.get("git")
            own = " with changes of its own" if git and git.get("dirty") else ""
            commit = f"{git['commit']}{own}" if git and "commit" in git else "not known"
            versions = ", ".join(
                f"{name} {version}" for name, version in (start.get("versions") or {}).items() if version
            )
            machine = start.get("machine") or {}
            rows = [
                ["started", _value(start.get("started"))],
                ["commit", escape(commit)],
                ["versions", escape(versions)],
                ["ranks", f"{machine.get('world_size', '-')}, {_value(machine.get('accelerator'))}"],
            ]
            made.append(
                f"<h3>{escape(run.name)}{again}</h3><pre>{escape(start.get('command') or '')}</pre>"
                + table(["", ""], rows, f"how {run.name} was made")
            )
    return f'<section class="wrap"><h2>Made with</h2>{"".join(made)}</section>' if made else ""
