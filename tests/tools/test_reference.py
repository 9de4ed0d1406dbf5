from __future__ import annotations

import re

import pytest

import memstore
from tests.tools.reference import BUILD_ON, CLASSES, DOCS, FUNCTIONS, pages


@pytest.mark.parametrize("page", ["cli.md", "api.md"])
def test_a_page_is_current(page: str) -> None:
    assert (DOCS / page).read_text(encoding="utf-8") == pages()[page], "run: make docs"


def test_every_public_name_has_its_place() -> None:
    errors = {
        name
        for name in memstore.__all__
        if isinstance(each := getattr(memstore, name), type) and issubclass(each, memstore.MemstoreError)
    }
    assert {*FUNCTIONS, *CLASSES, *errors, "__version__"} >= set(memstore.__all__)


def test_what_pages_subclass_has_its_place() -> None:
    told = "\n".join(page.read_text("utf-8") for page in DOCS.glob("*.md"))
    imported = {
        name
        for line in re.findall(r"^ *from memstore\S* import (.*)$", told, re.MULTILINE)
        for name in line.split(", ")
    }
    bases = set(re.findall(r"^ *class \w+\((\w+)\):", told, re.MULTILINE)) & imported
    assert {"BlockStore", "VectorIndex", "StoreTests", "IndexTests"} <= bases
    assert bases <= {each.partition(":")[2] for each in BUILD_ON}


def test_fields_have_their_type_default_and_choices() -> None:
    page = pages()["api.md"]
    assert "- `positions: 'stingy' | 'true' | 'clamped' = 'stingy'`: " in page
    assert "- `capacity: int | None = None`: " in page
