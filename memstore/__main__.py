"""The entry point of the command ``memstore``, also as ``python -m memstore``. It runs before anything else is loaded.

Ctrl-C works from the first moment on. If it interrupts an import, any error may surface, even much later. Extension
modules end the process if their initialisation is interrupted. So while one of these loads, Ctrl-C waits. In the
callback of a weak reference or in ``__del__``, Python prints the interrupt and drops it. There we raise it again,
unless the process is about to end anyway.

The process ends without Python's shutdown, which takes a second once a model was loaded. Before Python deletes a
million objects one by one, it waits for threads, runs the ``atexit`` functions (which close stores) and flushes its
output. All that is done here in the same order, and the objects go with the process. ``multiprocessing`` ends its
children with the same two functions.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from types import FrameType

MISSING = 3
"""The exit code if something is missing."""
FRAGILE = ("numpy", "torch")
PATIENCE = 0.05
"""Seconds until the next try."""

_pressed: list[bool] = []


# Nothing heavy is imported here: Ctrl-C while the rest is loaded then ends in one line. An interrupted import may
# surface as any error later. So after Ctrl-C, every error counts as an interrupt.
def run(*, resident: bool = True) -> int:
    """Run the command line and return the exit code. With ``resident``, a resident process may do it.

    Loading takes a moment, in which Ctrl-C must end the command in one line, as at any other time. The command line
    owns the process: after its output is complete, Ctrl-C ends it silently.
    """
    listen()
    try:
        if resident and sys.argv[1:2] in (["ask"], ["chat"]):  # those that answer a person
            from memstore.tools.resident import run_resident

            if (code := run_resident(sys.argv[1:])) is not None:
                return code
        from memstore.tools.app import main as run_verb

        return run_verb(pressed=pressed, closing=unlisten)
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.stderr.write(f"memstore: the command needs the package {error.name}: pip install 'torch-memstore[cli]'\n")
        return MISSING
    except KeyboardInterrupt:
        unlisten()
        sys.stderr.write("memstore: interrupted; run the same command again\n")
        return 128 + signal.SIGINT
    finally:
        unlisten()


def main(*, resident: bool = True) -> int:
    """Run the command line and end the process. Return the exit code if Python must end the process."""
    code = run(resident=resident)
    leave(code)
    return code


def listen() -> None:
    """Record Ctrl-C for ``pressed`` from now on.

    It raises ``KeyboardInterrupt`` as always, if necessary a moment later.
    """

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


def unlisten() -> None:
    """Let Ctrl-C end the process silently from now on: the last message is complete, or about to be printed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0)


def pressed() -> bool:
    """Whether Ctrl-C was pressed since ``listen``."""
    return bool(_pressed)


def loading() -> bool:
    """Whether a module that must not be interrupted is being imported."""
    specs = (getattr(sys.modules.get(name), "__spec__", None) for name in FRAGILE)
    return any(getattr(spec, "_initializing", False) for spec in specs)  # the import system itself uses this flag


def leave(code: int) -> None:
    """End this process with the exit status ``code``. Return only if Python has to end it, with its full shutdown.

    Never call it in a process that belongs to someone else: code after the call does not run, not even ``finally``.
    """
    if _watched():
        return
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):  # Python reports it, with an exit status of its own
        return
    os._exit(code)


def _watched() -> bool:
    """Whether a debugger, a profiler, coverage, ``python -i`` or ``-X dev`` continues after the command's end."""
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    tools = () if monitoring is None else map(monitoring.get_tool, range(6))
    flags = sys.flags.inspect or sys.flags.interactive or sys.flags.dev_mode
    return bool(flags) or sys.gettrace() is not None or sys.getprofile() is not None or any(tools)


if __name__ == "__main__":
    sys.exit(main())
