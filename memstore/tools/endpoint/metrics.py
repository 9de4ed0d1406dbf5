"""What a server has done so far, in the text form of Prometheus."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from memstore.resources import memory_in_use

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from memstore.tools.endpoint.worker import Result


class Metrics:
    """Counters since the server began; they hold nothing of what was asked."""

    def __init__(self) -> None:
        self._statuses: Counter[int] = Counter()
        self._sums: Counter[str] = Counter()
        self._seconds = 0.0

    def add(self, result: Result) -> None:
        """An answer is complete. Called by the worker's thread alone."""
        self._sums.update(answers=1, prompt=result.prompt_tokens, generated=result.tokens, missing=len(result.missing))
        self._seconds += result.seconds

    def counting(self, app: ASGIApp) -> ASGIApp:
        """``app``, whose answers are counted by their status."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            async def sending(message: Message) -> None:
                if message["type"] == "http.response.start":
                    self._statuses[message["status"]] += 1
                await send(message)

            await app(scope, receive, sending)

        return counted

    def text(self, *, waiting: int, memories: int) -> str:
        """All of them, with what is so at the moment."""
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
