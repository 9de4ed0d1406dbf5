"""How models here are traced: one step for each call, with the lists that its last token used in every layer.

A cache that is traced has a ``Tracing``, of the kind that belongs to its model. It is told when a call begins and ends,
and what each layer retrieved; it writes to a ``Recorder`` of ``memstore.memory.traces``. Blocks of the cache itself,
which no memory has, belong to no document and have the tier "own".
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.memory import Document
from memstore.memory.look import TIERS, Array
from memstore.memory.recorder import Recorder
from memstore.models.packing import Packing

T = TypeVar("T")
OWN = TIERS.index("own")


class Tracing(ABC):
    """Writes what a cache after ``document`` retrieves to ``recorder``."""

    def __init__(self, recorder: Recorder, document: Document, device: torch.device) -> None:
        """``device`` is where the model computes."""
        if recorder.before_writing is not None:  # another cache wrote to it before
            recorder.before_writing()
        self.recorder = recorder
        self.document = document
        self.names = [document.name]
        self.stored = document.complete_blocks.stop
        """Blocks from here on are the cache's own."""
        self._near = TIERS.index("host" if device.type == "cpu" else "device")
        self._begun = False

    def begin(self, ids: Tensor) -> None:
        """A call of the model with ``ids [B, T]`` begins; the first of them is what the call before has chosen."""
        if self._begun:
            self.recorder.token(int(ids[0, 0]))
        self._begun = True
        self.recorder.begin()

    @abstractmethod
    def end(self) -> None:
        """All layers have attended."""

    def refuse_reordering(self) -> None:
        """Raise ``InvalidArgument``: a trace follows each row from its beginning to its end."""
        raise InvalidArgument("a cache that is traced keeps its rows in order; generate without beams, or untraced")

    def documents_of(self, blocks: Array) -> Array:
        """For each of ``blocks`` where it is from: 0, the document, or -1, no document."""
        return np.where((blocks >= 0) & (blocks < self.stored), 0, -1).astype(np.int16)

    def tiers_of(self, layer: int, blocks: Array, held: range = range(0)) -> Array:
        """Where the states of each of ``blocks`` are now; those of ``held`` are tensors, where the model is."""
        wanted: list[int] = blocks.ravel().tolist()
        asked = [block for block in {*wanted} if 0 <= block < self.stored and block not in held]
        found = dict.fromkeys(held, self._near) | {-1: -1}
        if asked:
            tiers = self.document.layer(layer).tiers(asked)
            found |= {block: TIERS.index(tier) for block, tier in zip(asked, tiers, strict=True)}
        return np.array([found.get(block, OWN) for block in wanted], np.int8).reshape(blocks.shape)


def timed(function: Callable[[], T]) -> tuple[T, float]:
    """What ``function`` returns, and the microseconds that it took."""
    begun = time.perf_counter()
    result = function()
    return result, (time.perf_counter() - begun) * 1e6


def numbers(x: Tensor) -> Array:
    """``x`` as an array on the CPU."""
    array: Array = x.detach().cpu().float().numpy() if x.is_floating_point() else x.detach().cpu().numpy()
    return array


def last_tokens(packing: Packing) -> list[int]:
    """Where the last token of each row stands in the stream; 0 for a row without tokens."""
    if packing.uniform:
        return [int(packing.slots[0, -1])] * packing.rows
    last: list[int] = packing.slots.masked_fill(packing.slots >= packing.items, 0).amax(1).tolist()
    return last if len(last) == packing.rows else last * packing.rows
