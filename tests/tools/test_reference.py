from __future__ import annotations

from pathlib import Path

from memstore.tools.reference import reference

PAGE = Path(__file__).parents[2] / "docs/cli.md"


def test_the_reference_is_current() -> None:
    assert PAGE.read_text() == reference(), "run: make docs"
