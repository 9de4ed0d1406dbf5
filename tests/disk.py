"""Nobody cuts the power of a test: what a killed process has written is there without waiting for the disk."""

import os
from functools import partial

import lmdb


def is_not_waited_for() -> None:
    """From here on this process, and what it forks, writes without waiting: that takes longer than all else."""
    os.fsync = lambda _: None  # type: ignore[assignment]
    lmdb.open = partial(lmdb.open, sync=False)  # type: ignore[assignment]  # all call it
