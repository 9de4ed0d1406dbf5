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

Only this module knows the layout. Pages are numbered from 0; the first two are the meta pages.

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
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

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
PAGE = struct.Struct("<QHHHH")
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
_NONE = np.empty(0, np.int64)
_WRONG_HEAD = "the first page of a large value names another page or another length"


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
    big_bytes: list[_Array] = field(default_factory=list)
    """Lengths of these values in bytes."""
    trees: list[_Array] = field(default_factory=list)
    """Pages of the trees themselves."""
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
        pages = _mapped(file.fileno(), page_bytes)
    try:
        return None, _Check(pages, transaction, key_bytes, large=large).run().ends
    except _PageDamage as error:
        return str(error), None


def _mapped(file: int, page_bytes: int) -> _Array:
    """Map the pages of an open file for reading, ``[pages, page_bytes]``."""
    count = os.fstat(file).st_size // page_bytes
    content = mmap.mmap(file, count * page_bytes, prot=mmap.PROT_READ)
    return np.frombuffer(content, np.uint8).reshape(count, page_bytes)


class _Check:
    def __init__(self, pages: _Array, transaction: int, key_bytes: int, *, large: bool) -> None:
        self._pages = pages
        self._large = large
        self._size = pages.shape[1]
        self._key_bytes = key_bytes
        metas = [METAS.unpack_from(pages[number], HEADER_BYTES) for number in (0, 1)]
        kinds = [(PAGE.unpack_from(pages[number])[2], *meta[:2]) for number, meta in enumerate(metas)]
        _require(kinds == [(META, MAGIC, FORMAT)] * 2, "its first two pages are no meta pages")
        metas.sort(key=lambda meta: meta[-1] != transaction)
        (*found, last, number), (*other, _, before) = metas
        # Each commit replaces the older of the two; a writer may be one commit further by now.
        _require(
            number == transaction and abs(number - before) == 1,
            "its two meta pages do not belong to consecutive commits",
        )
        self._transaction, self.last = number, last
        # LMDB does not write pages at the end of the file that a transaction took and freed again.
        self._end = min(last + 1, len(pages))
        self._free, self._values = Tree(*found[4:12]), Tree(*found[12:20])
        self._before = (Tree(*other[4:12]), Tree(*other[12:20]), before) if before < number else None

    def run(self) -> _Pages:
        """Return the pages of the commit, including free ones. Raises ``_PageDamage``."""
        met = self._of_values(self._free, self._values)
        met.take(np.array([0]), np.array([2]))
        newest = 0
        for freed, pages in self._free_pages(self._free, met):
            met.take(pages, np.ones_like(pages))
            newest = freed
        # Every commit except the first replaces pages and lists them as free, under its own number.
        _require(newest == self._transaction or self._transaction == 1, "it is not the last commit")
        if self._before and self._before[-1] > 1:
            older = max((freed for freed, _ in self._free_pages(self._before[0], _Pages())), default=0)
            _require(older == self._before[-1], "a later commit is hidden")
        self._tile(met)
        return met

    def older(self) -> _Pages:
        """Return the pages of the commit before, without free ones. Raises ``_PageDamage``."""
        assert self._before is not None
        free, values, _ = self._before
        met = self._of_values(free, values)
        for _ in self._free_pages(free, met):
            pass
        return met

    def _of_values(self, free: Tree, values: Tree) -> _Pages:
        _require(
            (free.pad, free.flags & _TREE_FLAGS) == (self._size, _INTEGER_KEYS)
            and (values.pad, values.flags) == (0, 0),
            "its trees do not belong to a memory",
        )
        met = _Pages()
        for _ in self._walk(values, self._key_bytes, met):
            pass
        return met

    def _tile(self, met: _Pages) -> None:
        """Check that every page has one use; seemingly lost pages belong to shortened values, which say so."""
        starts, lengths = np.concatenate(met.starts), np.concatenate(met.lengths)
        order = np.argsort(starts)
        starts, lengths = starts[order], lengths[order]
        taken = np.append(starts[1:], self.last + 1) - starts
        longer = (taken != lengths).nonzero()[0]
        good: bool | np.bool_ = True
        if len(longer):  # rare, and searching all large values takes long
            large = np.isin(starts[longer], np.concatenate([*met.big, _NONE]))
            said = self.stated_pages(starts[longer[large]])
            good = large.all() and (taken[longer] > lengths[longer]).all() and (said == taken[longer]).all()
        spare = int((taken - lengths).sum())
        _require(bool(good) and spare == met.spare, "some pages overlap or are lost")
        if self._large:
            # LMDB frees as many pages as the first page of a large value states, starting at the stated number.
            own = np.concatenate([*met.big, _NONE])
            _require(bool((self.stated_pages(own) == taken[np.searchsorted(starts, own)]).all()), _WRONG_HEAD)

    def stated_pages(self, own: _Array) -> _Array:
        """Return how many pages the first pages ``own [n]`` of large values state. Raises ``_PageDamage``."""
        stated, order = np.zeros_like(own), np.argsort(own)
        for place in range(0, len(own), _CHUNK):
            chunk = order[place : place + _CHUNK]
            head = self._pages[own[chunk], :HEADER_BYTES].copy()
            numbers, words = head.view("<u8")[:, 0], head.view("<u4").astype(np.int64)
            good = (
                (numbers == own[chunk]) & (words[:, 2] >> 16 == OVERFLOW) & (own[chunk] + words[:, 3] <= self.last + 1)
            )
            _require(bool(good.all()), _WRONG_HEAD)
            stated[chunk] = words[:, 3]
        return stated

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
        met.trees += found.trees
        met.big += found.big
        met.big_bytes += found.big_bytes
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
            met.big_bytes.append(lengths[big])
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
        met.trees.append(numbers)
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
_MOST_AT_ONCE = 64 << 20  # bytes erased between two reports of progress


def erase_unused(
    file: int, transaction: int, page_bytes: int, key_bytes: int, progress: Progress | None = None
) -> None:
    """Erase all bytes that the last two commits of an open data file do not use; return when that is on disk.

    ``transaction`` is the last commit. The caller holds the write transaction and ensures that nobody reads a commit
    before the last two. Raises ``DamagedError``, and changes nothing, if any detail of the file is not understood.
    """
    pages = _mapped(file, page_bytes)
    try:
        check = _Check(pages, transaction, key_bytes, large=True)
        total, both = check.last + 1, [check.run(), check.older()]
        extents = [(np.concatenate([*met.big, _NONE]), np.concatenate([*met.big_bytes, _NONE])) for met in both]
        counts = [check.stated_pages(own) for own, _ in extents]
    except _PageDamage as error:
        raise DamagedError(f"the data file has unexpected pages: {error}. Nothing was changed. Run verify") from None
    used = np.zeros(total, np.bool_)
    used[:2] = True
    for met, (own, nbytes), stated in zip(both, extents, counts, strict=True):
        for tree in met.trees:
            for number in tree[~used[tree]].tolist():
                lower, upper = pages[number, 12:16].view("<u2").tolist()
                _clear(file, pages, number * page_bytes + lower, number * page_bytes + upper)
            used[tree] = True
        for number, length, count in zip(own.tolist(), nbytes.tolist(), stated.tolist(), strict=True):
            if not used[number : number + count].any():  # of a shared value, the newest commit knows the length
                _clear(file, pages, number * page_bytes + HEADER_BYTES + length, (number + count) * page_bytes)
            used[number : number + count] = True
    done = int(used.sum()) * page_bytes
    edges = np.flatnonzero(np.diff(np.concatenate([[True], used, [True]]).astype(np.int8)))
    for first, stop in (edges.reshape(-1, 2) * page_bytes).tolist():
        for start in range(first, stop, _MOST_AT_ONCE):
            part = min(_MOST_AT_ONCE, stop - start)
            _erase(file, start, part)
            done += part
            if progress:
                progress(done, total * page_bytes)
    if (length := os.fstat(file).st_size) > total * page_bytes:  # bytes that a failed write left after the last page
        _erase(file, total * page_bytes, length - total * page_bytes)
    os.fsync(file)


def _clear(file: int, pages: _Array, start: int, stop: int) -> None:
    """Overwrite the bytes of the file from ``start`` to ``stop`` with zeros, unless they are zeros."""
    if pages.reshape(-1)[start:stop].any():
        os.pwrite(file, bytes(stop - start), start)


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
