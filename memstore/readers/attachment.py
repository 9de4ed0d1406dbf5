"""A model and its memories, open for the length of a ``with`` block: what every ``Reader`` stands on.

What does not depend on the mechanism is here: memories are opened, made and checked, and the documents among them are
found by their names. A mechanism says what it stores (``spec``) and how its model gets to see the memory
(``_install``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from memstore.errors import InvalidArgument, NotFound, UnsupportedModel
from memstore.memory import Document, Memory, MemorySpec, open_memory
from memstore.memory.memory import check_same
from memstore.memory.urls import Mode
from memstore.readers.fingerprint import dividing
from memstore.readers.kinds import ATTACHED, OPTIONS, RETRIEVAL, Kind, Retrieval
from memstore.readers.observer import Observer
from memstore.readers.ranks import Ranks, Share, SharedDocument

UNNAMED = "document"
"""The first document of a memory, where nobody names it."""
Place = Memory | str | Path
"""A memory: one that is open, or where it is."""


class Attachment(ABC):
    """A model with memories. Nothing is opened, locked or changed before ``open``."""

    kind: ClassVar[Kind]
    several: ClassVar[bool] = False
    """Whether several documents, and several memories, can be seen at once."""
    divisible: ClassVar[bool] = False
    """Whether the model's weights may be divided among processes."""
    model: Any
    retrieval: Retrieval

    def __init__(
        self,
        model: Any,
        memory: Place | Sequence[Place],
        document: str | Sequence[str] | None = None,
        *,
        retrieval: Retrieval | None = None,
        tokenizer: Any = None,
        index: str = "exact",
        mode: Mode = "a",
        device: str | torch.device | None = None,
        process_group: Any = None,
    ) -> None:
        """See ``memstore.attach``."""
        self.model, self.tokenizer = model, tokenizer
        self.retrieval = self.usual(model) if retrieval is None else retrieval
        check_retrieval(self.kind, self.retrieval)
        if process_group is not None and mode != "r":
            raise InvalidArgument("with process_group a memory is only asked: use mode='r', and read with one process")
        if process_group is not None and self.retrieval.on_error == "miss":
            raise InvalidArgument("on_error='miss' is for one process: ranks would attend to different lists")
        if not self.divisible and dividing(model) is not None:
            raise UnsupportedModel(
                f"the weights of this {self.kind.name} are divided among processes, which is for stock models: give "
                "each the whole model"
            )
        self._process_group = process_group
        self.share: Share | None = None
        """This rank's share of the blocks, where there are others."""
        self.names = [document] if isinstance(document, str) else None if document is None else list(document)
        on = model.device if device is None and model.device.type == "cuda" else device
        self._places = _places(memory)
        self._opening: dict[str, Any] = {"mode": mode, "index": index, "device": on}
        self._memories: tuple[Memory, ...] | None = None
        self._stack = ExitStack()
        self.observers: list[Observer] = []
        """Told what the calls of the model retrieve; not what reading does."""
        for what, given in (("memories", self._places), ("documents", self.names or [])):
            if len(given) > 1 and not self.several:
                raise InvalidArgument(
                    f"a {self.kind.name} goes on after one document at a time, got {len(given)} {what}: attach one "
                    "after the other"
                )

    @classmethod
    def usual(cls, model: Any, made: MemorySpec | None = None) -> Retrieval:  # noqa: ARG003 - for those that care
        """How ``model`` retrieves unless it is told otherwise; ``made``: from a memory that is there already."""
        return Retrieval()

    def __enter__(self) -> Self:
        return self.open() if self._memories is None else self  # like a file that is open already

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.document)

    def __bool__(self) -> bool:
        return True

    def open(self) -> Self:
        """What entering the ``with`` block does. Raises ``ForeignMemory`` for a memory of another model."""
        if self._memories is not None:
            raise InvalidArgument("this reader is open already: leave its with block first")
        with ExitStack() as stack:
            try:
                self._memories = tuple(self._opened(stack))
                self._join()
                self._begin()
                self._install(stack)
            except BaseException:
                self._memories = None
                raise
            self._stack = stack.pop_all()
        return self

    def close(self) -> None:
        """What leaving the ``with`` block does. Memories that were given open stay open."""
        try:
            self._stack.close()
        finally:
            self._memories = None

    def _join(self) -> None:
        """Join the other ranks, where there is a process group."""
        if self._process_group is not None:
            if any(memory.mode != "r" for memory in self.memories):
                raise InvalidArgument("with process_group a memory is only asked: open it with mode='r'")
            self.share = Share(Ranks(self._process_group))

    def _check_alone(self) -> None:
        """Raise ``InvalidArgument`` where there are other ranks: what they retrieve is in no one place."""
        if self.share is not None:
            raise InvalidArgument(
                "what several ranks retrieve cannot be searched, watched or asked for: use generate, or attach without "
                "process_group"
            )

    # The memory

    @property
    def memories(self) -> tuple[Memory, ...]:
        """The memories, open; the first one is the one that is read into."""
        if self._memories is None:
            raise InvalidArgument(
                "a memory is read and asked inside a with block: with memstore.attach(model, memory) as reader: ..."
            )
        return self._memories

    @property
    def memory(self) -> Memory:
        """The memory that is read into."""
        return self.memories[0]

    @property
    def document(self) -> Document:
        """The document that the model goes on after. Raises ``InvalidArgument`` where it is not clear which one."""
        return self._document(None)

    @property
    def documents(self) -> list[Document]:
        """The documents that the model sees; the last one is the one that it goes on after."""
        return [self.document]

    def _document(self, name: str | None) -> Document:
        """The document called ``name``, or the one that is meant where nobody says."""
        if name is None and self.names is not None and len(self.names) == 1:
            (name,) = self.names
        if name is None:
            names = [each.name for each in self.memory.documents()]
            if len(names) > 1 or (self.names is not None and len(self.names) > 1):
                shown = ", ".join(map(repr, self.names or names))
                raise InvalidArgument(f"which document? Pass document=NAME, there are {shown}")
            name = names[0] if names else UNNAMED
        document = self.memory.document(name)
        return document if self.share is None else SharedDocument(document, self.share)

    def _continued(self) -> Document:
        """The document that a call goes on after, as it is now. Raises where ranks see different ones."""
        document = self.document
        if self.share is not None:
            if self.observers:
                self._check_alone()
            self.share.ranks.agree(document.n_blocks, len(document))
        return document

    def _opened(self, stack: ExitStack) -> Iterator[Memory]:
        """Each memory; those that are not there are made like the first one that is."""
        found = [each if isinstance(each, Memory) else self._existing(each, stack) for each in self._places]
        like = next((memory.spec for memory in found if memory is not None), None)
        for place, there in zip(self._places, found, strict=True):
            memory = there
            if memory is None:
                spec = self.spec(like)
                memory = open_memory(str(place), spec=spec, **self._opening)
                stack.enter_context(memory)
                self._sign(memory)
            self._check_memory(memory, self.memories[0] if self._memories else found[0] or memory)
            yield memory

    def _existing(self, place: str | Path, stack: ExitStack) -> Memory | None:
        if self._opening["mode"] == "x":
            return None
        try:
            return stack.enter_context(open_memory(place, **self._opening))
        except NotFound:
            if self._opening["mode"] == "r":
                raise
            return None

    def _sign(self, memory: Memory) -> None:
        """Write into a new memory which model it is for, so that other programs need not be told."""
        names = {"name": self.model, "tokenizer": self.tokenizer}
        info = {key: name for key, of in names.items() if (name := _name_of(of))}
        if "name" in info:
            memory.put_info("model", {**info, "dtype": str(self.model.dtype).removeprefix("torch.")})

    @abstractmethod
    def spec(self, made: MemorySpec | None = None) -> MemorySpec:
        """What is stored of this model. ``made``: of the memory that is there already, to be like it in what is free.

        Raises ``InvalidArgument`` for a model that can store nothing.
        """

    def _check_memory(self, memory: Memory, first: Memory) -> None:  # noqa: ARG002 - for those that see several
        """Raise ``ForeignMemory`` where ``memory`` was made by another model."""
        check_same(self.spec(memory.spec), memory)

    def _begin(self) -> None:  # noqa: B027 - nothing for most
        """The memories are open: whatever else has to be checked or loaded."""

    @abstractmethod
    def _install(self, stack: ExitStack) -> None:
        """Let the model see the memory, until ``stack`` is closed."""


def check_options(kind: Kind, given: Mapping[str, Any]) -> None:
    """Raise ``InvalidArgument`` for options of ``attach`` that are given to a ``kind`` which does not take them."""
    for name, value in given.items():
        if value is not None and kind not in OPTIONS.get(name, ATTACHED):
            raise InvalidArgument(
                f"{name} is for {_names(OPTIONS[name])}; a {kind.name} does not take it: leave it out"
            )


def check_retrieval(kind: Kind, retrieval: Retrieval) -> None:
    """Raise ``InvalidArgument`` for what a ``kind`` cannot do: a field it does not take, and that is not as usual."""
    for field in fields(retrieval):
        value = getattr(retrieval, field.name)
        if kind not in RETRIEVAL[field.name] and value != field.default:
            raise InvalidArgument(
                f"Retrieval.{field.name} is for {_names(RETRIEVAL[field.name])}; a {kind.name} does not take it: "
                "leave it out"
            )


def _names(kinds: tuple[Kind, ...]) -> str:
    return " and ".join(f"{kind.name}s" for kind in kinds)


def _places(memory: object) -> list[Place]:
    given = list(memory) if isinstance(memory, (list, tuple)) else [memory]
    places = [each for each in given if isinstance(each, (str, Path, Memory))]
    if not places or len(places) < len(given):
        raise InvalidArgument(f"attach needs a memory, the path of one, or several of them, got {memory!r}")
    return places


def _name_of(thing: Any) -> str | None:
    """Where a model or tokenizer was loaded from; a folder by its whole path, for others may run elsewhere."""
    name = getattr(thing, "name_or_path", None)
    if not isinstance(name, str) or not name:
        return None
    return str(Path(name).resolve()) if Path(name).is_dir() else name
