"""Routes of the inspector page: its static files, and JSON for what ``data.py`` and ``traced.py`` say."""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memstore.errors import (
    InvalidArgument,
    MemstoreError,
    NotFound,
)
from memstore.tools.inspector import data, traced
from memstore.tools.inspector.asking import PATHS, AskBox, can_ask, conversations, takes_several
from memstore.tools.inspector.guard import Guard
from memstore.tools.inspector.words import Words
from memstore.tools.web import LOOPBACK, MOST_BYTES, body_of, require_web, run, server_of, status_of

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from memstore.memory import Memory

STATIC = Path(__file__).parent / "static"
Answer = Callable[["PageQuery"], Mapping[str, Any]]


def serve(
    memory: Memory,
    *,
    host: str = LOOPBACK,
    port: int = 0,
    allow_write: bool = False,
    started: Callable[[str], None] = lambda _: None,
) -> str:
    """Serve the page of ``memory`` until Ctrl-C; the url that it had.

    ``port`` 0 is a free one. ``started`` is given the url, which has the token that the page asks for, once it can be
    opened. With ``allow_write`` the page can pin and forget documents and remove traces. Raises ``NotFound`` where
    starlette or uvicorn is not installed, ``InvalidArgument`` for a host or port that cannot be had.
    """
    require_web()
    inspector = Inspector(memory, allow_write=allow_write, hosts=(host,))

    def begun(url: str) -> None:
        inspector.warm()
        started(url)

    try:
        return run(
            server_of(inspector.app, most=100, grace=1, lifespan=False, ending=inspector.close),
            host=host,
            port=port,
            path=f"/?token={inspector.token}",
            started=begun,
        )
    finally:
        inspector.close()


class Inspector:
    """The page of one memory, as an ASGI application; made for ``memstore view``.

    ``token`` is what requests must have. With ``allow_write``, ``data.ACTIONS`` can be asked for.
    """

    def __init__(self, memory: Memory, *, allow_write: bool = False, hosts: tuple[str, ...] = ()) -> None:
        self.token = secrets.token_urlsafe(24)
        self._memory = memory
        self._words = Words(memory)
        self._write_token = secrets.token_urlsafe(24) if allow_write else None
        self._box = AskBox(memory, hosts=hosts, allow_write=allow_write)
        asking = {"asking": PATHS if can_ask(memory) else ()}
        self.app = Guard(self._routes(), token=self.token, write_token=self._write_token, hosts=hosts, **asking)

    def warm(self) -> None:
        """Load the tokenizer in a thread, so that it is there when the first text is asked for."""

        def load() -> None:
            with contextlib.suppress(MemstoreError):  # the memory may be closed by now; who asks for a text is told
                _ = self._words.missing

        threading.Thread(target=load, name="tokenizer", daemon=True).start()

    def close(self) -> None:
        """Break off what is being answered."""
        self._box.close()

    def _routes(self) -> Any:
        from starlette.applications import Starlette
        from starlette.responses import FileResponse
        from starlette.routing import Mount, Route
        from starlette.staticfiles import StaticFiles

        def page(_: Request) -> Response:
            return FileResponse(STATIC / "index.html")

        answers = [Route(f"/api/{path}", _endpoint(answer)) for path, answer in self._answers().items()]
        return Starlette(
            routes=[
                Route("/", page),
                *answers,
                Route("/api/do/{action}", self._change, methods=["POST"]),
                *(Route(path, self._box) for path in PATHS),
                Mount("/static", StaticFiles(directory=STATIC)),
            ]
        )

    def _answers(self) -> dict[str, Answer]:
        memory, words = self._memory, self._words
        return {
            "memory": lambda _: data.overview(memory) | {"write_token": self._write_token},
            "text": lambda _: {"missing": words.missing, "several": takes_several(memory)},
            "live": lambda asked: traced.live(memory, words, asked.number("trace", -1)),
            "documents": lambda asked: data.documents(memory, asked.text("part")),
            "documents/{document}/blocks": lambda asked: data.blocks(
                memory, words, asked.document, asked.number("start"), asked.number("stop")
            ),
            "documents/{document}/blocks/{block}": lambda asked: data.block(
                memory, words, asked.document, asked.block, asked.number("layer", 0)
            ),
            "documents/{document}/blocks/{block}/neighbours": lambda asked: data.neighbours(
                memory, words, asked.document, asked.block, asked.number("layer")
            ),
            "documents/{document}/blocks/{block}/traces": lambda asked: traced.using(
                memory, asked.document, asked.block
            ),
            "documents/{document}/find": lambda asked: data.find(
                memory, words, asked.document, asked.text("text"), asked.number("start", 0)
            ),
            "documents/{document}/ask": lambda asked: data.ask(memory, words, asked.document, asked.text("text")),
            "conversations": lambda _: conversations(memory),
            "traces/{trace}": lambda asked: traced.trace(
                memory,
                words,
                asked.trace,
                range(asked.number("start", 0), asked.number("stop", traced.MOST_STEPS)),
                asked.choice("layer"),
                asked.choice("head"),
            ),
            "traces/{trace}/overview": lambda asked: traced.overview(
                memory, asked.trace, range(asked.number("start", 0), asked.number("stop", traced.MOST_STEPS))
            ),
            "traces/{trace}/steps/{step}": lambda asked: traced.step(
                memory, words, asked.trace, asked.step, asked.choice("layer"), asked.choice("head")
            ),
            "traces/{trace}/used": lambda asked: traced.used(
                memory, words, asked.trace, asked.choice("layer"), asked.choice("head")
            ),
        }

    async def _change(self, request: Request) -> Response:
        from starlette.concurrency import run_in_threadpool

        try:
            asked = json.loads(await body_of(request))
            if not isinstance(asked, dict):
                raise ValueError
        except (ValueError, RecursionError):  # the second: brackets in brackets
            return _failed(InvalidArgument(f"what to change is a JSON object of at most {MOST_BYTES:,} bytes."))
        action = request.path_params["action"]

        def change() -> Response:
            try:
                data.change(self._memory.url, action, asked)
            except MemstoreError as error:
                return _failed(error)
            return _json({"done": action})

        return await run_in_threadpool(change)


class PageQuery:
    """What a request asks for, checked."""

    def __init__(self, path: Mapping[str, Any], query: Mapping[str, str]) -> None:
        self._path = path
        self._query = query

    @property
    def document(self) -> int:
        """Number of the document. Raises ``InvalidArgument``, as all of these."""
        return _whole("document", self._path["document"])

    @property
    def block(self) -> int:
        """Number of the block."""
        return _whole("block", self._path["block"])

    @property
    def trace(self) -> int:
        """Number of the trace."""
        return _whole("trace", self._path["trace"])

    @property
    def step(self) -> int:
        """Number of the step."""
        return _whole("step", self._path["step"])

    def text(self, name: str) -> str:
        """A parameter, empty if it is not there."""
        return self._query.get(name, "")

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number. Raises ``InvalidArgument``."""
        given = self._query.get(name)
        if given is None and default is not None:
            return default
        return _whole(name, given)

    def choice(self, name: str) -> int | None:
        """A whole number, or None for all."""
        return self.number(name) if name in self._query else None


def _whole(name: str, given: str | None) -> int:
    """``given`` as a whole number that a page's numbers can hold. Raises ``InvalidArgument``."""
    with contextlib.suppress(ValueError):  # also for thousands of digits
        number = int(given or "")
        if abs(number) < 1 << 53:
            return number
    shown = None if given is None else given[:40]
    raise InvalidArgument(f"{name} must be a whole number below 2**53, not {shown!r}.")


def _endpoint(answer: Answer) -> Callable[[Request], Response]:
    """An endpoint that starlette runs in a thread, for answers read from the disk."""

    def endpoint(request: Request) -> Response:
        try:
            return _json(answer(PageQuery(request.path_params, request.query_params)))
        except MemstoreError as error:
            return _failed(error)
        except FileNotFoundError:
            return _failed(NotFound("the memory was removed. Start memstore view again when there is one."))

    return endpoint


def _json(answer: Mapping[str, Any], status: int = 200) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse(answer, status_code=status)


def _failed(error: MemstoreError) -> Response:
    return _json({"error": type(error).__name__, "message": str(error), **error.facts()}, status_of(error))
