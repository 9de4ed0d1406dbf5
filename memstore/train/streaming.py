"""Training on rows that stream documents, with a memory of what each row has read; checkpoints hold it too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from memstore.errors import DamagedError
from memstore.train.trainer import MemoryTrainer


class StreamTrainer(MemoryTrainer):
    """Trains on the batches of ``Streams``. Subclasses say what the memory is."""

    def clear(self, row: int) -> None:
        """Forget what a row has read, where another document begins."""
        raise NotImplementedError

    def remembered(self) -> dict[str, Tensor]:
        """What all rows have read, as tensors."""
        raise NotImplementedError

    def remember(self, state: dict[str, Tensor]) -> None:
        """The inverse of ``remembered``."""
        raise NotImplementedError

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
