"""What the servers share: which names they answer to, sockets, how much is taken from a request, and its status."""

from __future__ import annotations

import asyncio
import errno
import hmac
import ipaddress
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from memstore.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterable

    import uvicorn
    from starlette.requests import Request
    from starlette.types import ASGIApp

LOOPBACK = "127.0.0.1"
MOST_BYTES = 65_536
"""Of the body of a request, unless said."""
CONNECTIONS = 256
"""At a time; more than requests may wait, so that those that are turned away are told so."""


REQUEST_SECONDS = 10.0
"""Seconds until a request that has begun, or a connection that was opened, must have come as a whole."""
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:@/?#\[\]]+))(?::[0-9]{1,5})?")
"""RFC 9110, 7.2: an address in brackets, or a name or address without a colon; then a port."""
_PATH = re.compile(r"""(?<![\w.~/-])/([\w.-]+)/[^\s'",;:()]*""")


def without_paths(error: Exception, memory: str = "") -> str:
    """What a client is told of an error: of paths of this machine the last name alone. ``memory``: the url of one."""
    told = str(error)
    for known in filter(None, (memory, memory.rpartition(":")[2])):
        told = told.replace(known, Path(known).name)
    # A route of the server, such as /v1/models, begins with no folder of this machine.
    return _PATH.sub(lambda found: Path(found[0]).name if Path("/", found[1]).exists() else found[0], told)


def names_of(hosts: Iterable[str]) -> frozenset[str]:
    """What this machine may be called in a request, beside its addresses."""
    return frozenset({"localhost", socket.gethostname().lower(), *(host.lower() for host in hosts)})


def host_is_known(host: str, names: frozenset[str]) -> bool:
    """Whether the header ``Host`` is an address or one of ``names``, and at most a port behind it."""
    if (parts := _HOST.fullmatch(host)) is None:
        return False
    name = (parts[1] or parts[2]).lower()
    if name in names:
        return True
    try:
        ipaddress.ip_address(name)  # nobody can make an address point elsewhere
    except ValueError:
        return False
    return True


def same(given: str, expected: str) -> bool:
    """Whether two secrets are the same, in a time that does not tell how much of them is."""
    return hmac.compare_digest(given.encode(), expected.encode())


async def body_of(request: Request, most: int = MOST_BYTES) -> bytes:
    """What was sent. Raises ``ValueError`` for more than ``most`` bytes."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise ValueError
    return body


def server_of(
    app: ASGIApp,
    *,
    most: int = CONNECTIONS,
    grace: int = 4,
    lifespan: bool = True,
    ending: Callable[[], None] = lambda: None,
) -> uvicorn.Server:
    """A server of ``app`` that speaks HTTP alone, believes no proxy, and logs nothing but errors.

    ``most`` connections; what runs when it is to end has ``grace`` seconds. ``ending`` is called before these. With
    ``lifespan`` the app is told when it begins and ends.
    """
    import uvicorn

    config = uvicorn.Config(
        app,
        http=_timed_connection(most),
        log_level="error",
        access_log=False,
        server_header=False,
        lifespan="on" if lifespan else "off",
        ws="none",
        proxy_headers=False,
        timeout_graceful_shutdown=grace,
    )
    server = uvicorn.Server(config)
    shutdown = server.shutdown

    async def ended(sockets: list[socket.socket] | None = None) -> None:
        ending()
        await shutdown(sockets)

    server.shutdown = ended  # type: ignore[method-assign]  # the lifespan's end, which is public, comes too late
    return server


# A connection says nothing of who made it before its request is complete, so any user of this machine can open them by
# the hundred and say nothing. uvicorn waits for ever for the first one, and its ``limit_concurrency`` would turn away
# the owner's requests with theirs.
def _timed_connection(most: int) -> type[asyncio.Protocol]:
    """HTTP as uvicorn speaks it, not for ever: of more than ``most`` the one goes that is waited for longest."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class TimedConnection(H11Protocol):
        timer: asyncio.TimerHandle | None = None
        since = 0.0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.wait()
            if len(self.connections) > most:
                waiting = [each for each in self.connections if isinstance(each, TimedConnection) and each.is_waiting]
                min(waiting, key=lambda each: each.since).transport.abort()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not self.is_waiting:
                self.stop()
            elif self.timer is None:
                self.wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self.stop()
            super().connection_lost(exc)

        @property
        def is_waiting(self) -> bool:
            """Whether no request is complete that would be answered now."""
            return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

        def wait(self) -> None:
            self.since = self.loop.time()
            self.timer = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)

        def stop(self) -> None:
            if self.timer is not None:
                self.timer.cancel()
                self.timer = None

    return TimedConnection


def run(
    server: uvicorn.Server,
    *,
    host: str = LOOPBACK,
    port: int = 0,
    path: str = "",
    started: Callable[[str], None] = lambda _: None,
) -> str:
    """Serve until Ctrl-C or SIGTERM; the url of ``path``, which ``started`` is given once it can be asked.

    ``port`` 0 is a free one. In a thread it hears no signals. Raises
    ``InvalidArgument`` for a host or port that cannot be had.
    """

    def end(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    heard = threading.current_thread() is threading.main_thread()
    with listen(host, port) as listening:
        url = f"http://{in_url(host)}:{listening.getsockname()[1]}{path}"
        # The server finishes what it answers and then raises the signal again, for which it asks the handler before.
        before = signal.signal(signal.SIGTERM, end) if heard else None
        try:
            with suppress(KeyboardInterrupt):  # how a server is put away: not a failure, so exit status 0
                started(url)
                server.run([listening])
        finally:
            if heard:
                signal.signal(signal.SIGTERM, before)
    return url


def require_web() -> None:
    """Raise ``NotFound`` unless starlette and uvicorn are there."""
    if not all(find_spec(package) for package in ("starlette", "uvicorn")):
        raise NotFound("this needs the packages starlette and uvicorn: pip install 'torch-memstore[web]'")


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at ``host`` and ``port``. Raises ``InvalidArgument``."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InvalidArgument(f"--host {host} is no address of this machine: {error.strerror or error}.") from None
    try:
        if sys.platform != "win32":  # there it would let two programs share a port
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise _unavailable(host, port, error) from None
    return listening


def _unavailable(host: str, port: int, error: OSError) -> InvalidArgument:
    if error.errno == errno.EADDRINUSE:
        return InvalidArgument(f"port {port} is in use; choose another with --port, or leave it out for a free one.")
    if error.errno == errno.EACCES:
        return InvalidArgument(f"port {port} needs root; choose one above 1023 with --port.")
    return InvalidArgument(f"cannot listen at --host {host}: {error.strerror}.")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def in_url(host: str) -> str:
    """``host`` as a url has it."""
    if ":" in host:
        return f"[{host}]"
    return LOOPBACK if host == "0.0.0.0" else host  # noqa: S104 - not bound to here
