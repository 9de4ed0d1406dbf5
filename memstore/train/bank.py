"""Distractors that cost no reading: blocks of other rows, and a bank of blocks of earlier steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from memstore.models.drt import DRTForCausalLM, SharedBlocks
from memstore.models.drt.modeling import DTYPES
from memstore.train.recipes import Recipe

MEMORY = 0.95
"""How much of what was found in the steps before counts, at each step."""


class Bank:
    """What rows may retrieve beside their own blocks.

    It listens to the block encoder and keeps the latest blocks, without gradients. It opens as long as needles are
    found, and closes when they are not: among ``n`` distractors the Gumbel noise of the choice reaches ``log n``, so a
    block that does not lead them by as much is not taken, and what is not taken gets no gradient. Each doubling asks
    for the same growth of that lead. ``docs/notes/drt.md`` has the runs that failed.
    """

    opened: float = 0.0
    """0: no distractors; 1: all. In between their number grows exponentially."""
    found: float = 1.0
    """The part of the needles that were found lately."""

    states: Tensor | None = None
    """``[P, S, hidden]``, the latest first."""
    landmarks: Tensor | None = None
    """``[P, hidden]``"""

    def __init__(self, model: DRTForCausalLM, recipe: Recipe) -> None:
        self._recipe = recipe
        self._dtype = DTYPES[model.config.state_dtype]
        self._size = model.config.tokens_per_block
        self._encoded: tuple[Tensor, Tensor] | None = None
        if recipe.bank:
            model.model.encoder.register_forward_hook(self._listen)

    def _listen(self, module: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> None:  # noqa: ARG002 - a hook
        if module.training:
            self._encoded = output[0].detach(), output[1].detach()

    def shared(self, free: Tensor, progress: float) -> SharedBlocks | None:
        """For rows in which ``free [B, T]`` holds no answer to anybody else's question, at a part of the training."""
        recipe = self._recipe
        count = round(recipe.bank**self.opened) if recipe.bank else 0
        if progress < recipe.hard_from or self.states is None or self.landmarks is None or count < 2:
            return None
        # The blocks of other rows are more distractors all at once.
        rows = free if recipe.share_rows and count * self._size >= free.numel() else None
        return SharedBlocks(rows=rows, states=self.states[:count], landmarks=self.landmarks[:count])

    def pace(self, found: float, progress: float, steps: int) -> None:
        """Open or close by a step, for the part of the needles that was found at a part of a training of ``steps``."""
        recipe = self._recipe
        if progress >= recipe.hard_from:
            self.found = MEMORY * self.found + (1 - MEMORY) * found
            width = 1 / max(1.0, recipe.bank_growth * steps)
            self.opened = min(1.0, max(0.0, self.opened + (width if self.found >= recipe.ready else -width)))

    def keep(self, free: Tensor) -> None:
        """Take in the free blocks of the rows that were just encoded."""
        if self._encoded is None:
            return
        blocks = free.unflatten(1, (-1, self._size)).all(-1)
        states, landmarks = (part[blocks].to(self._dtype) for part in self._encoded)
        self._encoded = None
        if self.states is not None and self.landmarks is not None:
            states, landmarks = torch.cat([states, self.states]), torch.cat([landmarks, self.landmarks])
        self.states, self.landmarks = states[: self._recipe.bank], landmarks[: self._recipe.bank]

    def save(self, path: Path) -> None:
        """Write the blocks, if there are any."""
        tensors = {name: getattr(self, name) for name in ("states", "landmarks") if getattr(self, name) is not None}
        if tensors:
            pace = torch.tensor([self.opened, self.found], dtype=torch.float64)
            save_file({**{name: tensor.contiguous() for name, tensor in tensors.items()}, "pace": pace}, path)

    def load(self, path: Path, device: torch.device) -> None:
        """Go on with the blocks of ``path``, if there are any."""
        if path.exists():
            tensors = load_file(path, device=str(device))
            self.opened, self.found = tensors.pop("pace").tolist()
            for name, tensor in tensors.items():
                setattr(self, name, tensor)
