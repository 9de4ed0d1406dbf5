from __future__ import annotations

import pytest

import memstore
from tests.tools.reference import CLASSES, DOCS, FUNCTIONS, pages


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
