"""How blocks are read: names of what is wanted in, tensors out, from whichever tier has them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memstore.errors import DamagedError, InvalidArgument
from memstore.memory.ingest import background_workers
from memstore.memory.spec import MemorySpec, block_layouts
from memstore.memory.tensors import Rows, decode_block_rows, read_tail
from memstore.store.contract import BlockStore, Key
from memstore.store.tiered import Changed, Tiers, Wanted

HOST_BYTES = 256 << 20
"""Bytes of host memory for blocks of a memory on disk, unless ``memstore.open`` is told otherwise."""

_log = logging.getLogger("memstore")


class BlockReader:
    """The blocks of one open memory. Safe to use from several threads."""

    def __init__(
        self,
        store: BlockStore,
        spec: MemorySpec,
        *,
        host_bytes: int | None = None,
        device_bytes: int = 0,
        device: str | torch.device | None = None,
    ) -> None:
        """Budgets are bytes; ``host_bytes`` None is ``HOST_BYTES``, and 0 for a store that is in host memory itself."""
        if host_bytes is None:
            host_bytes = HOST_BYTES if store.capabilities.durable else 0
        for name, value in {"host_bytes": host_bytes, "device_bytes": device_bytes}.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise InvalidArgument(f"{name} is a number of bytes, 0 for none, not {value!r}.")
        self._store = store
        self._spec = spec
        self._layouts = block_layouts(spec)
        self._tiers = Tiers(
            store,
            self._layouts,
            partial(background_workers, 1),
            host_bytes=host_bytes,
            device_bytes=device_bytes,
            device=_pool_device(device) if device_bytes else None,
        )
        self._lost: set[tuple[int, Key]] = set()
        self._left_out = 0
        self._lock = threading.Lock()

    def read(self, wanted: Wanted, still: Callable[[], bool], device: torch.device | None = None) -> dict[str, Tensor]:
        """States of blocks, verified: one tensor ``[n, *shape]`` per field, on ``device`` (None: the CPU).

        ``still()`` says whether the names are still right once the blocks have been read from the store.
        Raises ``Changed`` where they are not, ``NotFound`` or ``DamagedError``.
        """
        if not wanted.blocks or self._spec.codec == "none" or max(wanted.blocks) < wanted.stop:
            return self._complete(wanted, still, device)
        whole = [place for place, block in enumerate(wanted.blocks) if block < wanted.stop]
        complete = self._complete(wanted.only(whole), still, device)
        tail = next(key for key in wanted.keys if key.item >= wanted.stop)
        last = read_tail(self._store, self._spec, tail)
        if not still():
            raise Changed
        row = {place: number for number, place in enumerate(whole)}
        order = torch.tensor([row.get(place, len(whole)) for place in range(len(wanted.blocks))])
        return {field: torch.cat([each, last[field].to(each.device)])[order] for field, each in complete.items()}

    def stored(self, wanted: Wanted, still: Callable[[], bool]) -> list[Tensor]:
        """Complete blocks as they are stored, verified: ``[n, ...]`` for each of ``block_layouts``; see ``read``."""
        if not wanted.blocks:
            return Rows(0, self._layouts).tensors()
        return self._tiers.read(wanted, still, None)

    def _complete(self, wanted: Wanted, still: Callable[[], bool], device: torch.device | None) -> dict[str, Tensor]:
        if not wanted.blocks:
            return decode_block_rows(self._spec, Rows(0, self._layouts).tensors())
        return decode_block_rows(self._spec, self._tiers.read(wanted, still, device))

    def tiers(self, wanted: Wanted) -> list[str]:
        """The tier that each block would be read from now: "device", "host" or "disk"."""
        return self._tiers.where(wanted)

    @property
    def prefetches(self) -> bool:
        """Whether there is room for what is brought ahead."""
        return self._tiers.prefetches

    def prefetch(self, wanted: Wanted, still: Callable[[], bool]) -> None:
        """Let a thread bring blocks into host memory; returns at once, and never raises for a block."""
        self._tiers.prefetch(wanted, still)

    def leave_out(self, wanted: Wanted, error: DamagedError) -> None:
        """Count a block, the one ``wanted``, that could not be read and is done without; log it the first time."""
        with self._lock:
            self._left_out += 1
            lost = (wanted.edits, wanted.keys[0])
            if lost in self._lost:
                return
            self._lost.add(lost)
        _log.warning("a block is left out: %s", error)

    def stats(self) -> dict[str, Any]:
        """Counts of each tier, and how often a block was left out because it could not be read."""
        return {**self._tiers.stats(), "left_out": self._left_out}

    def close(self) -> None:
        """Stop the thread that reads ahead. Closing twice is allowed."""
        self._tiers.close()


def _pool_device(device: str | torch.device | None) -> torch.device:
    if device is None and not torch.cuda.is_available():
        raise InvalidArgument(
            "device_bytes needs an accelerator, and torch sees none; pass device=, or device_bytes=0."
        )
    try:
        chosen = torch.device("cuda" if device is None else device)
    except RuntimeError as error:
        raise InvalidArgument(f"device={device!r} is no device that torch knows ({error}).") from None
    return torch.device("cuda", torch.cuda.current_device()) if chosen == torch.device("cuda") else chosen
