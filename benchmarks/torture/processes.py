"""Forked children that report through a pipe, and the ways to end them.

A fork starts in a millisecond; a new interpreter would import for two seconds. A process that forks must have only one
thread, and no open memory. A child may have a file system of a few megabytes, in a mount namespace of its own. It
disappears with the child.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

PATIENCE = 60  # seconds of processor time until a child counts as hanging; then SIGPROF ends it
WAITING = 10  # times as long by the clock, which continues on a busy or halted machine; then SIGALRM ends the child
_TRACE_ME, _SINGLE_STEP, _SYSCALL = 0, 9, 24  # from <sys/ptrace.h>
_PARENT_DEATH_SIGNAL = 1  # from <sys/prctl.h>

Say = Callable[[str], None]


@dataclass
class Ending:
    """How a child ended."""

    lines: list[str]
    """Lines that it reported, without an incomplete last one."""
    code: int
    """Exit status, or the negative number of a signal."""

    @property
    def crashed(self) -> bool:
        """Check whether it was ended by a signal that nobody sent."""
        return self.code < 0 and not self.hung

    @property
    def hung(self) -> bool:
        """Check whether it ran out of time."""
        return self.code in (-signal.SIGALRM, -signal.SIGPROF)

    @property
    def last(self) -> str:
        return self.lines[-1] if self.lines else ""


@dataclass
class _Child:
    """A forked process."""

    pid: int
    pipe: int
    _heard: bytes = field(default=b"", init=False)

    def wait(self) -> Ending:
        """Read all lines until its end."""
        while piece := os.read(self.pipe, 1 << 16):
            self._heard += piece
        return self.reap(os.waitpid(self.pid, 0)[1])

    def hear(self, line: str) -> None:
        """Wait until it has reported this line, or has ended."""
        while f"\n{line}\n" not in "\n" + self._heard.decode(errors="replace") and (
            piece := os.read(self.pipe, 1 << 16)
        ):
            self._heard += piece

    def reap(self, status: int) -> Ending:
        """Return the ending, once ``waitpid`` has returned its status."""
        _running.discard(self.pid)
        while piece := os.read(self.pipe, 1 << 16):
            self._heard += piece
        os.close(self.pipe)
        return Ending(self._heard.decode(errors="replace").split("\n")[:-1], os.waitstatus_to_exitcode(status))

    def kill(self) -> Ending:
        os.kill(self.pid, signal.SIGKILL)
        return self.wait()


_running: set[int] = set()
"""Process ids of the children that nobody has waited for."""


def end_children() -> None:
    """End all children, for example after an interruption: they would write into files that are being removed."""
    while _running:
        pid = _running.pop()
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def fork(body: Callable[[Say], None], patience: int = PATIENCE) -> _Child:
    """Run ``body`` in a child. Its error is reported as ``error: ...`` with exit status 1.

    On Linux the child ends with its parent. If this process is interrupted, call ``end_children``.
    """
    hear, say = os.pipe()
    sys.stdout.flush()
    # Signals are held back here: Python's fork can swallow an interruption, and the child is not listed yet.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        pid = os.fork()
    except OSError:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raise
    if pid:
        os.close(say)
        _running.add(pid)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return _Child(pid, hear)
    os.close(hear)
    _running.clear()  # they are the parent's
    code = 1
    try:
        if sys.platform == "linux":  # the child may be stopped, and nobody else would know of it
            _libc.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the child must not run its parent's handler
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.setitimer(signal.ITIMER_PROF, patience)
        signal.alarm(WAITING * patience)
        body(lambda line: _tell(say, line))
        code = 0
    except BaseException as error:  # noqa: BLE001 - the parent gets every error
        sys.settrace(None)
        place = traceback.extract_tb(error.__traceback__)[-1]
        words = " ".join(str(error).split())
        _tell(say, f"error: {type(error).__name__}: {words} ({place.filename}:{place.lineno})")
    finally:
        os._exit(code)


def _tell(pipe: int, line: str) -> None:
    os.write(pipe, f"{line}\n".encode())


def run(body: Callable[[Say], None]) -> Ending:
    """Run ``body`` in a child until its end."""
    return fork(body).wait()


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def may_trace() -> bool:
    """Check whether ptrace works here."""
    return step_through(lambda say: say("a system call"), 1, 0).code == -signal.SIGKILL


def be_traced() -> None:
    """Stop, so that the parent counts from here."""
    if not _libc.ptrace(_TRACE_ME, 0, None, None):
        os.kill(os.getpid(), signal.SIGSTOP)


def step_through(body: Callable[[Say], None], calls: int, instructions: int, *, at_once: bool = True) -> Ending:
    """Run ``body`` past that many starts and ends of system calls, then machine instructions, then kill it.

    They count from its beginning, or without ``at_once`` from its call of ``be_traced``.
    """

    def traced(say: Say) -> None:
        be_traced()
        body(say)

    child = fork(traced if at_once else body)
    status = os.waitpid(child.pid, 0)[1]
    for step in range(calls + instructions):
        if not os.WIFSTOPPED(status):
            break
        arrived = os.WSTOPSIG(status)
        deliver = 0 if arrived in (signal.SIGTRAP, signal.SIGSTOP) else arrived
        _libc.ptrace(_SYSCALL if step < calls else _SINGLE_STEP, child.pid, None, deliver)
        status = os.waitpid(child.pid, 0)[1]
    if os.WIFSTOPPED(status):
        os.kill(child.pid, signal.SIGKILL)
        status = os.waitpid(child.pid, 0)[1]
    return child.reap(status)


_NEW_NAMESPACE, _NEW_USER = 0x20000, 0x10000000  # from <linux/sched.h>
_PRIVATE = 1 << 18 | 1 << 14  # from <linux/mount.h>: changes stay invisible outside, for all mounts below


def mount_small_disk(folder: Path, nbytes: int) -> None:
    """Mount a new file system on ``folder``, seen by this process alone. Raises ``OSError`` if that is forbidden."""
    user, group = os.getuid(), os.getgid()
    if user:  # a user may mount in a namespace where that user is root
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
    """Check whether this process may mount such a file system."""
    with tempfile.TemporaryDirectory() as folder:
        return run(lambda _: mount_small_disk(Path(folder), 1 << 20)).code == 0


def _do(failed: int) -> None:
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
