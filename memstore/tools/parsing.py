"""The text of what is no plain text: HTML, exports of chats (``conversations.json`` of ChatGPT), PDF, EPUB and mail.

A file of the last three may be anybody's: a small one can unpack to gigabytes, and keep a parser busy for ever, or lead
it to any error. So it is parsed in a process of its own, with little memory and little time:
``python -P -m memstore.tools.parsing FILE`` prints its text.
"""

from __future__ import annotations

import json
import mailbox
import re
import resource
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from email import message_from_bytes, policy
from email.message import EmailMessage
from html import unescape
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from memstore.errors import InvalidArgument

REFUSED, MISSING = 3, 4
"""Exit codes: the file cannot be read; a package is missing. The last line of standard error says which."""
MOST_BYTES = 400 << 20
"""Of memory."""
MOST_TEXT = 32 << 20
"""Characters."""
SECONDS, BYTES_A_SECOND = 5, 100_000
"""Of processor time: at least, and one more for each so many bytes of the file."""
MOST_VALUES = 4 << 20
"""Values of an export at most: an empty list takes three characters, and twenty times that in memory."""
HEADERS = ("From", "To", "Date", "Subject")

# The words and tags of HTML that may be anybody's are found in time that grows with their length alone. ``html.parser``
# of Python's library looks again from every "<" for the end of what is never ended, so a page of 200 KB can take it
# hours. Here what is not ended goes on to the end of the page, as the HTML standard says (13.2.5): nothing is looked at
# twice. No entity is followed anywhere.
_ATTRIBUTE = r"""(=[^\s/>=]*+|[^\s/>=]++)(?:\s*+=\s*+("[^"]*+"|'[^']*+'|(?!["'])[^\s>]*+))?+"""
_TAG = re.compile(rf"</?+([A-Za-z][^\s/>]*+)((?:[\s/]++|{_ATTRIBUTE})*+)>")
_OPENING, _LETTER = re.compile("<(?=[A-Za-z/!?])"), re.compile("[A-Za-z]")
_ATTRIBUTES = re.compile(_ATTRIBUTE)
_RAW = ("script", "style", "textarea", "title")
"""What has no tags inside."""
_HIDDEN = ("script", "style", "template", "noscript", "svg", "head")
_LINES = ("p", "div", "br", "li", "tr", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "section", "article", "table")
_PIECE = 1 << 20
_LONGEST_NUMBER = re.compile(r"&#[0-9]{10,}+;?")  # no character, and more digits than Python makes a number of

Tag = tuple[str, str]
"""Its name in small letters, with "/" before it where it ends something; its attributes."""


def html_text(page: str) -> str:
    """The words of an HTML page, a line for each paragraph, without tags, scripts and styles."""
    parts, hidden, pre = list[str](), 0, 0
    for found in _found(page):
        if isinstance(found, str):
            if not hidden:
                parts += [found] if pre else _squeezed(found)
            continue
        name, end = found[0].removeprefix("/"), found[0].startswith("/")
        if name in _HIDDEN:
            hidden = max(0, hidden - 1) if end else hidden + 1
        if name == "pre":
            pre = max(0, pre - 1) if end else pre + 1
        if name in _LINES:
            parts.append("\n")
    lines = [line.rstrip() for line in "".join(parts).split("\n")]
    kept = [line for i, line in enumerate(lines) if line.strip() or (i and lines[i - 1].strip())]
    return "\n".join(kept).strip() + "\n"


def attributes(page: str, tag: str) -> list[dict[str, str]]:
    """The attributes of each element ``tag``, whatever the prefix of its name."""
    return [
        {name.lower(): _characters(value.strip("\"'")) for name, value in _ATTRIBUTES.findall(inner)}
        for name, inner in (found for found in _found(page) if not isinstance(found, str))
        if name.rpartition(":")[2] == tag
    ]


def _found(page: str) -> Iterator[str | Tag]:
    """Text, with its characters as they are, and tags, in order."""
    at = 0
    while (opening := _OPENING.search(page, at)) is not None:
        start = opening.start()
        if start > at:
            yield _characters(page[at:start])
        if page.startswith("<!--", start):
            end = page.find("-->", start + 4)
            at = len(page) if end < 0 else end + 3
        elif page.startswith("<![CDATA[", start):
            end = page.find("]]>", start)
            at = len(page) if end < 0 else end + 3
            yield page[start + 9 : at - 3 if end >= 0 else at]
        elif page[start + 1 : start + 2] in ("!", "?") or (
            page.startswith("</", start) and _LETTER.match(page, start + 2) is None
        ):
            end = page.find(">", start)
            at = len(page) if end < 0 else end + 1
        elif (tag := _TAG.match(page, start)) is not None:
            at, name = tag.end(), tag[1].lower()
            end = tag[0].startswith("</")
            yield f"/{name}" if end else name, tag[2]
            if name in _RAW and not end and not tag[2].endswith("/"):
                close = re.compile(rf"</{name}", re.IGNORECASE).search(page, at)
                stop = len(page) if close is None else close.start()
                if stop > at:
                    yield page[at:stop] if name in ("script", "style") else _characters(page[at:stop])
                at = stop
        else:
            return
    if at < len(page):
        yield _characters(page[at:])


def _characters(text: str) -> str:
    return unescape(_LONGEST_NUMBER.sub("\N{REPLACEMENT CHARACTER}", text)) if "&" in text else text


def _squeezed(text: str) -> list[str]:
    """White space as single spaces; piece by piece, for a list of all words takes ten times the memory of the text."""
    pieces = (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))
    return [" ".join(f"|{piece}|".split())[1:-1] for piece in pieces]


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


def _pdf(path: Path) -> str:
    from pypdf import PdfReader

    pages, length = list[str](), 0
    for page in PdfReader(path).pages:
        pages.append(page.extract_text())
        length += len(pages[-1])
        if length > MOST_TEXT:
            break
    return "\f".join(pages)  # a form feed between pages, as printers have it


def _epub(path: Path) -> str:
    """The chapters of a book, in the order in which they are read."""
    with zipfile.ZipFile(path) as archive:
        (package,) = attributes(_member(archive, "META-INF/container.xml"), "rootfile")[:1]
        folder = PurePosixPath(package["full-path"]).parent
        book = _member(archive, package["full-path"])
        parts = {each.get("id"): each.get("href", "") for each in attributes(book, "item")}
        order = dict.fromkeys(
            parts[each["idref"]] for each in attributes(book, "itemref") if each.get("idref") in parts
        )
        return "\n".join(html_text(_member(archive, str(folder / unquote(chapter)))) for chapter in order)


def _member(archive: zipfile.ZipFile, name: str) -> str:
    return archive.read(name).decode("utf-8", errors="replace")


KINDS: dict[str, tuple[Callable[[Path], str], str]] = {
    ".pdf": (_pdf, "no text, only pictures of it"),
    ".epub": (_epub, "no text"),
    ".eml": (mail, "no words"),
    ".mbox": (mails, "no messages"),
}
"""What reads a file, and what one has in which there is nothing; by its ending."""


def main(name: str) -> int:
    """Print the text of the file ``name``; the exit code."""
    path = Path(name)
    seconds = SECONDS + path.stat().st_size // BYTES_A_SECOND
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    ending = path.suffix.lower()
    parse, lacks = KINDS[ending]
    try:
        text = parse(path)
    except ModuleNotFoundError as error:
        return _told(MISSING, f"{path} needs the package {error.name}: pip install 'torch-memstore[files]'")
    except MemoryError:
        return _told(REFUSED, f"{path} cannot be read: it unpacks to more than the {MOST_BYTES >> 20} MiB it may take.")
    except Exception as error:  # noqa: BLE001 - whatever a parser runs into
        why = " ".join(str(error).split())[:200] or type(error).__name__
        return _told(REFUSED, f"{path} is no {ending[1:].upper()} file that can be read: {why}")
    if len(text) > MOST_TEXT:
        return _told(REFUSED, f"{path} cannot be read: it has more than {MOST_TEXT:,} characters.")
    if not text.strip():
        return _told(REFUSED, f"{path} has {lacks}: there is nothing to read.")
    sys.stdout.buffer.write(text.encode("utf-8", "surrogatepass"))
    return 0


def _told(code: int, message: str) -> int:
    sys.stderr.buffer.write(" ".join(message.split()).encode("utf-8", "replace"))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
