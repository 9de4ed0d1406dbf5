"""The text of JSON files that people have: exports of chats, and notebooks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from memstore.errors import InvalidArgument

_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
"""Of terminals."""
MOST_VALUES = 4 << 20
"""Values of an export at most: an empty list takes three characters, and twenty times that in memory."""


def chats(text: str) -> str | None:
    """What was said in the conversations of an export; None for JSON that is none.

    ChatGPT's (``mapping``), Claude's (``chat_messages``), and lists of ``messages`` (``role`` and ``content``, or
    Telegram's ``from`` and ``text``) or of ``conversations`` (``from`` and ``value``). A conversation of an export
    that is in none of these forms stays JSON.
    """
    if sum(map(text.count, ",[{")) > MOST_VALUES:
        return None
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        return None
    listed = given if isinstance(given, list) else [given]
    told = [_conversation(each) for each in listed]
    if not any(told):
        return None
    pairs = zip(told, listed, strict=True)
    texts = [json.dumps(each, ensure_ascii=False) if one is None else one for one, each in pairs]
    return "\n\n".join(filter(None, texts)) + "\n"


def notebook(text: str) -> str:
    """The cells of a Jupyter notebook and the text that they gave out, without pictures.

    Raises ``InvalidArgument``, with a message to put behind the file's name, for what is no notebook.
    """
    try:
        given = json.loads(text)
        sheets = given.get("worksheets", [given])  # in versions before 4
        cells = [cell for sheet in sheets for cell in sheet["cells"]]
        parts = [_COLOURS.sub("", part).strip("\n") for cell in cells for part in _cell(cell)]
        return "\n\n".join(filter(str.strip, parts)) + "\n"
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"is no notebook that can be read ({type(error).__name__}: {error})") from None


def _cell(cell: dict[str, Any]) -> Iterator[str]:
    yield _joined(cell.get("source", cell.get("input", "")))
    for output in cell.get("outputs", ()):
        data = output.get("data", output)
        if "ename" in output:
            yield f"{output['ename']}: {output.get('evalue', '')}"
        else:
            yield _joined(next((data[key] for key in ("text/plain", "text/markdown", "text") if key in data), ""))


def _joined(lines: str | Iterable[str]) -> str:
    return lines if isinstance(lines, str) else "".join(lines)


def _conversation(given: Any) -> str | None:
    """What was said in one; empty where nothing was, None for what is in no form that is known."""
    match given:
        case {"mapping": dict()}:
            branch = [each for each in _branch(given) if each is not None]
            if not all(map(_role, branch)):
                return None
            messages = [each for each in branch if _role(each) in ("user", "assistant")]
        case {"chat_messages": list(messages)} | {"messages": list(messages)} | {"conversations": list(messages)}:
            pass
        case _:
            return None
    turns = [(_role(each) or "someone", words) for each in messages if (words := _words(each))]
    if not turns or not any(map(_role, messages)):
        return None if messages else ""
    title = given.get("title") or given.get("name")
    head = f"# {title if isinstance(title, str) else 'Conversation'}{_day(given)}"
    return "\n\n".join([head, *(f"{role}: {words}" for role, words in turns)])


def _day(given: dict[str, Any]) -> str:
    match given.get("create_time", given.get("created_at")):
        case int() | float() as began:
            with suppress(ValueError, OverflowError, OSError):  # no time that there is
                return f" ({datetime.fromtimestamp(began, UTC):%Y-%m-%d})"
        case str(began):
            with suppress(ValueError):
                return f" ({datetime.fromisoformat(began):%Y-%m-%d})"
    return ""


def _branch(given: dict[str, Any]) -> list[Any]:
    """The message that was said last, and those that led to it: other branches were taken back."""
    nodes, at = given["mapping"], given.get("current_node")
    path: list[Any] = []
    if not isinstance(at, str) or at not in nodes:
        at = next(reversed(nodes), None)
    while isinstance(at, str) and isinstance(node := nodes.get(at), dict) and len(path) < len(nodes):
        path.append(node.get("message"))
        at = node.get("parent")
    return path[::-1]


def _role(message: Any) -> str | None:
    """Who has said a message."""
    match message:
        case {"author": {"role": str(role)}} | {"sender": str(role)} | {"role": str(role)} | {"from": str(role)}:
            return role
    return None


def _words(message: Any) -> str:
    """The text of a message, with that of the files attached to it."""
    if not isinstance(message, dict):
        return ""
    said = _text(message.get("content")).strip() or _text(message.get("text", message.get("value"))).strip()
    files = message.get("attachments")
    texts = [
        f"Attached: {each.get('file_name', '')}\n{each['extracted_content']}".strip()
        for each in (files if isinstance(files, list) else [])
        if isinstance(each, dict) and isinstance(each.get("extracted_content"), str)
    ]
    return "\n".join([said] * bool(said) + texts)


def _text(content: Any) -> str:
    match content:
        case str():
            return content
        case {"parts": list(parts)}:
            return "\n".join(filter(None, map(_text, parts)))
        case {"text": str(text)}:
            return text
        case list():
            spans = any(isinstance(each, str) for each in content)  # pieces of one line, some of them links
            return ("" if spans else "\n").join(filter(None, map(_text, content)))
    return ""
