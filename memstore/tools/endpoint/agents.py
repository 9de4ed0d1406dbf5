"""A memory as a server of the Model Context Protocol: ``memstore mcp``.

The official package ``mcp`` serves tools and documents. The one answering thread (``Worker``) does their work, so an
agent's requests queue as a chat's do. An agent works for the owner of the memory. It can name a conversation to see or
forget it, but only the chat itself writes into it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import quote, unquote

from mcp.server.lowlevel.helper_types import ReadResourceContents
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ResourceError, ResourceNotFoundError
from mcp.server.transport_security import TransportSecuritySettings
from mcp.types import Resource, ToolAnnotations
from pydantic import Field
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memstore._version import __version__
from memstore.errors import InvalidArgument, MemstoreError, NotFound
from memstore.memory.shared import CHAT
from memstore.readers.passages import Passage, passages
from memstore.readers.reader import Reader
from memstore.tools.ask import chosen_documents
from memstore.tools.endpoint.app import WAITING, Gate
from memstore.tools.endpoint.request import MOST_TOKENS, Refusal
from memstore.tools.endpoint.worker import QueuedJob, ServedMemory, Worker
from memstore.tools.verb import fact_of
from memstore.tools.web import LOOPBACK, in_url, is_loopback, names_of, without_paths

SCHEME = "memstore://"
NOTES = "remembered"
"""The document to write to if none is named."""
MOST_PASSAGES = 50
T = TypeVar("T")
Text = Annotated[str, Field(min_length=1, max_length=1 << 20)]
Documents = Annotated[
    list[str] | None, Field(description="Search only these documents. Default: all documents except chats.")
]


@dataclass(frozen=True)
class Receipt:
    """The result of storing a text."""

    document: str
    new_tokens: int
    tokens: int


@dataclass(frozen=True)
class AnswerWithPassages:
    """An answer and the passages that it was written with."""

    answer: str
    sources: list[Passage]
    unsupported: list[str]
    """Words of the answer that neither the question nor its passages contain: perhaps made up."""
    coverage: float | None
    """The share of the question's words in the quoted passage. Below 0.4 the memory probably has nothing on it."""


@dataclass(frozen=True)
class DocumentFacts:
    """A document."""

    document: str
    tokens: int
    uri: str


class Agents(MCPServer[Any]):
    """A memory for agents. Close its ``worker`` before the memory."""

    def __init__(self, served: ServedMemory, *, write: bool) -> None:
        """Serve a memory; with ``write`` also tools that change it."""
        super().__init__(
            "memstore",
            version=__version__,
            instructions=(
                f"A memory called {served.name}, which outlasts this conversation. Search it with recall or ask "
                "before you say that you do not know"
            )
            + (", and store what is worth keeping with remember." * write or "."),
            log_level="ERROR",
        )
        self._served, self.worker = served, Worker(WAITING)
        reads, adds = ToolAnnotations(read_only_hint=True), ToolAnnotations(destructive_hint=False)
        drops = ToolAnnotations(destructive_hint=True, idempotent_hint=True)
        self._add("recall", self.recall, reads)
        self._add("ask", self.ask, reads)
        self._add("list", self.list_documents, reads)
        if write:
            self._add("remember", self.remember, adds)
            self._add("forget", self.forget, drops)

    def _add(self, name: str, tool: Callable[..., object], hints: ToolAnnotations) -> None:
        self.add_tool(tool, name, annotations=hints.model_copy(update={"open_world_hint": False}))

    def over_http(self, host: str, token: str | None, names: Sequence[str] = ()) -> ASGIApp:
        """Serve at the path ``/mcp``, under ``names`` and the machine's own; see ``Gate``."""
        hosts = (host, *names)
        # The package also guards servers that only this machine reaches, against other sites. It must know the names.
        known = [end for each in (LOOPBACK, "[::1]", in_url(host), *names_of(hosts)) for end in (each, f"{each}:*")]
        origins = [f"{scheme}://{each}" for scheme in ("http", "https") for each in known]
        security = TransportSecuritySettings(
            enable_dns_rebinding_protection=is_loopback(host), allowed_hosts=known, allowed_origins=origins
        )
        app = self.streamable_http_app(json_response=True, stateless_http=True, transport_security=security)
        return Gate(_noticing_who_leaves(app), token=token, hosts=hosts)

    # Tools: models read their docstrings

    async def recall(
        self,
        query: Text,
        most: Annotated[int, Field(ge=1, le=MOST_PASSAGES, description="Return at most this many passages.")] = 5,
        documents: Documents = None,
    ) -> list[Passage]:
        """Find the passages of the memory that fit a question or a few words, best first, with their scores."""

        def work(reader: Reader, _: QueuedJob) -> list[Passage]:
            self._look_into(reader, documents)
            if not reader.names:
                return []
            return passages(reader, reader.search(query, most), query)

        return await self._done(work)

    async def ask(
        self,
        question: Text,
        documents: Documents = None,
        max_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS, description="Generate at most this many tokens.")] = 256,
    ) -> AnswerWithPassages:
        """Let the model that read the memory answer a question from it, and list the passages that it used."""

        def work(reader: Reader, job: QueuedJob) -> AnswerWithPassages:
            self._look_into(reader, documents)
            if not reader.names:
                raise NotFound("the memory has no documents yet, so there is nothing to answer from")
            answer = reader.ask(question, max_tokens=max_tokens, stopping_criteria=job.stopping)
            return AnswerWithPassages(answer.text, answer.sources(), answer.unsupported(), answer.coverage)

        return await self._done(work)

    async def list_documents(self) -> list[DocumentFacts]:
        """List the documents of the memory."""
        served = self._served

        def work(_: Reader, __: QueuedJob) -> list[DocumentFacts]:
            place = f"{SCHEME}{quote(served.name)}"
            there = served.memory.documents()
            return [DocumentFacts(each.name, len(each), f"{place}/{quote(each.name)}") for each in there]

        return await self._done(work)

    async def remember(
        self,
        text: Annotated[Text, Field(description="The text to remember, in full sentences.")],
        document: Annotated[
            Text, Field(description="The document that the text is appended to. A new name creates one.")
        ] = NOTES,
    ) -> Receipt:
        """Store a text in the memory, where later questions and other conversations find it."""

        def work(reader: Reader, _: QueuedJob) -> Receipt:
            _check_place(reader, document)
            if not text.strip():
                raise InvalidArgument("the text is empty: pass some words to remember")
            result = reader.append(text.strip() + "\n", document)
            return Receipt(document, result.new_tokens, result.tokens)

        return await self._done(work, writes=True)

    async def forget(self, document: Text) -> str:
        """Remove a document from the memory, for good."""

        def work(reader: Reader, _: QueuedJob) -> str:
            reader.memory.forget(reader.memory.document(document).name)
            return f"forgot {document}"

        return await self._done(work, writes=True)

    # Documents as resources

    async def list_resources(self) -> list[Resource]:
        """Return every document."""
        listed = await self.list_documents()
        return [Resource(uri=each.uri, name=each.document, mime_type="text/plain") for each in listed]

    async def read_resource(self, uri: object, context: object = None) -> Sequence[ReadResourceContents]:  # noqa: ARG002 - of MCPServer
        """Return the text of a document."""
        name = unquote(str(uri).removeprefix(f"{SCHEME}{quote(self._served.name)}/"))

        def work(reader: Reader, _: QueuedJob) -> str:
            document = self._served.memory.document(name)
            return str(reader.tokenizer.decode(document.tokens(), skip_special_tokens=True))

        return [ReadResourceContents(content=await self._done(work), mime_type="text/plain")]

    def _look_into(self, reader: Reader, documents: list[str] | None) -> None:
        for name in documents or []:
            self._served.memory.document(name)  # its error lists the documents of the memory
        reader.names = chosen_documents(reader.model, reader.memory, documents, "documents") or []

    async def _done(self, work: Callable[[Reader, QueuedJob], T], *, writes: bool = False) -> T:
        try:
            return await self.worker.done(lambda _: self._served, work, writes=writes, left=_LEFT.get())
        except (MemstoreError, Refusal) as error:
            # Tools and documents: both may report their errors by this class.
            kind = ResourceNotFoundError if isinstance(error, NotFound) else ResourceError
            raise kind(without_paths(error, self._served.memory.url)) from error


_LEFT: ContextVar[threading.Event | None] = ContextVar("left", default=None)
"""Set when the client of this request has closed the connection. On standard input the package notices it."""


def _noticing_who_leaves(app: ASGIApp) -> ASGIApp:
    """Wrap ``app`` so that tools are cancelled when their client disconnects.

    The package does not check it over HTTP.
    """

    async def noticing(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        left, gone = threading.Event(), asyncio.Event()
        watching: list[asyncio.Task[None]] = []

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            left.set()
            gone.set()

        async def received() -> Message:
            if watching:  # the whole request has arrived
                await gone.wait()
                return {"type": "http.disconnect"}
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body"):
                watching.append(asyncio.create_task(watch()))
            return message

        before = _LEFT.set(left)
        try:
            await app(scope, received, send)
        finally:
            _LEFT.reset(before)
            for task in watching:
                task.cancel()

    return noticing


def _check_place(reader: Reader, document: str) -> None:
    """Raise ``InvalidArgument`` for documents that must not be written to."""
    if document.startswith(CHAT):
        raise InvalidArgument(f"{document!r} is the name of a chat: choose another name")
    if path := fact_of(reader.memory, document).get("path"):
        name = Path(str(path)).name
        raise InvalidArgument(
            f"{document!r} is the document of the file {name}, which is read again when it changes: choose another name"
        )
