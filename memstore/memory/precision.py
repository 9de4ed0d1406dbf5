"""What a memory holds and finds does not depend on ``torch.autocast`` of whoever asks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def own_types() -> Iterator[None]:
    """Inside, operations of this thread compute in the types of their tensors."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
