"""``memstore compact``: erase what was forgotten, and give its space back."""

from __future__ import annotations

import memstore
from memstore.tools.bars import bar
from memstore.tools.options import MemoryUrl
from memstore.tools.output import Json, Report


def compact(memory: MemoryUrl, *, json: Json = False) -> Report:
    """Erase what was forgotten from the file, and give its space back to the disk.

    Works in place and beside readers. It can be interrupted at any moment and run again.

    Example:

        memstore compact notes.mem

    In Python: memstore.Memory.compact.
    """
    with memstore.open(memory) as opened, bar("compacting", show=not json, in_bytes=True) as progress:
        done = opened.compact(progress)
    data = {"memory": memory, "disk_bytes_before": done.before, "disk_bytes": done.after}
    freed = max(0, done.before - done.after)
    told = f"what was forgotten is erased; {freed:,} bytes went back to the disk, {done.after:,} are taken"
    return Report(data=data, text=lambda page: page.line(told))
