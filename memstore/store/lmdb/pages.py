"""The private pages of an LMDB data file: their layout, and a check that their tree is whole.

No checksum covers the pages that lead to the values. A flipped bit in one of them can end a reader by a signal, hide
existing values, or bring an older commit back. In the list of free pages, it can let a writer overwrite committed data.
So the pages of the last commit are checked when a memory is opened. The pages of the tree, of the values and the free
ones must tile the file without gap or overlap. Every key must lie where a search looks for it. The free pages must
match the last commit. Values are not read (their records have checksums), so this reads about one page for every
hundred values.

A large value takes as many pages as its length needs, with one exception. If a value becomes shorter within one
transaction, LMDB leaves it on its old pages. Then its first page says how many pages it has, and these are counted.

LMDB never gives a page back: pages of a deleted value are listed as free, and keep their bytes until they are
overwritten. ``erase_unused`` removes these bytes from the file. Free pages become holes. The unused parts of pages in
use (between the nodes of a page, and at the end of a large value's last page) become zeros. Readers of the last two
commits see none of this, so they go on, and a process that dies half-way leaves a whole memory. Nothing is erased
unless everything is understood: both trees of both meta pages are walked and compared with LMDB's own counts. Any
contradiction is damage, and is left alone.

Only this module knows the layout. It has two readers: the check at each opening uses array operations, and the
``Survey`` for erasing goes through both commits page by page. A single reader would be too slow for the check or see
too little for erasing. Pages are numbered from 0; the first two are the meta pages.

A page, in the data format of LMDB 0.9 on a 64-bit little-endian machine (bytes, kind, meaning):

    page    0 u64 own number   8 u16 -   10 u16 flags   12 u16 lower   14 u16 upper (overflow: 12 u32 number of pages)
            16 ... lower: u16 places of nodes;  lower ... upper: unused;  upper ...: nodes
    node    0 u32 size of the value   4 u16 flags   6 u16 size of the key   8 key, then the value
            or, with flag 1, the u64 number of the first overflow page of the value
            in a branch page: 0 u48 number of the page below   6 u16 size of the key   8 key
    meta   16 u32 magic   20 u32 version   24 u64 address   32 u64 size of the map   40 free list, 88 values: two trees
           136 u64 last page   144 u64 commit
    tree    0 u32 -   4 u16 flags   6 u16 depth   8 u64 branch pages, leaf pages, overflow pages, values, root
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import lmdb
import numpy as np
import numpy.typing as npt

from memstore import paths
from memstore.errors import DamagedError
from memstore.store.contract import Progress

BRANCH, LEAF, OVERFLOW, META = 1, 2, 4, 8  # flags of a page
LARGE = 1  # flag of a node: its value has its own pages
HEADER_BYTES = 16  # of a page, before the places of its nodes
NODE_BYTES = 8  # of a node, before its key
NO_PAGE = 2**64 - 1  # root of an empty tree
MAGIC, FORMAT = 0xBEEFC0DE, 1
META_BYTES = 152
PAGE = struct.Struct("<QHHHH")
NODE = struct.Struct("<IHH")
METAS = struct.Struct("<IIQQ" + "IHHQQQQQ" * 2 + "QQ")  # after the header of a meta page
UNWRITTEN_BYTES = 1 << 20  # LMDB may leave its last pages unwritten if they are empty

_KNOWN = (0, 9)


class Tree(NamedTuple):
    """A tree as described in its meta page."""

    pad: int
    """Bytes of a page, for the list of free pages."""
    flags: int
    depth: int
    branches: int
    leaves: int
    overflow: int
    entries: int
    root: int


def is_known() -> bool:
    """Return whether the LMDB in use has this layout. Only its version says so: the format in its files stays 1."""
    return lmdb.version()[:2] == _KNOWN


def version() -> str:
    """Return the version of the LMDB in use."""
    return ".".join(map(str, lmdb.version()))


_Array = npt.NDArray[Any]

_INTEGER_KEYS = 8  # flag of a tree
_TREE_FLAGS = 0x3FFF  # the other bits are flags of the environment
_CHUNK = 1024  # pages checked together


@dataclass
class _Pages:
    """Pages and counts found by a walk over a tree."""

    starts: list[_Array] = field(default_factory=list)
    lengths: list[_Array] = field(default_factory=list)
    branches: int = 0
    leaves: int = 0
    overflow: int = 0
    entries: int = 0
    big: list[_Array] = field(default_factory=list)
    """First pages of large values."""
    spare: int = 0
    """Pages of large values that their trees count, but that their lengths do not need."""
    ends: int = 0
    """Sum of the last four bytes of each key."""

    def take(self, starts: _Array, lengths: _Array) -> None:
        self.starts.append(starts.astype(np.int64))
        self.lengths.append(lengths.astype(np.int64))


class _PageDamage(Exception):
    """An error in the pages; its text says what is wrong."""


def survey(
    data: Path, transaction: int, page_bytes: int, key_bytes: int, *, large: bool = False
) -> tuple[str | None, int | None]:
    """Return what is wrong with the tree of the commit ``transaction`` in the file ``data``, or None.

    Also return the sum of the last four bytes of all keys, as big-endian numbers, if known: see ``values.py``. A read
    transaction must hold that commit. Keys have ``key_bytes``. ``large`` also checks the first page of each large
    value.
    """
    if not transaction or not is_known():
        return None, None  # nothing was ever committed, or the layout is unknown: then LMDB has to be trusted
    with os.fdopen(paths.open_file(data.parent, data.name, os.O_RDONLY), "rb") as file:
        count = os.fstat(file.fileno()).st_size // page_bytes
        pages = np.memmap(file, np.uint8, "r", shape=(count, page_bytes))
    try:
        return None, _Check(pages, transaction, key_bytes, large=large).run()
    except _PageDamage as error:
        return str(error), None


class _Check:
    def __init__(self, pages: _Array, transaction: int, key_bytes: int, *, large: bool) -> None:
        self._pages = pages
        self._large = large
        self._size = pages.shape[1]
        self._key_bytes = key_bytes
        metas = [METAS.unpack_from(pages[number], HEADER_BYTES) for number in (0, 1)]
        metas.sort(key=lambda meta: meta[-1] != transaction)
        (*found, last, number), (*other, _, before) = metas
        # Each commit replaces the older of the two; a writer may be one commit further by now.
        _require(
            number == transaction and abs(number - before) == 1,
            "its two meta pages do not belong to consecutive commits",
        )
        self._transaction, self._last = number, last
        # LMDB does not write pages at the end of the file that a transaction took and freed again.
        self._end = min(last + 1, len(pages))
        self._free, self._values = Tree(*found[4:12]), Tree(*found[12:20])
        self._before = (Tree(*other[4:12]), before) if before < number else None

    def run(self) -> int:
        """Return the sum of the ends of all keys. Raises ``_PageDamage``."""
        _require(
            (self._free.pad, self._free.flags & _TREE_FLAGS) == (self._size, _INTEGER_KEYS)
            and (self._values.pad, self._values.flags) == (0, 0),
            "its trees do not belong to a memory",
        )
        met = _Pages()
        met.take(np.array([0]), np.array([2]))
        for _ in self._walk(self._values, self._key_bytes, met):
            pass
        newest = 0
        for freed, pages in self._free_pages(self._free, met):
            met.take(pages, np.ones_like(pages))
            newest = freed
        # Every commit except the first replaces pages and lists them as free, under its own number.
        _require(newest == self._transaction or self._transaction == 1, "it is not the last commit")
        if self._before and self._before[1] > 1:
            older = max((freed for freed, _ in self._free_pages(self._before[0], _Pages())), default=0)
            _require(older == self._before[1], "a later commit is hidden")
        self._tile(met)
        return met.ends

    def _tile(self, met: _Pages) -> None:
        """Check that every page has one use; seemingly lost pages belong to shortened values, which say so."""
        starts, lengths = np.concatenate(met.starts), np.concatenate(met.lengths)
        order = np.argsort(starts)
        starts, lengths = starts[order], lengths[order]
        taken = np.append(starts[1:], self._last + 1) - starts
        longer = (taken != lengths).nonzero()[0]
        good: bool | np.bool_ = True
        if len(longer):  # rare, and searching all large values takes long
            large = np.isin(starts[longer], np.concatenate([*met.big, np.empty(0, np.int64)]))
            said = [self._pages_of(number) for number in starts[longer[large]].tolist()]
            good = large.all() and (taken[longer] > lengths[longer]).all() and said == taken[longer].tolist()
        spare = int((taken - lengths).sum())
        _require(bool(good) and spare == met.spare, "some pages overlap or are lost")
        if self._large:
            self._check_large(starts, taken, met)

    # LMDB frees as many pages as the first page of a large value states, starting at the stated number.
    def _check_large(self, starts: _Array, taken: _Array, met: _Pages) -> None:
        own = np.sort(np.concatenate([*met.big, np.empty(0, np.int64)]))
        pages = taken[np.searchsorted(starts, own)]
        for place in range(0, len(own), _CHUNK):
            chunk = own[place : place + _CHUNK]
            head = self._pages[chunk, :HEADER_BYTES].copy()
            numbers, words = head.view("<u8")[:, 0], head.view("<u4")
            good = (numbers == chunk) & (words[:, 2] >> 16 == OVERFLOW)
            good &= words[:, 3] == pages[place : place + _CHUNK]
            _require(bool(good.all()), "the first page of a large value names another page or another length")

    def _pages_of(self, number: int) -> int:
        """Return the number of pages that page ``number`` states for its large value; 0 if it states none."""
        own, _, flags, pages = struct.unpack_from("<QHHI", self._pages[number])
        return pages if (own, flags) == (number, OVERFLOW) else 0

    def _free_pages(self, tree: Tree, met: _Pages) -> Iterator[tuple[int, _Array]]:
        """Yield the number of a commit, and the pages that it freed."""
        for key, place, length in self._walk(tree, 8, met):
            numbers = np.frombuffer(self._pages.reshape(-1)[place : place + length - length % 8].tobytes(), "<u8")
            _require(
                length % 8 == 0 and len(numbers) > 0 and int(numbers[0]) == length // 8 - 1,
                "a list of free pages has a wrong length",
            )
            yield int(key), numbers[1:].astype(np.int64)

    def _walk(self, tree: Tree, key_bytes: int, met: _Pages) -> Iterator[tuple[Any, int, int]]:
        """Check a tree level by level; yield key, file offset and length of each value of the list of free pages."""
        found = _Pages()
        if tree.root != NO_PAGE:
            numbers, bounds = np.array([min(tree.root, 2**62)]), np.zeros(1, _keys(key_bytes))
            for _ in range(tree.depth - 1):
                numbers, bounds = self._branches(numbers, bounds, key_bytes, found)
            yield from self._leaves(numbers, bounds, key_bytes, found)
        counted, spare = (found.branches, found.leaves, found.entries), tree.overflow - found.overflow
        _require(
            counted == (tree.branches, tree.leaves, tree.entries) and spare >= 0, "some pages or values are missing"
        )
        met.starts += found.starts
        met.lengths += found.lengths
        met.big += found.big
        met.spare += spare
        met.ends += found.ends

    def _branches(self, numbers: _Array, bounds: _Array, key_bytes: int, met: _Pages) -> tuple[_Array, _Array]:
        """Return the pages one level below, in order, and the smallest key that a search expects in each."""
        below, keys = [], []
        for nodes, chunk_bounds in self._nodes(numbers, bounds, BRANCH, key_bytes, met):
            below.append(nodes.child)
            keys.append(np.where(nodes.first, chunk_bounds[nodes.page], nodes.keys))
        met.branches += len(numbers)
        return np.concatenate(below), np.concatenate(keys)

    def _leaves(self, numbers: _Array, bounds: _Array, key_bytes: int, met: _Pages) -> Iterator[tuple[Any, int, int]]:
        before = None
        for nodes, chunk_bounds in self._nodes(numbers, bounds, LEAF, key_bytes, met):
            keys, starts = nodes.keys, nodes.first.nonzero()[0]
            ascending = bool((keys[1:] > keys[:-1]).all()) and (before is None or before < keys[0])
            lasts = keys[starts[1:] - 1]
            apart = bool((lasts < chunk_bounds[1:]).all()) and (before is None or before < chunk_bounds[0])
            _require(ascending and apart and bool((keys[starts] >= chunk_bounds).all()), "its keys are out of order")
            before = keys[-1]
            places, lengths, big = nodes.values, nodes.length, nodes.big
            own = _unaligned(self._pages, "<i8")[places[big]]
            sizes = (HEADER_BYTES - 1 + lengths[big]) // self._size + 1
            inside = (own > 1) & (own < self._end) & (own + sizes <= self._end)
            _require(bool(inside.all()), "a value is outside the file")
            met.take(own, sizes)
            met.big.append(own)
            met.overflow += int(sizes.sum())
            met.entries += len(keys)
            if key_bytes == self._key_bytes:
                ends = keys.view(np.uint8).reshape(-1, key_bytes)[:, -4:].copy().view(">u4")
                met.ends += int(ends.sum(dtype=np.int64))
            if key_bytes == 8:
                places[big] = own * self._size + HEADER_BYTES
                yield from zip(keys.tolist(), places.tolist(), lengths.tolist(), strict=True)
        met.leaves += len(numbers)

    def _nodes(
        self, numbers: _Array, bounds: _Array, kind: int, key_bytes: int, met: _Pages
    ) -> Iterator[tuple[_Nodes, _Array]]:
        _require(bool(((numbers > 1) & (numbers < self._end)).all()), "a pointer leads outside the file")
        met.take(numbers, np.ones(len(numbers)))
        for start in range(0, len(numbers), _CHUNK):
            chunk = numbers[start : start + _CHUNK]
            yield _Nodes(self._pages[chunk], chunk, kind, key_bytes), bounds[start : start + _CHUNK]


class _Nodes:
    """All nodes of some pages of one kind, in order. Raises ``_PageDamage``."""

    def __init__(self, pages: _Array, numbers: _Array, kind: int, key_bytes: int) -> None:
        size = pages.shape[1]
        halves = pages.view("<u2")
        flags, lower, upper = (halves[:, place].astype(np.int64) for place in (5, 6, 7))
        counts = (lower - HEADER_BYTES) // 2
        good = (pages[:, :8].copy().view("<u8")[:, 0] == numbers) & (flags == kind) & (counts > 0) & (lower % 2 == 0)
        _require(bool((good & (lower <= upper) & (upper <= size)).all()), "a page has a wrong header")
        self.page = np.repeat(np.arange(len(pages)), counts)
        starts = self.page * size
        column = np.arange(len(starts)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.first = column == 0
        """Whether a node is the first of its page; in a branch its key may be left out."""
        offset = np.take(halves, starts // 2 + HEADER_BYTES // 2 + column).astype(np.int64)
        fits = (offset >= upper[self.page]) & (offset + 8 <= size) & (offset % 2 == 0)
        _require(bool(fits.all()), "a node is outside its page")
        header = _unaligned(pages, "<i8")[starts + offset]
        self.child = header & (2**48 - 1)
        """In a branch: the page below."""
        self.length, self.big = header & (2**32 - 1), (header >> 32 & 0xFFFF) == LARGE
        """In a leaf: bytes of the value, and whether it has its own pages."""
        key = header >> 48 & 0xFFFF
        body: _Array | int = 0
        if kind == LEAF:
            _require(bool((header >> 32 & 0xFFFF <= LARGE).all()), "a value has a wrong type")
            body = np.where(self.big, 8, self.length)
        _require(bool(((key == key_bytes) | (key == 0) & self.first & (kind == BRANCH)).all()), "a key is too long")
        taken = 8 + key + body + (key + body) % 2
        full = np.bincount(self.page, taken, len(pages)) == size - upper
        _require(bool(full.all() and (offset + taken <= size).all()), "the nodes of a page do not fill it")
        # A key left out at the very end has no bytes to read.
        self.keys = _unaligned(pages, _keys(key_bytes))[np.minimum(starts + offset + 8, pages.size - key_bytes)]
        self.values = numbers[self.page] * size + offset + 8 + key_bytes
        """Offset of each value in the file; for a big value, of its first page number."""


def _unaligned(pages: _Array, kind: str) -> _Array:
    """View the item of this type that starts at each byte."""
    return np.ndarray((pages.size - np.dtype(kind).itemsize + 1,), kind, pages.reshape(-1), 0, (1,))


def _keys(key_bytes: int) -> str:
    """Return the type of keys; keys of the list of free pages are numbers."""
    return "<u8" if key_bytes == 8 else f"S{key_bytes}"


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise _PageDamage(what)


_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # flags of fallocate(2)
_DEEPEST = 32  # pages from root to leaf; LMDB has no deeper trees
_REPORT_EVERY = 4096  # pages
_MOST_AT_ONCE = 64 << 20  # bytes erased between two reports of progress


@dataclass(frozen=True)
class Meta:
    """The content of one of the two meta pages: the state of the file at one commit."""

    page_bytes: int
    commit: int
    last_page: int
    free: Tree
    values: Tree

    @classmethod
    def read(cls, file: int, place: int, number: int) -> Self:
        """Read meta page ``number`` at byte ``place`` of an open file. Raises ``DamagedError``."""
        raw = os.pread(file, META_BYTES, place)
        if len(raw) < META_BYTES or PAGE.unpack_from(raw)[2] & META == 0:
            raise _damaged(f"page {number} is not a meta page")
        magic, version, _, _, *trees, last_page, commit = METAS.unpack_from(raw, HEADER_BYTES)
        if (magic, version) != (MAGIC, FORMAT):
            raise _damaged(f"meta page {number} belongs to another kind of file ({magic:#x}, format {version})")
        free, values = Tree(*trees[:8]), Tree(*trees[8:])
        page_bytes = free.pad
        if page_bytes < 512 or page_bytes & (page_bytes - 1):
            raise _damaged(f"meta page {number} names a page size of {page_bytes} bytes")
        return cls(page_bytes, commit, last_page, free, values)


def read_metas(file: int) -> tuple[Meta, Meta]:
    """Read the states at the last two commits, the older one first. Raises ``DamagedError``."""
    first = Meta.read(file, 0, 0)
    second = Meta.read(file, first.page_bytes, 1)
    if first.page_bytes != second.page_bytes:
        raise _damaged("the two meta pages name different page sizes")
    return (first, second) if first.commit < second.commit else (second, first)


class _Slack(NamedTuple):
    """Bytes of a page in use that are unused and not zero."""

    place: int
    """First byte, counted from the start of the file."""
    nbytes: int


class _Counts(NamedTuple):
    branches: int = 0
    leaves: int = 0
    overflows: int = 0
    entries: int = 0

    def plus(self, other: _Counts) -> _Counts:
        return _Counts(*(mine + its for mine, its in zip(self, other, strict=True)))


class Survey:
    """Every page that the last two commits use. Hold the write transaction while it is made, so that nobody writes."""

    def __init__(self, file: int, progress: Progress | None = None) -> None:
        """Walk the trees of an open data file. Raises ``DamagedError`` unless everything is as expected."""
        self._file = file
        self._progress = progress
        self.metas = read_metas(file)
        """The states at the last two commits, the older one first."""
        self.page_bytes = self.metas[0].page_bytes
        self.pages = 1 + max(meta.last_page for meta in self.metas)
        """Pages of the file, used or not."""
        length = os.fstat(file).st_size
        if length + UNWRITTEN_BYTES < self.pages * self.page_bytes:  # so that a wrong number cannot use up all memory
            raise _damaged(f"it should have {self.pages} pages, but it has {length} bytes")
        self.used: npt.NDArray[np.bool_] = np.zeros(self.pages, np.bool_)
        """``[pages]``: whether a page is used by one of the last two commits."""
        self.used[:2] = True
        self.slack: list[_Slack] = []
        """Unused bytes on pages in use."""
        self.listed: list[int] = []
        """Pages that the last commit lists as free."""
        self._met = 2
        self._known: dict[int, _Counts] = {}  # branch page -> what is below it: the two commits share most pages
        self._newest = True  # its pages are met once each; the older commit meets most of them again
        for meta in reversed(self.metas):
            self._check(meta, "list of free pages", meta.free)
            self._check(meta, "tree of values", meta.values)
            if self._newest:
                self._check_listed()
            self._newest = False

    def unused(self) -> Iterator[range]:
        """Runs of pages that neither commit uses, in order."""
        edges = np.flatnonzero(np.diff(np.concatenate([[True], self.used, [True]]).astype(np.int8)))
        for start, stop in edges.reshape(-1, 2).tolist():
            yield range(start, stop)

    def _check(self, meta: Meta, what: str, tree: Tree) -> None:
        if tree.depth > _DEEPEST:
            raise _damaged(f"the {what} of commit {meta.commit} claims to be {tree.depth} pages deep")
        lists = self._newest and tree is meta.free
        found = _Counts() if tree.root == NO_PAGE else self._walk(tree.root, tree.depth, lists)
        expected = _Counts(tree.branches, tree.leaves, tree.overflow, tree.entries)
        if found != expected:
            raise _damaged(f"the {what} of commit {meta.commit} should have {expected}, but it has {found}")

    def _check_listed(self) -> None:
        """Check that no page is both in use and listed as free by the same commit."""
        listed = np.array(self.listed, np.uint64)
        if listed.size and (listed.max() >= self.pages or bool(self.used[listed].any())):
            raise _damaged("a page in the list of free pages is in use, or does not exist")

    def _walk(self, number: int, depth: int, lists: bool) -> _Counts:
        """Visit the page ``number`` and all pages below it; return the counts."""
        if number in self._known and not self._newest:
            return self._known[number]
        page = self._page(number, BRANCH if depth > 1 else LEAF)
        self._use(range(number, number + 1))
        places = self._nodes(number, page)
        if depth <= 1:
            overflows = sum(self._value(page, place, lists) for place in places)
            return _Counts(leaves=1, overflows=overflows, entries=len(places))
        counts = _Counts(branches=1)
        for place in places:
            low, high, top = struct.unpack_from("<HHH", page, place)
            counts = counts.plus(self._walk(low | high << 16 | top << 32, depth - 1, lists))
        self._known[number] = counts
        return counts

    def _page(self, number: int, kind: int) -> bytes:
        if not 2 <= number < self.pages:
            raise _damaged(f"a tree leads to page {number}, but there are {self.pages} pages")
        page = os.pread(self._file, self.page_bytes, number * self.page_bytes)
        if len(page) < self.page_bytes:
            raise _damaged(f"it ends before page {number}")
        own, _, flags, _, _ = PAGE.unpack_from(page)
        if own != number or flags != kind:
            raise _damaged(f"page {number} claims to be page {own} of kind {flags}; expected kind {kind}")
        return page

    def _nodes(self, number: int, page: bytes) -> list[int]:
        """Return the places of the nodes of a page."""
        lower, upper = struct.unpack_from("<HH", page, 12)
        if not HEADER_BYTES <= lower <= upper <= self.page_bytes:
            raise _damaged(f"page {number} has nodes at {lower} to {upper}, which is impossible")
        self._left_over(number * self.page_bytes + lower, page[lower:upper])
        places = list(struct.unpack_from(f"<{(lower - HEADER_BYTES) // 2}H", page, HEADER_BYTES))
        if places and not (min(places) == upper and max(places) <= self.page_bytes - NODE_BYTES):
            raise _damaged(f"the nodes of page {number} are not where its header says")
        return places

    def _value(self, page: bytes, place: int, lists: bool) -> int:
        """Visit the value of a node in a leaf page; return its number of overflow pages."""
        nbytes, flags, key_bytes = NODE.unpack_from(page, place)
        start = place + NODE_BYTES + key_bytes
        if flags not in (0, LARGE) or start + (8 if flags else nbytes) > self.page_bytes:
            raise _damaged("a value does not fit its page, or has a type that memories do not use")
        if not flags:
            if lists:
                self._list(page[start : start + nbytes])
            return 0
        number = int.from_bytes(page[start : start + 8], "little")
        pages, first = self._overflow(number, nbytes)
        if self._use(range(number, number + pages)):
            self._tail(number, pages, nbytes, first)
        if lists:
            self._list(os.pread(self._file, nbytes, number * self.page_bytes + HEADER_BYTES))
        return pages

    def _overflow(self, number: int, nbytes: int) -> tuple[int, bytes]:
        """Return the number of pages of a large value, and the first of them."""
        first = self._page(number, OVERFLOW)
        pages = int(struct.unpack_from("<I", first, 12)[0])
        if pages * self.page_bytes < nbytes + HEADER_BYTES or number + pages > self.pages:
            raise _damaged(f"a value of {nbytes} bytes claims {pages} pages from page {number} on")
        return pages, first

    def _tail(self, number: int, pages: int, nbytes: int, first: bytes) -> None:
        end = number * self.page_bytes + HEADER_BYTES + nbytes
        rest = (number + pages) * self.page_bytes - end
        if pages == 1:
            self._left_over(end, first[self.page_bytes - rest :])
        elif rest:
            self._left_over(end, os.pread(self._file, rest, end))

    def _use(self, pages: range) -> bool:
        """Mark pages as used; False if they were already. Raises ``DamagedError`` for pages used twice."""
        if self.used[pages.start : pages.stop].any():
            if self._newest:
                raise _damaged(f"pages {pages.start} to {pages.stop - 1} are used twice")
            return False
        self.used[pages.start : pages.stop] = True
        self._met += len(pages)
        if self._progress and self._met % _REPORT_EVERY < len(pages):
            self._progress(self._met * self.page_bytes, self.pages * self.page_bytes)
        return True

    def _left_over(self, place: int, rest: bytes) -> None:
        if rest.count(0) != len(rest):
            self.slack.append(_Slack(place, len(rest)))

    def _list(self, raw: bytes) -> None:
        """Store the pages of one entry of the list of free pages: a count, then their numbers."""
        numbers = np.frombuffer(raw[: len(raw) & ~7], "<u8").tolist()
        if len(raw) % 8 or not numbers or numbers[0] >= len(numbers):
            raise _damaged("an entry in the list of free pages has a wrong length")
        self.listed += numbers[1 : numbers[0] + 1]


def erase_unused(file: int, progress: Progress | None = None) -> None:
    """Erase all bytes that the last two commits of an open data file do not use; return when that is on disk.

    The caller holds the write transaction and ensures that nobody reads an older commit. Raises ``DamagedError``, and
    changes nothing, if any detail of the file is not understood.
    """
    survey = Survey(file, progress)
    size, total = survey.page_bytes, survey.pages * survey.page_bytes
    done = int(survey.used.sum()) * size
    for run in survey.unused():
        for start in range(run.start * size, run.stop * size, _MOST_AT_ONCE):
            nbytes = min(_MOST_AT_ONCE, run.stop * size - start)
            _erase(file, start, nbytes)
            done += nbytes
            if progress:
                progress(done, total)
    if (length := os.fstat(file).st_size) > total:  # bytes that a failed write left after the last page
        _erase(file, total, length - total)
    for place, nbytes in survey.slack:
        os.pwrite(file, bytes(nbytes), place)
    os.fsync(file)


def _erase(file: int, start: int, nbytes: int) -> None:
    """Make a hole, or zeros if the file system has no holes. Bytes after the end of the file stay."""
    nbytes = min(nbytes, os.fstat(file).st_size - start)
    if nbytes <= 0 or _punch(file, start, nbytes):
        return
    zeros = bytes(1 << 20)
    for place in range(start, start + nbytes, len(zeros)):
        part = min(len(zeros), start + nbytes - place)
        if os.pread(file, part, place).count(0) != part:
            os.pwrite(file, zeros[:part], place)


def _punch(file: int, start: int, nbytes: int) -> bool:
    """Return whether the file system made a hole."""
    libc = ctypes.CDLL(None, use_errno=True)
    fallocate = getattr(libc, "fallocate64", None)
    if fallocate is None:
        return False
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if fallocate(file, _PUNCH_HOLE | _KEEP_SIZE, start, nbytes) == 0:
        return True
    if (code := ctypes.get_errno()) in (errno.EOPNOTSUPP, errno.ENOSYS):
        return False
    raise OSError(code, os.strerror(code))


def _damaged(what: str) -> DamagedError:
    return DamagedError(f"the data file has unexpected pages: {what}. Nothing was changed; run verify")
