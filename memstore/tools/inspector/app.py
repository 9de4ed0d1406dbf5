"""Routes of the inspector page (files, JSON from ``data.py`` and ``traced.py``, questions), and who gets an answer."""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from memstore.errors import InvalidArgument, MemstoreError, NotFound, first_line
from memstore.tools import web
from memstore.tools.inspector import data, traced
from memstore.tools.models import named_model
from memstore.tools.verb import status_of

if TYPE_CHECKING:
    from starlette.datastructures import Headers
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from memstore.memory import Memory
    from memstore.tools.endpoint.app import Endpoint

PATHS = ("/v1/chat/completions", "/v1/completions")
"""Routes of the endpoint that the page uses. For the others it has its own answers."""
SESSIONS = 1000
"""Conversations that a memory may keep, if the page may change it."""
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
    "conversations": data.conversations,
    "traces/{trace}": traced.trace,
    "traces/{trace}/overview": traced.overview,
    "traces/{trace}/steps/{step}": traced.step,
    "traces/{trace}/used": traced.used,
}
"""Path -> function that answers. A request's parameters are those of the function, except the memory and its words."""
READ_HEADER = "x-memstore-page"
WRITE_HEADER = "x-memstore-token"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def serve(
    memory: Memory,
    *,
    host: str = web.LOOPBACK,
    port: int = 0,
    allow_write: bool = False,
    started: Callable[[str], None] = lambda _: None,
) -> str:
    """Serve the page of ``memory`` until Ctrl-C, and return its url.

    ``port`` 0 picks a free one. ``started`` gets the url, with the page's token, once it can be opened. With
    ``allow_write`` the page can pin and forget documents and remove traces. Raises ``NotFound`` if starlette or uvicorn
    is not installed, ``InvalidArgument`` for a host or port that is not available.
    """
    web.require_web()
    inspector = Inspector(memory, allow_write=allow_write, hosts=(host,))

    def begun(url: str) -> None:
        inspector.warm()
        started(url)

    try:
        with web.listen(host, port) as listening:
            server = web.server_of(inspector.app, most=100, grace=1, lifespan=False, ending=inspector.close)
            return web.run(server, listening, host=host, path=f"/?token={inspector.token}", started=begun)
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
        asking = PATHS if data.can_ask(memory) else ()
        self.app = Guard(self._routes(), token=self.token, write_token=self._write_token, hosts=hosts, asking=asking)

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
            ],
            exception_handlers={MemstoreError: _failed, OSError: _failed},
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
            asked = {name: _checked(each, given) for name, each in wanted.items() if name not in ours}
            return _json(answer(**{name: ours[name] for name in wanted if name in ours}, **asked))

        return endpoint

    async def _change(self, request: Request) -> Response:
        from starlette.concurrency import run_in_threadpool

        try:
            asked = json.loads(await web.body_of(request))
            if not isinstance(asked, dict):
                raise ValueError
        except (ValueError, RecursionError):  # the second: deeply nested brackets
            raise InvalidArgument(f"a change must be a JSON object of at most {web.MOST_BYTES:,} bytes.") from None
        action = request.path_params["action"]

        def change() -> Response:
            data.change(self._memory.url, action, asked)
            return _json({"done": action})

        return await run_in_threadpool(change)


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
            self._made.worker.close()
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


def _failed(_: Request, error: Exception) -> Response:
    if isinstance(error, FileNotFoundError) and not isinstance(error, MemstoreError):
        error = NotFound("the memory was removed. Start memstore view again when there is a memory.")
    elif not isinstance(error, MemstoreError):  # such as too many open files
        error = MemstoreError(f"the memory cannot be read now: {first_line(error)}")
    return _json({"error": type(error).__name__, "message": str(error), **error.facts()}, status_of(error))


class Guard:
    """Passes only permitted requests to ``app``, and adds ``HEADERS`` to every answer.

    - Contents of the memory need the token of this run. It is in the link that ``memstore view`` prints; later the
      page's scripts send it in a header. A browser sends cookies to every port of a machine, so also to another user's
      server. So the cookie opens only the page's own files. No other site can send it, and no script can read it.
    - The ``Host`` of a request must be an address, this machine's name or the requested host. A foreign name that
      points here (DNS rebinding) is refused.
    - A question, which is sent to the server, needs an ``Origin`` that is our own.
    - A request that changes something needs a second token in a header, which only our page can know, and our own
      ``Origin``.
    - Answers may load scripts, styles, pictures and data from here only, run nothing inline, and stand in no frame.
    """

    # Rebinding needs a name, because nobody can redirect an address. So any address is accepted, but a name must be
    # known.
    def __init__(
        self, app: ASGIApp, *, token: str, write_token: str | None, hosts: Iterable[str], asking: Iterable[str] = ()
    ) -> None:
        """Guard ``app``.

        ``hosts``: names of this server beside addresses. Without ``write_token`` nothing can be changed, but questions
        may still be sent to the paths ``asking``.
        """
        self._app = app
        self._token = token
        self._files_token = secrets.token_urlsafe(24)
        self._write_token = write_token
        self._asking = frozenset(asking)
        self._hosts = web.names_of(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":  # the page has no websockets
            return
        from starlette.datastructures import Headers
        from starlette.requests import cookie_parser
        from starlette.responses import PlainTextResponse

        headers = Headers(scope=scope)
        cookie_name = f"memstore-{(scope.get('server') or ('', 0))[1]}"  # cookies do not distinguish ports
        in_link = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        known = web.same(in_link or headers.get(READ_HEADER, ""), self._token)
        if scope["path"] == "/" or scope["path"].startswith("/static/"):
            # A browser sends the cookies of every server on this machine.
            known |= web.same(cookie_parser(headers.get("cookie", "")).get(cookie_name, ""), self._files_token)
        refusal = self._refusal(scope["method"], headers, known=known, asks=scope["path"] in self._asking)
        added = dict(HEADERS)
        if in_link and refusal is None:
            added["set-cookie"] = f"{cookie_name}={self._files_token}; Path=/; HttpOnly; SameSite=Strict"
        answer = self._app if refusal is None else PlainTextResponse(f"memstore: {refusal}\n", 403)
        await answer(scope, receive, _adding(send, added))

    def _refusal(self, method: str, headers: Headers, *, known: bool, asks: bool) -> str | None:
        """Return why a request is refused; None if it is not."""
        host = headers.get("host", "")
        if not web.host_is_known(host, self._hosts):
            return "this server does not accept that host name."
        if not known:
            return "the token is missing or wrong. Open the link that memstore view printed."
        if method in ("GET", "HEAD"):
            return None
        if not asks and self._write_token is None:
            return "this page is read-only: start memstore view with --allow-write."
        if not asks and not web.same(headers.get(WRITE_HEADER, ""), self._write_token or ""):
            return f"a change needs the header {WRITE_HEADER}."
        if headers.get("origin", f"http://{host}") != f"http://{host}":
            return "a change must come from this page."
        return None


def _adding(send: Send, added: dict[str, str]) -> Send:
    from starlette.datastructures import MutableHeaders

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(added)
        await send(message)

    return sending
