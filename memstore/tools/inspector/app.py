"""Routes of the inspector page: its static files, and JSON from ``data.py`` and ``traced.py``."""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memstore.errors import (
    InvalidArgument,
    MemstoreError,
    NotFound,
)
from memstore.tools.inspector import data, traced
from memstore.tools.inspector.asking import PATHS, AskBox, can_ask, conversations
from memstore.tools.inspector.guard import Guard
from memstore.tools.verb import status_of
from memstore.tools.web import LOOPBACK, MOST_BYTES, body_of, require_web, run, server_of

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from memstore.memory import Memory

STATIC = Path(__file__).parent / "static"
Answer = Callable[..., Mapping[str, Any]]
ANSWERS: Mapping[str, Answer] = {
    "memory": data.overview,
    "text": data.texts,
    "live": traced.live,
    "documents": data.documents,
    "documents/{document}/blocks": data.blocks,
    "documents/{document}/blocks/{block}": data.block,
    "documents/{document}/blocks/{block}/neighbours": data.neighbours,
    "documents/{document}/blocks/{block}/traces": traced.using,
    "documents/{document}/find": data.find,
    "documents/{document}/ask": data.ask,
    "conversations": conversations,
    "traces/{trace}": traced.trace,
    "traces/{trace}/overview": traced.overview,
    "traces/{trace}/steps/{step}": traced.step,
    "traces/{trace}/used": traced.used,
}
"""Path -> function that answers. A request's parameters are those of the function, except the memory and its words."""


def serve(
    memory: Memory,
    *,
    host: str = LOOPBACK,
    port: int = 0,
    allow_write: bool = False,
    started: Callable[[str], None] = lambda _: None,
) -> str:
    """Serve the page of ``memory`` until Ctrl-C, and return its url.

    ``port`` 0 picks a free one. ``started`` gets the url, with the page's token, once it can be opened. With
    ``allow_write`` the page can pin and forget documents and remove traces. Raises ``NotFound`` if starlette or uvicorn
    is not installed, ``InvalidArgument`` for a host or port that is not available.
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
    """The page of one memory, as an ASGI application for ``memstore view``.

    Requests must carry ``token``. With ``allow_write`` they may run ``data.ACTIONS``.
    """

    def __init__(self, memory: Memory, *, allow_write: bool = False, hosts: tuple[str, ...] = ()) -> None:
        self.token = secrets.token_urlsafe(24)
        self._memory = memory
        self._words = data.Words(memory)
        self._write_token = secrets.token_urlsafe(24) if allow_write else None
        self._box = AskBox(memory, hosts=hosts, allow_write=allow_write)
        asking = {"asking": PATHS if can_ask(memory) else ()}
        self.app = Guard(self._routes(), token=self.token, write_token=self._write_token, hosts=hosts, **asking)

    def warm(self) -> None:
        """Load the tokenizer in a thread, so that it is ready for the first text."""

        def load() -> None:
            with contextlib.suppress(MemstoreError):  # the memory may be closed; later requests get the error
                _ = self._words.missing

        threading.Thread(target=load, name="tokenizer", daemon=True).start()

    def close(self) -> None:
        """Cancel the current answer."""
        self._box.close()

    def _routes(self) -> Any:
        from starlette.applications import Starlette
        from starlette.responses import FileResponse
        from starlette.routing import Mount, Route
        from starlette.staticfiles import StaticFiles

        def page(_: Request) -> Response:
            return FileResponse(STATIC / "index.html")

        answers = [Route(f"/api/{path}", self._endpoint(answer)) for path, answer in ANSWERS.items()]
        return Starlette(
            routes=[
                Route("/", page),
                *answers,
                Route("/api/do/{action}", self._change, methods=["POST"]),
                *(Route(path, self._box) for path in PATHS),
                Mount("/static", StaticFiles(directory=STATIC)),
            ]
        )

    def _endpoint(self, answer: Answer) -> Callable[[Request], Response]:
        """Make an endpoint that starlette runs in a thread, for answers read from disk.

        It takes the parameters of ``answer`` from the path or the query: texts where the default is a text, else
        numbers.
        """
        wanted = signature(answer).parameters
        ours = {"memory": self._memory, "words": self._words, "write_token": self._write_token}

        def endpoint(request: Request) -> Response:
            given = {**request.query_params, **request.path_params}
            try:
                asked = {name: _checked(each, given) for name, each in wanted.items() if name not in ours}
                return _json(answer(**{name: ours[name] for name in wanted if name in ours}, **asked))
            except MemstoreError as error:
                return _failed(error)
            except FileNotFoundError:
                return _failed(NotFound("the memory was removed. Start memstore view again when there is a memory."))

        return endpoint

    async def _change(self, request: Request) -> Response:
        from starlette.concurrency import run_in_threadpool

        try:
            asked = json.loads(await body_of(request))
            if not isinstance(asked, dict):
                raise ValueError
        except (ValueError, RecursionError):  # the second: deeply nested brackets
            return _failed(InvalidArgument(f"a change must be a JSON object of at most {MOST_BYTES:,} bytes."))
        action = request.path_params["action"]

        def change() -> Response:
            try:
                data.change(self._memory.url, action, asked)
            except MemstoreError as error:
                return _failed(error)
            return _json({"done": action})

        return await run_in_threadpool(change)


def _checked(wanted: Parameter, given: Mapping[str, str]) -> str | int | None:
    """Parse a parameter: text, or a whole number that JavaScript can hold. Raises ``InvalidArgument``."""
    text = given.get(wanted.name)
    if isinstance(wanted.default, str) or (text is None and wanted.default is not Parameter.empty):
        default: str | int | None = wanted.default
        return default if text is None else text
    with contextlib.suppress(ValueError):  # fails also for thousands of digits
        number = int(text or "")
        if abs(number) < 1 << 53:
            return number
    shown = None if text is None else text[:40]
    raise InvalidArgument(f"{wanted.name} must be a whole number below 2**53, not {shown!r}.")


def _json(answer: Mapping[str, Any], status: int = 200) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse(answer, status_code=status)


def _failed(error: MemstoreError) -> Response:
    return _json({"error": type(error).__name__, "message": str(error), **error.facts()}, status_of(error))
