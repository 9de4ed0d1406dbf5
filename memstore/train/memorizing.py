"""Training of Memorizing Transformers: rows that stream documents, and a memory that goes on from step to step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from memstore.attention.knn_memory import RecentTokens
from memstore.errors import InvalidArgument
from memstore.models.memorizing import MemorizingCache
from memstore.models.memorizing.refresh import key_shift, refresh
from memstore.train.run import Run
from memstore.train.streams import Streams, StreamTrainer

# 1 minus the mean cosine of keys as stored and as the present weights compute them. Keys of the layer with the memory
# do not depend on what was retrieved, so only tokens within a window for each layer below are read again: for the two
# oldest windows of one row that costs a fraction of a step.
COMPARED_WINDOWS = 2
"""Windows of the oldest keys that a line of the log compares with present ones: a small part of a step's time."""


class MemorizingTrainer(StreamTrainer):
    """Trains on the batches of ``Streams``."""

    def __init__(
        self, run: Run, model: Any, *rest: Any, data: Streams, refresh_every: int | None = None, **options: Any
    ) -> None:
        """``refresh_every``: steps after which all that is in the memory is computed again; None: never."""
        if refresh_every is not None and refresh_every < 1:
            raise InvalidArgument(f"refresh_every must be at least 1, got {refresh_every}")
        super().__init__(run, model, *rest, data=data, **options)
        self.streams = data
        self.cache = MemorizingCache(model.config, self.args.per_device_train_batch_size)
        self.refresh_every = refresh_every
        self._refreshed = 0

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """See ``MemoryTrainer``; before it the memory is refreshed where it is time."""
        step = self.state.global_step
        if self.refresh_every is not None and step % self.refresh_every == 0 and step != self._refreshed:
            self._refreshed = step
            if isinstance(self.cache.memory, RecentTokens):
                refresh(self.trained, self.cache.memory, self.texts())
        return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of a segment of each row; a row where a document begins forgets the one before."""
        given = self.segment(inputs) | {"past_key_values": self.cache, "use_cache": True}
        return super().compute_loss(model, given, return_outputs, num_items_in_batch)

    def texts(self, rows: int | None = None) -> list[Tensor]:
        """What the first ``rows`` rows of this process have read of their documents until now; all rows if None."""
        batch = self.args.per_device_train_batch_size
        first = self.args.process_index * batch
        step = self.state.global_step * self.args.gradient_accumulation_steps
        return [self.streams.before(first + row, step) for row in range(batch if rows is None else rows)]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add how far the oldest keys of the first row have shifted."""
        if "loss" in logs and isinstance(self.cache.memory, RecentTokens):
            oldest = COMPARED_WINDOWS * self.trained.config.window
            shift = key_shift(self.trained, self.cache.memory, self.texts(rows=1), oldest=oldest)
            if shift is not None:
                self.parts["key_shift"] = [torch.tensor(shift)]
        super().log(logs, start_time)

    def clear(self, row: int) -> None:
        """See ``StreamTrainer``."""
        self.cache.clear(row)

    def remembered(self) -> dict[str, Tensor]:
        """The memory and the windows."""
        return self.cache.state_dict()

    def remember(self, state: dict[str, Tensor]) -> None:
        """See ``StreamTrainer``."""
        self.cache.load_state_dict(state)
