"""Processes of their own for tests, which begin in milliseconds: forks of an interpreter that has imported the rest.

That interpreter has opened no memory and computed nothing. A fork of one that has would inherit environments of LMDB,
and perhaps a lock of MKL for ever.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from tests import disk

IMPORTED = [
    "transformers.generation.utils",
    "memstore.memory.salvage",
    "transformers.models.llama.modeling_llama",
    "tests.readers.child",
    "tests.readers.ranks",
    "tests.readers.test_contract",
    "tests.models.child",
    "tests.memory.helpers",
]


def start(work: Callable[..., object], *arguments: object) -> BaseProcess:
    """Let ``work``, a function of a module, begin in another process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    process = context.Process(target=_as_here, args=(dict(os.environ), Path.cwd(), work, arguments))
    # The first one starts the interpreter, which finds these tests in its folder; textstat installs others as "tests".
    with contextlib.chdir(Path(__file__).parents[1]):
        process.start()
    return process


def _as_here(
    environment: dict[str, str], folder: Path, work: Callable[..., object], arguments: Sequence[object]
) -> None:
    disk.is_not_waited_for()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    work(*arguments)


def begun(work: Callable[..., object], *arguments: object) -> BaseProcess:
    """Like ``start``; returns when ``work``, which is given a connection too, has sent something through it."""
    hears, says = multiprocessing.Pipe(duplex=False)
    process = start(work, *arguments, says)
    says.close()
    hears.recv()
    return process


def killed(commits: int, seconds: float, work: Callable[..., object], *arguments: object) -> list[Any]:
    """Let ``work``, which is given a connection too, tell of that many commits, and kill it so many seconds later.

    So it is met at its work on a slow machine as on a quick one. What it told of, until it was killed or had ended.
    """
    hears, says = multiprocessing.Pipe(duplex=False)
    process = start(work, *arguments, says)
    told: list[Any] = []
    says.close()
    with contextlib.suppress(EOFError):
        while len(told) < commits:
            told.append(hears.recv())
        time.sleep(seconds)  # the moment of the kill is what is tried
        process.kill()
        while True:
            told.append(hears.recv())
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
    return told


def run(work: Callable[..., object], *arguments: object) -> None:
    """Let ``work`` be done in another process."""
    process = start(work, *arguments)
    process.join()
    assert process.exitcode == 0, process.exitcode


def run_code(code: str, *arguments: str) -> str:
    """What ``code`` prints in another process, whose command line has these arguments."""
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "said"
        process = start(_execute, code, arguments, str(said))
        process.join()
        assert process.exitcode == 0, said.read_text()
        return said.read_text()


def completed(command: list[str], *, input: str | None = None, **_: object) -> CompletedProcess[str]:  # noqa: A002
    """``subprocess.run`` of a module: ``[python, ..., "-m", module, *arguments]``."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder) / name for name in ("out", "err"))
        process = start(_run_module, command[command.index("-m") + 1 :], input or "", str(out), str(err))
        process.join()
        assert process.exitcode is not None
        return CompletedProcess(command, process.exitcode, out.read_text(), err.read_text())


def _run_module(words: list[str], order: str, out: str, err: str) -> None:
    for number, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), number)
    sys.argv[:], sys.stdin = words, io.StringIO(order)
    warnings.simplefilter("ignore")  # the module has been imported already
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def _execute(code: str, arguments: tuple[str, ...], said: str) -> None:
    sys.argv[1:] = arguments
    with Path(said).open("w") as out, contextlib.redirect_stdout(out):
        try:
            exec(code, {"__name__": "__main__"})  # noqa: S102 - of a test
        except BaseException:
            traceback.print_exc(file=out)
            raise
