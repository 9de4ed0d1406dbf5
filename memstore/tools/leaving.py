"""Leaving a process without taking Python down, which takes a second where a model was loaded.

Before it takes away a million objects one by one, Python waits for threads, runs what ``atexit`` was given (stores are
closed there) and writes what is still to be written. All that is done here in the same order; the objects go with the
process. The two functions for it are those that ``multiprocessing`` ends its children with.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading


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
