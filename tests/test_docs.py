"""What the documents point at is there: files, names of the code in docs/architecture.md; docs/openai.md is complete by
the write-up's numbers, and its settings have the values that it says.
"""

import dataclasses
import re
from pathlib import Path

import pytest

from engine.algorithms import DIALECTS, get_dialect, parse_settings
from training.tools import flag_docs

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(path.relative_to(ROOT) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
FOLDERS = ("engine", "training", "tests", "scripts", "configs", "docs")


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_and_paths_lead_somewhere(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    links = {link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link}
    paths = set(re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w/.]+)`", text))
    missing = {link for link in links if not (ROOT / document.parent / link).exists()}
    missing |= {path for path in paths if not (ROOT / path).exists()}
    assert missing == set()


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_anchors_are_headings(document):
    page = ROOT / document
    links = re.findall(r"\]\(([\w./]*)#([^)]+)\)", page.read_text(encoding="utf-8"))
    assert {(file, name) for file, name in links if name not in anchors(page.parent / file if file else page)} == set()


def test_the_tests_that_caught_the_bugs_of_others_are_there():
    page = (ROOT / "docs" / "bugs.md").read_text(encoding="utf-8")
    named = {
        (file, test)
        for cell in re.findall(r"[^|;]+\(`tests/[^)]*\)", page)
        for file in re.findall(r"`(tests/[\w/.]+)`", cell)
        for test in re.findall(r"`(test_\w+)`", cell)
    }
    assert len(named) > 12
    assert {(f, test) for f, test in named if f"def {test}(" not in (ROOT / f).read_text(encoding="utf-8")} == set()


def test_what_the_architecture_names_is_in_the_code():
    files = [*(ROOT / "engine").rglob("*.py"), *(ROOT / "training").rglob("*.py")]
    defined = set(re.findall(r"\w+", "\n".join(path.read_text(encoding="utf-8") for path in files)))
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").replace("```", "")
    quoted = [*re.findall(r"`([^`]+)`", page), *re.findall(r"^  +([a-z_.]+)", page, re.MULTILINE)]
    names = {word for text in quoted if "/" not in text and ".py" not in text for word in re.findall(r"\w{3,}", text)}
    assert len(names) > 50
    assert names - defined == set()


def sentence(page: str, first: str, last: str) -> str:
    """The text of a page between two phrases."""
    text = " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())
    return text.partition(first)[2].partition(last)[0]


def test_the_dialects_that_pad_and_those_without_a_critic_are_named():
    padded = {name for name, dialect in DIALECTS.items() if dialect.counts_padding}
    assert (
        set(re.findall(r"`(\w+)`", sentence("performance.md", "Dialects whose formulas count padding", ")"))) == padded
    )
    averaged = {name for name, dialect in DIALECTS.items() if dialect.micro_batches_matter}
    assert set(re.findall(r"`(\w+)`", sentence("many_nodes.md", "average within micro-batches", ")"))) == averaged
    rows = sentence("without_critic.md", "| dialect | source | when |", "## What they compute")
    named = re.findall(r"\| `(\w+)` \|", rows)
    assert sorted(named) == sorted(name for name, dialect in DIALECTS.items() if not dialect.has_critic)
    assert f"{NUMBERS[len(named)]} [dialects](dialects.md) have no critic" in sentence("without_critic.md", "#", "##")


NUMBERS = dict(enumerate(["Eight", "Nine", "Ten", "Eleven", "Twelve", "Thirteen"], start=8))


def test_the_pad_token_of_each_dialect():
    rows = sentence("dialects.md", "| `pad_token` | the pad token | dialects |", "`[PAD]` is added")
    for rule in ("eos_unless_llama", "never_eos", "padding"):
        cell = rows.partition(f"| `{rule}` |")[2].partition(" |")[2].partition(" | |")[0]
        named = {name for name in re.findall(r"`(\w+)`", cell) if name in DIALECTS}
        assert named == {name for name, dialect in DIALECTS.items() if dialect.pad_token == rule}, rule
    others = {name for name, dialect in DIALECTS.items() if dialect.pad_token == "tokenizer"}
    without = {name for name, dialect in DIALECTS.items() if not dialect.has_critic}
    assert others == {"default", "openai"} | without - {"trl_rloo"}  # as its row says


SECTIONS = {
    "General": [str(number) for number in range(1, 7)],
    "Reward model": ["1", "2", "3"],
    "Policy": [*(str(number) for number in range(1, 12)), "Adam"],
    "What its code does besides": ["a", "b", "c", "d", "e"],
}
FLAGS = {field.name for flags in flag_docs.PROGRAMS.values() for field in dataclasses.fields(flags)}


def rows() -> dict[tuple[str, str], list[str]]:
    """(section, number) -> what stands in backquotes under "set by"."""
    found, section = {}, ""
    for line in (ROOT / "docs" / "openai.md").read_text().splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif line.startswith("| ") and not line.startswith(("| | ", "| --- ")):
            number, _, settings = [cell.strip() for cell in line.strip("|").split("|")]
            found[section, number] = re.findall(r"`([^`]+)`", settings)
    return found


ROWS = rows()


def test_every_numbered_detail_has_its_row_in_order():
    found = {}
    for section, number in ROWS:
        found.setdefault(section, []).append(number)
    assert found == SECTIONS


def test_fields_have_these_values_and_flags_exist():
    for setting in (each for settings in ROWS.values() for each in settings):
        if setting.startswith("--"):
            assert setting[2:] in FLAGS
        else:
            ((field, value),) = parse_settings([setting]).items()
            assert getattr(get_dialect("openai"), field) == value


def test_the_table_names_every_field_in_which_openai_departs_from_the_default():
    named = {
        field
        for settings in ROWS.values()
        for setting in settings
        if not setting.startswith("--")
        for field in parse_settings([setting])
    }
    assert get_dialect("default").differences(get_dialect("openai")).keys() <= named
