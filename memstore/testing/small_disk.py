"""File systems of a few megabytes, in a mount namespace of the calling process: they go when it does."""

from __future__ import annotations

import ctypes
import os
import tempfile
from functools import cache
from pathlib import Path

from memstore.testing.processes import run

_NEW_NAMESPACE, _NEW_USER = 0x20000, 0x10000000  # of <linux/sched.h>
_PRIVATE = 1 << 18 | 1 << 14  # of <linux/mount.h>: nothing done here is seen outside, for all mounts below
_libc = ctypes.CDLL(None, use_errno=True)


def mount_small_disk(folder: Path, nbytes: int) -> None:
    """Give ``folder`` a file system of its own, seen by this process alone. Raises ``OSError`` where forbidden."""
    user, group = os.getuid(), os.getgid()
    if user:  # a user who is root of a namespace of his own may mount there
        _do(_libc.unshare(_NEW_USER | _NEW_NAMESPACE))
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    else:
        _do(_libc.unshare(_NEW_NAMESPACE))
    _do(_libc.mount(None, b"/", None, _PRIVATE, None))
    _do(_libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={nbytes}".encode()))


@cache
def may_mount() -> bool:
    """Whether this process may make such a file system."""
    with tempfile.TemporaryDirectory() as folder:
        return run(lambda _: mount_small_disk(Path(folder), 1 << 20)).code == 0


def _do(failed: int) -> None:
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
