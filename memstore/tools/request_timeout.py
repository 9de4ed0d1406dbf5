"""How long the page's server waits for a request, and for how many at once.

A connection says nothing of who made it before its request is complete, so any user of this machine can open them by
the hundred and say nothing. uvicorn waits for ever for the first one, and its ``limit_concurrency`` would turn away the
owner's requests with theirs.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 10.0
"""Seconds until a request that has begun, or a connection that was opened, must have come as a whole."""


class TimedConnection(H11Protocol):
    """HTTP as uvicorn speaks it, for one connection, but neither waiting for ever nor for everybody."""

    max_connections = 100
    """Connections. When there are more, the one that has been waited for longest goes."""
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait; for this one instead of the oldest, where there are many."""
        super().connection_made(transport)
        self._wait()
        waiting = [each for each in self.connections if isinstance(each, TimedConnection) and each.is_waiting]
        if len(self.connections) > self.max_connections:
            min(waiting, key=lambda each: each._since).transport.abort()

    def data_received(self, data: bytes) -> None:
        """Go on waiting, unless the request is complete now."""
        super().data_received(data)
        if not self.is_waiting:
            self._stop()
        elif self._timer is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._stop()
        super().connection_lost(exc)

    @property
    def is_waiting(self) -> bool:
        """Whether no request is complete that would be answered now."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def _wait(self) -> None:
        self._since = self.loop.time()
        self._timer = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
