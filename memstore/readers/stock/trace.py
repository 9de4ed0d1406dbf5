"""What was retrieved, for whom, and why: a bounded record kept while a memory is attached."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

KEPT = 4096


@dataclass(frozen=True)
class Retrieved:
    """One list of blocks that was chosen."""

    step: int
    """Local tokens seen when the list was chosen (the length of the prompt, for a prompt)."""
    row: int
    """Row of the batch."""
    layer: int
    """The layer that chose. With ``share="model"`` its list serves every layer from the first routed one on."""
    head: int
    """Which of the layer's lists this is; 0 where all heads share one."""
    document: str
    """Name of the document that the blocks are of; a list over several documents becomes one record for each."""
    blocks: list[int]
    """Block ids, oldest first."""
    scores: list[float]
    """Score of each block; comparable within one list only."""


class Trace(deque[Retrieved]):
    """The last few thousand choices, oldest first."""

    def __init__(self) -> None:
        super().__init__(maxlen=KEPT)
