"""The open memories of a server, each with its model."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import memstore
from memstore.errors import NotFound
from memstore.memory.urls import OpenFolder
from memstore.readers.kinds import kind_of
from memstore.tools.ask import OnError, attached, chosen_documents, opened_when_free
from memstore.tools.endpoint.request import Refusal
from memstore.tools.endpoint.worker import ServedMemory
from memstore.tools.models import SMOLLM2, LoadedModel, chosen_name, load_model, record_model, usual_dtype

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}", re.IGNORECASE)
"""Pattern of a memory name in a request. It cannot contain a path."""


@dataclass
class Shelf:
    """Opens memories and keeps them until ``stack`` is closed. Memories of one model share it."""

    stack: ExitStack
    model: str | None = None
    """The model that answers; None for the model that read each memory."""
    top_k: int | None = None
    device: str = "cpu"
    index: str = "exact"
    on_error: OnError = "raise"
    folder: Path | None = None
    """Folder of the memories that requests name."""
    most: int = 0
    """Memories in it, at most."""
    served: dict[str, ServedMemory] = field(default_factory=dict)
    """The open memories by name."""
    later: dict[str, str] = field(default_factory=dict)
    """Paths of memories by name, to be opened at the first request."""
    _loaded: dict[tuple[str, str], LoadedModel] = field(default_factory=dict)

    def open(self, url: str, name: str, *, create: bool = False) -> ServedMemory:
        """Open the memory at ``url`` under ``name``; with ``create``, make it if it does not exist."""
        try:
            memory = memstore.open(url, mode="r", index=self.index, device=self.device)
        except NotFound:
            if not create:
                raise
            reading = self.model or SMOLLM2
            loaded = self._load(reading, "auto")
            with closing(opened_when_free(attached(loaded, url, document=None))) as reader:
                record_model(reader.memory, reading, loaded)
            memory = memstore.open(url, mode="r", index=self.index, device=self.device)
        with ExitStack() as own:  # closes what is open if a later step fails
            own.enter_context(memory)
            place = own.enter_context(OpenFolder(url))
            answers = chosen_name(memory, self.model)
            loaded = self._load(answers, usual_dtype(answers, memory.model_info().get("dtype")))
            several = kind_of(loaded.model).reader_class().several
            first = None if several else [document.name for document in memory.documents()[:1]]  # requests name theirs
            asked = chosen_documents(loaded.model, memory, first or None)
            reader = attached(loaded, memory, document=asked, top_k=self.top_k, on_error=self.on_error)
            with reader:  # refuses a memory of another model now, not at every answer
                pass
            writer = attached(loaded, url, document=None, top_k=self.top_k, on_error=self.on_error, index=self.index)
            self.stack.push(own.pop_all())
        model = Path(answers).name.removesuffix(".gguf")
        self.served[name] = served = ServedMemory(name, model, memory, reader, writer, place)
        return served

    @property
    def urls(self) -> list[str]:
        """Return the places of all memories, and their folder, which clients must not see."""
        there = [*(each.memory.url for each in self.served.values()), *self.later.values()]
        return there if self.folder is None else [*there, str(self.folder)]

    def check(self, name: str) -> str:
        """Return ``name`` without its model if such a memory exists or may be made. Raises ``Refusal``."""
        if name in self.served or name in self.later:
            return name
        model, _, memory = name.rpartition("@")
        found = self.served.get(memory)
        if found is not None and model in ("", found.model):
            return memory
        if self.folder is not None and not model and NAME.fullmatch(memory):
            return memory
        raise Refusal(
            f"there is no memory called {name[:80]!r}. This server has: {', '.join(self.served) or 'none'}",
            status=404,
            param="model",
            code="model_not_found",
        )

    def find(self, name: str, leave: Callable[[], None]) -> ServedMemory:
        """Return the memory checked as ``name``, and open or make it if needed. Raises ``Refusal``.

        ``leave`` is called before a memory is opened, because the model may be attached to another one.
        """
        if name in self.served:
            return self.served[name]
        leave()
        if name in self.later:
            return self.open(self.later[name], name)
        assert self.folder is not None
        place = self.folder / f"{name}.mem"
        if not place.exists() and len(list(self.folder.glob("*.mem"))) >= self.most:
            raise Refusal(
                f"this server may create at most {self.most:,} memories, and that many exist already: use one of them",
                status=403,
                param="model",
                code="memory_limit",
            )
        return self.open(str(place), name, create=True)

    def _load(self, name: str, dtype: str) -> LoadedModel:
        if (name, dtype) not in self._loaded:
            self._loaded[name, dtype] = load_model(name, dtype, device=self.device)
        return self._loaded[name, dtype]


def name_of(url: str) -> str:
    """Return the name of a memory in requests: the last part of its path, without ``.mem``."""
    return Path(url.partition("?tail=")[0].rpartition(":")[2]).resolve().name.removesuffix(".mem")
