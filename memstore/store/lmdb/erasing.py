"""The pages of an LMDB data file: which of them the last two commits use, and erasing all others in place.

LMDB never gives a page back: what a deleted value leaves is listed as free, and its bytes stay until something is
written over them. ``erase_unused`` takes them out of the file: free pages become holes, and what is left over on pages
in use (the room between the nodes of a page, the end of a large value's last page) becomes zeros. No byte that a reader
of one of the last two commits looks at is touched, so readers go on, and a process that dies half-way leaves a whole
memory.

Nothing is erased unless everything is understood. The walk starts from both meta pages, goes down both trees of each
(the tree of values and the list of free pages), and compares what it met with the counts that LMDB keeps itself: branch
pages, leaf pages, overflow pages, values. A page that says another number or another kind than expected, that is used
twice, or that is in use and listed as free is damage, and the file is left alone.

``pages.py`` says how pages are laid out.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import lmdb
import numpy as np
import numpy.typing as npt

from memstore import paths
from memstore.errors import DamagedError, MemoryInUse, MemstoreError, ReadOnlyMemory
from memstore.store.contract import Progress
from memstore.store.lmdb import pages as layout
from memstore.store.lmdb.environment import DATA_NAME

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # flags of fallocate(2)
_DEEPEST = 32  # pages from root to leaf; LMDB has no deeper trees
_REPORT_EVERY = 4096  # pages
_MOST_AT_ONCE = 64 << 20  # bytes erased between two reports of progress


@dataclass(frozen=True)
class Meta:
    """What one of the two meta pages says: the state of the file at one commit."""

    page_bytes: int
    commit: int
    last_page: int
    free: layout.Tree
    values: layout.Tree

    @classmethod
    def read(cls, file: int, place: int, number: int) -> Self:
        """Read meta page ``number`` at byte ``place`` of an open file. Raises ``DamagedError``."""
        raw = os.pread(file, layout.META_BYTES, place)
        if len(raw) < layout.META_BYTES or layout.PAGE.unpack_from(raw)[2] & layout.META == 0:
            raise _damaged(f"page {number} is not a meta page")
        magic, version, _, _, *trees, last_page, commit = layout.METAS.unpack_from(raw, layout.HEADER_BYTES)
        if (magic, version) != (layout.MAGIC, layout.FORMAT):
            raise _damaged(f"meta page {number} is of another kind of file ({magic:#x}, format {version})")
        free, values = layout.Tree(*trees[:8]), layout.Tree(*trees[8:])
        page_bytes = free.pad
        if page_bytes < 512 or page_bytes & (page_bytes - 1):
            raise _damaged(f"meta page {number} says that pages have {page_bytes} bytes")
        return cls(page_bytes, commit, last_page, free, values)


def read_metas(file: int) -> tuple[Meta, Meta]:
    """The states at the last two commits, the older one first. Raises ``DamagedError``."""
    first = Meta.read(file, 0, 0)
    second = Meta.read(file, first.page_bytes, 1)
    if first.page_bytes != second.page_bytes:
        raise _damaged("the two meta pages disagree on the size of a page")
    return (first, second) if first.commit < second.commit else (second, first)


class Slack(NamedTuple):
    """Bytes of a page in use that belong to nothing, and are not zero."""

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
    """Every page that the last two commits use. Nobody may write while it is made: hold the write transaction."""

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
        if (
            length + layout.UNWRITTEN_BYTES < self.pages * self.page_bytes
        ):  # so that a wrong number cannot take all memory
            raise _damaged(f"it should have {self.pages} pages, and has {length} bytes")
        self.used: npt.NDArray[np.bool_] = np.zeros(self.pages, np.bool_)
        """``[pages]``: whether a page is used by one of the last two commits."""
        self.used[:2] = True
        self.slack: list[Slack] = []
        """What is left over on pages in use."""
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

    def _check(self, meta: Meta, what: str, tree: layout.Tree) -> None:
        if tree.depth > _DEEPEST:
            raise _damaged(f"the {what} of commit {meta.commit} is said to be {tree.depth} pages deep")
        lists = self._newest and tree is meta.free
        found = _Counts() if tree.root == layout.NO_PAGE else self._walk(tree.root, tree.depth, lists)
        expected = _Counts(tree.branches, tree.leaves, tree.overflow, tree.entries)
        if found != expected:
            raise _damaged(f"the {what} of commit {meta.commit} should have {expected}, and has {found}")

    def _check_listed(self) -> None:
        """No page may be in use and listed as free by the same commit."""
        listed = np.array(self.listed, np.uint64)
        if listed.size and (listed.max() >= self.pages or bool(self.used[listed].any())):
            raise _damaged("a page that is listed as free is used, or does not exist")

    def _walk(self, number: int, depth: int, lists: bool) -> _Counts:
        """Visit the page ``number`` and all below it; what was there."""
        if number in self._known and not self._newest:
            return self._known[number]
        page = self._page(number, layout.BRANCH if depth > 1 else layout.LEAF)
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
            raise _damaged(f"a tree leads to page {number} of {self.pages}")
        page = os.pread(self._file, self.page_bytes, number * self.page_bytes)
        if len(page) < self.page_bytes:
            raise _damaged(f"it ends before page {number}")
        own, _, flags, _, _ = layout.PAGE.unpack_from(page)
        if own != number or flags != kind:
            raise _damaged(f"page {number} says that it is page {own} of kind {flags}, and kind {kind} was expected")
        return page

    def _nodes(self, number: int, page: bytes) -> list[int]:
        """Places of the nodes of a page."""
        lower, upper = struct.unpack_from("<HH", page, 12)
        if not layout.HEADER_BYTES <= lower <= upper <= self.page_bytes:
            raise _damaged(f"page {number} has its nodes at {lower} to {upper}")
        self._left_over(number * self.page_bytes + lower, page[lower:upper])
        places = list(struct.unpack_from(f"<{(lower - layout.HEADER_BYTES) // 2}H", page, layout.HEADER_BYTES))
        if places and not (min(places) == upper and max(places) <= self.page_bytes - layout.NODE_BYTES):
            raise _damaged(f"the nodes of page {number} do not lie where it says")
        return places

    def _value(self, page: bytes, place: int, lists: bool) -> int:
        """Visit the value of a node in a leaf page; how many overflow pages it has."""
        nbytes, flags, key_bytes = layout.NODE.unpack_from(page, place)
        start = place + layout.NODE_BYTES + key_bytes
        if flags not in (0, layout.LARGE) or start + (8 if flags else nbytes) > self.page_bytes:
            raise _damaged("a value does not fit the page that it lies on, or is of a kind that memories do not have")
        if not flags:
            if lists:
                self._list(page[start : start + nbytes])
            return 0
        number = int.from_bytes(page[start : start + 8], "little")
        pages, first = self._overflow(number, nbytes)
        if self._use(range(number, number + pages)):
            self._tail(number, pages, nbytes, first)
        if lists:
            self._list(os.pread(self._file, nbytes, number * self.page_bytes + layout.HEADER_BYTES))
        return pages

    def _overflow(self, number: int, nbytes: int) -> tuple[int, bytes]:
        """The number of pages of a large value, and the first of them."""
        first = self._page(number, layout.OVERFLOW)
        pages = int(struct.unpack_from("<I", first, 12)[0])
        if pages * self.page_bytes < nbytes + layout.HEADER_BYTES or number + pages > self.pages:
            raise _damaged(f"a value of {nbytes} bytes is said to have {pages} pages from page {number} on")
        return pages, first

    def _tail(self, number: int, pages: int, nbytes: int, first: bytes) -> None:
        end = number * self.page_bytes + layout.HEADER_BYTES + nbytes
        rest = (number + pages) * self.page_bytes - end
        if pages == 1:
            self._left_over(end, first[self.page_bytes - rest :])
        elif rest:
            self._left_over(end, os.pread(self._file, rest, end))

    def _use(self, pages: range) -> bool:
        """Note that pages are in use; False where that was known. Raises ``DamagedError`` for what is used twice."""
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
            self.slack.append(Slack(place, len(rest)))

    def _list(self, raw: bytes) -> None:
        """Remember the pages of one entry of the list of free pages: a count, then their numbers."""
        numbers = np.frombuffer(raw[: len(raw) & ~7], "<u8").tolist()
        if len(raw) % 8 or not numbers or numbers[0] >= len(numbers):
            raise _damaged("an entry of the list of free pages is not as long as it says")
        self.listed += numbers[1 : numbers[0] + 1]


def erase_unused(file: int, progress: Progress | None = None) -> None:
    """Erase what the last two commits of an open data file do not use; return when that is on disk.

    The caller holds the write transaction and has made sure that nobody reads an older commit. Raises ``DamagedError``
    if the file is not understood in every detail; nothing is changed then.
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
    if (length := os.fstat(file).st_size) > total:  # what a write that failed has left behind the last page
        _erase(file, total, length - total)
    for place, nbytes in survey.slack:
        os.pwrite(file, bytes(nbytes), place)
    os.fsync(file)


def _erase(file: int, start: int, nbytes: int) -> None:
    """Make a hole; zeros where the file system has no holes. What lies behind the end of the file stays there."""
    nbytes = min(nbytes, os.fstat(file).st_size - start)
    if nbytes <= 0 or _punch(file, start, nbytes):
        return
    zeros = bytes(1 << 20)
    for place in range(start, start + nbytes, len(zeros)):
        part = min(len(zeros), start + nbytes - place)
        if os.pread(file, part, place).count(0) != part:
            os.pwrite(file, zeros[:part], place)


def _punch(file: int, start: int, nbytes: int) -> bool:
    """Whether the file system made a hole."""
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
    return DamagedError(f"the pages of the data file are not as expected: {what}; nothing was changed, run verify")


def wait_for_readers(env: lmdb.Environment, folder: Path, oldest: int, patience: float) -> None:
    """Return when nobody reads a commit before ``oldest``. Raises ``MemoryInUse`` after ``patience`` seconds."""
    until = time.monotonic() + patience
    while late := _readers_before(env, oldest):
        if time.monotonic() > until:
            raise MemoryInUse(
                f"nothing was erased: process {late[0]} has been reading an older state of memory {folder} for "
                f"more than {patience:g} seconds; let it finish, then compact again",
                memory=folder,
            )
        time.sleep(0.01)
        env.reader_check()


def _readers_before(env: lmdb.Environment, oldest: int) -> list[int]:
    """Processes that read a commit before ``oldest``."""
    lines = [line.split() for line in env.readers().splitlines()]
    rows = [line for line in lines if len(line) == 3 and line[0].isdigit() and line[2].isdigit()]
    return [int(pid) for pid, _, commit in rows if int(commit) < oldest]


def check_known(folder: Path) -> None:
    """Raise ``MemstoreError`` where the LMDB in use may lay out its pages in another way than is known here."""
    if not layout.is_known():
        raise MemstoreError(
            f"memory {folder} was not compacted: this is LMDB {layout.version()}, and only the pages of LMDB 0.9 are "
            "known well enough to erase in them. Nothing was erased; a copy of the memory leaves behind what "
            "was deleted",
            memory=folder,
        )


def erase(folder: Path, progress: Progress | None) -> None:
    """Erase, and give the space back. Nothing may write meanwhile. Raises ``ReadOnlyMemory`` or ``DamagedError``."""
    try:
        handle = paths.open_file(folder, DATA_NAME, os.O_RDWR)
        try:
            erase_unused(handle, progress)
        finally:
            os.close(handle)
    except OSError as error:
        if isinstance(error, DamagedError):
            raise
        kept = "what is stored is whole, but bytes of what was deleted are still in the file"
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise ReadOnlyMemory(
                f"memory {folder} may not be written to any more ({error.strerror}); {kept}. Give the right back, then "
                "compact again",
                memory=folder,
            ) from error
        raise DamagedError(
            f"memory {folder} could not be compacted ({error.strerror}); {kept}. Check the disk, then compact again"
        ) from error
