"""The header of a memory: META item 0, written once when the memory is made."""

from __future__ import annotations

from typing import Any, NamedTuple

from memstore._version import __version__
from memstore.errors import DamagedError, ForeignMemory, InvalidArgument, NotAMemory
from memstore.memory.layouts import block_layouts, blocks_per_run, run_layout
from memstore.memory.spec import MemorySpec
from memstore.memory.state import HEADER
from memstore.memory.urls import Blank
from memstore.store.contract import Batch, BlockStore, Record
from memstore.stored import anything, fit, table, text, whole

FORMAT = 1
MOST_RUN_BYTES = 64 * 1024 * 1024
"""Far more than ``layouts.RUN_BYTES`` ever was: what a run that holds several blocks may take."""
FACTS = table(format=whole(1), library=text(1000), spec=anything, blocks_per_run=whole(1, 2**31))


class Header(NamedTuple):
    """What the header says."""

    spec: MemorySpec
    blocks_per_run: int
    """Blocks whose landmarks are stored together."""


def blank(spec: MemorySpec) -> Blank:
    """What makes an empty store a memory with this spec."""
    batch = Batch()
    values = {"format": FORMAT, "library": __version__, "spec": spec.to_dict(), "blocks_per_run": blocks_per_run(spec)}
    batch.put(HEADER, Record.from_json(values))
    return Blank(batch, sum(layout.nbytes for layout in block_layouts(spec)))


def read_header(store: BlockStore, url: str) -> Header:
    """Raises ``NotAMemory``, ``ForeignMemory`` or ``DamagedError``."""
    try:
        records = store.get(HEADER)
    except DamagedError as error:
        raise DamagedError(
            f"memory {url} has lost its header, without which nothing of it can be understood ({error}). "
            "Restore it from a copy",
            memory=url,
            remedy="restore",
        ) from error
    if records is None:
        raise NotAMemory(f"{url} has no header of a memory; it holds something else, or was made by hand.")
    values: dict[str, Any] = fit(records[0].to_json(), FACTS, f"the header of memory {url}")
    if values["format"] > FORMAT:
        raise ForeignMemory(
            f"memory {url} has format {values['format']}, made by memstore {values['library']}; "
            f"memstore {__version__} reads up to {FORMAT}. Upgrade memstore."
        )
    try:
        spec = MemorySpec.from_dict(values["spec"])
        if values["blocks_per_run"] > 1 and run_layout(spec, values["blocks_per_run"]).nbytes > MOST_RUN_BYTES:
            raise DamagedError(f"memory {url}: no memstore writes {values['blocks_per_run']:,} blocks in one run")
        return Header(spec, values["blocks_per_run"])
    except InvalidArgument as error:
        raise ForeignMemory(f"memory {url} has a spec that this memstore cannot use: {error}") from error
