"""What all tests of indexes have in common."""

from __future__ import annotations

import pytest

from memstore.index import chunks, exact


@pytest.fixture(autouse=True)
def codes_of_few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact search reads codes first however few keys there are: the short way is tested by its own name."""
    monkeypatch.setattr(exact, "FEWEST_GROUPS", 0)
    monkeypatch.setattr(chunks, "CODED_AFTER", 0)
