"""Processes of their own for tests, which begin in milliseconds: forks of an interpreter that has imported the rest.

That interpreter has opened no memory and computed nothing. A fork of one that has would inherit environments of LMDB,
and perhaps a lock of MKL for ever.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

IMPORTED = ["transformers.generation.utils", "tests.readers.child", "tests.models.child", "tests.memory.helpers"]


def start(work: Callable[..., object], *arguments: object) -> BaseProcess:
    """Let ``work``, a function of a module, begin in another process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    process = context.Process(target=work, args=arguments)
    process.start()
    return process


def begun(work: Callable[..., object], *arguments: object) -> BaseProcess:
    """Like ``start``; returns when ``work``, which is given a connection too, has sent something through it."""
    hears, says = multiprocessing.Pipe(duplex=False)
    process = start(work, *arguments, says)
    says.close()
    hears.recv()
    return process


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


def _execute(code: str, arguments: tuple[str, ...], said: str) -> None:
    sys.argv[1:] = arguments
    with Path(said).open("w") as out, contextlib.redirect_stdout(out):
        try:
            exec(code, {"__name__": "__main__"})  # noqa: S102 - of a test
        except BaseException:
            traceback.print_exc(file=out)
            raise
