"""The memories that a server has open, each with its model."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import memstore
from memstore.errors import NotFound
from memstore.tools.ask import attached, several
from memstore.tools.endpoint.worker import Served
from memstore.tools.models import SMOLLM2, Loaded, chosen_name, load_model
from memstore.tools.read import model_info


@dataclass
class Shelf:
    """Opens memories until ``stack`` is closed; those of one model share it."""

    stack: ExitStack
    model: str | None = None
    """The model that answers; without it the one that read each memory."""
    top_k: int | None = None
    device: str = "cpu"
    index: str = "exact"
    _loaded: dict[tuple[str, str], Loaded] = field(default_factory=dict)

    def open(self, url: str, *, create: bool = False) -> Served:
        """The memory at ``url``; with ``create`` it is made where it is not there."""
        try:
            memory = memstore.open(url, mode="r", index=self.index)
        except NotFound:
            if not create:
                raise
            name, loaded = self._load(self.model or SMOLLM2, "auto")
            with attached(loaded, url, document=None) as reader:
                reader.memory.put_info("model", model_info(name, loaded))
            memory = memstore.open(url, mode="r", index=self.index)
        self.stack.enter_context(memory)
        name, loaded = self._load(chosen_name(memory, self.model), str(memory.model_info().get("dtype", "auto")))
        reader = several(loaded, memory, None, top_k=self.top_k)
        with reader:  # a memory of another model is refused now, and not by every answer
            pass
        writer = attached(loaded, url, document=None, top_k=self.top_k, index=self.index)
        return Served(name_of(url), Path(name).name.removesuffix(".gguf"), loaded, memory, reader, writer)

    def _load(self, name: str, dtype: str) -> tuple[str, Loaded]:
        if (name, dtype) not in self._loaded:
            self._loaded[name, dtype] = load_model(name, dtype, device=self.device)
        return name, self._loaded[name, dtype]


def name_of(url: str) -> str:
    """What a memory is called in requests: the last part of its path, without ``.mem``."""
    return Path(url.rpartition(":")[2]).resolve().name.removesuffix(".mem")
