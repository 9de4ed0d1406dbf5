"""Steps of one token of a landmark model, to be recorded."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, cast

import torch
from torch import Tensor

from memstore.attention.positions import local_slot
from memstore.models.landmark.lists import ListLayout
from memstore.readers.graphs import Steps
from memstore.transfer import alike


class LandmarkSteps(Steps):
    """Those of a ``LandmarkCache``: each token goes into the frames of the layers, which are attended to as a whole."""

    cache: Any  # a LandmarkCache, which knows these steps

    @property
    def place(self) -> int:
        """See ``Steps``: in the segment that is being written."""
        return int(self.cache.items[0])

    def same(self) -> Hashable | None:
        """See ``Steps``: within a block, while lists stay; new lists of the same size lie where those before lay."""
        cache = self.cache
        alone = alike(cache.items) and alike(cache.blocks) and len(set(cache.counts)) == 1
        last = (cache.counts[0] + 1) % cache.config.tokens_per_block == 0
        if not alone or last or cache.observers or cache.config.context_miss or None in cache._frames:
            return None
        blocks = int(cache.blocks[0])
        latest = blocks <= cache._top_k
        if blocks and not all(self._stays(layer, latest) for layer in range(len(cache._kept))):
            return None
        slot = int(local_slot(cache.blocks[:1], cache.slots)[0])
        return blocks > 0, latest, slot, tuple(x.shape for x in self.buffers())

    def _stays(self, layer: int, latest: bool) -> bool:
        """Whether the next token uses the list of before."""
        cache, kept = self.cache, self.cache._kept[layer]
        if kept is None:
            return False
        if latest or layer in cache.config.local_layers:
            return torch.equal(kept.run, cache._segment)
        every = cache.retrieval.every
        stays = every == "segment" or (isinstance(every, int) and cache.counts[0] % every != 0)
        return stays and torch.equal(kept.run, cache._run) and bool(kept.made.all())

    def buffers(self) -> list[Tensor]:
        """See ``Steps``."""
        shown = [kept.shown for kept in self.cache._kept if kept is not None]
        parts = [*(frame for frame in self.cache._frames if frame is not None), *shown]
        return [x for part in parts for x in part if x is not None]

    def use(self, buffers: list[Tensor]) -> None:
        """See ``Steps``."""
        cache, given = self.cache, iter(buffers)
        cache._frames = [
            None if frame is None else type(frame)(*(next(given) for _ in frame)) for frame in cache._frames
        ]
        for layer, kept in enumerate(cache._kept):
            if kept is not None:
                shown = [None if x is None else next(given) for x in kept.shown]
                cache._kept[layer] = kept._replace(shown=ListLayout(*cast("list[Tensor]", shown)))

    def back(self) -> None:
        """See ``Steps``."""
        self._count(-1)

    def on(self, _: Tensor | None) -> None:
        """See ``Steps``."""
        self._count(1)

    def _count(self, tokens: int) -> None:
        cache, config = self.cache, self.cache.config
        cache.items += tokens
        cache.counts, cache.given = [count + tokens for count in cache.counts], cache.given + tokens
        if bool(cache.blocks.any()):
            cache.asked.queries += tokens * config.num_hidden_layers * cache.rows * config.num_attention_heads
