"""What the documents point at is there: files, and in docs/architecture.md names of the code."""

import re
from pathlib import Path

import pytest

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
    assert names - defined == {"opo"}  # what a user brings
