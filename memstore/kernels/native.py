"""C code for operations that PyTorch lacks or runs slowly, compiled at the first use by the machine's own compiler.

PyTorch has no operation that multiplies 8 bits and keeps the largest product, so it writes all products to memory and
reads them again. The alternatives were compiled wheels for every processor, or Numba (which has no AMX, and is a large
dependency).

The C code is optional: all of it exists in PyTorch too. PyTorch is used if there is no compiler, on other processors,
or with ``MEMSTORE_NATIVE=0``. Compiled libraries are stored in the cache folder, under a name with hashes of their
source and content. So neither an old library nor a damaged one is loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from memstore.paths import cache_folder

VARIABLE = "MEMSTORE_NATIVE"
FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O3", "-fno-math-errno", "-fopenmp-simd", "-fPIC", "-shared")
MOST_SECONDS = 120

_log = logging.getLogger("memstore.kernels")


class Unavailable(Exception):
    """C code is not available; the text says why, and fits after the name of a back end."""


_read: dict[Path, str] = {}


def beside(module: str) -> Path:
    """Return the file ``native.c`` beside the Python file ``module``, read now.

    A process may outlive an upgrade of the package. Code that is compiled later must still take the arguments that the
    imported Python passes.
    """
    path = Path(module).with_name("native.c")
    with suppress(OSError):  # whoever loads it hears why
        _read[path] = path.read_text()
    return path


def vectors() -> list[str]:
    """Return compiler flags for this processor's float32 vectors, and float16 in memory; none if unknown."""
    flags = {"avx2": "-mavx2", "fma": "-mfma", "avx512f": "-mavx512f", "avx512vl": "-mavx512vl", "f16c": "-mf16c"}
    return [flag for name, flag in flags.items() if name in processor()]


def lanes() -> int:
    """Return how many numbers of float32 such a vector has: GCC takes wider ones apart through memory."""
    return 16 if "-mavx512f" in vectors() else 8 if "-mavx2" in vectors() else 4


@cache
def processor() -> frozenset[str]:
    """Return this processor's features, in Linux's terms; empty if unknown.

    ``ATEN_CPU_CAPABILITY=avx2``, PyTorch's switch, leaves out all that is wider than AVX2.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    features = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    narrow = os.environ.get("ATEN_CPU_CAPABILITY") == "avx2"
    return frozenset(each for each in features if not (narrow and each.startswith(("avx512", "avx_vnni", "amx"))))


def half_problem(dtype: object) -> str | None:
    """Say why a loop cannot read ``dtype``, a type of PyTorch; None if it can."""
    if str(dtype) == "torch.float16" and "f16c" not in processor():
        return "takes float16 only on an x86-64 processor with F16C; use 'auto' or 'torch'"
    return None


class Library:
    """The functions of the C file beside a Python file, loaded at the first use."""

    def __init__(self, module: str, load: Callable[[Path], ctypes.CDLL]) -> None:
        """``module``: the Python file. ``load`` may raise ``Unavailable``."""
        self._source, self.load = beside(module), load

    @cached_property
    def _functions(self) -> ctypes.CDLL:
        return self.load(self._source)

    @cached_property
    def _problem(self) -> str | None:
        try:
            _ = self._functions
        except Unavailable as reason:
            return str(reason)
        return None

    def problem(self) -> str | None:
        """Say why the library cannot be loaded; None if it can."""
        return self._problem

    def call(self, name: str, *given: Any) -> int:
        """Call a function with addresses of tensors, 64 bits of integers, None, arrays, and references to structures.

        The result has no meaning if the function returns nothing.
        """
        result: int = getattr(self._functions, name)(*map(_argument, given))  # found once; [name] would look each time
        return result

    def address(self, name: str) -> int:
        """Return where a function begins."""
        return ctypes.cast(getattr(self._functions, name), ctypes.c_void_p).value or 0


def _argument(x: Any) -> Any:
    if isinstance(x, Tensor):
        return ctypes.c_void_p(x.data_ptr())
    if isinstance(x, int):
        return ctypes.c_int64(x)
    return ctypes.byref(x) if isinstance(x, ctypes.Structure) else x


def structure(*, pointers: str = "", numbers: str, factors: str = "") -> Any:
    """Make a C structure: names of addresses, of integers in 64 bits and of float32, in this order."""
    kinds = ((pointers, ctypes.c_void_p), (numbers, ctypes.c_int64), (factors, ctypes.c_float))
    fields = [(name, kind) for names, kind in kinds for name in names.split()]
    return type("_Structure", (ctypes.Structure,), {"_fields_": fields})


def address(x: Tensor | None) -> int | None:
    """Return where the numbers of a tensor begin, for a structure."""
    return None if x is None else x.data_ptr()


def parallel(source: Path, flags: Sequence[str]) -> ctypes.CDLL:
    """Load a library like ``library``, with several threads if the compiler has OpenMP.

    The threads are PyTorch's own; otherwise PyTorch's would occupy the processors that ours need.
    """
    try:
        return library(source, [*flags, "-fopenmp"])
    except Unavailable:
        return library(source, flags)


def library(source: Path, flags: Sequence[str]) -> ctypes.CDLL:
    """Load the functions of the C file ``source``, compiled with ``flags``. Raises ``Unavailable``."""
    if os.environ.get(VARIABLE) == "0":
        raise Unavailable(f"is switched off by {VARIABLE}=0; unset it, or use 'auto'")
    if sys.platform == "win32":
        raise Unavailable("needs Linux or macOS; use 'auto'")
    try:
        text = _read[source] if source in _read else source.read_text()
        made_from = (sys.platform, platform.machine(), *FLAGS, *flags, text)
        key = hashlib.sha256("\0".join(made_from).encode()).hexdigest()[:16]
        name = f"{source.parent.name}-{key}"
        kept = _kept_folder()
        with tempfile.TemporaryDirectory(prefix="memstore-") if kept is None else nullcontext(kept) as place:
            folder = Path(place)
            return ctypes.CDLL(str(_find(folder, name) or _compile(text, flags, folder, name)))
    except OSError as error:
        raise Unavailable(f"could not be compiled or loaded ({error}); use 'auto'") from error


def _kept_folder() -> Path | None:
    """Return the folder of libraries; None if that is impossible, or if somebody else could put one there."""
    folder = Path(os.path.abspath(cache_folder())) / "native"  # noqa: PTH100 - resolve() would follow links
    try:
        for each in (folder.parent, folder):  # with a umask of 002 the group could write to the upper one
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        problem = _not_private(folder)
    except OSError as error:
        problem = str(error)
    if problem is None:
        return folder
    _log_once(f"The compiled code cannot be cached: {problem}")
    return None


def _not_private(folder: Path) -> str | None:
    """Say why others could put a file into ``folder``, or replace it or a folder above it; None if they cannot.

    Links above are checked, and their targets too. Raises ``OSError``.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        about = os.fstat(handle)
    finally:
        os.close(handle)
    if about.st_uid != os.getuid() or about.st_mode & 0o022 or not os.access(folder, os.W_OK):
        return f"the folder {folder} belongs to another user"
    for above in {*folder.parents, *folder.resolve().parents}:
        found = above.lstat()
        # In a folder with the sticky bit, such as /tmp, only owners can rename their files.
        others = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX and not stat.S_ISLNK(found.st_mode)
        if found.st_uid not in (0, os.getuid()) or others:
            return (
                f"other users could replace {folder}, because {above} belongs to them or they can write to it "
                "(chmod go-w)"
            )
    return None


@cache
def _log_once(what: str) -> None:
    _log.warning(what)


def _find(folder: Path, name: str) -> Path | None:
    """Find the library of that name whose content is unchanged since it was written."""
    return next((path for path in folder.glob(f"{name}-*.so") if path.stem == f"{name}-{_digest(path)}"), None)


def _compile(text: str, flags: Sequence[str], folder: Path, name: str) -> Path:
    with tempfile.TemporaryDirectory(dir=folder, prefix="new-") as new:
        source, made = Path(new) / "library.c", Path(new) / "library.so"
        source.write_text(text)
        command = [*_compiler(), *FLAGS, *flags, str(source), "-lm", "-o", str(made)]
        try:
            result = subprocess.run(  # noqa: S603 - the user's compiler
                command, capture_output=True, text=True, errors="replace", timeout=MOST_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"did not compile within {MOST_SECONDS} s; use 'auto'") from error
        if result.returncode or not made.exists():
            lines = [line for line in result.stderr.splitlines() if "error" in line]
            reason = lines[0] if lines else f"exit code {result.returncode} of {command[0]}"
            raise Unavailable(f"could not be compiled ({reason}); use 'auto'")
        path = folder / f"{name}-{_digest(made)}.so"
        made.replace(path)
    return path


def _compiler() -> list[str]:
    try:
        chosen = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise Unavailable(f"cannot read CC={os.environ['CC']} ({error}); use 'auto'") from error
    for candidate in [chosen] if chosen else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(candidate[0]):
            return candidate
    raise Unavailable("needs a C compiler (cc, gcc, clang, or the one named by CC); use 'auto'")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
