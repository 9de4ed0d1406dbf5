"""Mail and chats as text: ``.eml`` and ``.mbox`` files, and exports of chats (``conversations.json`` of ChatGPT)."""

from __future__ import annotations

import json
import mailbox
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from email import message_from_bytes, policy
from email.message import EmailMessage
from pathlib import Path
from typing import Any

from memstore.errors import InvalidArgument
from memstore.tools.markup import html_text

MOST_VALUES = 4 << 20
"""Values of an export at most: an empty list takes three characters, and twenty times that in memory."""
HEADERS = ("From", "To", "Date", "Subject")


def mail(path: Path) -> str:
    """One message: who, when, about what, and its words."""
    return _message(path.read_bytes())


def mails(path: Path) -> str:
    """All messages of a mailbox file, oldest first as they are in it."""
    box = mailbox.mbox(path, create=False)
    try:
        return "\n".join(_message(box.get_bytes(key)) for key in box.iterkeys())
    finally:
        box.close()


def chats(text: str) -> str | None:
    """What was said in the conversations of an export; None for JSON that is none."""
    if sum(map(text.count, ",[{")) > MOST_VALUES:
        return None
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        return None
    listed = given if isinstance(given, list) else [given]
    if not listed or not all(isinstance(each, dict) and isinstance(each.get("mapping"), dict) for each in listed):
        return None
    return "\n\n".join(_conversation(each) for each in listed) + "\n"


def _message(raw: bytes) -> str:
    message: EmailMessage = message_from_bytes(raw, policy=policy.default)
    try:
        heads = [f"{name}: {message[name]}" for name in HEADERS if message[name]]
        body = message.get_body(("plain", "html"))
        words = "" if body is None else str(body.get_content())
    except (LookupError, ValueError, TypeError, AttributeError) as error:  # what its parser runs into
        raise InvalidArgument(f"a message cannot be read: {error}") from None
    if body is not None and body.get_content_subtype() == "html":
        words = html_text(words)
    files = [each.get_filename() for each in message.iter_attachments()]
    named = [f"Attached: {', '.join(filter(None, files))}"] if any(files) else []
    return "\n".join([*heads, "", words.replace("\r\n", "\n").strip(), *named, ""])


def _conversation(given: dict[str, Any]) -> str:
    began, title, when = given.get("create_time"), given.get("title"), ""
    if isinstance(began, int | float):
        with suppress(ValueError, OverflowError, OSError):  # no time that there is
            when = f" ({datetime.fromtimestamp(began, UTC):%Y-%m-%d})"
    return "\n\n".join([f"# {title if isinstance(title, str) and title else 'Conversation'}{when}", *_turns(given)])


def _turns(given: dict[str, Any]) -> Iterator[str]:
    """What was said last, and what led to it: other branches were taken back."""
    nodes, at = given["mapping"], given.get("current_node")
    path: list[dict[str, Any]] = []
    if not isinstance(at, str) or at not in nodes:
        at = next(reversed(nodes), None)
    while isinstance(at, str) and isinstance(node := nodes.get(at), dict) and len(path) < len(nodes):
        path.append(node)
        at = node.get("parent")
    for node in reversed(path):
        match node.get("message"):
            case {"author": {"role": "user" | "assistant" as role}, "content": {"parts": list(parts)}}:
                words = "\n".join(part for part in parts if isinstance(part, str)).strip()
                if words:
                    yield f"{role}: {words}"
