"""Ctrl-C from the first moment on: whether it was pressed, and that it breaks nothing that is half loaded.

Met in the middle of an import, it may come out as any error, long after; and extension modules end the process where
their initialisation is interrupted. So as long as one of these loads, Ctrl-C waits. In the callback of a weak reference
or in ``__del__`` Python prints it and throws it away; there it comes again, unless the process is about to end anyway.
"""

from __future__ import annotations

import atexit
import signal
import sys
from types import FrameType

FRAGILE = ("numpy", "torch")
PATIENCE = 0.05
"""Seconds after which it is tried again."""

_pressed: list[bool] = []


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
