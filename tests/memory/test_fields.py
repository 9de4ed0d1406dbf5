"""What users fill in explains itself in ``help()``."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import Any

import pytest

import memstore


@pytest.mark.parametrize("kind", [memstore.Retrieval, memstore.MemorySpec, memstore.Fingerprint])
def test_help_has_a_sentence_for_every_field(kind: Any) -> None:
    explained = re.findall(r"^    (\w+): \S", inspect.getdoc(kind) or "", re.MULTILINE)
    assert explained == [each.name for each in fields(kind)]
