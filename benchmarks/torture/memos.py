"""MemOS: ``pip install MemoryOS==2.0.33``."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from memos.memories.activation.item import KVCacheItem
from memos.memories.activation.kv import KVCacheMemory
from transformers import DynamicCache

from benchmarks.torture.harness import SHAPE, States, Subject


class MemOS(Subject):
    """The KV-cache memory of MemOS: an item a block, all of them dumped to one file after each change."""

    name = f"MemOS {version('MemoryOS')}"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._memory: Any = KVCacheMemory.__new__(KVCacheMemory)  # its constructor loads a language model
        self._memory.config = SimpleNamespace(memory_filename="activation_memory.pickle")
        self._memory.kv_cache_memories = {}
        self._memory.load(str(folder))

    def __len__(self) -> int:
        return len(self._memory.get_all())

    def append(self, states: States) -> None:
        """Add items."""
        for number, each in enumerate(states, len(self)):
            cache = DynamicCache()
            keys, values = torch.from_numpy(each).unsqueeze(1)
            cache.update(keys, values, 0)
            self._memory.add([KVCacheItem(id=str(number), memory=cache)])
        self._memory.dump(str(self._folder))

    def cut(self, blocks: int) -> None:
        """Delete items."""
        self._memory.delete([str(number) for number in range(blocks, len(self))])
        self._memory.dump(str(self._folder))

    def read(self, block: int) -> States:
        """The states of an item."""
        cache = self._memory.get(str(block)).memory
        layer = (
            cache.layers[0]
            if hasattr(cache, "layers")
            else SimpleNamespace(keys=cache.key_cache[0], values=cache.value_cache[0])
        )
        return np.stack([layer.keys[0].numpy(), layer.values[0].numpy()]).reshape(SHAPE)
