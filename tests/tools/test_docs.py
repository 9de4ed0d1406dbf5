"""Pages link to what is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_links_to_files_that_are_there(page: Path) -> None:
    targets = [target for _, target in LINK.findall(page.read_text("utf-8")) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def anchors(page: Path) -> set[str]:
    """Give the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", LINK.sub(r"\1", each).lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_link_to_a_section_leads_to_a_heading(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s:]*\.md)?#([^)\s]+)\)", page.read_text("utf-8"))
    assert [(to, name) for to, name in links if name not in anchors(page.parent / to if to else page)] == []


def test_each_row_of_figures_in_the_readme_links_to_its_section() -> None:
    section = (ROOT / "README.md").read_text("utf-8").partition("## Measured")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| .+$", section, re.MULTILINE)[1:]
    assert len(rows) > 4
    assert [row for row in rows if "](docs/measured.md#" not in row] == []


def test_pages_name_sources_that_are_there() -> None:
    """By their names alone, or from any folder above them on."""
    folders = ("memstore", "tests", "benchmarks", "examples")
    there = [f"/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.py")]
    missing = []
    for page in PAGES:
        named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", page.read_text("utf-8"))) - {"xxhash.py"}  # somebody else's
        missing += [(page.name, name) for name in named if not any(path.endswith(f"/{name}") for path in there)]
    assert missing == []


def symbols(source: Path) -> set[str]:
    """Functions and classes of a file, methods as ``Class.method``."""
    found = set()
    for node in ast.parse(source.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


def test_the_stops_of_the_tour_are_functions_that_are_there() -> None:
    page = ROOT / "docs" / "tour.md"
    text = page.read_text("utf-8")
    stops = re.findall(r"\[`([\w.]+)`\]\((\.\./memstore/[\w/]+\.py)\)", text)
    assert 8 <= len(re.findall(r"^\d+\. ", text, re.MULTILINE)) <= 12 <= len({stop for stop, _ in stops})
    missing = [(stop, source) for stop, source in stops if stop not in symbols(page.parent / source)]
    assert missing == []


def test_docstrings_and_comments_name_files_that_are_there() -> None:
    missing = []
    for source in (ROOT / "memstore").rglob("*.py"):
        # Beside the file, in a package below or above it, from memstore/ on, or from the root of the tree on.
        below = [each for each in source.parent.iterdir() if each.is_dir()]
        places = [source.parent, *below, source.parent.parent, ROOT / "memstore", ROOT]
        for names in re.findall(r"`((?:\w+/)*\w+\.(?:py|c|js|md))`|\((docs/[\w/]+\.md)\)", source.read_text("utf-8")):
            missing += [
                (source.name, name) for name in names if name and not any((at / name).is_file() for at in places)
            ]
    assert missing == []


RUN = {
    "README.md": ("tests/tools/test_readme.py", 1),
    "docs/everyday.md": ("tests/tools/test_serve.py", 1),
    "docs/export.md": ("tests/tools/test_export.py", 1),
    "docs/format.md": ("tests/store/test_format_doc.py", 1),
    "docs/howto.md": ("tests/tools/test_howto.py", 4),
    "docs/indexes.md": ("tests/index/test_indexes_doc.py", 3),
    "docs/models.md": ("tests/tools/test_models_doc.py", 2),
    "docs/own_mechanism.md": ("tests/readers/test_kinds.py", 2),
    "docs/scale.md": ("tests/tools/test_scale_doc.py", 3),
    "docs/stores.md": ("tests/store/test_stores_doc.py", 3),
}
"""A page -> the test that runs its blocks of Python, and how many they are. A new block goes into that test too."""
INDENTED = re.compile(r"^    (?:from \S+ import|import \w).*\n(?:    .*\n|\n(?=    ))*", re.MULTILINE)


def test_each_block_of_python_is_one_that_a_test_runs() -> None:
    found = {}
    for page in PAGES:
        rest, fenced = re.subn(r"^```python\n.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        if page.name != "api.md" and (
            blocks := fenced + len(INDENTED.findall(rest))
        ):  # api.md only says what to import
            found[str(page.relative_to(ROOT))] = blocks
    assert found == {page: blocks for page, (_, blocks) in RUN.items()}
    assert [test for page, (test, _) in RUN.items() if Path(page).name not in (ROOT / test).read_text("utf-8")] == []
