"""Options of measurements for the command line. This module does not need PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from memstore.train.options import option


@dataclass(frozen=True, kw_only=True)
class ContextPerplexity:
    """Perplexity of the same last tokens after contexts of each length, with a memory and with retrieval off."""

    lengths: list[int] | None = option("Lengths of the context. Without it: 2K,8K,32K.", tokens=1)
    scored: int | None = option("Tokens scored at the end of each sample. Without it: 1024.", min=1)
    samples: int | None = option("Places of the text, the same for all lengths. Without it: 4.", min=1)
