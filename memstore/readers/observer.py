"""One way to watch a retrieval: whoever wants to know what a model retrieves is an ``Observer``.

Every mechanism tells a ``Choice`` at one place of its code, for each layer of each forward pass that attends to
retrieved blocks. A choice has little that all mechanisms share, for they differ on purpose: a DRT asks where a block
ends, a landmark model with every head and token, a Memorizing Transformer for single tokens. What asked, and what was
found, is in the class of the mechanism, for the observers that know it: its audit, and its search by text.

What all of them share is a ``Draft``, of which a trace makes its ``Look``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from memstore.memory import Document
from memstore.memory.trace_file import TIERS, Array, Look
from memstore.memory.traces import Recorder

C = TypeVar("C", bound="Choice")
T = TypeVar("T")

_OWN = TIERS.index("own")


class Draft(ABC):
    """Looks whose weights are yet to be computed, and no more tensors than that takes: it outlives the forward pass."""

    @classmethod
    @abstractmethod
    def looks(cls, drafts: Sequence[Self]) -> list[list[Look]]:
        """The looks of each draft, one for each of its rows. Many drafts at once are cheaper than one after another."""


class Looks(Draft):
    """Looks that are complete."""

    def __init__(self, looks: list[Look]) -> None:
        self._looks = looks

    @classmethod
    def looks(cls, drafts: Sequence[Self]) -> list[list[Look]]:
        """See ``Draft``."""
        return [draft._looks for draft in drafts]


class Choice(ABC):
    """The lists of blocks that one layer attends to in one segment of a forward pass.

    It may refer to what the model is working with: valid during ``Observer.choice``, which is to keep the draft or what
    it computes, not the tensors of a whole prompt.
    """

    layer: int
    searched: bool
    """Whether the lists were searched for in this segment: not before it, and not without need as all blocks fit."""
    rows: Sequence[int]
    """Rows of the batch whose last token of this forward pass is in this segment. A step of a trace is of those."""

    @abstractmethod
    def draft(self) -> Draft:
        """For a trace: what the last tokens of ``rows`` attend to."""


class Observer(ABC):
    """What is told of the retrievals of a model. It must change nothing."""

    def begin(self, ids: Tensor | None, *, fresh: bool) -> None:  # noqa: B027 - most have nothing to do
        """A forward pass begins, over ``ids [T]`` in the first row; None where they are not known.

        ``fresh``: it is the first one of its cache.
        """

    @abstractmethod
    def choice(self, choice: Choice) -> None:
        """A layer attends to what it has retrieved."""


class Choices(list[T], Observer):
    """An observer that keeps what ``take`` makes of each choice of one kind, as it is told."""

    def __init__(self, kind: type[C], take: Callable[[C], T]) -> None:
        super().__init__()
        self._kind, self._take = kind, take

    def choice(self, choice: Choice) -> None:
        """See ``Observer``."""
        if isinstance(choice, self._kind):
            self.append(self._take(choice))


class Recording(Observer):
    """An observer that writes a trace: each forward pass is a step of ``recorder``.

    Weights are computed when the recorder writes, about once a second, for many steps at once: one by one they would
    cost more than the five per cent that a recording may.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._begun = False
        self._drafts: list[tuple[int, Draft]] = []
        recorder.before_writing = self.settle

    def begin(self, ids: Tensor | None, *, fresh: bool) -> None:
        """See ``Observer``. What a pass begins with is what the pass before has chosen."""
        # Steps count from the prompt's pass, which chose the first token: that comes in with the next pass. The last
        # token of all is known to whoever generates, and told with Recorder.close.
        if ids is not None and self._recorder.step < 0:
            if "prompt" not in self._recorder.info:
                self._recorder.describe(prompt=ids.tolist())
        elif ids is not None and not fresh:
            self._recorder.token(int(ids[0]))
        self._begun = True
        self._recorder.begin()

    def choice(self, choice: Choice) -> None:
        """See ``Observer``. What comes before the first step, as a reader takes up its document, is no part of it."""
        if self._begun and choice.rows and self._recorder.active:
            self._drafts.append((self._recorder.step, choice.draft()))

    def settle(self) -> None:
        """Finish the drafts, and hand the looks to the recorder."""
        drafts, self._drafts = self._drafts, []
        done: list[tuple[int, Look]] = []
        for kind in dict.fromkeys(type(draft) for _, draft in drafts):
            steps, mine = zip(*((step, draft) for step, draft in drafts if type(draft) is kind), strict=True)
            for step, looks in zip(steps, kind.looks(mine), strict=True):
                done += [(step, look) for look in looks]
        for step, look in sorted(done, key=lambda each: (each[0], each[1].layer, each[1].row)):
            self._recorder.look(look, step=step)


class Origin:
    """Where the blocks that a cache retrieves are from: a document, or the cache itself.

    Blocks of the cache, which no memory has, belong to no document and have the tier "own".
    """

    def __init__(
        self, document: Document | None = None, device: torch.device | None = None, *, stored: int = 0
    ) -> None:
        """Blocks below ``stored`` are those of ``document``; ``device`` is where the model computes."""
        self.document, self.stored = document, stored
        self.names = [] if document is None else [document.name]
        self._near = TIERS.index("host" if device is None or device.type == "cpu" else "device")

    def documents(self, blocks: Array) -> Array:
        """For each of ``blocks`` where it is from: 0, the document, or -1, no document."""
        # A document that is read on would have other text under the numbers of the cache's own blocks.
        return np.where((blocks >= 0) & (blocks < self.stored), 0, -1).astype(np.int16)

    def tiers(self, layer: int, blocks: Array, held: range = range(0)) -> Array:
        """Where the states of each of ``blocks`` are now; those of ``held`` are tensors, where the model is."""
        wanted: list[int] = blocks.ravel().tolist()
        asked = [block for block in {*wanted} if 0 <= block < self.stored and block not in held]
        found = dict.fromkeys(held, self._near) | {-1: -1}
        if asked and self.document is not None:
            tiers = self.document.layer(layer).tiers(asked)
            found |= {block: TIERS.index(tier) for block, tier in zip(asked, tiers, strict=True)}
        return np.array([found.get(block, _OWN) for block in wanted], np.int8).reshape(blocks.shape)


def as_array(x: Tensor) -> Array:
    """``x`` as an array on the CPU; floating-point numbers as float32."""
    array: Array = x.detach().cpu().float().numpy() if x.is_floating_point() else x.detach().cpu().numpy()
    return array
