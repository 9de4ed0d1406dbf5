"""The ask box: the routes of ``memstore serve``, for the memory of the page."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from memstore.errors import MemstoreError, printable
from memstore.memory.shared import CHAT, owner_of
from memstore.readers.asking import SAID
from memstore.tools.models import named_model, recorded_name

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from memstore.memory import Memory
    from memstore.tools.endpoint.app import Endpoint

PATHS = ("/v1/chat/completions", "/v1/completions")
"""Routes of the endpoint that the page uses. For the others it has its own answers."""
SESSIONS = 1000
"""Conversations that a memory may keep, if the page may change it."""
MOST_TURNS = 40


class AskBox:
    """An ASGI application that answers from a memory and records the blocks of each answer.

    At the first question it opens the memory for itself and loads the model.
    """

    def __init__(self, memory: Memory, *, hosts: Iterable[str], allow_write: bool) -> None:
        """Prepare the box. With ``allow_write`` it also continues conversations, which the memory keeps."""
        self._memory, self._hosts, self._sessions = memory, tuple(hosts), SESSIONS if allow_write else 0
        self._stack = ExitStack()
        self._lock = threading.Lock()
        self._made: Endpoint | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await self._endpoint().app(scope, receive, send)

    def close(self) -> None:
        """Cancel the current answer."""
        if self._made is not None:
            self._made.close()
        self._stack.close()

    def _endpoint(self) -> Endpoint:
        from memstore.tools.endpoint.app import Endpoint
        from memstore.tools.endpoint.shelf import Shelf, name_of

        with self._lock:
            if self._made is None:
                url = self._memory.url
                shelf = Shelf(self._stack, model=named_model(self._memory), later={name_of(url): url})
                self._made = Endpoint(shelf, hosts=self._hosts, sessions=self._sessions, trace=True, chats=True)
            return self._made


def can_ask(memory: Memory) -> bool:
    """Check whether a model can be asked: the memory or the user names one, and the memory can be opened again."""
    return recorded_name(memory) is not None and not memory.url.startswith("ram:")


def takes_several(memory: Memory) -> bool:
    """Check whether the memory's model sees several documents at a time, without loading it."""
    from memstore.tools.models import chosen_name, kind_named

    try:
        return bool(kind_named(chosen_name(memory)).reader_class().several)
    except MemstoreError:  # a question gets the reason
        return True


def conversations(memory: Memory) -> dict[str, Any]:
    """List the conversations of the memory, with the last message of each."""
    said: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for key, fact in memory.infos(SAID).items():
        session, _, number = key.removeprefix(SAID).rpartition("/")
        if owner_of(key) and isinstance(fact, dict):
            said.setdefault(session, []).append((int(number), fact))
    told = []
    for session, turns in said.items():
        last = [fact for _, fact in sorted(turns, key=lambda turn: turn[0])[-MOST_TURNS:]]
        shown = [{name: printable(str(fact.get(name, ""))) for name in ("role", "text", "time")} for fact in last]
        told.append({"session": printable(session), "document": printable(CHAT + session), "turns": shown})
    return {"conversations": told}
