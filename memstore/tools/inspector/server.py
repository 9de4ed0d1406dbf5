"""From a memory to a page that can be opened: binding, serving, ending at Ctrl-C."""

from __future__ import annotations

import html
import os
import sys
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from memstore.tools.web import LOOPBACK, in_url, listen, require_web, server_of

if TYPE_CHECKING:
    from memstore.memory import Memory

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
