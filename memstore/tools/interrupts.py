"""Whether Ctrl-C was pressed. Met in the middle of an import, it may come out as any error, long after."""

from __future__ import annotations

import signal
from types import FrameType

_pressed: list[bool] = []


def listen() -> None:
    """From here on ``pressed`` tells; Ctrl-C raises ``KeyboardInterrupt`` as always."""

    def note(number: int, frame: FrameType | None) -> None:
        _pressed.append(True)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, note)


def pressed() -> bool:
    """Whether Ctrl-C was pressed since ``listen``."""
    return bool(_pressed)
