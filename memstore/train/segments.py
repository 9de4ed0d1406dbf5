"""Documents cut into segments of equal length, and the order in which training sees them.

A document that fills a segment starts one: its segments begin at its start, without a gap. What is left of it, and
documents that are shorter, are joined one after another, each closed by the end-of-text token, and cut likewise. The
last incomplete segment is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from memstore.errors import InvalidArgument
from memstore.train.corpora import Tokens

Rows = NDArray[np.int32]


def cut(documents: Iterable[Tokens], context: int, end: int) -> Rows:
    """Segments ``[N, context]`` of ``documents``. Raises ``InvalidArgument`` where they do not fill a single one."""
    rows: list[Tokens] = []
    rest: list[Tokens] = []
    for document in documents:
        whole = len(document) // context
        rows += np.split(document[: whole * context], whole) if whole else []
        rest.append(np.append(document[whole * context :], np.int32(end)))
    joined = np.concatenate(rest) if rest else np.empty(0, np.int32)
    count = len(joined) // context
    rows += np.split(joined[: count * context], count) if count else []
    if not rows:
        raise InvalidArgument(
            f"the texts have {len(joined):,} tokens, one segment has {context:,}: give more text or a smaller --context"
        )
    return np.stack(rows)


def held_out(rows: Rows, fraction: float) -> tuple[Rows, Rows]:
    """``rows`` to train on, and the ``fraction`` of them that is kept for measuring: evenly spaced over the corpus."""
    if not 0 <= fraction < 1:
        raise InvalidArgument(f"--valid is the part of the text that is held out, from 0 to below 1, not {fraction}")
    if not fraction:
        return rows, rows[:0]
    count = max(1, round(fraction * len(rows)))
    if count >= len(rows):
        raise InvalidArgument(
            f"the texts have {len(rows)} segments: holding {fraction:g} of them out leaves nothing to train on. "
            "Give more text or a smaller --context."
        )
    held = np.zeros(len(rows), bool)
    held[(np.arange(count) * len(rows)) // count + len(rows) // count // 2] = True
    return rows[~held], rows[held]


class ShuffledItems(Dataset[Any]):
    """``count`` items drawn from ``items``: each pass in a new order, which depends on the seed and the pass alone."""

    def __init__(self, items: Any, count: int, seed: int) -> None:
        self._items = items
        self._count = count
        self._seed = seed
        self._pass, self._order = -1, np.empty(0, np.int64)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Any:
        turn, place = divmod(number, len(self._items))
        if turn != self._pass:
            self._pass, self._order = turn, np.random.default_rng([self._seed, turn]).permutation(len(self._items))
        return self._items[int(self._order[place])]


def collate(rows: list[Tokens]) -> dict[str, Tensor]:
    """A batch in which every token is also a label."""
    ids = torch.from_numpy(np.stack(rows).astype(np.int64))
    return {"input_ids": ids, "labels": ids}
