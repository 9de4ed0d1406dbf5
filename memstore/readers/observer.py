"""Observers, which watch what a model retrieves.

Every mechanism reports a ``Choice`` at one place of its code, for each layer of each forward pass that attends to
retrieved blocks. Choices of different mechanisms share little, because the mechanisms differ on purpose. A DRT searches
at the end of a block, a landmark model with every head and token, a Memorizing Transformer for single tokens. The class
of the mechanism has the queries and the results. Observers that know the class use them: its audit, and its search by
text.

All choices can make a ``Draft``, which a trace turns into its ``Look``.
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
    """Looks without weights yet, and no more tensors than these need: a draft outlives the forward pass."""

    @classmethod
    @abstractmethod
    def looks(cls, drafts: Sequence[Self]) -> list[list[Look]]:
        """Return the looks of each draft, one for each of its rows. Many drafts at once are cheaper than one by one."""


class Looks(Draft):
    """Complete looks."""

    def __init__(self, looks: list[Look]) -> None:
        self._looks = looks

    @classmethod
    def looks(cls, drafts: Sequence[Self]) -> list[list[Look]]:
        return [draft._looks for draft in drafts]


class Choice(ABC):
    """The lists of blocks that one layer attends to in one segment of a forward pass.

    It may refer to tensors that the model still uses, so it is valid only during ``Observer.choice``. An observer keeps
    the draft or its own results, not the tensors of a whole prompt.
    """

    layer: int
    """The number of the layer."""
    searched: bool
    """Whether this segment searched for the lists. False if an earlier one did, or if all blocks fit without a
    search."""
    rows: Sequence[int]
    """Rows of the batch whose last token of this forward pass is in this segment. A step of a trace has these rows."""

    @abstractmethod
    def draft(self) -> Draft:
        """Return a draft for a trace: what the last tokens of ``rows`` attend to."""


class Observer(ABC):
    """An object that is called at each retrieval of a model. It must change nothing."""

    def begin(self, ids: Tensor | None, *, fresh: bool) -> None:  # noqa: B027 - most have nothing to do
        """Take the beginning of a forward pass, over ``ids [T]`` in the first row, or None if they are unknown.

        ``fresh``: it is the first pass of its cache.
        """

    @abstractmethod
    def choice(self, choice: Choice) -> None:
        """Take the choice of a layer that attends to retrieved blocks."""


class Choices(list[T], Observer):
    """An observer that keeps the result of ``take`` for each choice of one kind."""

    def __init__(self, kind: type[C], take: Callable[[C], T]) -> None:
        super().__init__()
        self._kind, self._take = kind, take

    def choice(self, choice: Choice) -> None:
        if isinstance(choice, self._kind):
            self.append(self._take(choice))


class Recording(Observer):
    """An observer that writes a trace: each forward pass is a step of ``recorder``.

    Weights are computed when the recorder writes, about once a second, for many steps at once. One by one they would
    cost more than the five per cent that a recording may cost.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._begun = False
        self._drafts: list[tuple[int, Draft]] = []
        recorder.before_writing = self.settle

    def begin(self, ids: Tensor | None, *, fresh: bool) -> None:
        """See ``Observer``. A pass begins with the token that the previous pass has chosen."""
        # Steps count from the prompt's pass, which chose the first token. That token comes in with the next pass. Only
        # the caller knows the last token of all, and passes it to Recorder.close.
        if ids is not None and self.recorder.step < 0:
            if "prompt" not in self.recorder.info:
                self.recorder.describe(prompt=ids.tolist())
        elif ids is not None and not fresh:
            self.recorder.token(int(ids[0]))
        self._begun = True
        self.recorder.begin()

    def choice(self, choice: Choice) -> None:
        """See ``Observer``. Choices before the first step, while a reader loads its document, are not part of it."""
        if self._begun and choice.rows and self.recorder.active:
            self._drafts.append((self.recorder.step, choice.draft()))

    def settle(self) -> None:
        """Finish the drafts, and pass the looks to the recorder."""
        drafts, self._drafts = self._drafts, []
        done: list[tuple[int, Look]] = []
        for kind in dict.fromkeys(type(draft) for _, draft in drafts):
            steps, mine = zip(*((step, draft) for step, draft in drafts if type(draft) is kind), strict=True)
            for step, looks in zip(steps, kind.looks(mine), strict=True):
                done += [(step, look) for look in looks]
        for step, look in sorted(done, key=lambda each: (each[0], each[1].layer, each[1].row)):
            self.recorder.look(look, step=step)


class Origin:
    """The origin of the blocks that a cache retrieves: a document, or the cache itself.

    Blocks of the cache are in no memory. They belong to no document and have the tier "own".
    """

    def __init__(
        self, document: Document | None = None, device: torch.device | None = None, *, stored: int = 0
    ) -> None:
        """Blocks below ``stored`` belong to ``document``; ``device`` is where the model computes."""
        self.document, self.stored = document, stored
        self.names = [] if document is None else [document.name]
        self._near = TIERS.index("host" if device is None or device.type == "cpu" else "device")

    def documents(self, blocks: Array) -> Array:
        """Return the origin of each of ``blocks``: 0 for the document, or -1 for no document."""
        # If the document grows, its new blocks get the numbers of the cache's own blocks, with another text.
        return np.where((blocks >= 0) & (blocks < self.stored), 0, -1).astype(np.int16)

    def tiers(self, layer: int, blocks: Array, held: range = range(0)) -> Array:
        """Return the tier of each of ``blocks`` now. Those of ``held`` are tensors on the model's device."""
        wanted: list[int] = blocks.ravel().tolist()
        asked = [block for block in {*wanted} if 0 <= block < self.stored and block not in held]
        found = dict.fromkeys(held, self._near) | {-1: -1}
        if asked and self.document is not None:
            tiers = self.document.layer(layer).tiers(asked)
            found |= {block: TIERS.index(tier) for block, tier in zip(asked, tiers, strict=True)}
        return np.array([found.get(block, _OWN) for block in wanted], np.int8).reshape(blocks.shape)


def as_array(x: Tensor) -> Array:
    """Return ``x`` as an array on the CPU; floating-point numbers become float32."""
    array: Array = x.detach().cpu().float().numpy() if x.is_floating_point() else x.detach().cpu().numpy()
    return array
