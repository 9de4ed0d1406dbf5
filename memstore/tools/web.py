"""Common parts of the servers: their host names, sockets, limits on requests, and HTTP status."""

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
from memstore.memory.urls import folder

if TYPE_CHECKING:
    from collections.abc import Iterable

    import uvicorn
    from starlette.requests import Request
    from starlette.types import ASGIApp

LOOPBACK = "127.0.0.1"
MOST_BYTES = 65_536
"""Bytes of a request's body by default, at most."""
CONNECTIONS = 256
"""Connections at a time. They exceed the requests that may wait, so that refused requests get an answer."""
REQUEST_SECONDS = 10.0
"""Seconds within which a new connection, or a request that has begun, must send a whole request."""
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:@/?#\[\]]+))(?::[0-9]{1,5})?")
"""RFC 9110, 7.2: an address in brackets, or a name or address without a colon; then a port."""
_PATH = re.compile(r"""(?<![\w.~/-])(?:[a-z][\w+.-]{0,30}://)?/([\w.-]+)/[^\s'",;:?()]*""")


def without_paths(error: Exception, *memories: str) -> str:
    """Return an error's text for a client: paths of this machine are cut to the last name. ``memories``: their urls."""
    told, names = str(error), dict[str, str]()
    for url in memories:  # their paths may have spaces, at which _PATH ends
        place, held = url.partition("?tail=")[0], folder(url) or Path()
        path = place.rpartition(":")[2].replace("///", "/")
        names |= {str(held): held.name} | dict.fromkeys((url, place, path), Path(path).name)
    for each in sorted(names, key=len, reverse=True):  # one may be the beginning of another
        told = told.replace(each, names[each] or each)
    # The first part of a server's route, such as /v1/models, is no folder of this machine.
    return _PATH.sub(lambda found: Path(found[0]).name if Path("/", found[1]).exists() else found[0], told)


def names_of(hosts: Iterable[str]) -> frozenset[str]:
    """Return the names of this machine in requests, beside its addresses."""
    return frozenset({"localhost", socket.gethostname().lower(), *(host.lower() for host in hosts)})


def host_is_known(host: str, names: frozenset[str]) -> bool:
    """Check whether the header ``Host`` is an address or one of ``names``, followed by at most a port."""
    name = _name_in(host)
    if name in names:
        return True
    try:
        ipaddress.ip_address(name)  # nobody can redirect an address
    except ValueError:
        return False
    return True


def origin_is_known(origin: str, host: str, names: frozenset[str]) -> bool:
    """Check whether a page of ``origin`` may call ``host``: it comes from this server or machine, at any port."""
    name = _name_in(origin.partition("://")[2])
    return name != "" and (name in names or name == _name_in(host) or is_loopback(name))


def _name_in(host: str) -> str:
    """Return ``host`` without its port, in lower case; an empty text if it is malformed."""
    parts = _HOST.fullmatch(host)
    return "" if parts is None else (parts[1] or parts[2]).lower()


def same(given: str, expected: str) -> bool:
    """Compare two secrets, in a time that does not depend on how many characters agree."""
    return hmac.compare_digest(given.encode(), expected.encode())


async def body_of(request: Request, most: int = MOST_BYTES) -> bytes:
    """Read the body of a request. Raises ``ValueError`` for more than ``most`` bytes."""
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
    """Return a server of ``app`` that speaks HTTP only, trusts no proxy, and logs errors only.

    It takes ``most`` connections. At its end it calls ``ending``, and running requests have ``grace`` seconds. With
    ``lifespan`` the app hears of start and end.
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


# A connection does not tell who made it before its request is complete. So any user of this machine can open hundreds
# and send nothing. uvicorn waits for ever for the first request. Its ``limit_concurrency`` would refuse the owner's
# requests too.
def _timed_connection(most: int) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP with a time limit: beyond ``most`` connections, the longest-waiting one is closed."""
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
            """Return whether the connection has no complete request to answer now."""
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
    listening: socket.socket,
    *,
    host: str = LOOPBACK,
    path: str = "",
    started: Callable[[str], None] = lambda _: None,
) -> str:
    """Serve until Ctrl-C or SIGTERM, and return the url of ``path``. ``started`` gets that url once the server answers.

    ``listening``: what ``listen`` returned for ``host``. In a thread the server receives no signals.
    """

    def end(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    heard = threading.current_thread() is threading.main_thread()
    url = f"http://{in_url(host)}:{listening.getsockname()[1]}{path}"
    # The server finishes its answers, restores this handler, and raises the signal again.
    before = signal.signal(signal.SIGTERM, end) if heard else None
    try:
        with suppress(KeyboardInterrupt):  # the usual way to stop a server: not a failure, so exit status 0
            started(url)
            server.run([listening])
    finally:
        if heard:
            signal.signal(signal.SIGTERM, before)
    return url


def require_web() -> None:
    """Raise ``NotFound`` unless starlette and uvicorn are installed."""
    if not all(find_spec(package) for package in ("starlette", "uvicorn")):
        raise NotFound("this command needs the packages starlette and uvicorn: pip install 'torch-memstore[web]'")


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at ``host`` and ``port``; 0 picks a free one. Raises ``InvalidArgument``."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InvalidArgument(f"--host {host} is not an address of this machine: {error.strerror or error}.") from None
    try:
        if sys.platform != "win32":  # on Windows it would let two programs share a port
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)
    except OSError as error:
        listening.close()
        known = {
            errno.EADDRINUSE: f"port {port} is in use. Choose another with --port; 0 is any free one.",
            errno.EACCES: f"port {port} needs root. Choose one above 1023 with --port.",
        }
        told = known.get(error.errno or 0, f"cannot listen at --host {host}: {error.strerror}.")
        raise InvalidArgument(told) from None
    return listening


def is_loopback(host: str) -> bool:
    """Check whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def in_url(host: str) -> str:
    """Return ``host`` in the form for a url."""
    if ":" in host:
        return f"[{host}]"
    return LOOPBACK if host == "0.0.0.0" else host  # noqa: S104 - not bound to here
