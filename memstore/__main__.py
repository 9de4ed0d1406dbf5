"""The command ``memstore``, also as ``python -m memstore``: where it starts, before anything of it is loaded.

Ctrl-C counts from the first moment on. Met in the middle of an import, it may come out as any error, long after; and
extension modules end the process where their initialisation is interrupted. So as long as one of these loads, Ctrl-C
waits. In the callback of a weak reference or in ``__del__`` Python prints it and throws it away; there it comes again,
unless the process is about to end anyway.

The process is left without taking Python down, which takes a second where a model was loaded. Before it takes away a
million objects one by one, Python waits for threads, runs what ``atexit`` was given (stores are closed there) and
writes what is still to be written. All that is done here in the same order; the objects go with the process. The two
functions for it are those that ``multiprocessing`` ends its children with.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from types import FrameType

MISSING = 3
"""The exit code for what is not there."""
FRAGILE = ("numpy", "torch")
PATIENCE = 0.05
"""Seconds after which it is tried again."""

_pressed: list[bool] = []


# Nothing heavy is imported here, so that Ctrl-C while the rest is loaded ends in one line. An interrupted import may
# surface as any error later, so once Ctrl-C was pressed every error is that.
def run() -> int:
    """Run the command line; the exit code.

    Loading it takes a moment, in which Ctrl-C is to end it in one line as at any other time. It owns the process: once
    all is said, Ctrl-C ends it without a word.
    """
    listen()
    try:
        from memstore.tools.app import main as run_verb

        return run_verb(pressed=pressed)
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.stderr.write(f"memstore: the command needs {error.name}: pip install 'torch-memstore[cli]'\n")
        return MISSING
    except KeyboardInterrupt:
        sys.stderr.write("memstore: interrupted; run the same command again\n")
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> int:
    """The program ``memstore``: run the command line and leave; the exit code where Python is to end the process."""
    code = run()
    leave(code)
    return code


def listen() -> None:
    """From here on ``pressed`` tells; Ctrl-C raises ``KeyboardInterrupt`` as always, if need be a moment later."""

    def note(number: int, frame: FrameType | None) -> None:
        _pressed.append(True)
        if loading():
            later()
        else:
            signal.default_int_handler(number, frame)

    def later() -> None:
        if ending:  # Python gives signals back before its last steps, and an alarm would then kill the process
            return
        signal.signal(signal.SIGALRM, note)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)

    def thrown_away(lost: sys.UnraisableHookArgs) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            later()
        else:
            sys.__unraisablehook__(lost)

    def end() -> None:
        ending.append(True)
        signal.setitimer(signal.ITIMER_REAL, 0)

    ending: list[bool] = []
    atexit.register(end)
    signal.signal(signal.SIGINT, note)
    sys.unraisablehook = thrown_away


def pressed() -> bool:
    """Whether Ctrl-C was pressed since ``listen``."""
    return bool(_pressed)


def loading() -> bool:
    """Whether a module that must not be interrupted is being imported."""
    specs = (getattr(sys.modules.get(name), "__spec__", None) for name in FRAGILE)
    return any(getattr(spec, "_initializing", False) for spec in specs)  # what the import system itself goes by


def leave(code: int) -> None:
    """End this process with the exit status ``code``. It returns where Python has to end it, with all it does then.

    Never call it in a process that is somebody else's: what follows the call, also ``finally``, is not run.
    """
    if _watched():
        return
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):  # Python tells it, and has an exit status of its own for it
        return
    os._exit(code)


def _watched() -> bool:
    """Whether a debugger, a profiler, coverage, ``python -i`` or ``-X dev`` goes on after the command's end."""
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    tools = () if monitoring is None else map(monitoring.get_tool, range(6))
    flags = sys.flags.inspect or sys.flags.interactive or sys.flags.dev_mode
    return bool(flags) or sys.gettrace() is not None or sys.getprofile() is not None or any(tools)


if __name__ == "__main__":
    sys.exit(main())
