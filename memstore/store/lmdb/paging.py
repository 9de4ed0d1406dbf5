"""Pages of a mapped file, asked for before they are touched.

A page that is touched and not in memory stops its thread until the disk has brought it, one page after the other; a
page that cannot be brought ends the process (a bus error). Where the system lets us, both are asked for beforehand.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import resource
import threading
from collections.abc import Callable

_WILL_NEED = 3
_POPULATE_READ = 22  # Linux 5.14; touches pages like a read, and reports what a read would die of
_IO_ERRORS = (errno.EFAULT, errno.EIO)
_WHOSE = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # some systems count for the process alone


def _find_madvise() -> Callable[[int, int, int], int] | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).madvise
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


_madvise = _find_madvise()


class _SoFar(threading.local):
    waits = 0


_so_far = _SoFar()


def will_need(address: int, length: int) -> None:
    """Start to bring ``length`` bytes of a map into memory, without waiting for them."""
    _advise(address, length, _WILL_NEED)


def bring(address: int, length: int) -> bool:
    """Wait, with the interpreter lock released, until ``length`` bytes of a map are there; False if the disk fails.

    Where the system has no such call it returns True at once, and the pages come when they are touched.
    """
    return _advise(address, length, _POPULATE_READ) not in _IO_ERRORS


def waited() -> bool:
    """Whether this thread has asked the disk, or waited for it, since it called this before."""
    usage = resource.getrusage(_WHOSE)
    before, _so_far.waits = _so_far.waits, usage.ru_majflt + usage.ru_inblock
    return _so_far.waits != before


def _advise(address: int, length: int, advice: int) -> int:
    """The error number, or 0."""
    if _madvise is None:
        return 0
    start = address - address % mmap.PAGESIZE
    return ctypes.get_errno() if _madvise(start, address + length - start, advice) else 0
