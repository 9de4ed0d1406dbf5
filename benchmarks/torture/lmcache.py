"""LMCache's local disk back end, on a CPU: ``pip install --no-deps lmcache==0.5.6``.

Of its other dependencies those are needed that are not of CUDA.
"""

from __future__ import annotations

import asyncio
import threading
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

from benchmarks.torture.harness import SHAPE, States, Subject

_, HEADS, TOKENS, DIM = SHAPE


class LocalDisk(Subject):
    """A chunk a block, under the block's number; what there is is asked as the engine asks."""

    name = f"LMCache {version('lmcache')}, local disk"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=TOKENS, local_cpu=False, max_local_cpu_size=0.1, local_disk=str(folder), max_local_disk_size=1.0
        )
        about = LMCacheMetadata("model", 1, 1, 0, 0, torch.float32, (1, 2, TOKENS, HEADS, DIM))
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._memory = LocalCPUBackend(config, about)
        self._disk = LocalDiskBackend(config, self._loop, self._memory)

    def __len__(self) -> int:
        blocks = 0
        while self._disk.contains(self._key(blocks)):
            blocks += 1
        return blocks

    def append(self, states: States) -> None:
        """Put chunks, and wait until they are written."""
        start = len(self)
        for number, each in enumerate(states, start):
            chunk = self._memory.allocate(torch.Size([2, 1, TOKENS, HEADS * DIM]), torch.float32, MemoryFormat.KV_2LTD)
            chunk.tensor.copy_(torch.from_numpy(each).transpose(1, 2).reshape(2, 1, TOKENS, HEADS * DIM))
            self._disk.submit_put_task(self._key(number), chunk)
        until = time.monotonic() + 20
        while len(self) < start + len(states):
            if time.monotonic() > until:
                raise OSError("LMCache did not write the chunks")
            time.sleep(0.001)

    def cut(self, blocks: int) -> None:
        """Remove chunks."""
        for number in range(len(self) - 1, blocks - 1, -1):
            self._disk.remove(self._key(number))

    def read(self, block: int) -> States:
        """Of one chunk."""
        found = self._disk.get_blocking(self._key(block))
        return np.array(found.tensor).reshape(2, TOKENS, HEADS, DIM).transpose(0, 2, 1, 3)

    def _key(self, number: int) -> CacheEngineKey:
        return CacheEngineKey("model", 1, 0, number, torch.float32)
