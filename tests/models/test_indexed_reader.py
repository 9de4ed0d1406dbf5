"""What every reader promises, kept by that of models with an index of their own."""

from __future__ import annotations

from typing import Any, ClassVar

from memstore.testing.readers import ReaderTests
from tests.models.indexed import tiny


class TestIndexedReader(ReaderTests):
    options: ClassVar[dict[str, Any]] = {"block_size": 16}

    def model(self, seed: int = 0) -> Any:
        return tiny("deepseek_v32", seed=seed)
