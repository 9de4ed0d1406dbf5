"""Long documents as the rows of batches: each row streams one document in order, then the next (Wu et al. 2022).

``Streams`` are the batches, and a ``StreamTrainer`` trains on them with a memory of what each row has read. What a row
reads at a step depends on the seed and the step alone, so a training that goes on reads on where it stopped.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import Dataset

from memstore.errors import DamagedError, InvalidArgument
from memstore.train.corpora import Tokens
from memstore.train.settings import Optimisation
from memstore.train.trainer import MemoryTrainer

NO_LABEL = -100
"""What transformers' losses leave out."""


class Segment(NamedTuple):
    """What a row reads in one step."""

    tokens: Tokens
    """At most a window of them, and the one after the last: each is predicted from those before it."""
    begins: bool
    """Whether it is the first of its document."""


# Which document a row reads at which step is worked out beforehand, from the seed: so the Trainer may skip batches when
# it goes on, several processes read what the rows of one would, and what a row has read until now can be had again for
# a refresh without keeping it.
class Streams(Dataset[Segment]):
    """Segments of documents in the order of training: item ``n`` is that of row ``n % rows`` at step ``n // rows``.

    A row that has read its document takes the next of a shuffled pass, and of the pass after it.
    """

    def __init__(self, documents: Sequence[Tokens], *, window: int, rows: int, steps: int, seed: int) -> None:
        """``documents`` have at least two tokens each."""
        self.rows = rows
        self._documents = documents
        self._window = window
        self._steps = steps
        segments = [segments_of(each, window) for each in documents]
        self.facts = {"documents": len(documents), "segments": sum(segments)}
        """How much there is to read."""
        self._turns = _turns(segments, rows, steps, seed)

    @classmethod
    def of(cls, texts: Iterable[Tokens], optimisation: Optimisation, *, window: int, processes: int, end: int) -> Self:
        """The batches of a training on ``texts``, each closed by the token ``end``; see ``shared_out``."""
        rows = optimisation.batch * processes
        documents = shared_out(texts, rows, end)
        segments = sum(segments_of(each, window) for each in documents)
        steps = optimisation.steps or math.ceil(optimisation.epochs * segments / (rows * optimisation.accumulate))
        return cls(documents, window=window, rows=rows, steps=steps * optimisation.accumulate, seed=optimisation.seed)

    def __len__(self) -> int:
        return self.rows * self._steps

    def __getitem__(self, number: int) -> Segment:
        step, row = divmod(number, self.rows)
        document, start = self._place(row, step)
        return Segment(document[start : start + self._window + 1], start == 0)

    def before(self, row: int, step: int) -> Tensor:
        """What ``row`` has read of its document before ``step``, or of the one that it has just finished."""
        if step == 0:
            return torch.empty(0, dtype=torch.int64)
        document, start = self._place(row, step - 1)
        return torch.from_numpy(document[: min(start + self._window, len(document) - 1)].astype(np.int64))

    def _place(self, row: int, step: int) -> tuple[Tokens, int]:
        begun, number = self._turns[row][bisect_right(self._turns[row], step, key=lambda turn: turn[0]) - 1]
        return self._documents[number], (step - begun) * self._window


def segments_of(document: Tokens, window: int) -> int:
    """Steps that a document takes; nothing follows its last token, which is only predicted."""
    return math.ceil((len(document) - 1) / window)


def _turns(segments: Sequence[int], rows: int, steps: int, seed: int) -> list[list[tuple[int, int]]]:
    """For each row the steps at which documents begin, and which they are."""
    turns: list[list[tuple[int, int]]] = [[] for _ in range(rows)]
    order = _shuffled(len(segments), seed)
    free = [(0, row) for row in range(rows)]
    while free[0][0] < steps:
        step, row = heapq.heappop(free)
        number = next(order)
        turns[row].append((step, number))
        heapq.heappush(free, (step + segments[number], row))
    return turns


def _shuffled(count: int, seed: int) -> Iterator[int]:
    turn = 0
    while True:
        yield from np.random.default_rng([seed, turn]).permutation(count).tolist()
        turn += 1


# A document that is longer than a row's part of the texts is cut into equal parts: one book and a batch of four would
# otherwise be four rows that read the same tokens at once. Corpora of many documents are not touched.
def shared_out(documents: Iterable[Tokens], rows: int, end: int) -> list[Tokens]:
    """``documents``, each closed by the token ``end``, for so many ``rows`` to stream.

    One that is longer than a row's part of the whole is cut, for otherwise several rows would read the same at once.
    Raises ``InvalidArgument`` where there is nothing.
    """
    closed = [np.append(document, np.int32(end)) for document in documents]
    if not closed:
        raise InvalidArgument("the texts have no tokens: give texts that are not empty")
    part = max(2, math.ceil(sum(map(len, closed)) / rows))  # of one token nothing is predicted
    parts = [each for whole in closed for each in np.array_split(whole, math.ceil(len(whole) / part))]
    return [each for each in parts if len(each) > 1]


# Labels are shifted over the whole document, not within segments, where a token in each window would go unlearned.
def collate(segments: list[Segment], window: int, padding: int) -> dict[str, Tensor]:
    """A batch of segments, the shorter ones with ``padding`` behind; ``begins [B]`` says where documents begin."""
    ids = torch.full((len(segments), window), padding)
    labels = torch.full_like(ids, NO_LABEL)
    mask = torch.zeros_like(ids)
    for row, (tokens, _) in enumerate(segments):
        count = len(tokens) - 1
        ids[row, :count] = torch.from_numpy(tokens[:-1].astype(np.int64))
        labels[row, :count] = torch.from_numpy(tokens[1:].astype(np.int64))
        mask[row, :count] = 1
    begins = torch.tensor([segment.begins for segment in segments])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "shift_labels": labels, "begins": begins}


class StreamTrainer(MemoryTrainer, ABC):
    """Trains on the batches of ``Streams``. Subclasses say what the memory is; checkpoints hold it too."""

    @abstractmethod
    def clear(self, row: int) -> None:
        """Forget what a row has read, where another document begins."""

    @abstractmethod
    def remembered(self) -> dict[str, Tensor]:
        """What all rows have read, as tensors."""

    @abstractmethod
    def remember(self, state: dict[str, Tensor]) -> None:
        """The inverse of ``remembered``."""

    def segment(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """What the model gets of a batch; rows where a document begins forget the one before."""
        given = dict(inputs)
        for row in given.pop("begins").nonzero().flatten().tolist():
            self.clear(row)
        return given

    def keep(self, checkpoint: Path) -> None:
        """The memory."""
        save_file(self.remembered(), self._file(checkpoint))

    def resume(self, checkpoint: Path) -> None:
        """The memory. Raises ``DamagedError`` where it is not whole."""
        path = self._file(checkpoint)
        try:
            state = load_file(path, device=str(self.args.device))
        except (OSError, SafetensorError) as error:
            raise DamagedError(
                f"{path} cannot be read: {error}. Remove the folder {checkpoint}; the training goes on from the "
                "checkpoint before it."
            ) from None
        self.remember(state)

    def _file(self, checkpoint: Path) -> Path:
        return checkpoint / f"memory-{self.args.process_index}.safetensors"
