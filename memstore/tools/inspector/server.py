"""From a memory to a page that can be opened: binding, serving, ending at Ctrl-C."""

from __future__ import annotations

import errno
import html
import ipaddress
import os
import socket
import sys
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from memstore.errors import InvalidArgument, MemstoreError, NotFound

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

    from memstore.memory import Memory

LOOPBACK = "127.0.0.1"
REDIRECT = """<!doctype html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={0}">
<a href="{0}">memstore</a>
"""


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
    from memstore.tools.inspector.app import Inspector

    with listen(host, port) as listening:
        inspector = Inspector(memory, allow_write=allow_write, hosts=(host,))
        bound = listening.getsockname()[1]
        url = f"http://{in_url(host)}:{bound}/?token={inspector.token}"
        inspector.warm()
        started(url)
        try:
            with suppress(KeyboardInterrupt):  # how a page is put away: not a failure, so exit status 0
                server_of(inspector.app).run([listening])
        finally:
            inspector.close()
    return url


def server_of(app: ASGIApp, *, most: int = 100, grace: int = 1, lifespan: bool = False) -> uvicorn.Server:
    """A server of ``app`` that speaks HTTP alone, believes no proxy, and logs nothing but errors.

    ``most`` connections; what runs when it is to end has ``grace`` seconds. With ``lifespan`` the app is told when
    it begins and ends.
    """
    import uvicorn

    from memstore.tools.inspector.patience import Patience

    config = uvicorn.Config(
        app,
        http=type("Patience", (Patience,), {"most": most}),
        log_level="error",
        access_log=False,
        server_header=False,
        lifespan="on" if lifespan else "off",
        ws="none",
        proxy_headers=False,
        timeout_graceful_shutdown=grace,
    )
    return uvicorn.Server(config)


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


def _unavailable(host: str, port: int, error: OSError) -> MemstoreError:
    if error.errno == errno.EADDRINUSE:
        return InvalidArgument(f"port {port} is in use; choose another with --port, or leave it out for a free one.")
    if error.errno == errno.EACCES:
        return InvalidArgument(f"port {port} is not for everybody to use; choose one above 1023 with --port.")
    return InvalidArgument(f"cannot listen at --host {host}: {error.strerror}.")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def open_browser(url: str, folder: Path) -> None:
    """Open ``url`` in the user's browser, where there is a screen to show it on.

    Every user can read the command line of a browser, and ``url`` has a token. So what it is told to open is a file in
    ``folder``, which only this user can enter, and the file leads on.
    """
    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return  # what would open is a browser for terminals, in this terminal
    page = folder / "open.html"
    with open(os.open(page, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:  # noqa: PTH123 - of a descriptor
        file.write(REDIRECT.format(html.escape(url)))
    webbrowser.open(page.as_uri())


def in_url(host: str) -> str:
    """``host`` as a url has it."""
    if ":" in host:
        return f"[{host}]"
    return LOOPBACK if host == "0.0.0.0" else host  # noqa: S104 - not bound to here
