"""A resident process of the user that has torch and transformers imported, so that a question is answered at once.

Nearly all the time of a short ``memstore ask`` in a new process goes into imports. The first such command therefore
starts a process that imports them once. It waits at a socket. For each later command it forks, and the child runs the
command as a process of its own would: with the arguments, environment, folder, standard streams and umask of the
caller, whose terminal it writes to. Only the imports are shared, and modules that a child imported besides. No model,
memory or answer stays in the resident process.

It serves nobody else: the socket has mode 0600, lies in a folder of mode 0700, and both sides check the other's user.
Processes that imports would treat differently (another Python, package, variable such as ``OMP_NUM_THREADS``, limit,
cgroup or namespace) have a socket of their own. The lock file beside a socket has the number of its process, which ends
after an hour without a command, or when memory is short. The next one to start removes it. Linux only. Whatever is
wrong with it, the command runs in its own process.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import hashlib
import importlib
import json
import os
import select
import selectors
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from memstore.paths import cache_folder

VARIABLE = "MEMSTORE_RESIDENT"
"""Environment variable; "off" runs every command in its own process, as ``memstore --no-resident`` does."""
IDLE_SECONDS = 3600.0
LEAST_FREE_KB = 1 << 20
"""The resident process ends if the system has less memory available. It starts if there is twice as much."""
LOOK_SECONDS = 15.0
PATIENCE = 1.0
"""Seconds that either side waits for the other to begin."""
TRIAL_SECONDS = 60.0
UNABLE = "unable"
"""Content of the lock file where children of a resident process cannot compute: none is started again."""
READY = b"1"
LARGEST = 1 << 24
"""Most bytes of a request."""
IMPORTED = ("memstore.tools.app", "memstore.tools.ask", "memstore.tools.chat")
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "faiss", "lmdb", "memstore")
"""Modules of these packages, once a child has imported them, are imported for the next one too."""
VARIABLES = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH", "PYTORCH", "ATEN_", "HF_", "TRANSFORMERS_", "TOKENIZERS_"),
    *("CUDA_", "HIP_", "ROCR_", "TRITON_", "LD_", "MALLOC_", "GLIBC_"),
    *("PYTHON", "VIRTUAL_ENV", "PATH", "HOME", "XDG_CACHE", "XDG_CONFIG", "XDG_DATA"),
    *("TMP", "TEMP", "LANG", "LC_", "TZ"),
)
"""Beginnings of the variables that are read when libraries are imported. The resident process gets no others."""
START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from memstore.__main__ import main
from memstore.tools.resident import serve
serve(main)
"""


def run_resident(arguments: Sequence[str]) -> int | None:
    """Run a command in the resident process and return its exit code; None if it must run in this process.

    If there is no resident process, one is started for later commands when this one ends.
    """
    if not _wanted(arguments):
        return None
    try:
        path = _folder() / _identity()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.settimeout(PATIENCE)
            try:
                server.connect(str(path))
            except (FileNotFoundError, ConnectionRefusedError):
                atexit.register(_start, path)
                return None
            if _user_of(server) != os.geteuid() or _received(server, 1) != READY:
                return None
            server.settimeout(None)
            return _call(server, arguments)
    except (OSError, ValueError, struct.error):
        return None


def _wanted(arguments: Sequence[str]) -> bool:
    if sys.platform != "linux" or os.environ.get(VARIABLE, "").lower() in ("off", "0", "no"):
        return False
    watched = sys.gettrace() is not None or sys.getprofile() is not None or sys.flags.inspect or sys.flags.dev_mode
    # A driver of a device may not work in a child of a process that has looked for devices.
    elsewhere = any(each.startswith("--device") for each in arguments)
    # The next file that is opened here gets the number of a closed stream, and would be given in its place.
    closed = None in (sys.stdin, sys.stdout, sys.stderr)
    waits = _reads(arguments) and _in_background()
    return not watched and not elsewhere and not closed and not waits and os.getuid() == os.geteuid()


def _reads(arguments: Sequence[str]) -> bool:
    return arguments[0] == "chat" or "-" in arguments


def _in_background() -> bool:
    """Whether standard input is the controlling terminal, and another job has it."""
    try:
        return os.tcgetpgrp(0) != os.getpgrp()
    except OSError:
        return False


def _folder() -> Path:
    """Return the folder of the sockets, which only this user may enter. Raises ``OSError`` if there is none."""
    chosen = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = Path(chosen) / "memstore" if chosen and Path(chosen).is_dir() else cache_folder() / "resident"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        raise PermissionError(f"{folder} must be a folder of mode 0700 of this user")
    return folder


def _identity() -> str:
    """Return a name that two processes share only if one can stand in for the other."""
    import resource

    limits = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
    status = Path("/proc/self/status").read_text("ascii", "replace").splitlines()
    facts = [
        Path("/proc/sys/kernel/random/boot_id").read_text("ascii"),  # machines may share the folder
        sys.executable,
        tuple(sys.flags),
        sys.path,
        _installed(),
        sorted(_environment().items()),
        [line for line in status if line.startswith(("Uid:", "Gid:", "Groups:", "Cap", "NoNewPrivs:", "Seccomp:"))],
        sorted(os.sched_getaffinity(0)),
        os.getpriority(os.PRIO_PROCESS, 0),
        [Path("/proc/self", each).read_text("ascii", "replace") for each in ("cgroup", "oom_score_adj")],
        [resource.getrlimit(each) for each in limits],
        sorted(str(each.readlink()) for each in Path("/proc/self/ns").iterdir()),
    ]
    return hashlib.sha256(repr(facts).encode("utf-8", "surrogateescape")).hexdigest()[:24]


def _installed() -> list[tuple[str, int]]:
    """Return the files of this package, and the folders that other packages are installed to, with their times."""
    found = [Path(spec.origin) for each in ("torch", "transformers") if (spec := find_spec(each)) and spec.origin]
    files = [*found, *(file.parents[1] for file in found), *sorted(Path(__file__).parents[1].rglob("*.py"))]
    return [(str(file), file.stat().st_mtime_ns) for file in files]


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}


def _user_of(peer: socket.socket) -> int:
    return int(struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1])


def _call(server: socket.socket, arguments: Sequence[str]) -> int | None:
    umask = os.umask(0o077)
    os.umask(umask)
    request = json.dumps({"arguments": [*arguments], "environment": dict(os.environ), "umask": umask}).encode()
    here = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        socket.send_fds(server, [struct.pack("!I", len(request))], [0, 1, 2, here])
    finally:
        os.close(here)
    server.sendall(request)
    pid = _number(server)
    _follow_terminal(pid, _reads(arguments))
    while True:
        try:
            code = _number(server)
        except KeyboardInterrupt:
            _signal(pid, signal.SIGINT)  # the child says that it was interrupted, and ends
        except (OSError, struct.error):
            _signal(pid, signal.SIGTERM)
            sys.stderr.write(f"memstore: the resident process ended; run the command again, or set {VARIABLE}=off\n")
            return 1
        else:
            return code if code >= 0 else 128 - code


def _follow_terminal(pid: int, reads: bool) -> None:
    """Pass on what the terminal tells this process: Ctrl-Z, and its size. The child has no terminal that tells it."""

    def pause(number: int, _: object) -> None:
        _signal(pid, signal.SIGSTOP)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, pause)
        while reads and _in_background():  # the system does not stop the child when it reads there
            os.kill(os.getpid(), signal.SIGSTOP)
        _signal(pid, signal.SIGCONT)

    if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
        signal.signal(signal.SIGTSTP, pause)
    signal.signal(signal.SIGWINCH, lambda *_: _signal(pid, signal.SIGWINCH))


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _number(peer: socket.socket) -> int:
    return int(struct.unpack("!i", _received(peer, 4))[0])


def _received(peer: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = peer.recv(min(size - len(parts), 1 << 16))
        if not part:
            raise ConnectionResetError("the other side is gone")
        parts += part
    return bytes(parts)


def _start(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.with_suffix(".lock").read_text() == UNABLE:
            return
    if _free_kb() < 2 * LEAST_FREE_KB:
        return
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    with contextlib.suppress(OSError):
        subprocess.Popen(
            [sys.executable, *flags, "-c", START, json.dumps(sys.path), str(path)],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )


def serve(main: Callable[..., int]) -> None:
    """Be the resident process at the socket that the last argument names, unless another process is.

    ``main``: runs the command line that ``sys.argv`` has, and ends the process.
    """
    path = Path(sys.argv[-1])
    try:
        lock = _locked(path.with_suffix(".lock"), os.O_CREAT)
    except OSError:
        return
    _remove_others(path.parent)
    os.truncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())
    for name in IMPORTED:
        importlib.import_module(name)
    from memstore.tools.models import import_libraries

    import_libraries()
    import torch

    # An OpenMP thread that this process starts would be missing in its children, which would wait for it for ever.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if not _children_compute(threads):
        os.truncate(lock, 0)
        os.pwrite(lock, UNABLE.encode(), 0)
        return
    path.unlink(missing_ok=True)
    for number in (signal.SIGCHLD, signal.SIGTERM):  # whoever started the first command may ignore them
        signal.signal(number, signal.SIG_DFL)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        umask = os.umask(0o177)
        listening.bind(str(path))
        os.umask(umask)
        listening.listen()
        own = _inode(path)
        try:
            _Resident(listening, lock, threads, main).run(lambda: _inode(path) == own)
        finally:
            if _inode(path) == own:
                path.unlink()


def _locked(file: Path, flags: int = 0) -> int:
    """Open and lock a file. Raises ``OSError`` if another process has locked it, or has removed it meanwhile."""
    lock = os.open(file, flags | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(lock), file.stat()):
            raise FileNotFoundError(f"{file} is another file now")
    except OSError:
        os.close(lock)
        raise
    return lock


def _remove_others(folder: Path) -> None:
    """Remove sockets and lock files of processes that have ended. Only who has locked a lock file may remove it."""
    for file in folder.glob("*.lock"):
        with contextlib.suppress(OSError), os.fdopen(_locked(file)) as lock:  # fails for the own one too
            if lock.read() != UNABLE:
                file.with_suffix("").unlink(missing_ok=True)
                file.unlink()


def _inode(path: Path) -> int | None:
    return path.lstat().st_ino if path.is_socket() else None


def _children_compute(threads: int) -> bool:
    """Try whether a child of this process can compute. With some builds of libraries it would wait for ever."""
    import torch

    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(threads)
        for dtype in (torch.float32, torch.bfloat16):
            _ = torch.ones(512, 512, dtype=dtype) @ torch.ones(512, 512, dtype=dtype)
            _ = torch.ones(1 << 20, dtype=dtype).sum()
        os._exit(0)
    ended = os.pidfd_open(pid)
    try:
        if not select.select([ended], [], [], TRIAL_SECONDS)[0]:
            os.kill(pid, signal.SIGKILL)
        return os.waitpid(pid, 0)[1] == 0
    finally:
        os.close(ended)


class _Resident:
    """The loop of the resident process."""

    def __init__(self, listening: socket.socket, lock: int, threads: int, main: Callable[..., int]) -> None:
        """``threads``: the number that a child computes with unless it is told otherwise. ``main``: see ``serve``."""
        self._listening, self._lock, self._threads, self._main = listening, lock, threads, main
        self._events = selectors.DefaultSelector()
        self._events.register(listening, selectors.EVENT_READ)
        self._children = dict[int, tuple[socket.socket, int, int]]()
        """Connection to the caller, process file, and pipe with imported modules of each child, by its number."""

    def run(self, reachable: Callable[[], bool]) -> None:
        last, tasks = time.monotonic(), _tasks()  # OpenBLAS has threads from its import on, and copes with forks
        installed = _installed()
        gc.freeze()
        while self._children or (
            time.monotonic() - last < IDLE_SECONDS
            and _free_kb() >= LEAST_FREE_KB
            and _tasks() <= tasks
            and reachable()
            and _installed() == installed
        ):
            for key, _ in self._events.select(LOOK_SECONDS):
                last = time.monotonic()
                if key.data is None:
                    with contextlib.suppress(OSError, ValueError, struct.error):
                        self._take()
                elif key.data[0] in self._children:
                    self._heard(*key.data)

    def _take(self) -> None:
        """Accept a command and fork a child for it."""
        peer, _ = self._listening.accept()
        given: list[int] = []
        try:
            if _user_of(peer) != os.geteuid():
                raise PermissionError("another user")
            peer.settimeout(PATIENCE)
            peer.sendall(READY)
            header, given, _, _ = socket.recv_fds(peer, 4, 4)
            (size,) = struct.unpack("!I", header)
            if size > LARGEST or len(given) != 4:
                raise ValueError("not a request")
            request = json.loads(_received(peer, size))
            reading, writing = os.pipe()
            may_begin, known = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(known)
                # A caller that was not told of its child runs the command itself: it must not run twice.
                if not os.read(may_begin, 1):
                    os._exit(1)
                os.close(may_begin)
                self._become(request, given, writing)
            os.close(may_begin)
            os.close(writing)
        except BaseException:
            peer.close()
            raise
        finally:
            for each in given:
                os.close(each)
        ended = os.pidfd_open(pid)
        self._children[pid] = peer, ended, reading
        self._events.register(ended, selectors.EVENT_READ, (pid, True))
        self._events.register(peer, selectors.EVENT_READ, (pid, False))
        with contextlib.suppress(OSError):  # a caller that is gone can be read from: its child is ended
            peer.sendall(struct.pack("!i", pid))
        with os.fdopen(known, "wb") as child, contextlib.suppress(BrokenPipeError):
            child.write(b"1")

    def _heard(self, pid: int, ended: bool) -> None:
        """Report a child's end to its caller, or end a child whose caller is gone."""
        peer, process, pipe = self._children[pid]
        if not ended:
            self._events.unregister(peer)
            for number in (signal.SIGTERM, signal.SIGCONT):  # it may be stopped
                _signal(pid, number)
            return
        del self._children[pid]
        self._events.unregister(process)
        with contextlib.suppress(KeyError):
            self._events.unregister(peer)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError):
            peer.sendall(struct.pack("!i", code))
        peer.close()
        os.close(process)
        with os.fdopen(pipe, encoding="utf-8") as names:
            for name in names.read().split():
                if name.partition(".")[0] in PACKAGES and name not in sys.modules:
                    with contextlib.suppress(Exception):
                        importlib.import_module(name)
        gc.freeze()

    def _become(self, request: dict[str, Any], given: Sequence[int], pipe: int) -> NoReturn:
        """Run a command in this child as if its caller had started it."""
        code = 1
        try:
            self._events.close()
            self._listening.close()
            os.close(self._lock)
            for peer, *files in self._children.values():
                peer.close()
                for each in files:
                    os.close(each)
            for place, each in enumerate(given[:3]):
                os.dup2(each, place)
            os.fchdir(given[3])
            for each in given:
                os.close(each)
            os.umask(request["umask"])
            os.environ.clear()
            os.environ.update(request["environment"])
            sys.argv = ["memstore", *request["arguments"]]
            sys.stdin = _stream(0, "r")
            sys.stdout, sys.stderr = _stream(1, "w"), _stream(2, "w")
            import torch

            torch.set_num_threads(self._threads)
            before = {*sys.modules}
            atexit.register(lambda: os.write(pipe, " ".join({*sys.modules} - before).encode()[: 1 << 15]))
            code = self._main(resident=False)
        finally:
            os._exit(code)


def _stream(number: int, mode: str) -> Any:
    usual = (sys.__stdin__, sys.__stdout__, sys.__stderr__)[number]
    encoding, errors = ("utf-8", "strict") if usual is None else (usual.encoding, usual.errors)
    lines = 1 if number == 2 else -1  # by default, a terminal gets whole lines too
    return open(number, mode, lines, encoding, errors, closefd=False)


def _tasks() -> int:
    return len([*Path("/proc/self/task").iterdir()])


def _free_kb() -> int:
    facts = Path("/proc/meminfo").read_text("ascii").splitlines()
    return next((int(line.split()[1]) for line in facts if line.startswith("MemAvailable:")), 0)
