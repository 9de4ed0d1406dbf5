"""S3-FIFO: which pages are kept, after Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023).

What comes new waits in a small queue, a tenth of all pages. What is asked for again while it waits there moves to the
main queue; what is not leaves, and only its name is remembered for a while, so that it goes to the main queue at once
if it comes back soon. So a scan, however long, passes through the small queue and leaves the main one alone. Nothing is
moved when it is found: a use is a number that goes up.

Deviation from the paper: one use, not two, is enough to move to the main queue. A list of blocks is asked for at every
retrieval that chooses it, and twice is already a habit.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Hashable, Iterable

_MOST_USES = 3
_SMALL_SHARE = 10
"""One page of so many is for what came new."""


# Our own, since libraries keep Python objects, one call per name: here a policy only hands out pages of a slab, and a
# hit of 32 blocks is one look into a dict for each and one copy for all.
class S3Fifo:
    """Names and the pages ``0 ... pages - 1`` that hold them. Not safe to use from several threads at once."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._held: dict[Hashable, int] = {}
        self._new: deque[Hashable] = deque()
        self._main: deque[Hashable] = deque()
        self._left: dict[Hashable, None] = {}  # names without pages, the one that left first first
        self._uses = array("b", bytes(pages))  # small enough to stay in the processor's cache
        self._room_for_new = max(1, pages // _SMALL_SHARE)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._held

    def __len__(self) -> int:
        return len(self._held)

    def find(self, names: Iterable[Hashable]) -> list[int | None]:
        """The page of each name, None where it has none; counts as a use of each page."""
        pages = list(map(self._held.get, names))
        uses = self._uses
        for page in set(pages):
            if page is not None and uses[page] < _MOST_USES:
                uses[page] += 1
        return pages

    def place(self, names: Collection[Hashable], *, ahead: bool = False) -> list[int]:
        """A page for each of ``names``, which had none; those that had these pages have none any more.

        With more names than pages, pages repeat: the last name to get one has it. ``ahead``: nobody has asked for
        these names yet, so that the first time somebody does is not yet the second.
        """
        return [self._place(name, -1 if ahead else 0) for name in names]

    def _place(self, name: Hashable, uses: int) -> int:
        page = len(self._held) if len(self._held) < self.pages else self._evict()
        queue = self._main if name in self._left else self._new
        self._left.pop(name, None)
        queue.append(name)
        self._held[name] = page
        self._uses[page] = uses
        return page

    def _evict(self) -> int:
        """Take a page from whoever deserves it least."""
        while True:
            new = len(self._new) > self._room_for_new or not self._main
            name = (self._new if new else self._main).popleft()
            page = self._held[name]
            if self._uses[page] <= 0:
                break
            self._uses[page] = 0 if new else self._uses[page] - 1
            self._main.append(name)
        if new:
            self._remember(name)
        return self._held.pop(name)

    def _remember(self, name: Hashable) -> None:
        self._left[name] = None
        if len(self._left) > self.pages:
            del self._left[next(iter(self._left))]
