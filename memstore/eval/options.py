"""Options of measurements for the command line. This module does not need PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from memstore.train.options import option


@dataclass(frozen=True, kw_only=True)
class ContextPerplexity:
    """Perplexity of the same last tokens after contexts of each length, with a memory and with retrieval off."""

    lengths: list[int] | None = option(
        "Score after contexts of these lengths, in tokens. Default: 2K,8K,32K.", tokens=1
    )
    scored: int | None = option("Score this many tokens at the end of each sample. Default: 1024.", min=1)
    samples: int | None = option(
        "Measure at this many places of the text, the same for all lengths. Default: 4.", min=1
    )
