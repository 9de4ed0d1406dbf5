"""Who may ask, and what a browser may do with the answer: around every request of the page's server.

- What the memory says needs the token of this run: in the link that ``memstore view`` prints, from then on in a header
  that the page's scripts add. A browser sends cookies to every port of a machine, so also to what another user serves
  there: the cookie (which no other site can send, and no script can read) opens the page's own files and nothing else.
- Its ``Host`` must be an address, this machine's name or the host that was asked for: a foreign name that was made to
  point here (DNS rebinding) is refused.
- A question, which is sent to the server, needs an ``Origin`` that is our own.
- A request that changes something needs another token in a header, which only our page can know, and an ``Origin`` that
  is our own.
- Answers may load scripts, styles, pictures and data from here alone, run nothing inline, and stand in no frame.
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
    """Lets those requests through to ``app`` that may come, and adds ``HEADERS`` to every answer."""

    # Rebinding needs a name, and nobody can make an address point elsewhere: so an address may be any, a name must be
    # known.
    def __init__(
        self, app: ASGIApp, *, token: str, write_token: str | None, hosts: Iterable[str], asking: Iterable[str] = ()
    ) -> None:
        """``hosts`` are names for this server beside addresses; without ``write_token`` nothing can be changed.

        To the paths ``asking`` something may be sent all the same.
        """
        self._app = app
        self._token = token
        self._files_token = secrets.token_urlsafe(24)
        self._write_token = write_token
        self._asking = frozenset(asking)
        self._hosts = names_of(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":  # no websockets here
            return
        from starlette.datastructures import Headers
        from starlette.requests import cookie_parser
        from starlette.responses import PlainTextResponse

        headers = Headers(scope=scope)
        cookie_name = f"memstore-{(scope.get('server') or ('', 0))[1]}"  # cookies do not tell ports apart
        in_link = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        known = same(in_link or headers.get(READ_HEADER, ""), self._token)
        if scope["path"] == "/" or scope["path"].startswith("/static/"):
            # The cookies of every server on this machine come along.
            known |= same(cookie_parser(headers.get("cookie", "")).get(cookie_name, ""), self._files_token)
        refusal = self._refusal(scope["method"], headers, known=known, asks=scope["path"] in self._asking)
        added = dict(HEADERS)
        if in_link and refusal is None:
            added["set-cookie"] = f"{cookie_name}={self._files_token}; Path=/; HttpOnly; SameSite=Strict"
        answer = self._app if refusal is None else PlainTextResponse(f"memstore: {refusal}\n", 403)
        await answer(scope, receive, _adding(send, added))

    def _refusal(self, method: str, headers: Headers, *, known: bool, asks: bool) -> str | None:
        """Why a request is refused; None where it is not."""
        host = headers.get("host", "")
        if not host_is_known(host, self._hosts):
            return "this server does not answer to that host name."
        if not known:
            return "the token is missing or wrong. Open the link that memstore view has printed."
        if method in ("GET", "HEAD"):
            return None
        if not asks and self._write_token is None:
            return "nothing can be changed here: start memstore view with --allow-write."
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
