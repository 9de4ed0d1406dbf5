"""Steps of one token of a DRT, to be recorded."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from memstore.readers.graphs import Steps


class DRTSteps(Steps):
    """Those of a ``DRTCache``: its windows slide, which makes them anew, and its incomplete block grows."""

    cache: Any  # a DRTCache, which knows these steps

    @property
    def place(self) -> int:
        """See ``Steps``: in the stream."""
        return int(self.cache.positions[0])

    def same(self) -> Hashable | None:
        """See ``Steps``: while windows are full and blocks incomplete; a new list lies where the one before lay."""
        cache = self.cache
        alike = len(set(cache.counts)) == 1 and cache.empty is None and cache.past == cache.config.window - 1
        last = cache.offsets[0] + 1 == cache.config.tokens_per_block
        if not alike or last or cache.observers or cache.config.retrieval == "external":
            return None
        return tuple(x.shape for x in self.buffers())

    def buffers(self) -> list[Tensor]:
        """See ``Steps``."""
        windows = [x for window in self.cache.windows if window is not None for x in window]
        return [*windows, *(x for last in self.cache.lists if last is not None for x in last)]

    def use(self, buffers: list[Tensor]) -> None:
        """See ``Steps``."""
        cache, given = self.cache, iter(buffers)
        cache.windows = [None if window is None else (next(given), next(given)) for window in cache.windows]
        cache.lists = [None if last is None else type(last)(*(next(given) for _ in last)) for last in cache.lists]

    def back(self) -> Tensor | None:
        """See ``Steps``; what the step adds to the incomplete block."""
        cache = self.cache
        cache.counts, cache.given = [count - 1 for count in cache.counts], cache.given - 1
        return cache.partial.pop() if cache.config.retrieval != "none" else None

    def on(self, added: Tensor | None) -> None:
        """See ``Steps``."""
        cache = self.cache
        cache.counts, cache.given = [count + 1 for count in cache.counts], cache.given + 1
        cache.partial += [] if added is None else [added.clone()]
