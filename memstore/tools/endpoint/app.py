"""The routes of ``memstore serve``: requests and answers in the form of OpenAI's API, each answer with its sources."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from memstore.errors import MemstoreError
from memstore.resources import memory_in_use
from memstore.tools.endpoint.request import Ask, Refusal
from memstore.tools.endpoint.shelf import Shelf
from memstore.tools.endpoint.worker import QueuedJob, Result, ServedMemory, Work, Worker, answer, converse
from memstore.tools.verb import Mistake, status_of
from memstore.tools.web import body_of, host_is_known, names_of, origin_is_known, same, without_paths

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


class _Metrics:
    """Counters since the start of the server. They hold nothing of any question."""

    def __init__(self) -> None:
        self._statuses: Counter[int] = Counter()
        self._sums: Counter[str] = Counter()
        self._seconds = 0.0

    def add(self, result: Result) -> None:
        """Count a complete answer. Only the worker's thread calls it."""
        missing = len(result.receipt.get("missing", ()))
        self._sums.update(answers=1, prompt=result.prompt_tokens, generated=result.tokens, missing=missing)
        self._seconds += result.seconds

    def counting(self, app: ASGIApp) -> ASGIApp:
        """Wrap ``app`` so that its answers are counted by their status."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            async def sending(message: Message) -> None:
                if message["type"] == "http.response.start":
                    self._statuses[message["status"]] += 1
                await send(message)

            await app(scope, receive, sending)

        return counted

    def text(self, *, waiting: int, memories: int) -> str:
        """Return all counters, with the gauges of this moment."""
        anonymous, resident = memory_in_use()
        samples: list[tuple[str, str, str, float]] = [
            *(("memstore_requests_total", f'{{status="{each}"}}', "counter", n) for each, n in self._statuses.items()),
            ("memstore_answers_total", "", "counter", self._sums["answers"]),
            ("memstore_answer_seconds_total", "", "counter", round(self._seconds, 3)),
            ("memstore_tokens_total", '{kind="prompt"}', "counter", self._sums["prompt"]),
            ("memstore_tokens_total", '{kind="generated"}', "counter", self._sums["generated"]),
            ("memstore_missing_blocks_total", "", "counter", self._sums["missing"]),
            ("memstore_waiting_requests", "", "gauge", waiting),
            ("memstore_open_memories", "", "gauge", memories),
            ("memstore_anonymous_memory_bytes", "", "gauge", anonymous),
            ("process_resident_memory_bytes", "", "gauge", resident),
        ]
        lines: dict[str, None] = {}  # the type of a metric stands once, before its samples
        for name, label, kind, value in samples:
            lines[f"# TYPE {name} {kind}"] = None
            lines[f"{name}{label} {value}"] = None
        return "\n".join(lines) + "\n"


MOST_BYTES = 1 << 20
"""Bytes of a request, at most."""
WAITING = 128
"""Requests that may wait for their turn."""
RETRY_AFTER = 5
"""Seconds after which a refused request may try again."""
KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
Told = str | Result | Exception | None
"""A piece of an answer, its end, or a notice that the client has left."""


class Endpoint:
    """Memories as an ASGI application. Close its ``worker`` before the memories."""

    def __init__(
        self,
        shelf: Shelf,
        *,
        token: str | None = None,
        hosts: Sequence[str] = (),
        waiting: int = WAITING,
        sessions: int = 0,
        trace: bool = False,
        chats: bool = False,
    ) -> None:
        """Serve memories.

        ``token``: requests must carry it. ``hosts``: names of this server. ``waiting``: requests that may wait.
        ``sessions``: conversations that each memory may keep. ``trace``: record the retrieved blocks of each answer;
        its receipt has the number of the trace. ``chats``: requests may read and continue chats of the terminal.
        """
        self._shelf, self._sessions, self._trace, self._chats = shelf, sessions, trace, chats
        self.worker = Worker(waiting)
        self._begun = int(time.time())
        self._metrics = _Metrics()
        routes = [
            Route("/health", self._health),
            Route("/metrics", self._told_metrics),
            Route("/v1/models", self._models),
            Route("/v1/models/{name}", self._model),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._completion, methods=["POST"]),
            Route("/v1/embeddings", self._embeddings, methods=["POST"]),
        ]
        there = ", ".join(f"{'POST' if 'POST' in (each.methods or ()) else 'GET'} {each.path}" for each in routes[:-1])

        def failed(_: Request, error: Exception) -> Response:
            if isinstance(error, HTTPException):
                refusal = Refusal(f"{error.detail}: this server has {there}", status=error.status_code)
                return _failed(refusal, headers=error.headers)
            return _failed(error if isinstance(error, MemstoreError | Refusal) else Mistake(error), shelf.urls)

        handlers = dict.fromkeys((HTTPException, MemstoreError, Refusal, Exception), failed)
        app = Starlette(routes=routes, exception_handlers=handlers)
        self.app = self._metrics.counting(Gate(app, token=token, hosts=hosts))

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok", "answering": self.worker.answering, "waiting": self.worker.waiting})

    async def _told_metrics(self, _: Request) -> Response:
        told = self._metrics.text(waiting=self.worker.waiting, memories=len(self._shelf.served))
        return Response(told, media_type="text/plain; version=0.0.4")

    async def _models(self, _: Request) -> Response:
        there = list(self._shelf.served.values())
        return JSONResponse({"object": "list", "data": [self._described(each) for each in there]})

    async def _model(self, request: Request) -> Response:
        name = self._shelf.check(request.path_params["name"])
        if name not in self._shelf.served:
            raise Refusal(f"no memory called {name!r} is open yet", status=404, code="model_not_found")
        return JSONResponse(self._described(self._shelf.served[name]))

    def _described(self, served: ServedMemory) -> dict[str, Any]:
        also = f"{served.model}@{served.name}"
        return {"id": served.name, "object": "model", "created": self._begun, "owned_by": "memstore", "also": also}

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, Ask.chat(await _object(request), request.headers))

    async def _completion(self, request: Request) -> Response:
        return await self._answer(request, Ask.completion(await _object(request), request.headers))

    # Such a model is worst at one vector for a text: see docs/decisions/014.
    async def _embeddings(self, _: Request) -> Response:
        raise Refusal(
            "a memory has no single vector for a text, because every token of a question searches it. Use "
            "/v1/chat/completions, whose sources are the passages. For vectors, use an embedding model",
            status=404,
            code="unsupported_endpoint",
        )

    async def _answer(self, request: Request, ask: Ask) -> Response:
        events: asyncio.Queue[Told] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(what: Told) -> None:
            if isinstance(what, Result):
                self._metrics.add(what)
            with suppress(RuntimeError):  # the loop has ended with the server
                loop.call_soon_threadsafe(events.put_nowait, what)

        name = self._shelf.check(ask.model)
        served = partial(self._shelf.find, name)
        if ask.session is not None and not self._sessions:
            raise Refusal(
                "this server stores no conversations: start it with --sessions NUMBER", status=403, param="metadata"
            )
        if ask.session is None:
            work: Work = partial(answer, ask, trace=self._trace, chats=self._chats)
            job = QueuedJob(served, work, tell, line=name)
        else:
            work = partial(converse, ask, self._sessions, trace=self._trace, chats=self._chats)
            job = QueuedJob(served, work, tell, writes=True, line=f"{name}/{ask.session}")
        self.worker.submit(job)
        leaving = asyncio.create_task(_leaving(request, job, events))
        form = _Form(ask)
        try:
            # Nothing is sent before the first piece, so an answer that fails at once has its proper status.
            first = await events.get()
            if ask.stream and not isinstance(first, Exception):
                stream = self._streamed(form, job, events, first, leaving)
                leaving = None  # type: ignore[assignment]  # the stream's from now on
                return StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-store"})
            while isinstance(first, str):
                first = await events.get()
            if isinstance(first, Exception):
                raise first
            return Response(status_code=499) if first is None else JSONResponse(form.whole(first))  # 499: nobody reads
        finally:
            if leaving is not None:
                leaving.cancel()
                job.left.set()

    async def _streamed(
        self, form: _Form, job: QueuedJob, events: asyncio.Queue[Told], told: Told, leaving: asyncio.Task[None]
    ) -> AsyncIterator[str]:
        """Yield server-sent events, beginning with ``told``."""
        try:
            yield form.begin()
            while isinstance(told, str):
                yield form.piece(told)
                told = await events.get()
            if isinstance(told, Exception):
                yield f"{_event(_error(told, self._shelf.urls))}data: [DONE]\n\n"
            elif told is not None:
                yield form.end(told)
        finally:
            leaving.cancel()
            job.left.set()


async def _leaving(request: Request, job: QueuedJob, events: asyncio.Queue[Told]) -> None:
    """Cancel a job whose client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    job.left.set()
    events.put_nowait(None)


class _Form:
    """The JSON objects of one answer."""

    def __init__(self, ask: Ask) -> None:
        self._raw, self._usage = ask.raw, ask.usage
        kind, mark = ("text_completion", "cmpl") if ask.raw else ("chat.completion", "chatcmpl")
        made = int(time.time())
        self._kind = kind
        self._head = {"id": f"{mark}-{secrets.token_hex(12)}", "created": made, "model": ask.model}

    def whole(self, result: Result) -> dict[str, Any]:
        """Return the answer to a request that does not stream."""
        said = {"text": result.text} if self._raw else {"message": {"role": "assistant", "content": result.text}}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": _reason(result)}
        told = {"usage": _usage(result), **result.receipt}
        return {**self._head, "object": self._kind, "choices": [choice], **told}

    def begin(self) -> str:
        """Return the first event of a stream: the role."""
        return "" if self._raw else self._chunk({"role": "assistant", "content": ""})

    def piece(self, text: str) -> str:
        """Return a piece of the answer as an event."""
        return self._chunk({"content": text}, text)

    def end(self, result: Result) -> str:
        """Return the last events of a stream."""
        last = self._chunk({}, reason=_reason(result), **result.receipt)
        usage = self._event(choices=[], usage=_usage(result)) if self._usage else ""
        return f"{last}{usage}data: [DONE]\n\n"

    def _chunk(self, delta: dict[str, str], text: str = "", *, reason: str | None = None, **more: Any) -> str:
        said: dict[str, Any] = {"text": text} if self._raw else {"delta": delta}
        return self._event(choices=[{"index": 0, **said, "logprobs": None, "finish_reason": reason}], **more)

    def _event(self, **told: Any) -> str:
        kind = self._kind if self._raw else f"{self._kind}.chunk"
        return _event({**self._head, "object": kind, **told})


def _event(told: dict[str, Any]) -> str:
    return f"data: {json.dumps(told)}\n\n"


def _reason(result: Result) -> str:
    return "stop" if result.ended else "length"


def _usage(result: Result) -> dict[str, int]:
    asked, made = result.prompt_tokens, result.tokens
    return {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}


async def _object(request: Request) -> dict[str, Any]:
    """Read the JSON object of a request. Raises ``Refusal``."""
    # A page of another site may send any text here unasked. It may send JSON only if this server agrees: it does not.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refusal("the header Content-Type must be application/json", status=415)
    try:
        body = await body_of(request, MOST_BYTES)
    except ValueError:
        raise Refusal(f"a request may have at most {MOST_BYTES:,} bytes", status=413) from None
    try:
        text = body.decode()
        given = json.loads(text)
    except (ValueError, RecursionError):  # the second: deeply nested brackets
        raise Refusal("the request must be JSON in UTF-8") from None
    if not isinstance(given, dict):
        raise Refusal("the request must be a JSON object")
    # Half a surrogate pair is valid JSON, but no text: tokenizers cannot take it.
    if "\\ud" in text.lower():
        try:
            json.dumps(given, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise Refusal("the request contains text that is not valid Unicode") from None
    return given


def _error(error: Exception, urls: Sequence[str]) -> dict[str, Any]:
    """Return OpenAI's error object. It has no paths of ``urls``, the memories that are served."""
    status, param, code = _status(error), getattr(error, "param", None), getattr(error, "code", None)
    kind = KINDS.get(status, "server_error" if status >= 500 else KINDS[400])
    return {"error": {"message": without_paths(error, *urls), "type": kind, "param": param, "code": code}}


def _status(error: Exception) -> int:
    return error.status if isinstance(error, Refusal) else status_of(error)


def _failed(error: Exception, urls: Sequence[str] = (), *, headers: Mapping[str, str] | None = None) -> Response:
    status = _status(error)
    usual = {429: {"retry-after": str(RETRY_AFTER)}, 401: {"www-authenticate": "Bearer"}}.get(status)
    return JSONResponse(_error(error, urls), status, headers or usual)


class Gate:
    """Passes to ``app`` only requests that name this server and carry its token, if it has one."""

    def __init__(self, app: ASGIApp, *, token: str | None, hosts: Sequence[str]) -> None:
        self._app, self._token, self._hosts = app, token, names_of(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if not host_is_known(headers.get("host", ""), self._hosts):
            refusal = Refusal("this server does not accept that host name: start it with --name HOST", status=403)
        elif (origin := headers.get("origin")) and not origin_is_known(origin, headers["host"], self._hosts):
            refusal = Refusal("pages of other sites may not call this server", status=403)
        # Health checks may run without the token.
        elif (
            self._token is not None
            and scope["path"] != "/health"
            and not (scheme.lower() == "bearer" and same(token.strip(), self._token))
        ):
            refusal = Refusal("the token is missing or wrong: send Authorization: Bearer TOKEN", status=401)
        else:
            await self._app(scope, receive, send)
            return
        await _failed(refusal)(scope, receive, send)
