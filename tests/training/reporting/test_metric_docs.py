"""docs/metrics.md and its pages list the metrics that the code writes: all of them, each once, and no others."""

import ast
import functools
import re
from collections import Counter
from pathlib import Path

from engine.rollout.conversations import COUNTED
from training.reporting.standard_errors import ENDINGS, Estimate, with_errors

ROOT = Path(__file__).parents[3]
GROUPS = "objective|policy|value|critic_pretrain|advantages|returns|rollout|time|checkpoint|memory|eval|train|reward"
ADDING = {
    "add",
    "add_sum",
    "add_max",
    "add_min",
    "add_moments",
    "add_explained_variance",
    "add_slope",
}  # an Accumulator's methods

# Names that are put together: the form in the code, with {} for what is filled in, and what it becomes.
SCORE_PARTS = ("scores_model", "scores_function", "length_penalty")
COUNTS = sorted({*COUNTED} - {"responses", "environment_seconds"})
EVALUATED = (
    *("score", "score_std", "kl", "response_length", "distinct_bigrams", "distinct_responses"),
    *("compressed_bytes", "new_words", "likelihood"),
    *SCORE_PARTS,
    *("reward_model", "reward_function"),
    *COUNTS,
)
FAMILIES = {
    "{}/{}": {f"{group}/{name}" for group in ("rollout", "critic_pretrain") for name in COUNTS},
    "time/{}_environments": {f"time/{group}_environments" for group in ("rollout", "eval", "critic_pretrain")},
    "{}/grad_norm": {"policy/grad_norm", "value/grad_norm"},
    "{}/lr": {"policy/lr", "value/lr"},
    "{}/skipped": {"policy/skipped", "value/skipped"},
    "{}/loss_scale": {"policy/loss_scale", "value/loss_scale"},
    "critic_pretrain/{}": {
        f"critic_pretrain/{name}"
        for name in (
            *("explained_variance", "loss", "slope", "bias", "mean", "scores", "response_length"),
            *("skipped", "loss_scale", "grad_norm", "lr"),
        )
    },
    "speed/{}": {"speed/make_experience", "speed/train"},
    "mfu/{}": {"mfu/generate", "mfu/make_experience", "mfu/train"},
    "time/{}": {"time/generate", "time/make_experience", "time/train"},
    "objective/{}": {f"objective/{part}" for part in SCORE_PARTS},
    "reward/{}": {"reward/model", "reward/function", "reward/server"},
    "eval/{}": {f"eval/{name}" for name in EVALUATED},
    "eval/ema_{}": {f"eval/ema_{name}" for name in EVALUATED},
}
# They name metrics and write none.
READERS = {
    *("reporting/summary.py", "reporting/standard_errors.py", "reporting/guards.py", "reporting/health.py"),
    *("tools/cards.py", "tools/measuring.py", "tools/merge/frontier.py", "tools/report/page.py"),
    *("config/models.py", "config/reward.py", "tools/merge/callback.py"),
}
NO_METRICS = {"objective/scores_histogram", "rollout/length_histogram"}  # TensorBoard's alone


def listed() -> list[str]:
    """The names in the first columns of the pages' tables."""
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("metrics*.md"))
    cells = re.findall(r"^\| (`[^|]*`) \|", pages, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def documented() -> set[str]:
    """The metrics among them, and those that a rule names: of conversations, and of the averaged weights."""
    names = set(listed()) - {"step", "samples", *ENDINGS}
    names |= {
        f"{group}/{name}" for name in COUNTS for group in ("eval", "critic_pretrain") if f"rollout/{name}" in names
    }
    return names | {f"eval/ema_{name}" for name in EVALUATED if f"eval/{name}" in names}


def named(paths: list[Path]) -> tuple[set[str], set[str]]:
    """The names in sources, whole ones and the forms of those that are put together.

    Whatever an Accumulator is given counts, under any group; elsewhere, what looks like a name of a known group.
    """
    found = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ADDING:
                given = [*node.args[:1], *(keyword.value for keyword in node.keywords)]
                found |= {text for text in map(_text, given) if text and re.fullmatch(r"[\w{}]+/[\w{}]+", text)}
            elif re.fullmatch(rf"(?:{GROUPS})/[\w{{}}]+", _text(node) or ""):
                found.add(_text(node))
    found = {f"{name}{{}}" if name.endswith("_") else name for name in found}  # a beginning that is replaced
    return {name for name in found if "{}" not in name}, {name for name in found if "{}" in name}


def _text(node: ast.AST) -> str | None:
    """A string of the source, with {} for what an f-string fills in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


@functools.cache
def written() -> tuple[set[str], set[str]]:
    """What the programs and the engine write."""
    programs = [
        path for path in (ROOT / "training").glob("**/*.py") if str(path.relative_to(ROOT / "training")) not in READERS
    ]
    return named([*programs, *(ROOT / "engine").glob("**/*.py")])


def without_endings(names: set[str]) -> set[str]:
    """Names without what `with_errors` puts behind them, which the page has in a table of its own."""
    return {re.sub(f"({'|'.join(ENDINGS)})$", "", name) for name in names}


def test_every_form_of_a_name_is_known():
    _, forms = written()
    assert forms == set(FAMILIES), "say in FAMILIES which metrics a form becomes"


def test_what_is_written_is_documented_and_nothing_else():
    names, _ = written()
    everything = (without_endings(names) | set().union(*FAMILIES.values())) - NO_METRICS
    assert everything - documented() == set(), "these are on none of the pages"
    assert documented() - everything == set(), "a page has these, and no code writes them"


def test_no_metric_has_two_rows():
    assert {name for name, count in Counter(listed()).items() if count > 1} == set()


def test_the_endings_of_errors_are_documented():
    added = with_errors({"a": Estimate.of([1.0, 2.0])}, {"a": Estimate.of([1.0, 1.0])}).keys() - {"a"}
    assert added == {f"a{ending}" for ending in ENDINGS}
    assert tuple(name for name in listed() if name.startswith("_")) == ENDINGS


def test_what_is_read_is_documented():
    names, _ = named([ROOT / "training" / name for name in READERS])
    assert len(names) > 20 and without_endings(names) <= documented()


def test_an_added_metric_would_be_found(tmp_path):
    source = tmp_path / "added.py"
    source.write_text("""
metrics.add("critic/new", total, count)
metrics.add_moments(values, mask, mean=f"{prefix}/mean", std="returns/std")
row["eval/extra"] = 1.0
path = f"{folder}/eval/x.jsonl"
""")
    assert named([source]) == ({"critic/new", "returns/std", "eval/extra"}, {"{}/mean"})
