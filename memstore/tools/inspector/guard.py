"""Checks of every request to the page's server, and headers that limit what a browser may do with the answer.

- Contents of the memory need the token of this run. It is in the link that ``memstore view`` prints; later the page's
  scripts send it in a header. A browser sends cookies to every port of a machine, so also to another user's server.
  So the cookie opens only the page's own files. No other site can send it, and no script can read it.
- The ``Host`` of a request must be an address, this machine's name or the requested host. A foreign name that points
  here (DNS rebinding) is refused.
- A question, which is sent to the server, needs an ``Origin`` that is our own.
- A request that changes something needs a second token in a header, which only our page can know, and our own
  ``Origin``.
- Answers may load scripts, styles, pictures and data from here only, run nothing inline, and stand in no frame.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from memstore.tools.web import host_is_known, names_of, same

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.datastructures import Headers
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

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


class Guard:
    """Passes only permitted requests to ``app``, and adds ``HEADERS`` to every answer."""

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
        self._hosts = names_of(hosts)

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
        known = same(in_link or headers.get(READ_HEADER, ""), self._token)
        if scope["path"] == "/" or scope["path"].startswith("/static/"):
            # A browser sends the cookies of every server on this machine.
            known |= same(cookie_parser(headers.get("cookie", "")).get(cookie_name, ""), self._files_token)
        refusal = self._refusal(scope["method"], headers, known=known, asks=scope["path"] in self._asking)
        added = dict(HEADERS)
        if in_link and refusal is None:
            added["set-cookie"] = f"{cookie_name}={self._files_token}; Path=/; HttpOnly; SameSite=Strict"
        answer = self._app if refusal is None else PlainTextResponse(f"memstore: {refusal}\n", 403)
        await answer(scope, receive, _adding(send, added))

    def _refusal(self, method: str, headers: Headers, *, known: bool, asks: bool) -> str | None:
        """Return why a request is refused; None if it is not."""
        host = headers.get("host", "")
        if not host_is_known(host, self._hosts):
            return "this server does not accept that host name."
        if not known:
            return "the token is missing or wrong. Open the link that memstore view printed."
        if method in ("GET", "HEAD"):
            return None
        if not asks and self._write_token is None:
            return "this page is read-only: start memstore view with --allow-write."
        if not asks and not same(headers.get(WRITE_HEADER, ""), self._write_token or ""):
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
